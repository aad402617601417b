"""What rollouts cost the trainer's own process, with 1,024 of them in flight.

    python -m benchmarks.trainer_process [--rollouts 2048] [--rounds 5] [--tokens 64]

A trainer that works in Python has no CPU to give away: the event loop of its rollouts competes with it. This
measures the CPU time of the trainer's process for each rollout with one tool call and token ids, and how
long its event loop was late at worst, for the ways in which trainers are connected:

- ``attached``: the graph runs on the trainer's Ray cluster (NeMo RL, a trainer of your own).
- ``http``: the graph runs elsewhere (`Gym.connect`).
- ``inline``: the graph runs in the trainer's process (the adapters of verl, OpenRLHF, SkyRL and slime).
- ``samples``: ``attached``, and each rollout is cut into training samples.

They take turns in every round; medians are printed. The model is an HTTP server on loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import replace

from benchmarks.harness.reports import table
from benchmarks.harness.work import graph, model_behaviour, rows
from benchmarks.loopback import run_model_server
from gym_serve import Gym
from gym_serve.training import samples
from gym_serve.types.rows import Rollout

IN_FLIGHT = 1024
_LOOK_SECONDS = 0.005


async def lateness(worst: list[float]) -> None:
    """Measure by how many seconds the event loop wakes up too late."""
    while True:
        due = time.monotonic() + _LOOK_SECONDS
        await asyncio.sleep(_LOOK_SECONDS)
        worst[0] = max(worst[0], time.monotonic() - due)


async def drained(rollouts: AsyncIterator[Rollout], *, cut: bool) -> int:
    """How many rollouts were scored; ``cut`` makes training samples of each."""
    scored = 0
    async for rollout in rollouts:
        scored += rollout.reward == 1.0
        if cut:
            assert samples(rollout)
    return scored


async def measured(gym: Gym, count: int, *, cut: bool) -> tuple[float, float, float]:
    """CPU milliseconds of this process per rollout, rollouts per second, and the worst delay in ms."""
    worst = [0.0]
    watch = asyncio.create_task(lateness(worst))
    cpu, begun = time.process_time(), time.perf_counter()
    scored = await drained(gym.rollouts(rows(count), concurrency=IN_FLIGHT), cut=cut)
    cpu, seconds = time.process_time() - cpu, time.perf_counter() - begun
    watch.cancel()
    assert scored == count, f"{scored} of {count} rollouts were scored"
    return 1000 * cpu / count, count / seconds, 1000 * worst[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=2 * IN_FLIGHT)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="that each model call generates")
    arguments = parser.parse_args()
    found: dict[str, list[tuple[float, float, float]]] = {}
    with ExitStack() as stack:
        model = stack.enter_context(run_model_server(replace(model_behaviour(), tokens=arguments.tokens)))
        spec = graph(model.url, in_flight=2 * IN_FLIGHT)
        spec["models"]["policy"]["return_token_ids"] = True
        attached = stack.enter_context(Gym.from_graph(spec, name="attached"))
        remote = stack.enter_context(Gym.connect(attached.url))
        inline = stack.enter_context(Gym.from_graph(spec, name="inline", ray=False))
        ways = {"attached": attached, "http": remote, "inline": inline, "samples": attached}
        for turn in range(arguments.rounds + 1):  # the first one is for caches
            for name, gym in ways.items():
                result = asyncio.run(measured(gym, arguments.rollouts, cut=name == "samples"))
                if turn:
                    found.setdefault(name, []).append(result)
    header = ("way", "CPU ms per rollout in the trainer's process", "rollouts/s", "loop late by at most, ms")
    medians = {
        name: [statistics.median(each) for each in zip(*all_, strict=True)] for name, all_ in found.items()
    }
    print(table(header, [(name, *(f"{value:.3g}" for value in values)) for name, values in medians.items()]))


if __name__ == "__main__":
    main()
