"""Captured calls: which conversation a call goes on with, chains and branches, and every protocol alike."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_serve.capture import CallTree, Node, chains_of, trajectories_of
from gym_serve.servers import Call, ModelServer, ServerRunner
from gym_serve.servers.context import current
from gym_serve.types.errors import BadRequest, GymError, SessionLost, SessionNotFound, Unavailable
from gym_serve.types.protocols import TOKEN_KEYS

Items = list[dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text}]
    return {"type": "message", "role": "assistant", "id": f"msg_{text}", "content": content}


def called(id_: str, arguments: str = '{"x": 1}') -> dict[str, Any]:
    return {"type": "function_call", "call_id": id_, "name": "tool", "arguments": arguments}


def returned(id_: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": id_, "output": f"out of {id_}"}


def response(*output: dict[str, Any], prompt: list[int] | None = None, generated: list[int] = []) -> Any:  # noqa: B006
    items = [dict(item) for item in output]
    if prompt is not None:
        bundle = (prompt, generated, [-0.5] * len(generated))
        items[-1].update(zip(TOKEN_KEYS, bundle, strict=True))
    return {"id": "resp", "output": items, "usage": {"input_tokens": 1, "output_tokens": 2}}


def record(tree: CallTree, items: Items, answer: dict[str, Any]) -> Node:
    return tree.add(items, answer, *tree.parent_of(items))


def tokens_of(item: dict[str, Any]) -> tuple[list[int], list[int]] | None:
    return (item[TOKEN_KEYS[0]], item[TOKEN_KEYS[1]]) if TOKEN_KEYS[0] in item else None


def assert_contiguous(output: Items) -> int:
    """What trainers assert of a rollout; how many bundles it has."""
    seen: list[int] = []
    bundles = [tokens for item in output if (tokens := tokens_of(item))]
    for prompt, generated in bundles:
        assert prompt[: len(seen)] == seen
        seen = prompt + generated
    return len(bundles)


def test_a_conversation_is_one_trajectory() -> None:
    tree = CallTree()
    first: Items = [{"role": "system", "content": "Be kind."}, user("Hi")]
    record(
        tree, first, response({"type": "reasoning", "summary": []}, called("a"), prompt=[1, 2], generated=[3])
    )
    # The harness drops reasoning and ids, and writes the arguments anew.
    second = [*first, called("a", '{"x":1}'), returned("a")]
    record(tree, second, response(said("Yes"), prompt=[1, 2, 3, 4], generated=[5]))
    (trajectory,) = trajectories_of(tree.nodes)
    assert trajectory["input"] == first
    assert trajectory["calls"] == 2
    output = trajectory["response"]["output"]
    kinds = ["reasoning", "function_call", "function_call_output", "message"]
    assert [item["type"] for item in output] == kinds
    assert assert_contiguous(output) == 2
    assert trajectory["response"]["usage"] == {"input_tokens": 2, "output_tokens": 4}


def test_other_tokens_of_the_same_words_begin_another_chain() -> None:
    tree = CallTree()
    record(tree, [user("Hi")], response(said("A"), prompt=[1], generated=[2]))
    follow = [user("Hi"), said("A"), user("More")]
    record(tree, follow, response(said("B"), prompt=[1, 9, 3], generated=[4]))
    last, before = trajectories_of(tree.nodes)
    assert [item.get("id") for item in last["response"]["output"]] == ["msg_A", None, "msg_B"]
    assert [tokens_of(item) for item in last["response"]["output"]] == [None, None, ([1, 9, 3], [4])]
    assert [tokens_of(item) for item in before["response"]["output"]] == [([1], [2])]


def test_branches_are_kept_apart() -> None:
    tree = CallTree()
    start = [user("Hi")]
    record(tree, start, response(said("A"), prompt=[1], generated=[2]))
    record(tree, start, response(said("dropped"), prompt=[1], generated=[7]))  # asked again
    for n in range(2):
        record(tree, [user("Sub"), user(str(n))], response(said(str(n)), prompt=[8, n], generated=[n]))
    go_on = [*start, said("A"), user("More")]
    record(tree, go_on, response(said("B"), prompt=[1, 2, 3], generated=[4]))
    record(tree, [*start, said("A"), user("Else")], response(said("C"), prompt=[1, 2, 6], generated=[6]))
    record(tree, [*go_on, said("B"), user("!")], response(said("D"), prompt=[1, 2, 3, 4, 5], generated=[0]))
    found = trajectories_of(tree.nodes)
    texts = [[item["id"] for item in t["response"]["output"] if "id" in item] for t in found]
    assert texts == [
        ["msg_A", "msg_B", "msg_D"],
        ["msg_A", "msg_C"],
        ["msg_1"],
        ["msg_0"],
        ["msg_dropped"],
    ]
    assert [assert_contiguous(t["response"]["output"]) for t in found] == [3, 1, 1, 1, 1]
    assert sum(t["calls"] for t in found) == len(tree.nodes)


@given(st.data())
def test_any_harness_gives_contiguous_chains_that_hold_every_call_once(data: st.DataObject) -> None:
    """A harness picks an earlier conversation, maybe cuts it, adds something, and asks; tokens may drift."""
    tree = CallTree()
    conversations: list[tuple[Items, list[int]]] = [([], [])]
    for number in range(data.draw(st.integers(1, 8))):
        items, tokens = data.draw(st.sampled_from(conversations))
        drift = data.draw(st.booleans()) and bool(tokens)
        has_tokens = data.draw(st.integers(0, 5)) > 0
        given_ = [*items, user(data.draw(st.sampled_from(["a", "b"])))]
        prompt = [*tokens[: -1 if drift else None], 100 + number]
        answer = data.draw(st.sampled_from([[said("x")], [said("x"), called("c")], [called(f"c{number}")]]))
        record(tree, given_, response(*answer, prompt=prompt if has_tokens else None, generated=[number]))
        conversations.append(([*given_, *answer], [*prompt, number]))
    chains = chains_of(tree.nodes)
    assert sorted(node.number for chain in chains for node in chain) == list(range(len(tree.nodes)))
    found = trajectories_of(tree.nodes)
    trained = [
        tokens
        for trajectory in found
        for item in trajectory["response"]["output"]
        if (tokens := tokens_of(item))
    ]
    assert len(trained) == sum(TOKEN_KEYS[0] in node.response["output"][-1] for node in tree.nodes)
    for trajectory in found:
        assert_contiguous(trajectory["response"]["output"])
    assert trajectories_of(tree.nodes) == found  # nothing was changed by it


@given(
    st.lists(st.dictionaries(st.sampled_from(["type", "role", "content", "call_id"]), st.text()), max_size=5)
)
def test_any_items_have_a_parent_or_none(items: Items) -> None:
    tree = CallTree()
    node = record(tree, items, response(said("x")))
    assert tree.parent_of([*items, said("x"), user("?")]) == (node, len(items) + 1)


class Scripted(ModelServer):
    """Says what it was told to, with tokens; keeps what it was asked."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.answers: list[Any] = []
        self.asked: list[dict[str, Any]] = []
        self.affinities: list[str | None] = []

    async def responses(self, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(body)
        self.affinities.append(current().affinity)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return {"created_at": 0, "model": "scripted", **answer}


class Harness:
    """The calls of one capture, without HTTP."""

    def __init__(self, *answers: Any, affinity: str | None = None) -> None:
        self.model = Scripted(name="policy", replica="r1")
        self.model.answers = list(answers)
        self.host = ServerRunner(self.model)
        self.affinity = affinity
        self.id: str | None = None

    async def call(self, op: str, body: Any = None, **call: Any) -> Any:
        reply = await self.host.dispatch(
            Call(
                op, json.dumps(body or {}).encode(), **{"session": self.id, "affinity": self.affinity, **call}
            )
        )
        answer = reply.json()
        self.id = self.id or reply.session
        return answer


async def test_chat_calls_become_one_trajectory_and_the_engine_gets_its_tokens_back() -> None:
    tool = response(said("Let me see."), called("a"), prompt=[1], generated=[2])
    harness = Harness(tool, response(said("Done"), prompt=[1, 2, 3], generated=[4]), affinity="0-1")
    assert (await harness.call("rollouts"))["id"] == harness.id
    messages: Items = [{"role": "system", "content": "Be kind."}, user("Hi")]
    first = await harness.call("rollouts/v1/chat/completions", {"model": "any", "messages": messages})
    message = first["choices"][0]["message"]
    assert TOKEN_KEYS[0] not in message
    assert message["tool_calls"][0]["function"]["name"] == "tool"
    back = {key: message[key] for key in ("role", "content", "tool_calls")}
    messages += [back, {"role": "tool", "tool_call_id": "a", "content": "out of a"}]
    await harness.call("rollouts/v1/chat/completions", {"messages": messages})
    assert harness.model.affinities == ["0-1", "0-1"]
    bundles = [tokens for item in harness.model.asked[1]["input"] if (tokens := tokens_of(item))]
    assert bundles == [([1], [2])]
    found = await harness.call("rollouts/trajectories")
    assert found["calls"] == 2
    (trajectory,) = found["trajectories"]
    assert assert_contiguous(trajectory["response"]["output"]) == 2
    assert harness.model.live_sessions == 1
    for _ in range(2):
        await harness.call("rollouts/close")
    assert harness.model.live_sessions == 0
    with pytest.raises(SessionNotFound):
        await harness.call("rollouts/v1/chat/completions", {"messages": messages})


async def test_messages_and_chat_of_one_conversation_are_one_trajectory() -> None:
    tool = response(said("Let me see."), called("a"), prompt=[1], generated=[2])
    last = response(said("Bye"), prompt=[1, 2, 3, 4, 5], generated=[6])
    harness = Harness(tool, response(said("Done"), prompt=[1, 2, 3], generated=[4]), last)
    await harness.call("rollouts")
    body: dict[str, Any] = {"model": "any", "max_tokens": 9, "system": "Be kind.", "messages": [user("Hi")]}
    answer = await harness.call("rollouts/v1/messages", body)
    assert answer["type"] == "message"
    assert [block["type"] for block in answer["content"]] == ["text", "tool_use"]
    result = [{"type": "tool_result", "tool_use_id": "a", "content": "out of a"}]
    body["messages"] += [
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": result},
    ]
    await harness.call("rollouts/v1/messages", body)
    chat: Items = [
        {"role": "system", "content": "Be kind."},
        user("Hi"),
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "tool", "arguments": '{"x":1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "out of a"},
        {"role": "assistant", "content": "Done"},
        user("Thanks"),
    ]
    await harness.call("rollouts/v1/chat/completions", {"messages": chat})
    (trajectory,) = (await harness.call("rollouts/trajectories"))["trajectories"]
    assert trajectory["calls"] == 3
    assert assert_contiguous(trajectory["response"]["output"]) == 3


async def test_instructions_belong_to_the_conversation() -> None:
    harness = Harness(response(said("A")), response(said("B")), response(said("C")))
    await harness.call("rollouts")
    for instructions, given_ in (("X", "Hi"), ("X", [user("Hi"), said("A"), user("?")]), ("Y", "Hi")):
        await harness.call("rollouts/v1/responses", {"instructions": instructions, "input": given_})
    assert harness.model.asked[1]["instructions"] == "X"
    assert [item["role"] for item in harness.model.asked[1]["input"]] == ["user", "assistant", "user"]
    found = (await harness.call("rollouts/trajectories"))["trajectories"]
    assert [(t["input"][0]["content"], t["calls"]) for t in found] == [("Y", 1), ("X", 2)]


async def test_calls_that_cannot_be_recorded() -> None:
    harness = Harness(Unavailable("down"), response(said("A")))
    with pytest.raises(BadRequest, match="names no rollout"):
        await harness.call("rollouts/v1/responses", {"input": "Hi"})
    with pytest.raises(SessionLost):
        await harness.call("rollouts/v1/responses", {"input": "Hi"}, session="r2.abc")
    await harness.call("rollouts")
    for body, match in (
        ({"input": "Hi", "previous_response_id": "resp"}, "whole conversation"),
        ({"input": ["Hi"]}, r"input\[0\]"),
        ({"input": "Hi"}, "down"),
    ):
        with pytest.raises(GymError, match=match):
            await harness.call("rollouts/v1/responses", body)
    assert (await harness.call("rollouts/trajectories"))["calls"] == 0
    await harness.call("rollouts/v1/responses", {"input": "Hi"})
    assert (await harness.call("rollouts/trajectories"))["calls"] == 1
