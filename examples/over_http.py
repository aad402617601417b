"""The trainer reaches the graph over HTTP alone: no Ray on its side, any version of Python.

export GYM_TOKEN=...                                    # the same on both sides; unset if the graph has none
gym-serve up graphs/mcqa.yaml --set 'auth_token=${GYM_TOKEN}'
python examples/over_http.py http://HOST:8000/mcqa
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from gym_serve import AsyncGym

ROWS = Path(__file__).parents[1] / "environments" / "mcqa" / "data" / "example.jsonl"


async def train(url: str) -> None:
    async with await AsyncGym.connect(url, os.environ.get("GYM_TOKEN")) as gym:
        async for group in gym.groups(ROWS, size=4, limit=3):
            rewards = [rollout.reward for rollout in group.rollouts]
            print(f"task {group.task_index}: rewards {rewards}")


if __name__ == "__main__":
    asyncio.run(train(sys.argv[1]))
