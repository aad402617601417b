"""One of three endpoints of the policy dies in the middle of a collection: no rollout fails."""

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.rollouts import FakeBackend, read_jsonl, row

from benchmarks.loopback import Behaviour, run_model_server
from gym_serve import AgentClient, EnvironmentClient, ModelClient, ServerRunner
from gym_serve.deployments import http_client
from gym_serve.deployments.chat_model import ChatModel
from gym_serve.deployments.simple_agent import SimpleAgent
from gym_serve.environments.simple_weather import SimpleWeather
from gym_serve.rollouts import Collection, Expansion, Progress, RunnerOptions, collect
from gym_serve.transports import InlineTransport

ROLLOUTS = 90
TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}}


def weather_row(number: int) -> dict[str, Any]:
    made = row(number)
    return {**made, "responses_create_params": {**made["responses_create_params"], "tools": [TOOL]}}


async def test_no_rollout_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "_PAUSE", 0.01)
    with ExitStack() as stack:
        behaviour = Behaviour(turns=2, latency_ms=5)
        servers = [stack.enter_context(run_model_server(behaviour)) for _ in range(3)]
        hosts: list[ServerRunner] = []

        def host(server: Any) -> InlineTransport:
            hosts.append(ServerRunner(server))
            return InlineTransport(hosts[-1])

        model = ChatModel(name="policy", base_url=[f"{s.url}/v1" for s in servers], model="m", max_retries=3)
        agent = SimpleAgent(
            name="agent",
            model=ModelClient(host(model)),
            resources=EnvironmentClient(host(SimpleWeather(name="weather"))),
        )
        run = AgentClient(host(agent)).run
        killed = False

        def progress(counts: Progress) -> None:
            nonlocal killed
            if counts.finished >= ROLLOUTS // 3 and not killed:
                killed = True
                os.kill(servers[0].pid, signal.SIGKILL)

        for started in hosts:
            await started.start()
        # One attempt per rollout: what failed over did so inside the model's call.
        runner_options = RunnerOptions(concurrency=16, attempts=1)
        work = Collection(FakeBackend(run), Expansion(default_agent="agent"), runner_options)
        rows = [weather_row(number) for number in range(ROLLOUTS)]
        report = await collect(rows, tmp_path / "out.jsonl", work, progress=progress)
        for started in reversed(hosts):
            await started.stop()
        assert killed
        assert (report.progress.scored, report.progress.failed) == (ROLLOUTS, 0)
        assert len(read_jsonl(tmp_path / "out.jsonl")) == ROLLOUTS
        assert not any("failure" in rollout for rollout in read_jsonl(tmp_path / "out.jsonl"))
        assert all(server.stats()["answered"] for server in servers[1:])
