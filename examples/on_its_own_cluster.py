"""The environments run on a Ray cluster of their own; the trainer (e.g. torchrun) does not use Ray.

    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=...           # on all machines, of `openssl rand -hex 32`
    ray start --head                                        # on the first machine of the cluster
    ray start --address=FIRST:6379                          # on its other machines
    ray start --address=FIRST:6379 --num-cpus=0             # on the trainer's, which gets no server
    python examples/on_its_own_cluster.py [auto]

Without `auto`, a new Ray starts on this machine alone, and ends with this process.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from gym_serve import AsyncGym

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "environments" / "mcqa" / "data" / "example.jsonl"


async def train(address: str | None) -> None:
    graph = ROOT / "graphs" / "mcqa.yaml"
    # A process of this run that is started again within ten minutes goes on with the same replicas.
    async with await AsyncGym.from_graph(
        graph, address, name="mcqa_apart", owner="run-17", lease_s=600
    ) as gym:
        async for group in gym.groups(ROWS, size=4, limit=3):
            rewards = [rollout.reward for rollout in group.rollouts]
            print(f"task {group.task_index}: rewards {rewards}")


if __name__ == "__main__":
    asyncio.run(train(sys.argv[1] if len(sys.argv) > 1 else None))
