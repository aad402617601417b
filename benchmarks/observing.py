"""CPU time per rollout with and without timelines and traces, in one process, the settings taking turns.

    python -m benchmarks.observing [--rounds 60] [--rollouts 40] [--http]

A round measures each setting for a few rollouts, in a random order, and divides its CPU time by that of
``bare``, an agent without timelines. As many rollouts go before these, unmeasured, because the interpreter
fits its code to what it runs. The median of these ratios is printed, and half the width of its 95% confidence
interval: a neighbour on the machine, who slows down all that runs in a round, does not count. ``again`` is
``bare`` once more: its difference is the error of the measurement.

The model is `scripted_model`, in this process. With ``--http`` it is the HTTP server on loopback of
`benchmarks.rollouts`, whose requests are a part of what a rollout costs wherever a model is real. Spans go
over OTLP to a receiver in a process of its own, whose time is not counted.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import random
import statistics
import time
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from benchmarks.harness.work import graph as http_graph
from benchmarks.harness.work import model_behaviour
from benchmarks.loopback import run_model_server
from gym_serve import Gym
from gym_serve.observe import tracing
from gym_serve.servers.runner import tune_process

ROWS = "environments/simple_weather/data/example.jsonl"
SETTINGS: dict[str, dict[str, Any]] = {
    "bare": {"timeline": False},
    "again": {"timeline": False},
    "timeline": {"timeline": True},
    "tracing: 0.01": {"timeline": True, "tracing": 0.01},
    "tracing: 1": {"timeline": True, "tracing": 1},
}


class Sink(BaseHTTPRequestHandler):
    """Takes what is sent."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def receive(port: Any) -> None:
    server = HTTPServer(("127.0.0.1", 0), Sink)
    port.send(server.server_address[1])
    server.serve_forever()


def margin(values: list[float]) -> float:
    """Half the width of the 95% confidence interval of the median, by ranks of a binomial distribution."""
    ordered, reach = sorted(values), 0.98 * len(values) ** 0.5
    middle = len(ordered) / 2
    low, high = max(0, round(middle - reach)), min(len(ordered) - 1, round(middle + reach))
    return (ordered[high] - ordered[low]) / 2


def measure(rounds: int, rollouts: int, graph: Any, agent: str) -> dict[str, list[float]]:
    """CPU microseconds per rollout of each setting in each round."""
    times: dict[str, list[float]] = {name: [] for name in SETTINGS}
    chance = random.Random(0)
    with ExitStack() as stack:
        gyms = {}
        for name, settings in SETTINGS.items():
            overrides = {f"agents.{agent}.timeline": settings["timeline"]}
            overrides |= {key: value for key, value in settings.items() if key == "tracing"}
            gyms[name] = stack.enter_context(Gym.from_graph(graph, overrides=overrides, ray=False))
        for turn in range(-1, rounds):  # the first one is for caches
            for name in chance.sample(list(SETTINGS), len(SETTINGS)):
                gyms[name].run(ROWS, limit=1, repeats=rollouts, agent=agent)
                gc.collect()
                began = time.process_time()
                gyms[name].run(ROWS, limit=1, repeats=rollouts, agent=agent)
                tracing.flush(60)
                if turn >= 0:
                    times[name].append(1e6 * (time.process_time() - began) / rollouts)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--rollouts", type=int, default=40)
    parser.add_argument("--http", action="store_true")
    arguments = parser.parse_args()
    tune_process()  # as `gym-serve collect` does
    theirs, ours = multiprocessing.Pipe()
    sink = multiprocessing.get_context("spawn").Process(target=receive, args=(ours,), daemon=True)
    sink.start()
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{theirs.recv()}"
    os.environ["OTEL_BSP_MAX_QUEUE_SIZE"] = "100000"  # none is dropped, so all are paid for
    with ExitStack() as stack:
        graph: Any = "graphs/weather.yaml"
        if arguments.http:
            graph = http_graph(stack.enter_context(run_model_server(model_behaviour())).url)
        agent = "agent" if arguments.http else "weather_agent"
        times = measure(arguments.rounds, arguments.rollouts, graph, agent)
    sink.terminate()
    for name, spent in times.items():
        ratios = [100 * (mine / bare - 1) for mine, bare in zip(spent, times["bare"], strict=True)]
        print(
            f"{name:14} {statistics.median(spent):7.1f} us per rollout  "
            f"{statistics.median(ratios):+6.2f} % +- {margin(ratios):.2f}"
        )


if __name__ == "__main__":
    main()
