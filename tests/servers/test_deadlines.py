"""Whose time it was: the policy's is graded, the machine's is masked and tried again."""

import asyncio
import os
import signal
import sys
import time
from functools import partial
from typing import Any

import pytest
from support.environments import Scripted, called

from gym_serve import Gym, ResourcesServer, Verdict, VerifyRequest, tool
from gym_serve.deployments.simple_agent import SimpleAgent
from gym_serve.servers import Call, EnvironmentClient, ModelServer, ServerRunner
from gym_serve.servers.context import with_verdict, without_verdict
from gym_serve.servers.runner import PULSE
from gym_serve.transports import InlineTransport

ROW = {"responses_create_params": {"input": "go"}}


class Thinker(ResourcesServer):
    """Its tools take as long as the policy says; a call that was made earns a half."""

    calls = 0

    @tool
    def think(self, seconds: float) -> str:
        """Think."""
        self.calls += 1
        time.sleep(seconds)
        return "thought"

    @tool
    async def wait(self, seconds: float) -> str:
        """Wait."""
        self.calls += 1
        await asyncio.sleep(seconds)
        return "waited"

    async def verify(self, request: VerifyRequest) -> Verdict:
        return Verdict(reward=0.5 * bool(request.response.function_calls), reason="only half of it")


class Slow(ModelServer):
    async def responses(self, body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(60)
        raise AssertionError


class Rambling(ModelServer):
    """Calls a tool again and again, each call a little time."""

    async def responses(self, body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0.01)
        call = {"type": "function_call", "call_id": "c", "name": "wait", "arguments": '{"seconds": 0.01}'}
        return {"id": "r", "output": [call], "usage": None}


async def run(model: Any, thinker: Thinker | None = None, **settings: Any) -> dict[str, Any]:
    environment = ServerRunner(thinker or Thinker())
    await environment.start()
    resources = EnvironmentClient(InlineTransport(environment))
    try:
        return await SimpleAgent(model=model, resources=resources, **settings).run(ROW)
    finally:
        await environment.stop()


def thinking(name: str = "think", seconds: float = 1.5) -> Scripted:
    return Scripted([called(name, f'{{"seconds": {seconds}}}')], "done")


@pytest.mark.parametrize("name", ["think", "wait"])
@pytest.mark.parametrize(
    ("settings", "stage", "setting"),
    [
        ({"tool_timeout": 0.8}, "tool", "tool_timeout: 0.8 s"),
        ({"episode_timeout": 0.8}, "episode", "episode_timeout: 0.8 s"),
    ],
)
async def test_time_that_a_tool_used_is_graded(
    name: str, settings: dict[str, Any], stage: str, setting: str
) -> None:
    rollout = await run(thinking(name), **settings)
    assert (rollout["reward"], rollout["stopped_by"]) == (0.5, f"{stage}_deadline")
    assert rollout["reason"].startswith("only half of it; ")
    assert setting in rollout["reason"]
    assert "failure" not in rollout


@pytest.mark.parametrize(("on_deadline", "reward"), [("zero", 0.0), ("mask", None)])
async def test_on_deadline(on_deadline: str, reward: float | None) -> None:
    rollout = await run(thinking(), tool_timeout=0.8, on_deadline=on_deadline)
    if reward is not None:
        assert (rollout["reward"], "failure" in rollout) == (reward, False)
        assert "tool_timeout: 0.8 s" in rollout["reason"]
        return
    failure = rollout["failure"]
    assert (failure["kind"], failure["stage"], failure["retryable"]) == ("tool_deadline", "tool", False)
    assert (rollout["mask_sample"], rollout["_ng_failure_terminal"]) == (True, True)


async def test_ever_more_turns_are_the_policys_time() -> None:
    rollout = await run(_client(Rambling(name="m")), episode_timeout=0.5, max_steps=None)
    assert (rollout["stopped_by"], rollout["reward"]) == ("episode_deadline", 0.5)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [({"model_timeout": 0.3}, "model_timeout"), ({"episode_timeout": 0.3}, "model_timeout")],
)
async def test_a_slow_model_is_the_machines(settings: dict[str, Any], kind: str) -> None:
    rollout = await run(_client(Slow(name="m")), **settings)
    assert (rollout["failure"]["kind"], rollout["failure"]["retryable"]) == (kind, True)


