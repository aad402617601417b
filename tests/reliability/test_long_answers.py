"""Answers that burn a processor hold up no others, on a machine that is busy all the same."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from support.burners import BURNERS, HONEST, Numbered

from gym_serve import AsyncGym, Gym

BUSY = 8  # processes


@pytest.fixture(scope="module")
def gym(deploy: Callable[..., Gym]) -> Gym:
    graph = {
        "models": {"policy": {"type": Numbered}},
        "resources": {"math": {"type": "math_with_judge", "should_use_judge": False}},
        "agents": {"agent": {"type": "single_turn_agent", "model": "policy", "resources": "math"}},
    }
    return deploy(graph, name="long-answers")


@pytest.fixture
def load(gym: Gym) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY)]
    yield
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.usefixtures("load")
async def test_all_are_scored_and_right(gym: Gym) -> None:
    count = len(BURNERS) + len(HONEST)
    rows = [
        {"responses_create_params": {"input": str(n)}, "question": "2 + 3?", "expected_answer": "5"}
        for n in range(count)
    ]
    begun = time.monotonic()
    rollouts = sorted(
        await AsyncGym.of(gym).run(rows, concurrency=count), key=lambda rollout: rollout.task_index
    )
    print(f"{count} answers in {time.monotonic() - begun:.0f} s at a load of {os.getloadavg()[0]:.0f}")
    assert [rollout.failure for rollout in rollouts] == [None] * count
    assert [rollout.reward for rollout in rollouts] == [0.0] * len(BURNERS) + [1.0] * 3 + [0.0] * 3
    assert all("CPU time" in rollout["reason"] for rollout in rollouts[: len(BURNERS)])
