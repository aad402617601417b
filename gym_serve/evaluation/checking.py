"""Checks of a benchmark without a model: on its sample, right answers score 1, and empty ones less.

Each answer is played as a whole episode by the benchmark's own agent, so the prompt, the tools and the limits
are checked as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from gym_serve.assembly import LocalGraph
from gym_serve.evaluation.benchmark import Benchmark, Turns, agent_of
from gym_serve.evaluation.templates import render
from gym_serve.graph.loading import load_graph
from gym_serve.graph.resolving import resolve
from gym_serve.servers.clients import AgentClient
from gym_serve.types.endings import failure_class
from gym_serve.types.errors import GymError
from gym_serve.types.protocols.items import message_item
from gym_serve.types.requests import JSON


def problems_of_benchmark(benchmark: Benchmark) -> Iterator[str]:
    """What is wrong with a benchmark; nothing of one that may be published."""
    if not benchmark.sample:
        yield "it has no sample"
    for (where, row, problem), sample in zip(benchmark.sample_rows(), benchmark.sample, strict=True):
        if row is None:
            yield f"{where}: {problem}"
            continue
        try:
            answer = sample.answer
            if answer is None and benchmark.answer is not None:
                answer = render(benchmark.answer, row)
            if answer is None:
                yield f"{where}: it has no right answer"
                continue
            judge = sample.judge or (None, None)
            right = asyncio.run(_reward(benchmark, row, answer, judge[0]))
            empty = asyncio.run(_reward(benchmark, row, "", judge[1]))
        except GymError as error:
            yield f"{where}: {error.message}"
            continue
        if right != 1.0:
            yield f"{where}: the right answer scores {right}"
        if not isinstance(empty, float) or empty >= 1.0:
            yield f"{where}: an empty answer scores {empty}"


async def _reward(benchmark: Benchmark, row: JSON, answer: Turns, judge: str | None) -> float | str:
    """The reward of an episode with these turns, or how it failed."""
    turns = [[message_item(answer)]] if isinstance(answer, str) else answer
    verdict = None if judge is None else _scripted([[message_item(judge)]])
    graph = benchmark.graph(_scripted(turns), verdict)
    local = LocalGraph(resolve(load_graph(graph).spec))
    await local.start()
    try:
        rollout = await AgentClient(local.transport(agent_of(benchmark.name, "policy"))).run(row)
    finally:
        await local.stop()
    if (failure := failure_class(rollout)) is not None:
        return f"nothing: {failure}, {rollout.get('failure')}"
    return float(rollout["reward"])


def _scripted(turns: list[list[JSON]]) -> JSON:
    return {"type": "scripted_model", "script": turns}