def _client(model: ModelServer) -> Any:
    from gym_serve.servers import ModelClient

    return ModelClient(InlineTransport(ServerRunner(model)))


async def test_waiting_for_a_thread_is_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_serve.servers.threads._MOST", 1)
    thinker = Thinker()
    busy = thinker.sessions.threads.call(partial(time.sleep, 1.0))
    rollout = await run(thinking(seconds=0.0), thinker, tool_timeout=0.3)
    await busy.result
    assert (rollout["failure"]["kind"], rollout["failure"]["retryable"]) == ("tool_timeout", True)


async def test_a_verifier_that_waits_for_the_policys_tool_gives_a_zero() -> None:
    class Exclusive(Thinker):
        def verify(self, request: VerifyRequest) -> Verdict:  # alone in its session, as it is no coroutine
            return Verdict(reward=1.0)

    runner = ServerRunner(Exclusive())
    await runner.start()
    resources = EnvironmentClient(InlineTransport(runner))
    agent = SimpleAgent(
        model=thinking(seconds=2.0), resources=resources, tool_timeout=0.3, verify_timeout=0.3
    )
    rollout = await agent.run(ROW)
    assert (rollout["reward"], rollout["stopped_by"]) == (0.0, "verify_deadline")
    assert "failure" not in rollout
    await runner.stop()


async def test_calls_with_equal_names_that_wait_for_one_another_are_the_policys() -> None:
    """Two calls of one turn: the second waits for the first, in the same session."""
    turn = [called("think", '{"seconds": 1.5}', "c1"), called("think", '{"seconds": 1.5}', "c2")]
    rollout = await run(Scripted(turn, "done"), tool_timeout=0.8, parallel_tools=True)
    assert (rollout["stopped_by"], "failure" in rollout) == ("tool_deadline", False)


async def test_a_process_that_stood_still_had_no_time() -> None:
    """As `make chaos` stops replicas: the tool did not run while its process was stopped."""
    PULSE.start()
    begun = time.monotonic()
    await asyncio.sleep(0.6)
    stopper = (
        "import os, signal, sys, time\n"
        "pid = int(sys.argv[1]); os.kill(pid, signal.SIGSTOP); time.sleep(2); os.kill(pid, signal.SIGCONT)"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", stopper, str(os.getpid()))
    assert await process.wait() == 0
    assert PULSE.stopped_since(begun) > 1.0
    await asyncio.sleep(0.6)
    assert PULSE.stopped_since(time.monotonic() - 0.3) == 0.0
    assert signal.getsignal(signal.SIGCONT) == signal.SIG_DFL


async def test_a_tool_of_a_process_that_stood_still_is_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PULSE, "stopped_since", lambda moment: 0.2)
    rollout = await run(thinking(), tool_timeout=0.3)
    assert rollout["failure"]["kind"] == "tool_timeout"


def test_the_limit_of_a_run_ends_the_episode_and_leaves_time_to_verify() -> None:
    graph = {
        "models": {"policy": {"type": "scripted_model", "script": [[called("wait", '{"seconds": 30}')]]}},
        "resources": {"env": {"type": Thinker}},
        "agents": {"agent": {"type": "simple_agent", "model": "policy", "resources": "env"}},
    }
    with Gym.from_graph(graph, ray=False) as gym:
        (rollout,) = gym.run([ROW], timeout=0.5, attempts=3)
    assert (rollout["stopped_by"], rollout["reward"]) == ("episode_deadline", 0.5)
    assert "timeout: 0.5 s" in rollout["reason"]


@pytest.mark.parametrize("seconds", [0.1, 8.0, 330.0, 5000.0])
def test_the_time_to_verify(seconds: float) -> None:
    assert without_verdict(with_verdict(seconds)) == pytest.approx(seconds)


async def test_a_call_without_a_limit_waits() -> None:
    runner = ServerRunner(Thinker())
    reply = await runner.dispatch(Call("tools/wait", b'{"seconds": 0.01}'))
    assert reply.status == 200
