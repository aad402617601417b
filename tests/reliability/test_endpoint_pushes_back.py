"""An endpoint that answers 429 slows a run down and fails no rollout; all in this process, over HTTP."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from support.rollouts import JSON

from benchmarks.loopback import Behaviour, run_model_server
from gym_serve.deployments.chat_model import ChatModel
from gym_serve.deployments.simple_agent import SimpleAgent
from gym_serve.environments.simple_weather import SimpleWeather
from gym_serve.rollouts import Backoff, Expansion, RunnerOptions, expand, jobs_of, stream
from gym_serve.servers.clients import EnvironmentClient, ModelClient
from gym_serve.servers.runner import ServerRunner
from gym_serve.transports import InlineTransport

ROW = {"responses_create_params": {"input": "How is the weather in Paris?"}}


@asynccontextmanager
async def agent(base_url: str, max_retries: int) -> AsyncIterator[SimpleAgent]:
    async with AsyncExitStack() as stack:

        async def started(host: ServerRunner) -> ServerRunner:
            await host.start()
            stack.push_async_callback(host.stop)
            return host

        model = await started(ServerRunner(ChatModel(base_url=base_url, model="m", max_retries=max_retries)))
        weather = await started(ServerRunner(SimpleWeather()))
        server = SimpleAgent(
            model=ModelClient(InlineTransport(model)), resources=EnvironmentClient(InlineTransport(weather))
        )
        await started(ServerRunner(server))
        yield server


async def test_every_third_request_is_refused() -> None:
    turned_away = 0
    with run_model_server(Behaviour(turns=1, faults={"overloaded": 3})) as endpoint:
        async with agent(f"{endpoint.url}/v1", max_retries=0) as server:

            async def run(row: JSON) -> JSON:
                nonlocal turned_away
                rollout = await server.run(row)
                if "failure" in rollout:
                    turned_away += 1
                    assert rollout["_ng_failure_class"] == "overloaded"
                    assert rollout["failure"]["retry_after"] == pytest.approx(0.1)
                return rollout

            options = RunnerOptions(concurrency=16, attempts=1, backoff=Backoff(first=0.01, largest=0.05))
            jobs = jobs_of(expand([ROW] * 60, Expansion(), problem=pytest.fail))
            found = [rollout async for _, rollout in stream(jobs, run, options)]
    assert len(found) == 60
    assert not any("failure" in rollout for rollout in found)
    assert turned_away >= 30


async def test_retries_of_the_model_server_come_first() -> None:
    with run_model_server(Behaviour(turns=1, faults={"overloaded": 3})) as endpoint:
        async with agent(f"{endpoint.url}/v1", max_retries=9) as server:
            rollouts = [await server.run({**ROW, "_ng_rollout_id": str(number)}) for number in range(6)]
    assert not any("failure" in rollout for rollout in rollouts)
