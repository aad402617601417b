"""Run tasksets made with verifiers as environments, and print rows and rollouts as JSON.

Run by `test_foreign_libraries.py` in a venv with verifiers 0.4: ``python host_verifiers.py``.
"""

import asyncio
import json

import verifiers.v1 as vf
from pydantic import Field
from support.environments import Scripted, called

from gym_serve.deployments.simple_agent import SimpleAgent
from gym_serve.interop.verifiers import Tasks, Verifiers
from gym_serve.servers import Call, EnvironmentClient, ServerRunner
from gym_serve.transports import InlineTransport
from gym_serve.types.errors import GraphError


class QuizData(vf.TaskData):
    answer: str


class QuizTask(vf.Task[QuizData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.75)
    async def right(self, task, trace) -> float:
        return float(task.answer in (trace.last_reply or ""))

    @vf.reward(weight=0.25)
    async def short(self, trace) -> float:
        return float(len(trace.last_reply or "") < 20)

    @vf.metric
    async def characters(self, trace) -> float:
        return float(len(trace.last_reply or ""))


class QuizConfig(vf.TasksetConfig):
    first: int = 1


class Quiz(vf.Taskset[QuizTask, QuizConfig]):
    def load(self):
        for n in range(self.config.first, self.config.first + 3):
            data = QuizData(prompt=f"{n} + {n}?", system_prompt="Be brief.", answer=str(2 * n))
            yield QuizTask(data, self.config.task)


class Basket(vf.State):
    items: list[str] = Field(default_factory=list)


class Shop(vf.Toolset[vf.ToolsetConfig, Basket]):
    async def setup_task(self, task):
        self.state.items.append(f"for {task.name}")

    @vf.tool
    async def put(self, item: str, count: int = 1) -> str:
        """Put something in the basket."""
        if item == "bomb":
            raise ValueError("not for sale")
        self.state.items.extend([item] * count)
        return f"{len(self.state.items)} in the basket"


class ShopTask(vf.Task[vf.TaskData, Basket, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Shop(vf.ToolsetConfig())]

    @vf.reward
    async def basket(self, trace) -> float:
        return float(trace.state.items == ["for a", "tea", "tea"])

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class Shopping(vf.Taskset[ShopTask, vf.TasksetConfig]):
    def load(self):
        yield ShopTask(vf.TaskData(name="a", prompt="Buy two teas."), self.config.task)


class NeedsRuntime(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def in_a_box(self, runtime) -> float:
        return 1.0


class Boxed(vf.Taskset[NeedsRuntime, vf.TasksetConfig]):
    def load(self):
        return []


class Game(vf.Taskset[vf.Task[vf.TaskData, vf.State, vf.TaskConfig], vf.TasksetConfig]):
    def load(self):
        return []


class TwoPlayers(vf.Env[vf.EnvConfig]):
    async def run(self, task, agents):
        raise NotImplementedError


def put(call_id, **arguments):
    return [called("shop_put", arguments, call_id)]


async def run(taskset, row, *turns, **config):
    host = ServerRunner(Verifiers(taskset=taskset, config=config))
    await host.start()
    policy = Scripted(*turns)
    try:
        agent = SimpleAgent(model=policy, resources=EnvironmentClient(InlineTransport(host)))
        rollout = (await ServerRunner(agent).dispatch(Call("run", json.dumps(row).encode()))).json()
    finally:
        await host.stop()
    return {"rollout": rollout, "tools": policy.asked[0].get("tools") if policy.asked else None}


async def main():
    rows = list(Tasks("__main__:Quiz", {"first": 3}).rows())
    (shopping,) = Tasks("__main__:Shopping", {}).rows()
    bare = {"responses_create_params": {"input": "?"}}
    refused = {}
    for name in ("Boxed", "Game", "TwoPlayers"):
        try:
            Tasks(f"__main__:{name}", {})
        except GraphError as error:
            refused[name] = str(error)
    purchases = [put("1", item="bomb"), put("2", item=3), put("3", item="tea", count=2), "done"]
    return {
        "rows": rows,
        "right": await run("__main__:Quiz", rows[0], "It is 6."),
        "wrong": await run("__main__:Quiz", rows[1], "I would say that it is 9."),
        "shopping": await run("__main__:Shopping", shopping, *purchases),
        "no_task": await run("__main__:Quiz", bare, "6"),
        "refused": refused,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main())))
