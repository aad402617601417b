"""`gymnasium_agent` without Ray: what goes upstream, what a rollout holds, and episodes that fail."""

from typing import Any

import pytest

pytest.importorskip("gymnasium", reason="needs the extra gymnasium")

from gym_serve.deployments.gymnasium_agent import GymnasiumAgent
from gym_serve.environments.gymnasium import GymnasiumServer, Step
from gym_serve.servers import EnvironmentClient, Operation, ServerRunner, VerifyRequest
from gym_serve.transports import InlineTransport
from gym_serve.types.errors import Overloaded

ROW = {"responses_create_params": {"input": "Count to three."}, "note": "kept"}


class Counter(GymnasiumServer):
    """Wants 1, 2, 3 in three turns; each is worth its number."""

    closed = 0

    async def reset(self, row: dict[str, Any], session: Any) -> tuple[str, dict[str, Any]]:
        session.count = 0
        return "Begin.", {}

    async def step(self, request: VerifyRequest, session: Any) -> Step:
        session.count += 1
        text = request.response.output_text
        assert len(request.response.output) == 1, "one turn, not the whole episode"
        assert request.note == "kept"  # type: ignore[attr-defined]
        if text != str(session.count):
            return Step(truncated=True, info={"said": text})
        outputs = [{"call_id": f"c{text}", "output": "ok"}]
        info = {"tool_outputs": outputs} if text == "1" else {}
        return Step(observation="Next.", reward=int(text), terminated=text == "3", info=info)

    async def close(self, session: Any) -> None:
        self.closed += 1


class WithoutVerify(Counter):
    """As a server of NeMo Gym is: reset and step alone."""

    def operations(self) -> dict[str, Operation]:
        return {op: o for op, o in super().operations().items() if op in ("reset", "step")}


class Model:
    """Says its texts in order."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.asked: list[list[dict[str, Any]]] = []

    async def responses(self, params: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(params["input"])
        text = self.texts.pop(0)
        if text == "overload":
            raise Overloaded("full")
        content = [{"type": "output_text", "text": text}]
        message = {"type": "message", "role": "assistant", "content": content}
        usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
        return {"id": "r", "output": [message], "usage": usage}

    async def chat_completions(self, body: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError


async def episode(server: Counter, model: Model, **settings: Any) -> dict[str, Any]:
    resources = EnvironmentClient(InlineTransport(ServerRunner(server)))
    agent = GymnasiumAgent(model=model, resources=resources, **settings)
    return await agent.run(ROW)


async def test_an_episode() -> None:
    server, model = Counter(), Model("1", "2", "3")
    rollout = await episode(server, model)
    assert (rollout["reward"], rollout["num_steps"]) == (6.0, 3)
    assert (rollout["terminated"], rollout["truncated"]) == (True, False)
    assert rollout["note"] == "kept"
    begin = {"type": "message", "role": "user", "content": "Begin."}
    first = {"role": "user", "content": "Count to three."}
    assert rollout["responses_create_params"]["input"] == [first, begin]
    kinds = [item.get("role") or item["type"] for item in rollout["response"]["output"]]
    assert kinds == ["assistant", "function_call_output", "user", "assistant", "user", "assistant"]
    assert rollout["response"]["usage"]["total_tokens"] == 6
    assert model.asked[0] == [first, begin]
    assert model.asked[2] == [first, begin, *rollout["response"]["output"][:5]]
    assert server.closed == 1


async def test_the_environment_may_cut_it_short() -> None:
    rollout = await episode(Counter(), Model("1", "5"))
    assert (rollout["reward"], rollout["terminated"], rollout["truncated"]) == (1.0, False, True)
    assert rollout["info"] == {"said": "5"}


async def test_the_last_step() -> None:
    rollout = await episode(Counter(), Model("1", "2"), max_steps=2)
    assert (rollout["reward"], rollout["terminated"], rollout["truncated"]) == (3.0, False, True)


async def test_a_server_with_reset_and_step_alone() -> None:
    rollout = await episode(WithoutVerify(), Model("1", "2", "3"))
    assert (rollout["reward"], rollout["terminated"]) == (6.0, True)


@pytest.mark.parametrize("texts", [["overload"], ["1", "overload"]])
async def test_a_model_that_fails_closes_the_episode(texts: list[str]) -> None:
    server = Counter()
    rollout = await episode(server, Model(*texts))
    assert rollout["_ng_failure_class"] == "overloaded"
    assert rollout["failure"]["stage"] == "model"
    assert server.closed == 1


async def test_a_step_that_breaks_is_a_failed_rollout() -> None:
    class Broken(Counter):
        async def step(self, request: VerifyRequest, session: Any) -> Step:
            raise RuntimeError("no more cards")

    server = Broken()
    rollout = await episode(server, Model("1"))
    assert rollout["mask_sample"] is True
    assert "no more cards" in rollout["error"]
    assert server.closed == 1


async def test_an_agent_in_the_place_of_a_model() -> None:
    class Free(Counter):
        async def step(self, request: VerifyRequest, session: Any) -> Step:
            return Step(terminated=True)

    agent = GymnasiumAgent(
        model=Model("1"), resources=EnvironmentClient(InlineTransport(ServerRunner(Free())))
    )
    response = await agent.responses({"input": "Count."})
    assert [item["role"] for item in response["output"]] == ["assistant"]
