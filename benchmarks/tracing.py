"""CPU time per rollout with and without traces, in one process without Ray, the settings taking turns.

    python -m benchmarks.tracing --rounds 20 --rollouts 200

Spans go over OTLP to a receiver in a process of its own, whose time is not counted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from gym_serve import Gym
from gym_serve.observe import tracing

SETTINGS: dict[str, dict[str, Any]] = {
    "absent": {},
    "tracing: 0": {"tracing": 0},
    "tracing: 0.01": {"tracing": 0.01},
    "tracing: 1": {"tracing": 1},
}
ROWS = "environments/simple_weather/data/example.jsonl"


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


def measure(rounds: int, rollouts: int) -> None:
    theirs, ours = multiprocessing.Pipe()
    sink = multiprocessing.get_context("spawn").Process(target=receive, args=(ours,), daemon=True)
    sink.start()
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{theirs.recv()}"
    os.environ["OTEL_BSP_MAX_QUEUE_SIZE"] = "100000"  # none is dropped, so all are paid for
    gyms = {
        name: Gym.from_graph("graphs/weather.yaml", overrides=setting, ray=False)
        for name, setting in SETTINGS.items()
    }
    times: dict[str, list[float]] = {name: [] for name in gyms}
    for turn in range(rounds + 1):
        for name, gym in gyms.items():
            began = time.process_time()
            gym.run(ROWS, limit=1, repeats=rollouts)
            tracing.flush(60)
            if turn:  # the first round is for caches
                times[name].append(1e6 * (time.process_time() - began) / rollouts)
    for gym in gyms.values():
        gym.shutdown()
    base = times["absent"]
    for name, values in times.items():
        ratios = [value / other for value, other in zip(values, base, strict=True)]
        share = 100 * (statistics.median(ratios) - 1)
        print(f"{name:14} {statistics.median(values):7.0f} us per rollout  {share:+6.1f} %")
    sink.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rollouts", type=int, default=200)
    arguments = parser.parse_args()
    measure(arguments.rounds, arguments.rollouts)


if __name__ == "__main__":
    main()
