"""The metrics of a run's files do not depend on who computes them, or in how many pieces it was made."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.rollouts import JSON, FakeAgent, collection, rows

from gym_serve.metrics import MetricSpec, Score, aggregate_metrics
from gym_serve.rollouts import Outputs, collect, progress
from gym_serve.rollouts.progress import summarize_run
from gym_serve.types.errors import BadRequest, Unavailable

SPEC = MetricSpec(scores=(Score("accuracy"),))


async def in_the_graph(agent: str, rollouts: list[JSON]) -> JSON:
    return aggregate_metrics(rollouts, SPEC)


@pytest.fixture
async def outputs(tmp_path: Path) -> Outputs:
    errors = {(1, 0): [Unavailable("gone")], (2, 1): [BadRequest("never")], (3, 0): [BadRequest("never")]}
    errors[3, 1] = [BadRequest("never")]
    await collect(rows(5), tmp_path / "out.jsonl", collection(FakeAgent(errors=errors), repeats=2))
    return Outputs.of(tmp_path / "out.jsonl")


def stored(outputs: Outputs) -> Any:
    return orjson.loads(outputs.metrics.read_bytes())


async def test_asking_and_computing_give_the_same(outputs: Outputs) -> None:
    asked = await summarize_run(outputs, in_the_graph)
    of_asked = stored(outputs)
    computed = await summarize_run(outputs, None, lambda agent: SPEC)
    assert of_asked == stored(outputs)
    assert asked == computed
    assert computed[0]["agent_metrics"]["pass@1/accuracy"] == 100.0
    assert computed[0]["failures"] == {"bad_request": 3, "unavailable": 1}
    assert [group["missing_num_rollouts"] for group in of_asked[0]["group_level_metrics"]] == [0, 0, 1, 2, 0]


async def test_many_rollouts_are_not_sent_around(outputs: Outputs, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = await summarize_run(outputs, in_the_graph)
    monkeypatch.setattr(progress, "MAX_ROLLOUTS_SENT", 3)

    async def aggregate(agent: str, rollouts: list[JSON]) -> JSON:
        raise AssertionError("nobody asks")

    assert await summarize_run(outputs, aggregate, lambda agent: SPEC) == asked


async def never(agent: str, rollouts: list[JSON]) -> JSON:
    await asyncio.Event().wait()
    raise AssertionError


async def broken(agent: str, rollouts: list[JSON]) -> JSON:
    return {**aggregate_metrics(rollouts, SPEC), "group_level_metrics": None}


async def nonsense(agent: str, rollouts: list[JSON]) -> Any:
    return ["no metrics"]


@pytest.mark.parametrize("aggregate", [never, broken, nonsense])
async def test_an_agent_that_gives_no_metrics_costs_none(
    outputs: Outputs, aggregate: progress.Aggregate, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = await summarize_run(outputs, None, lambda agent: SPEC)
    monkeypatch.setattr(progress, "_ANSWER_SECONDS", 0.05)
    assert await summarize_run(outputs, aggregate, lambda agent: SPEC) == computed


async def test_a_run_without_results(tmp_path: Path) -> None:
    outputs = Outputs.of(tmp_path / "out.jsonl")
    assert await summarize_run(outputs) == []
    assert stored(outputs) == []
