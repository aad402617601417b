"""CPU time per rollout with and without measuring, in one process without Ray, the settings taking turns.

    python -m benchmarks.observing --rounds 40 --rollouts 100

- ``none``: no timeline, and nothing is counted: the functions that record are replaced by empty ones.
- ``counted``: the metrics, as every process counts them, with CPU time by stage.
- ``timeline``: and a timeline in each rollout, which is the default.

The last line is the time of one publication, which a replica makes every 5 seconds.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from gym_serve import Gym
from gym_serve.observe import catalogue, cpu
from gym_serve.servers import runner

ROWS = "environments/simple_weather/data/example.jsonl"
SETTINGS = ("none", "counted", "timeline")


@contextmanager
def uncounted() -> Iterator[None]:
    """Nothing is counted inside."""

    def nothing(*args: Any) -> None:
        pass

    with (
        mock.patch.object(catalogue.CallMeter, "record", nothing),
        mock.patch.object(runner.ServerRunner, "_record_usage", nothing),
        mock.patch.object(catalogue.RolloutMeter, "record", nothing),
        mock.patch.object(cpu.StageMeter, "measured", lambda stage, work: work),
    ):
        yield


def cpu_of(work: Callable[[], Any], per: int) -> float:
    """CPU microseconds of ``work``, for each of so many."""
    gc.collect()
    began = time.process_time()
    work()
    return 1e6 * (time.process_time() - began) / per


def measure(rounds: int, rollouts: int) -> None:
    gyms = {
        name: Gym.from_graph(
            "graphs/weather.yaml", overrides={"agents.weather_agent.timeline": name == "timeline"}, ray=False
        )
        for name in SETTINGS
    }
    times: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for turn in range(rounds + 1):
        for name, gym in sorted(gyms.items(), reverse=bool(turn % 2)):

            def work(gym: Gym = gym) -> None:
                gym.run(ROWS, limit=1, repeats=rollouts)

            if name == "none":
                with uncounted():
                    spent = cpu_of(work, rollouts)
            else:
                spent = cpu_of(work, rollouts)
            if turn:  # the first round is for caches
                times[name].append(spent)
    # On a busy machine, the rounds that were disturbed least: of each setting, the best tenth.
    best = {name: statistics.mean(sorted(values)[: max(1, rounds // 10)]) for name, values in times.items()}
    for name, spent in best.items():
        print(f"{name:10} {spent:7.1f} us per rollout  {100 * (spent / best['none'] - 1):+5.1f} %")
    published = statistics.median(cpu_of(gyms["timeline"].metrics, 1) for _ in range(20))
    print(f"publication {published:.0f} us")
    for gym in gyms.values():
        gym.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--rollouts", type=int, default=100)
    arguments = parser.parse_args()
    measure(arguments.rounds, arguments.rollouts)


if __name__ == "__main__":
    main()
