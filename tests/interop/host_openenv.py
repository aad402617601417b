"""Play real environments of OpenEnv, in process and by URL, and print the rollouts as JSON.

Run by `test_foreign_libraries.py` in a venv with OpenEnv: ``python host_openenv.py FOLDER``. Into the folder
goes the echo environment that OpenEnv itself makes for a new project; the one with tools is written here with
OpenEnv's classes.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State
from support.environments import Scripted, called

from gym_serve.deployments.gymnasium_agent import GymnasiumAgent
from gym_serve.deployments.simple_agent import SimpleAgent
from gym_serve.interop.openenv import OpenEnv
from gym_serve.servers import Call, EnvironmentClient, ServerRunner
from gym_serve.transports import InlineTransport


class Till(MCPEnvironment):
    """Adds up prices; every sale is worth a point."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("till")
        self.total = 0

        @server.tool
        def sell(price: int) -> int:
            """Sell something."""
            self.total += price
            return self.total

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, start=0, **kwargs):
        self.total = start
        return Observation(metadata={"total": start})

    async def step_async(self, action, timeout_s=None, **kwargs):
        observation = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        if isinstance(action, CallToolAction) and observation.error is None:
            observation.reward = 1.0
        return observation

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation()

    @property
    def state(self):
        return State()


def sell(price):
    return [called("sell", {"price": price}, f"c{price}")]


async def play(environment, agent, turns, row, **settings):
    host = ServerRunner(environment)
    await host.start()
    try:
        client = EnvironmentClient(InlineTransport(host))
        server = agent(model=Scripted(*turns), resources=client, timeline=False, **settings)
        return (await ServerRunner(server).dispatch(Call("run", json.dumps(row).encode()))).json()
    finally:
        await host.stop()


@contextlib.asynccontextmanager
async def served(app):
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.02)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await task


async def main(folder):
    sys.path[:0] = [str(folder), str(folder / "my_echo")]
    from my_echo.models import MyEchoAction, MyEchoObservation
    from my_echo.server.my_echo_environment import MyEchoEnvironment

    echo = {
        "env": "my_echo.server.my_echo_environment:MyEchoEnvironment",
        "action": "my_echo.models:MyEchoAction",
    }
    tools = {"interface": "tools"}
    row = {"responses_create_params": {"input": "Go."}}
    from_5 = {**row, "verifier_metadata": {"options": {"start": 5}}}
    sales = [sell(2), sell(3), "done"]
    found = {
        "echo": await play(OpenEnv(**echo), GymnasiumAgent, ["hello", "bye"], row, max_steps=2),
        "till": await play(OpenEnv(env="__main__:Till", **tools), SimpleAgent, sales, from_5),
    }
    app = create_fastapi_app(MyEchoEnvironment, MyEchoAction, MyEchoObservation, max_concurrent_envs=4)
    async with served(app) as url:
        found["echo_by_url"] = await play(
            OpenEnv(url=url), GymnasiumAgent, ["hello", "bye"], row, max_steps=2
        )
    app = create_fastapi_app(Till, CallToolAction, CallToolObservation, max_concurrent_envs=4)
    async with served(app) as url:
        found["till_by_url"] = await play(OpenEnv(url=url, **tools), SimpleAgent, sales, from_5)
    return found


if __name__ == "__main__":
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(["openenv", "init", "my_echo"], cwd=sys.argv[1], check=True, capture_output=True)
    print(json.dumps(asyncio.run(main(Path(sys.argv[1])))))
