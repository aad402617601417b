"""The runner on a running graph: cancellation reaches model and tool, compare is called, collect survives."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from support.processes import replicas_of
from support.rollouts import JSON, keys, read_jsonl, write_jsonl
from support.stragglers import StragglingEnvironment, StragglingModel

from gym_serve import AsyncGym, Gym
from gym_serve.rollouts import Progress
from gym_serve.types.errors import Conflict, InvalidRequest

AGENT = {"type": "simple_agent", "model": "model", "resources": "env", "episode_timeout": 60}


@pytest.fixture(scope="module")
def gym(deploy: Any) -> Gym:
    graph = {
        "models": {"model": {"type": StragglingModel}},
        "resources": {"env": {"type": StragglingEnvironment}},
        "agents": {"agent": AGENT, "inline": {**AGENT, "inline": ["env"]}},
        "default_agent": "agent",
    }
    return deploy(graph, name="stragglers")


def row(number: int, **keys: Any) -> JSON:
    return {"responses_create_params": {"input": "go"}, "number": number, **keys}


def slow(number: int) -> JSON:
    return {"responses_create_params": {"input": "go", "user": "slow"}, "number": number}


def cancelled(gym: Gym) -> tuple[int, int, int]:
    """Cancelled model calls and tool calls so far, and live sessions."""
    response = gym.call("model", "v1/responses", {"input": "how many"})
    state = gym.call("env", "tools/state", {})
    return int(response["output"][0]["content"][0]["text"]), state["cancelled"], state["live"]


async def settle(gym: Gym, model: Collection[int], tool: int) -> None:
    """Check that so many calls are cancelled in half a minute, and that no session is open then."""
    for _ in range(300):
        of_model, of_tool, live = await asyncio.to_thread(cancelled, gym)
        if of_model in model and of_tool == tool and not live:
            return
        await asyncio.sleep(0.1)
    assert (of_model in model, of_tool, live) == (True, tool, 0)


async def test_stragglers_are_cancelled_down_to_the_model_and_the_tool(gym: Gym) -> None:
    found = [group async for group in gym.groups([row(n) for n in range(3)], size=2, oversample=2)]
    assert sorted(group.task_index for group in found) == [0, 1, 2]
    for group in found:
        assert group.usable
        assert [r["_ng_rollout_index"] for r in group.rollouts] == [0, 1]
        assert [r["reward"] for r in group.rollouts] == [2.0, 0.0]
        assert [r["verify_reward"] for r in group.rollouts] == [0.5, 0.5]
        assert group.comparison is not None
        assert group.comparison["answers"] == ["answer 0", "answer 1"]
    await settle(gym, model=[3], tool=3)


async def test_leaving_an_iteration_cancels_too(gym: Gym) -> None:
    before = await asyncio.to_thread(cancelled, gym)
    async for _ in gym.rollouts([row(0)], repeats=4):
        break
    # Rollout 3, and of 0 and 1 the one that has not answered yet, if there is one.
    await settle(gym, model=[before[0] + 1, before[0] + 2], tool=before[1] + 1)


async def test_an_attempt_that_takes_too_long_is_cancelled(gym: Gym) -> None:
    before = await asyncio.to_thread(cancelled, gym)
    source = [row(0, _ng_task_index=0, _ng_rollout_index=3)]
    (found,) = [r async for r in gym.rollouts(source, timeout=3.0)]
    assert found["failure"]["kind"] == "model_timeout"  # a slow model's, and not the policy's
    assert "(timeout: 3 s)" in found["failure"]["detail"]
    await settle(gym, model=[before[0] + 1], tool=before[1])


async def test_a_failing_compare_is_said(gym: Gym) -> None:
    (group,) = [g async for g in gym.groups([row(0, principle="none")], size=1, attempts=1)]
    assert not group.usable
    assert "compare failed: the judge is away" in (group.reason or "")


def test_compare_over_http(gym: Gym) -> None:
    remote = Gym.connect(gym.url)

    async def collected() -> list[Any]:
        return [group async for group in remote.groups([row(0)], size=2, agent="inline")]

    (group,) = asyncio.run(collected())
    assert [r["reward"] for r in group.rollouts] == [2.0, 0.0]
    remote.shutdown()


@pytest.mark.parametrize("remote", [False, True])
async def test_collect_compares_when_all_have_ended(gym: Gym, tmp_path: Path, remote: bool) -> None:
    used = await AsyncGym.connect(gym.url) if remote else AsyncGym.of(gym)
    source = [slow(0), slow(1), slow(2) | {"principle": "none"}]
    report = await used.collect(source, tmp_path / "out.jsonl", repeats=2, attempts=1, agent="agent")
    assert not report.complete
    assert report.uncompared == ["task 2: compare failed: the judge is away"]
    report = await used.collect(source[:2], tmp_path / "fine.jsonl", repeats=2, agent="agent")
    assert report.complete
    found = sorted(read_jsonl(tmp_path / "fine.jsonl"), key=lambda rollout: rollout["_ng_rollout_id"])
    assert [rollout["reward"] for rollout in found] == [2.0, 0.0, 2.0, 0.0]
    assert {rollout["verify_reward"] for rollout in found} == {0.5}
    if remote:
        await used.shutdown()


async def test_orders(gym: Gym) -> None:
    source = [slow(n) for n in range(6)]
    in_rows = [r async for r in gym.rollouts(source, order="row", repeats=2, concurrency=5)]
    assert [r["_ng_rollout_id"] for r in in_rows] == [f"{t}-{n}" for t in range(6) for n in range(2)]


async def test_a_file_is_checked_as_a_whole(gym: Gym, tmp_path: Path) -> None:
    source = write_jsonl(
        tmp_path / "rows.jsonl",
        [slow(0), {"agent_ref": {"name": "x"}}, slow(1) | {"agent_ref": {"name": "x"}}],
    )
    with pytest.raises(InvalidRequest) as caught:
        [r async for r in gym.rollouts(source)]
    assert f"{source}:2: invalid row: responses_create_params" in caught.value.message
    assert f"{source}:3: no agent 'x' in stragglers; it has agent, inline" in caught.value.message
    assert len([r async for r in gym.rollouts(source, skip_invalid=True)]) == 1


async def test_an_option_that_there_is_not(gym: Gym) -> None:
    with pytest.raises(TypeError, match="there is no option repeat"):
        [r async for r in gym.rollouts([slow(0)], repeat=2)]  # type: ignore[call-arg]


async def test_collect_survives_the_death_of_the_agent(gym: Gym, tmp_path: Path) -> None:
    """Its only replica is killed: what ran there is tried again, and the failures say what happened."""
    output = tmp_path / "out.jsonl"
    source = [slow(n) for n in range(60)]
    (pid,) = replicas_of("stragglers")["agent"]
    killed: list[int] = []

    def progress(now: Progress) -> None:
        if now.finished >= 20 and not killed:
            killed.append(now.finished)
            os.kill(pid, signal.SIGKILL)

    report = await AsyncGym.of(gym).collect(source, output, concurrency=20, progress=progress)
    assert killed
    assert report.complete
    assert keys(read_jsonl(output)) == [(task, 0) for task in range(60)]
    assert report.progress.failed_attempts.get("unavailable", 0) > 0
    (metrics,) = report.metrics
    assert metrics["failures"] == dict(report.progress.failed_attempts)
    assert metrics["agent_metrics"]["mean/verify_reward"] == 0.5

    again = await AsyncGym.of(gym).collect(source, output, resume=True)
    assert again.progress.earlier == 60
    with pytest.raises(Conflict, match=r"expansion.repeats: was 1, is 2"):
        await AsyncGym.of(gym).collect(source, output, resume=True, repeats=2)
