"""CPU time per rollout with and without measuring, in one process without Ray, the settings taking turns.

    python -m benchmarks.observing --rounds 120 --rollouts 40
    python -m benchmarks.observing --http --rounds 100 --rollouts 40
    python -m benchmarks.observing --ray --rounds 100 --rollouts 400

- ``none``: no timeline, and nothing is counted: see `uncounted`.
- ``again``: the same once more. Its difference to ``none`` is the error of the measurement.
- ``counted``: the metrics, as every process counts them, with CPU time by stage.
- ``timeline``: and a timeline in each rollout, which is the default.

A round measures each setting for a few rollouts, in a random order, and divides its CPU time by that of
``none``. As many rollouts go before these, unmeasured, because the interpreter fits its code to what it runs:
after a change of setting, the first ones are slower, and most so where something is counted. The median of
these ratios is printed, and half the width of its 95% confidence interval. So a neighbour on the machine, who
slows down all that runs in a round, does not count.

The last line is the CPU time of one publication, which a replica makes every 5 seconds.

The model is `scripted_model`, in this process. With ``--http`` it is the HTTP server on loopback of
`benchmarks.rollouts`, whose requests are a part of what a rollout costs wherever a model is real.

With ``--ray``, the same rollouts come from a graph on a local Ray, as in `benchmarks.rollouts`. The CPU time
is that of the replicas and of this process, which runs the rollouts; a quarter as many go before, unmeasured.
The replicas are the same for all settings, and are told to change: two processes that do the same differ by
up to two percent for as long as they live, by where their memory lies.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import psutil

from benchmarks.harness.ray_processes import replicas
from benchmarks.harness.uncounted import uncounted
from benchmarks.harness.work import graph as http_graph
from benchmarks.harness.work import model_behaviour
from benchmarks.loopback import run_model_server
from gym_serve import Gym
from gym_serve.servers.runner import tune_process

ROWS = "environments/simple_weather/data/example.jsonl"
SETTINGS = ("none", "again", "counted", "timeline")
SWITCHED = {"policy": "Model", "weather": "Weather", "agent": "Agent"}
"""The servers of the graph on Ray, and what their classes end with."""


def cpu_of(work: Callable[[], Any], per: int) -> float:
    """CPU microseconds of ``work``, for each of so many."""
    began = time.process_time()
    work()
    return 1e6 * (time.process_time() - began) / per


def margin(values: list[float]) -> float:
    """Half the width of the 95% confidence interval of the median, by ranks of a binomial distribution."""
    ordered, reach = sorted(values), 0.98 * len(values) ** 0.5
    middle = len(ordered) / 2
    low, high = max(0, round(middle - reach)), min(len(ordered) - 1, round(middle + reach))
    return (ordered[high] - ordered[low]) / 2


def show(times: dict[str, list[float]]) -> None:
    """Print the CPU time of each setting, and what it costs more than ``none``."""
    for name, spent in times.items():
        ratios = [100 * (mine / none - 1) for mine, none in zip(spent, times["none"], strict=True)]
        print(
            f"{name:10} {statistics.median(spent):7.1f} us per rollout  "
            f"{statistics.median(ratios):+5.2f} % +- {margin(ratios):.2f}"
        )


def measure(rounds: int, rollouts: int, graph: Any, agent: str) -> None:
    gyms = {
        name: Gym.from_graph(graph, overrides={f"agents.{agent}.timeline": name == "timeline"}, ray=False)
        for name in SETTINGS
    }
    chance = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for turn in range(-3, rounds):  # the first ones are for caches
        for name in chance.sample(SETTINGS, len(SETTINGS)):

            def work(gym: Gym = gyms[name]) -> None:
                gym.run(ROWS, limit=1, repeats=rollouts, agent=agent)

            with uncounted() if name in ("none", "again") else nullcontext():
                work()
                gc.collect()
                spent = cpu_of(work, rollouts)
            if turn >= 0:
                times[name].append(spent)
    show(times)
    published = statistics.median(cpu_of(gyms["timeline"].metrics, 1) for _ in range(20))
    print(f"publication {published:.0f} us")
    for gym in gyms.values():
        gym.shutdown()


def cpu_with(processes: Iterable[psutil.Process]) -> float:
    """CPU seconds so far of these processes and of this one, which runs the rollouts."""
    # clock_getcpuclockid(3): the clock of another process. What psutil reads has steps of 10 ms.
    return time.process_time() + sum(time.clock_gettime((~other.pid << 3) | 2) for other in processes)


def measure_on_ray(rounds: int, rollouts: int, model_url: str) -> None:
    """The same with every server in a replica, which is told before each run what to count."""
    graph = http_graph(model_url)
    for section, (name, kind) in zip(("models", "resources", "agents"), SWITCHED.items(), strict=True):
        graph[section][name]["type"] = f"benchmarks.harness.uncounted:Switched{kind}"
    times: dict[str, list[float]] = {name: [] for name in SETTINGS}
    chance = random.Random(0)
    with Gym.from_graph(graph) as gym:
        processes = replicas()
        for turn in range(-2, rounds):
            for name in chance.sample(SETTINGS, len(SETTINGS)):
                body = {"counted": name not in ("none", "again"), "timeline": name == "timeline"}
                for server in SWITCHED:
                    gym.call(server, "measure", body)
                gym.run(ROWS, limit=1, repeats=rollouts // 4, agent="agent")
                before = cpu_with(processes)
                gym.run(ROWS, limit=1, repeats=rollouts, agent="agent")
                if turn >= 0:
                    times[name].append(1e6 * (cpu_with(processes) - before) / rollouts)
    show(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--rollouts", type=int, default=40)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--http", action="store_true")
    arguments = parser.parse_args()
    tune_process()  # as `gym-serve collect` does
    if arguments.ray:
        with run_model_server(model_behaviour()) as model:
            measure_on_ray(arguments.rounds, arguments.rollouts, model.url)
    elif arguments.http:
        with run_model_server(model_behaviour()) as model:
            measure(arguments.rounds, arguments.rollouts, http_graph(model.url), "agent")
    else:
        measure(arguments.rounds, arguments.rollouts, "graphs/weather.yaml", "weather_agent")


if __name__ == "__main__":
    main()
