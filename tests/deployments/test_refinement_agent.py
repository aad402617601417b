"""`single_turn_agent` and `refinement_agent` without Ray: what is run, shown, verified and kept."""

from typing import Any

import pytest
from pydantic import BaseModel

from gym_serve import (
    EnvironmentClient,
    InvalidRequest,
    ResourcesServer,
    ServerRunner,
    Verdict,
    VerifierFailed,
    VerifyRequest,
    tool,
)
from gym_serve.deployments.refinement_agent import RefinementAgent
from gym_serve.deployments.scripted_model import ScriptedModel
from gym_serve.deployments.single_turn_agent import SingleTurnAgent
from gym_serve.transports import InlineTransport
from gym_serve.types.errors import BadRequest

ROW: dict[str, Any] = {"responses_create_params": {"input": "How much is 6 * 7?"}, "wanted": "42"}


def say(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def call(name: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": "c", "name": name, "arguments": "{}"}


class Fake:
    """A model that answers with its turns in order; remembers what it was asked."""

    def __init__(self, *turns: list[dict[str, Any]], incomplete: bool = False) -> None:
        self.turns = list(turns)
        self.asked: list[list[dict[str, Any]]] = []
        self.incomplete = {"reason": "max_output_tokens"} if incomplete else None

    async def responses(self, params: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(params["input"])
        return {"id": "r", "output": self.turns.pop(0), "incomplete_details": self.incomplete}

    async def chat_completions(self, body: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError


class Sums(ResourcesServer):
    """Wants one text, and says what is wrong if `hints` say so."""

    class Config(ResourcesServer.Config):
        hints: dict[str, Any] = {}  # noqa: RUF012

    class Session(BaseModel):
        rung: int = 0

    config: Config

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.seen: list[tuple[int, list[str]]] = []
        self.closed = 0

    @tool
    async def ring(self, session: Session) -> int:
        session.rung += 1
        return session.rung

    async def verify(self, request: VerifyRequest, session: Session) -> Verdict:
        said = request.response.last_text
        extra = request.model_extra or {}
        self.seen.append((extra.get("turn_index", -1), [i["type"] for i in request.response.output]))
        if said == "break":
            raise VerifierFailed("the verifier broke")
        reward = float(said == extra["wanted"])
        return Verdict(reward=reward, rung=session.rung, **({} if reward else self.config.hints))  # type: ignore[call-arg]

    async def close(self, session: Session) -> None:
        self.closed += 1


def refining(model: Any, env: Sums, **settings: Any) -> RefinementAgent:
    return RefinementAgent(
        model=model, resources=EnvironmentClient(InlineTransport(ServerRunner(env))), **settings
    )


async def test_one_call_and_its_tool_calls_are_the_answer() -> None:
    env, model = Sums(), Fake([say("42"), call("ring")])
    agent = SingleTurnAgent(model=model, resources=EnvironmentClient(InlineTransport(ServerRunner(env))))
    rollout = await agent.run(ROW)
    assert [item["type"] for item in rollout["response"]["output"]] == ["message", "function_call"]
    assert (rollout["reward"], rollout["rung"]) == (1.0, 0)
    assert env.closed == 1


async def test_attempts_go_on_in_one_conversation_until_one_is_right() -> None:
    env, model = Sums(), Fake([say("41")], [call("ring")], [say("42")], [say("no more")])
    rollout = await refining(model, env).run(ROW)
    assert (rollout["reward"], rollout["total_turns"], rollout["rung"]) == (1.0, 2, 1)
    output = rollout["response"]["output"]
    kinds = ["message", "message", "function_call", "function_call_output", "message"]
    assert [item["type"] for item in output] == kinds
    assert output[1]["role"] == "user"
    assert model.asked[2] == [{"role": "user", "content": "How much is 6 * 7?"}, *output[:4]]
    # The verifier saw each attempt by itself, in one session.
    assert env.seen == [(0, kinds[:1]), (1, kinds[2:])]
    assert env.closed == 1
    first, second = rollout["all_attempts"]
    assert first == {
        "turn_index": 0,
        "items": [0, 1],
        "reward": 0.0,
        "verdict": {"reward": 0.0, "rung": 0},
        "generation": "41",
        "critique": output[1]["content"],
    }
    assert (second["items"], second["reward"], second["critique"]) == ([2, 5], 1.0, None)
    assert "turn_index" not in rollout


async def test_the_last_attempt_counts_and_their_number_is_limited() -> None:
    env, model = Sums(), Fake([say("1")], [say("2")], [say("3")])
    rollout = await refining(model, env, max_attempts=2).run(ROW)
    assert rollout["reward"] == 0.0
    assert [attempt["generation"] for attempt in rollout["all_attempts"]] == ["1", "2"]


@pytest.mark.parametrize(
    ("hints", "settings", "critique"),
    [
        ({"correction_prompt": "Too low."}, {}, "Too low."),
        (
            {"note": "Odd.", "correction_prompt": ""},
            {"critique_fields": ["correction_prompt", "note"]},
            "Odd.",
        ),
        ({"correction_prompt": 7}, {"retry_prompt": "Again!"}, "Again!"),
        ({}, {"critic": "It is even."}, "It is even."),
        ({"correction_prompt": "Too low."}, {"critic": "It is even."}, "Too low."),
        ({}, {"critic": "", "retry_prompt": "Again!"}, "Again!"),
    ],
)
async def test_where_a_critique_comes_from(hints: Any, settings: dict[str, Any], critique: str) -> None:
    critic = Fake([say(settings["critic"])]) if "critic" in settings else None
    model = Fake([say("41")], [say("42")])
    rollout = await refining(model, Sums(hints=hints), **{**settings, "critic": critic}).run(ROW)
    assert rollout["response"]["output"][1]["content"] == critique == rollout["all_attempts"][0]["critique"]
    if critic is not None and critic.asked:
        # The critic is not told the answer that is wanted.
        system, shown = critic.asked[0]
        assert system["role"] == "system"
        assert "6 * 7" in shown["content"]
        assert "41" in shown["content"]
        assert "42" not in shown["content"]


async def test_a_critic_that_does_not_take_the_answer_sees_less_of_it() -> None:
    class Narrow(Fake):
        async def responses(self, params: dict[str, Any]) -> dict[str, Any]:
            if len(params["input"][-1]["content"]) > 2000:
                raise BadRequest("too long")
            return await super().responses(params)

    model, critic = Fake([say("41" * 5000)], [say("42")]), Narrow([say("It is even.")])
    rollout = await refining(model, Sums(), critic=critic).run(ROW)
    assert rollout["all_attempts"][0]["critique"] == "It is even."
    assert critic.asked[0][-1]["content"].endswith("4141")


@pytest.mark.parametrize(("needs_correction", "attempts"), [(False, 1), (True, 3), ("no", 3), (None, 3)])
async def test_the_verifier_may_say_whether_to_go_on(needs_correction: Any, attempts: int) -> None:
    model = Fake(*[[say("0")]] * 3)
    rollout = await refining(model, Sums(hints={"needs_correction": needs_correction})).run(ROW)
    assert rollout["total_turns"] == attempts


async def test_a_cut_off_attempt_is_the_last_one() -> None:
    rollout = await refining(Fake([say("4")], incomplete=True), Sums()).run(ROW)
    assert (rollout["reward"], rollout["total_turns"]) == (0.0, 1)


async def test_a_verifier_that_breaks_is_no_zero_and_what_was_done_is_kept() -> None:
    env = Sums()
    rollout = await refining(Fake([say("41")], [say("break")]), env).run(ROW)
    assert rollout["failure"]["kind"] == "verifier_failed"
    assert rollout["failure"]["stage"] == "verify"
    assert [attempt["reward"] for attempt in rollout["all_attempts"]] == [0.0]
    assert len(rollout["response"]["output"]) == 3
    assert env.closed == 1


async def test_every_attempt_is_trainable() -> None:
    """The tokens of an attempt are a prefix of the next one's prompt (docs/formats.md, Training tokens)."""
    script = [[say("40")], [call("ring")], [say("41")], [say("42")]]
    rollout = await refining(ScriptedModel(script=script), Sums()).run(ROW)
    assert (rollout["reward"], rollout["total_turns"]) == (1.0, 3)
    output, seen = rollout["response"]["output"], []
    for attempt in rollout["all_attempts"]:
        start, end = attempt["items"]
        bundles = [item for item in output[start:end] if "prompt_token_ids" in item]
        assert bundles
        for item in bundles:
            assert item["prompt_token_ids"][: len(seen)] == seen
            seen = item["prompt_token_ids"] + item["generation_token_ids"]


async def test_a_bad_row_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        await refining(Fake(), Sums()).run({"responses_create_params": {}})
