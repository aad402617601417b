"""What a model is sent of its episode is what strict endpoints take, whatever it wrote."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.environments import Scripted, called

from gym_serve import ResourcesServer, Verdict, VerifyRequest, tool
from gym_serve.deployments.scripted_model import check_body
from gym_serve.deployments.simple_agent import SimpleAgent
from gym_serve.servers import EnvironmentClient, ServerRunner
from gym_serve.servers.history import History, safe_arguments, safe_name
from gym_serve.transports import InlineTransport
from gym_serve.types.errors import BadRequest, EndpointMisconfigured, GymError, InvalidRequest, Unavailable

ROW = {"responses_create_params": {"input": "go"}}


class Clock(ResourcesServer):
    @tool
    async def time(self) -> str:
        """Tell the time."""
        return "noon"

    async def verify(self, request: VerifyRequest) -> Verdict:
        return Verdict(reward=0.25)


class Strict(Scripted):
    """Refuses what vLLM, SGLang, llama.cpp and OpenAI's API refuse, and keeps what it was sent."""

    async def responses(self, params: Any) -> Any:
        check_body(params)
        self.sent = params["input"]
        return await super().responses(params)


async def run(model: Any, row: dict[str, Any] = ROW) -> dict[str, Any]:
    resources = EnvironmentClient(InlineTransport(ServerRunner(Clock())))
    return await SimpleAgent(model=model, resources=resources).run(row)


TURNS: dict[str, list[Any]] = {
    "cut off": [called("time", '{"city": "Par')],
    "blank": [called("time", " ")],
    "single quotes": [called("time", "{'a': 1}")],
    "a list": [called("time", "[1]")],
    "a number": [called("time", "NaN")],
    "a name with spaces": [called("tell me the time", "{}")],
    "no name": [called("", "{}")],
    "markup as a name": [called("<tool>" * 40, "{}")],
    "equal ids": [called("time", "{}", "c1"), called("time", "{}", "c1")],
    "no id": [called("time", "{}", "")],
    "500 calls": [called("time", "{}", f"c{n}") for n in range(500)],
    "deeply nested": [called("time", '{"a":' * 950 + "1" + "}" * 950)],
    "half a pair": [called("time", '{"a": "\\ud83d"}')],
}


@pytest.mark.parametrize("turn", TURNS.values(), ids=TURNS)
async def test_what_the_policy_wrote_ends_no_episode_without_a_reward(turn: list[Any]) -> None:
    model = Strict(turn, "done")
    rollout = await run(model)
    assert "failure" not in rollout, rollout["failure"]
    assert rollout["reward"] == 0.25
    output = rollout["response"]["output"]
    wrote = [(item["name"], item["arguments"]) for item in output if item["type"] == "function_call"]
    assert wrote == [(item["name"], item["arguments"]) for item in turn]  # the record is what it wrote
    ids = [item["call_id"] for item in output if item["type"] == "function_call"]
    assert len(set(ids)) == len(ids)
    assert ids == [item["call_id"] for item in output if item["type"] == "function_call_output"]


@pytest.mark.parametrize("arguments", sorted({turn[0]["arguments"] for turn in TURNS.values()} | {"", "{{"}))
async def test_calls_in_the_prompt_are_mended_as_those_of_the_episode(arguments: str) -> None:
    earlier = called("time", arguments, "call_0")
    output = {"type": "function_call_output", "call_id": "call_0", "output": "noon"}
    prompt = [{"role": "user", "content": "go"}, earlier, output]
    model = Strict([called("time", "{}", "")], "done")
    rollout = await run(model, {"responses_create_params": {"input": prompt}})
    assert rollout.get("reward") == 0.25, rollout.get("failure")
    assert rollout["responses_create_params"]["input"][1]["arguments"] == arguments  # the row's own words
    assert len({item["call_id"] for item in model.sent if item.get("type") == "function_call"}) == 2


async def test_the_model_reads_that_calls_were_left_out() -> None:
    model = Strict([called("time", "{}", f"c{n}") for n in range(200)], "done")
    rollout = await run(model)
    sent = [item for item in model.sent if item.get("type") == "function_call_output"]
    assert len(sent) == 128
    assert "Not run" in sent[-1]["output"]
    assert len([i for i in rollout["response"]["output"] if i["type"] == "function_call"]) == 200


@pytest.mark.parametrize("arguments", ["", None, "  \n", "null", "{}"])
async def test_a_tool_without_parameters_is_called_without_arguments(arguments: Any) -> None:
    rollout = await run(Strict([{**called("time", "{}"), "arguments": arguments}], "done"))
    assert json.loads(rollout["response"]["output"][1]["output"]) == "noon"


def refusing(error: GymError, after: int) -> Any:
    class Refusing(Scripted):
        calls = 0

        async def responses(self, params: Any) -> Any:
            self.calls += 1
            if self.calls > after:
                raise error
            return await super().responses(params)

    return Refusing([called("time", "{}")], "done")


@pytest.mark.parametrize("error", [BadRequest("no"), InvalidRequest("the text is not allowed")])
async def test_a_refusal_of_the_models_own_words_is_scored(error: GymError) -> None:
    rollout = await run(refusing(error, after=1))
    assert (rollout["reward"], rollout["stopped_by"]) == (0.25, "history_refused")
    assert rollout["refusal"] == error.message


@pytest.mark.parametrize(
    ("error", "after", "kind"),
    [
        (BadRequest("no such option"), 0, "bad_request"),  # of the row
        (Unavailable("gone"), 1, "unavailable"),
        (EndpointMisconfigured("no such model"), 1, "endpoint_misconfigured"),
    ],
)
async def test_any_other_refusal_is_a_failure(error: GymError, after: int, kind: str) -> None:
    assert (await run(refusing(error, after)))["failure"]["kind"] == kind


@given(st.one_of(st.text(), st.none(), st.integers(), st.dictionaries(st.text(), st.text())))
def test_arguments_are_always_a_json_object(value: Any) -> None:
    safe = safe_arguments(value)
    safe.encode()
    assert isinstance(json.loads(safe), dict)
    assert safe_arguments(safe) == safe


@given(st.one_of(st.text(), st.none(), st.integers()))
def test_names_are_always_taken(name: Any) -> None:
    assert 1 <= len(safe_name(name)) <= 64
    assert safe_name(safe_name(name)) == safe_name(name)


def test_a_declared_name_stays() -> None:
    assert safe_name("files.read", {"files.read"}) == "files.read"
    assert safe_name("files.read") == "files_read"


@given(st.lists(st.sampled_from(["a", "a_2", "", "b c", "x" * 80]), max_size=12))
def test_ids_are_unique(ids: list[str]) -> None:
    history = History([], 128)
    turn = [{"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"} for id in ids]
    made = [item["call_id"] for item in history.identified(turn)]
    assert len(set(made)) == len(made)
    assert all(0 < len(id) <= 64 and id.isprintable() and " " not in id for id in made)
