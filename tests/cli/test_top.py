"""`gym-serve top`: the page for given numbers, and the command on a terminal; of a graph: test_collect.py."""

import io
import json
import math
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console, Group
from typer.testing import CliRunner

from gym_serve.cli import main
from gym_serve.cli.monitoring import page

GRAPH = {"models": {"policy": {}}, "resources": {"math": {}}, "agents": {"agent": {}}}
ENDPOINT = "http://10.0.0.1:8000/v1"


def server(**counts: Any) -> dict[str, Any]:
    idle = {
        "replicas": 1, "draining": 0, "running": 0, "waiting": 0, "sessions": 0, "cpu": 0.0, "refused": 0.0,
        "load": 0.0, "reason": "calls", "cpu_seconds": {},
    }  # fmt: skip
    return idle | counts


def stats(rollouts: int, failed: int = 0, endpoint_up: int = 1) -> dict[str, Any]:
    """The numbers after so many rollouts, each with two model calls of 0.3 s and one verification."""

    def point(value: float, **labels: str) -> dict[str, Any]:
        return {"labels": labels, "value": value}

    def buckets(count: int, **labels: str) -> list[dict[str, Any]]:
        return [
            point(value, **labels, le=bound)
            for bound, value in {"0.1": 0, "0.3": count, "1": count, "+Inf": count}.items()
        ]

    return {
        "bottleneck": "policy", "reason": "calls", "load": 0.95, "rollouts": 12, "concurrency": 13,
        "servers": {
            "policy": server(replicas=2, draining=1, running=24, waiting=3, load=0.95, cpu=0.2),
            "math": server(sessions=12, load=0.1, reason="cpu", cpu=1.5),
            "agent": server(running=12, load=0.2, cpu_seconds={"run": 3.0, "other": 1.0}),
        },
        "metrics": {
            "gym_serve_rollouts_total": [
                point(rollouts, agent="agent", outcome="scored"),
                point(failed, agent="agent", outcome="failed"),
            ],
            "gym_serve_rollout_reward_sum": [point(rollouts / 4, agent="agent")],
            "gym_serve_rollout_reward_count": [point(rollouts, agent="agent")],
            "gym_serve_failures_total": [
                point(failed, agent="agent", stage="model", **{"class": "model_timeout"})
            ],
            "gym_serve_calls_total": [
                point(2 * rollouts, server="policy", op="v1/responses", status="200"),
                point(failed, server="policy", op="v1/responses", status="504"),
            ],
            "gym_serve_call_seconds_bucket": buckets(2 * rollouts, server="policy", op="v1/responses"),
            "gym_serve_rollout_seconds_bucket": buckets(rollouts, agent="agent"),
            "gym_serve_tokens_total": [point(1000 * rollouts, model="policy", kind="input")],
            "gym_serve_endpoint_up": [
                point(1, model="policy", endpoint=ENDPOINT, replica="0"),
                point(endpoint_up, model="policy", endpoint=ENDPOINT, replica="1"),
            ],
            "gym_serve_policy_version": [point(7, model="policy", replica="0")],
        },
    }  # fmt: skip


def shown(before: dict[str, Any], latest: dict[str, Any], seconds: float, problem: str = "") -> list[str]:
    console = Console(width=100, file=io.StringIO())
    console.print(Group(*page("math", before, latest, seconds, problem)))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_the_page() -> None:
    assert shown(stats(280, failed=18), stats(290, failed=19, endpoint_up=0), 1.0) == [
        "math",
        "rollouts  11.0/s  12 running  290 scored  19 failed",
        "reward    0.250 mean",
        "tokens    10,000 input/s",
        "failures  19 model_timeout",
        "limit     policy (calls 0.95), 13 rollouts suit the graph",
        "",
        "server  replicas  load  by     running  queued  calls/s  sessions  cores",
        "policy  2+1       0.95  calls  24       3       21.0     0         0.20",
        "math    1         0.10  cpu    0        0       0.0      12        1.50",
        "agent   1         0.20  calls  12       0       0.0      0         0.00",
        "policy    http://10.0.0.1:8000/v1  down at 1 of 2 replicas",
        "policy    policy version 7",
    ]


def test_an_idle_graph_a_sum_that_falls_and_a_request_without_an_answer() -> None:
    idle = {"bottleneck": None, "rollouts": 0, "servers": {"policy": server(reason=None)}}
    facts = ["rollouts  0.0/s  0 running", "reward    -", "tokens    -", "failures  none", "limit     idle"]
    assert shown(idle, idle, 1.0)[1:6] == facts
    fallen = shown(stats(100), stats(50), 1.0, "no route")  # a replica has ended
    assert (fallen[1], fallen[2].split()[1]) == ("no answer: no route", "0.0/s")


class Gateway:
    """Answers as a graph's gateway, with more rollouts each time.

    Attributes:
        url: of the graph.
        state: ``runs``, ``hangs`` (no answer) or ``is gone`` (404, as of Serve's proxy).
        left: how many answers until it is gone.
    """

    def __init__(self) -> None:
        self.state, self.left = "runs", math.inf
        self.go_on = threading.Event()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.http.server_port}/math"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        gateway, asked = self, [0]

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked[0] += 1
                if gateway.state == "hangs":
                    gateway.go_on.wait()
                gateway.left -= 1
                is_gone = gateway.state == "is gone" or gateway.left < 0
                body = json.dumps(GRAPH if self.path == "/math/graph" else stats(10 * asked[0])).encode()
                body = b"Path '/math' not found" if is_gone else body
                self.send_response(404 if is_gone else 200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                with suppress(OSError):  # whoever asked may be gone
                    self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        return Handler


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    gateway = Gateway()
    thread = threading.Thread(target=gateway.http.serve_forever)
    thread.start()
    yield gateway
    gateway.go_on.set()
    gateway.http.shutdown()
    thread.join()
    gateway.http.server_close()


def test_without_a_terminal_the_page_is_printed_once(gateway: Gateway) -> None:
    result = CliRunner().invoke(main, ["top", "--url", gateway.url, "--interval", "0.2"])
    assert result.exit_code == 0, result.output
    assert "policy version 7" in result.stdout
    result = CliRunner().invoke(main, ["top", "--url", gateway.url, "--json"])
    assert json.loads(result.stdout)["servers"]["policy"]["running"] == 24


def test_it_ends_with_its_graph(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Console, "is_terminal", True)
    gateway.left = 5
    result = CliRunner().invoke(main, ["top", "--url", gateway.url, "--interval", "0.2"])
    assert result.exit_code == 1
    assert "is gone" in result.stderr
    assert "policy version 7" in result.stdout


def test_ctrl_c_ends_it(gateway: Gateway) -> None:
    code = "from gym_serve.cli import main; main()"
    command = [sys.executable, "-c", code, "top", "--url", gateway.url, "--interval", "0.2"]
    control, terminal = pty.openpty()
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=subprocess.PIPE)
    written = b""
    while written.count(b"policy version 7") < 3:
        written += os.read(control, 65536)
    process.send_signal(signal.SIGINT)
    _, problems = process.communicate(timeout=30)
    assert (process.returncode, problems) == (0, b"")
    os.close(terminal)
    os.close(control)
