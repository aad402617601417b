"""`user_simulator_agent` without Ray: who speaks when, what each side sees, and how it ends."""

from typing import Any

import pytest

from gym_serve import (
    EnvironmentClient,
    Overloaded,
    ResourcesServer,
    ServerRunner,
    Verdict,
    VerifyRequest,
    tool,
)
from gym_serve.deployments.scripted_model import ScriptedModel
from gym_serve.deployments.user_simulator_agent import UserSimulatorAgent
from gym_serve.transports import InlineTransport
from gym_serve.types.errors import BadRequest
from gym_serve.types.protocols import context_overflow_response

ASKING = {"role": "user", "content": "A table, please."}
ROW: dict[str, Any] = {"responses_create_params": {"instructions": "Book tables.", "input": [ASKING]}}


def say(text: str, **more: Any) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text}]
    return {"type": "message", "role": "assistant", "content": content, **more}


def call(name: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": "c", "name": name, "arguments": "{}"}


REASONING = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "They sound hungry."}]}


class Fake:
    """A model that answers with its turns in order; remembers what it was asked."""

    def __init__(self, *turns: Any, incomplete: bool = False) -> None:
        self.turns = list(turns)
        self.asked: list[dict[str, Any]] = []
        self.incomplete = {"reason": "max_output_tokens"} if incomplete else None

    async def responses(self, params: dict[str, Any]) -> dict[str, Any]:
        self.asked.append({**params, "input": list(params["input"])})
        turn = self.turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        output = [say(turn)] if isinstance(turn, str) else turn
        return {"id": "r", "output": output, "incomplete_details": self.incomplete}

    async def chat_completions(self, body: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError


class Tables(ResourcesServer):
    booked = closed = 0

    @tool
    async def book(self) -> str:
        self.booked += 1
        return "booked"

    async def verify(self, request: VerifyRequest) -> Verdict:
        return Verdict(reward=float(self.booked))

    async def close(self, session: Any) -> None:
        self.closed += 1


def talk(policy: Any, user: Any, env: Tables | None = None, **settings: Any) -> UserSimulatorAgent:
    resources = EnvironmentClient(InlineTransport(ServerRunner(env or Tables())))
    return UserSimulatorAgent(model=policy, user=user, resources=resources, **settings)


def texts(items: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [
        (item["role"], item["content"] if isinstance(item["content"], str) else item["content"][0]["text"])
        for item in items
        if "role" in item
    ]


async def test_a_conversation_until_the_user_is_done() -> None:
    env = Tables()
    policy = Fake([REASONING, say("For how many?")], [call("book")], "Booked for four.")
    user = Fake([REASONING, say("Four.", prompt_token_ids=[1])], "Thanks! ###STOP###")
    rollout = await talk(policy, user, env, persona="Be brief.").run(
        {**ROW, "user_scenario": "You are four."}
    )
    assert (rollout["reward"], rollout["conversation_end"]) == (1.0, "user")
    assert [item["type"] for item in rollout["response"]["output"]] == [
        "reasoning",
        "message",
        "message",
        "function_call",
        "function_call_output",
        "message",
    ]
    # What the policy sees: the user's words are user messages; the goodbye is not shown to it.
    assert texts(policy.asked[2]["input"]) == [
        ("user", "A table, please."),
        ("assistant", "For how many?"),
        ("user", "Four."),
    ]
    assert texts(rollout["response"]["output"]) == [
        ("assistant", "For how many?"),
        ("user", "Four."),
        ("assistant", "Booked for four."),
    ]
    # What the user sees: the roles are reversed, and neither thoughts, nor tools, nor instructions.
    assert texts(rollout["user_transcript"]) == [
        ("system", "Be brief.\n\nYou are four."),
        ("user", "Hi! How can I help you today?"),
        ("assistant", "A table, please."),
        ("user", "For how many?"),
        ("assistant", "Four."),
        ("user", "Booked for four."),
        ("assistant", "Thanks! ###STOP###"),
    ]
    assert user.asked[1]["input"] == rollout["user_transcript"][:-1]
    assert not any("prompt_token_ids" in item for item in rollout["user_transcript"])
    assert rollout["responses_create_params"] == ROW["responses_create_params"]
    assert env.closed == 1


@pytest.mark.parametrize(
    ("row", "opening", "asked"),
    [
        ({"responses_create_params": {"input": "A table, please."}}, [ASKING], 0),
        ({"responses_create_params": {"input": []}}, [{**ASKING, "type": "message"}], 1),
        (
            {"responses_create_params": {"input": []}, "initial_user_message": "For two."},
            [{"type": "message", "role": "user", "content": "For two."}],
            0,
        ),
        (
            {"responses_create_params": {"input": [{"role": "user", "content": "Hi."}, say("Yes?")]}},
            [{"role": "user", "content": "Hi."}, say("Yes?"), {**ASKING, "type": "message"}],
            1,
        ),
        (
            {"responses_create_params": {"input": [ASKING, call("book"), {"type": "function_call_output"}]}},
            [ASKING, call("book"), {"type": "function_call_output"}],
            0,
        ),
    ],
)
async def test_whoever_is_next_in_the_row_begins(row: Any, opening: Any, asked: int) -> None:
    policy, user = Fake("Yes."), Fake("A table, please.")
    rollout = await talk(policy, user, max_turns=1).run(row)
    assert len(user.asked) == asked
    assert policy.asked[0]["input"] == opening
    assert texts(rollout["response"]["output"]) == [("assistant", "Yes.")]
    assert rollout["conversation_end"] == "max_turns"
    if row["responses_create_params"]["input"] != "A table, please.":
        assert rollout["responses_create_params"]["input"] == opening


@pytest.mark.parametrize(
    ("policy", "settings", "ending"),
    [
        (Fake("1", "2"), {"max_turns": 2}, "max_turns"),
        (Fake([call("book")], "Goodbye."), {"stop_tools": ["book"]}, "tool"),
        (
            Fake([{**call("book"), "name": ["book"]}], "1"),
            {"stop_tools": ["book"], "max_turns": 1},
            "max_turns",
        ),
        (Fake("cut", incomplete=True), {}, "incomplete"),
        (Fake([REASONING], [REASONING]), {"max_empty_turns": 1}, "no_answer"),
        (Fake([say("Wait."), call("book")]), {"max_steps": 1}, "no_answer"),
        (Fake([]), {"max_empty_turns": 0}, "no_answer"),
        (Fake("1"), {"stop_phrases": ["well"]}, "user"),
    ],
)
async def test_what_ends_a_conversation(policy: Fake, settings: dict[str, Any], ending: str) -> None:
    rollout = await talk(policy, Fake("Oh well."), **settings).run(ROW)
    assert rollout["conversation_end"] == ending, rollout
    assert policy.turns == []


@pytest.mark.parametrize(
    ("turn", "kind"),
    [([REASONING], "unavailable"), (["x"], "unavailable"), (Overloaded("busy"), "overloaded")],
)
async def test_a_user_that_fails_is_not_the_policys_fault(turn: Any, kind: str) -> None:
    env = Tables()
    rollout = await talk(Fake("For how many?"), Fake(*[turn] * 4), env).run(ROW)
    assert rollout["failure"]["kind"] == kind
    assert rollout["failure"]["stage"] == "model"
    assert rollout["mask_sample"] is True
    assert texts(rollout["user_transcript"])[-1] == ("user", "For how many?")
    assert env.closed == 1


class Narrow(Fake):
    """A model that takes short texts alone."""

    def __init__(self, *turns: Any, refusal: Any) -> None:
        super().__init__(*turns)
        self.refusal = refusal

    async def responses(self, params: dict[str, Any]) -> dict[str, Any]:
        if sum(len(item["content"]) for item in params["input"] if item["role"] == "user") > 1000:
            if isinstance(self.refusal, Exception):
                raise self.refusal
            return self.refusal
        return await super().responses(params)


SILENCE = {"id": "r", "output": [REASONING]}


@pytest.mark.parametrize("refusal", [BadRequest("refused"), context_overflow_response({}), SILENCE])
async def test_a_policy_cannot_make_a_failure_of_what_the_user_does_not_take(refusal: Any) -> None:
    user = Narrow("Oh.", "###STOP###", refusal=refusal)
    rollout = await talk(Fake("For how many? " + "x" * 20_000, "Hm."), user, persona="Play.").run(ROW)
    assert (rollout["reward"], rollout["conversation_end"]) == (0.0, "user"), rollout
    assert texts(user.asked[0]["input"])[-1][1].startswith("For how many? xxx")
    assert len(texts(rollout["user_transcript"])[-4][1]) > 20_000


async def test_settings_of_the_user_and_a_scenario_that_is_an_object() -> None:
    user = Fake("###STOP###")
    row = {**ROW, "user_scenario": {"name": "Jo {x} %s"}}
    await talk(Fake("Yes?"), user, persona="Play.", user_params={"temperature": 0.3}).run(row)
    assert user.asked[0]["temperature"] == 0.3
    assert user.asked[0]["input"][0]["content"] == 'Play.\n\n{"name":"Jo {x} %s"}'


async def test_the_policys_tokens_are_contiguous_over_the_whole_conversation() -> None:
    script = [[say("For how many?")], [call("book")], [say("Done.")]]
    rollout = await talk(ScriptedModel(script=script), Fake("Four.", "###STOP###")).run(ROW)
    seen: list[int] = []
    bundles = [item for item in rollout["response"]["output"] if "prompt_token_ids" in item]
    assert len(bundles) == 3
    for item in bundles:
        assert item["prompt_token_ids"][: len(seen)] == seen
        seen = item["prompt_token_ids"] + item["generation_token_ids"]
