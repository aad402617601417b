"""`gym-serve top`: the page for given numbers, and the command on a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from support.traced import ROW, graph
from support.upstream import ChatEndpoint
from typer.testing import CliRunner

from gym_serve.cli import main
from gym_serve.cli.top import Samples, page

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


def shown(samples: Samples, width: int) -> list[str]:
    return [line.plain for line in page(samples, width)]


def running() -> Samples:
    samples = Samples("math")
    for second in range(20):
        samples.add(float(second), stats(100 + 10 * second, failed=second, endpoint_up=second < 10))
    return samples


def test_the_page_at_80_columns() -> None:
    assert shown(running(), 80) == [
        "math",
        "rollouts  11.0/s  12 running  290 scored  19 failed",
        "reward    0.250 mean  0.250 in the last minute",
        "duration  p50 200 ms  p95 290 ms",
        "tokens    10,000 input/s",
        "failures  19 model_timeout",
        "limit     policy (calls 0.95), 13 rollouts suit the graph",
        "",
        "server  replicas  load  by     running  queued  calls/s     p50     p95  err%",
        "policy       2+1  0.95  calls       24       3     21.0  200 ms  290 ms   4.8",
        "math           1  0.10  cpu          0       0      0.0       -       -     -",
        "agent          1  0.20  calls       12       0      0.0       -       -     -",
        "",
        "policy    http://10.0.0.1:8000/v1  down at 1 of 2 replicas",
        "policy    policy version 7",
    ]


def test_200_columns_have_more_of_each_server() -> None:
    lines = shown(running(), 200)
    assert lines[8].endswith("err%  sessions  cores  CPU time by stage")
    assert lines[11].endswith("run 75% other 25%")


@pytest.mark.parametrize("width", [20, 60, 80, 200])
def test_no_line_is_longer_than_the_terminal_is_wide(width: int) -> None:
    samples = Samples("http://a-very-long-host-name.example:8000/and-a-long-prefix/of-a-graph")
    many = stats(10**9, failed=10**6)
    many["servers"] |= {"s" * 63: server(replicas=100, running=10**6)}
    samples.add(0.0, many)
    samples.problem = "no gym_serve graph answers " * 10
    assert max(map(len, shown(samples, width))) <= width


def test_an_idle_graph_and_a_sum_that_falls_have_no_rates() -> None:
    samples = Samples("math")
    samples.add(0.0, {"bottleneck": None, "rollouts": 0, "servers": {"policy": server(reason=None)}})
    assert shown(samples, 80)[1:7] == [
        "rollouts  0.0/s  0 running", "reward    -", "duration  -", "tokens    -", "failures  none",
        "limit     idle",
    ]  # fmt: skip
    samples.add(1.0, stats(100))
    samples.add(2.0, stats(50))  # a replica has ended
    assert "rollouts  25.0/s" in shown(samples, 80)[1]
    assert samples.grown("gym_serve_rollouts_total", seconds=1.0) == {(): 0.0}


class Gateway:
    """Answers as a graph's gateway, with more rollouts each time.

    Attributes:
        url: of the graph.
        state: ``runs``, ``hangs`` (no answer) or ``is gone`` (404, as of Serve's proxy).
    """

    def __init__(self) -> None:
        self.state = "runs"
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
                is_gone = gateway.state == "is gone"
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


class Terminal:
    """`gym-serve top` on a terminal of 24 lines.

    Attributes:
        process: the command.
        written: what it has written so far.
    """

    def __init__(self, *arguments: str, columns: int = 80) -> None:
        self._control, self._terminal = pty.openpty()
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self._before = termios.tcgetattr(self._terminal)
        self.written = b""
        code = "from gym_serve.cli import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "top", *arguments, "--interval", "0.2"],
            stdin=self._terminal,
            stdout=self._terminal,
            stderr=self._terminal,
            env={**os.environ, "TERM": "xterm-256color"},
        )

    def read(self) -> None:
        """Read what is there within a tenth of a second."""
        readable, _, _ = select.select([self._control], [], [], 0.1)
        self.written += os.read(self._control, 65536) if readable else b""

    def until(self, text: bytes, times: int = 1) -> None:
        """Read until it has written a text, so many times."""
        while self.written.count(text) < times:
            self.read()
            assert self.process.poll() is None, self.written.decode(errors="replace")

    def type(self, keys: bytes) -> None:
        os.write(self._control, keys)

    def ends(self) -> int:
        """Its exit status. The terminal is as it was before."""
        while self.process.poll() is None:
            self.read()
        self.read()
        assert termios.tcgetattr(self._terminal) == self._before
        assert b"\x1b[?1049l" in self.written  # the screen that was there before
        assert (
            b"\x1b[?25h" in self.written.rpartition(b"\x1b[?1049l")[0][-60:] + self.written[-60:]
        )  # its cursor
        assert b"Traceback" not in self.written
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)
        os.close(self._control)


@pytest.fixture
def terminal(gateway: Gateway) -> Iterator[Terminal]:
    """It has been drawn three times."""
    terminal = Terminal("--url", gateway.url)
    try:
        terminal.until(b"policy version 7", 3)
        yield terminal
    finally:
        terminal.close()


@pytest.mark.parametrize("end", ["q", "interrupt", "terminate"])
def test_on_a_terminal_it_ends_cleanly(terminal: Terminal, end: str) -> None:
    if end == "q":
        terminal.type(b"q")
    else:
        terminal.process.send_signal(signal.SIGINT if end == "interrupt" else signal.SIGTERM)
    assert terminal.ends() == 0
    assert "13 rollouts suit the graph" in terminal.written.decode(errors="replace")


def test_a_graph_that_does_not_answer_holds_up_no_key(terminal: Terminal, gateway: Gateway) -> None:
    gateway.state = "hangs"
    terminal.until(b"policy version 7", 6)  # it is still drawn
    terminal.type(b"q")
    assert terminal.ends() == 0


def test_it_ends_with_its_graph(terminal: Terminal, gateway: Gateway) -> None:
    gateway.state = "is gone"
    assert terminal.ends() == 1
    last = terminal.written.rpartition(b"\x1b[?1049l")[2].decode()
    assert "is gone" in last


@pytest.mark.parametrize("columns", ["80", "200"])
def test_a_running_graph_by_its_name_address_and_url(shown_graph: Any, columns: str) -> None:
    import ray

    gym, endpoint = shown_graph
    address = ray.get_runtime_context().gcs_address
    for target in (["shown", "--address", address], ["--url", gym.url]):
        command = ["top", *target, "--interval", "0.2"]
        result = CliRunner().invoke(main, command, env={"COLUMNS": columns})
        assert result.exit_code == 0, result.output
        lines = result.stdout.splitlines()
        assert lines[0] == (gym.url if "--url" in target else "shown")
        assert lines[1].split()[-2:] == ["6", "scored"]
        assert f"policy    {endpoint}  up" in lines
        assert {line.split()[0] for line in lines[9:13]} == {"policy", "judge", "env", "agent"}
        assert not [line for line in lines if len(line) > int(columns)]
        assert ("CPU time by stage" in result.stdout) == (columns == "200")


@pytest.fixture(scope="module")
def shown_graph(deploy: Any) -> Iterator[tuple[Any, str]]:
    """A graph on the cluster that has run six rollouts, and the endpoint of its policy."""
    with ChatEndpoint("done") as endpoint:
        given = graph()
        del given["tracing"]
        given["models"]["policy"] = {"type": "chat_model", "base_url": endpoint.url, "model": "m"}
        gym = deploy(given, name="shown")
        gym.run([ROW] * 6)
        yield gym, endpoint.url
