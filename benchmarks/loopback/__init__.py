"""An OpenAI-compatible model server on loopback, without a model: for benchmarks and tests.

    with run_model_server(Behaviour(latency_ms=100)) as server:
        gym = Gym.from_graph(graph, overrides={"models.policy.base_url": f"{server.url}/v1"})

    python -m benchmarks.loopback --port 0 --latency-ms 0

It is fast, so it never limits what is measured. It is stateless: its answers depend on the request alone.
It fails when it is told to (`Behaviour.faults`). It runs in a process of its own, so that its CPU time can
be told apart.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args
from urllib.request import urlopen

import orjson

from gym_serve.types.errors import InvalidRequest, Unavailable

__all__ = ["FAULTS", "Behaviour", "Fault", "RunningModelServer", "run_model_server"]


Fault = Literal["overloaded", "error", "garbage", "hang", "drop"]
"""A failure: a 429 with ``Retry-After``, a 500, a 200 that is no JSON, no answer at all, or a connection
that is closed instead of an answer."""

FAULTS: tuple[Fault, ...] = get_args(Fault)


@dataclass(frozen=True)
class Behaviour:
    """What the model does in every episode.

    Attributes:
        turns: how many turns call tools, before the one that answers.
        calls_per_turn: tool calls in each of them.
        tool: name of the tool.
        arguments: of every call, a JSON object as text.
        answer: text of the final message.
        tokens: tokens that each turn generates; as many stand in the next prompt for what the tools said.
            0 sends no token ids.
        latency_ms: milliseconds between a request and its answer.
        token_latency_ms: milliseconds between two tokens of a stream; a token is a word of ``answer``.
        faults: every how many requests a fault stands in the place of the answer, by its kind; where
            several fall on one request, the first one counts.
    """

    turns: int = 1
    calls_per_turn: int = 1
    tool: str = "get_weather"
    arguments: str = '{"city":"Paris"}'
    answer: str = "That is all."
    tokens: int = 0
    latency_ms: float = 0.0
    token_latency_ms: float = 0.0
    faults: Mapping[Fault, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fine = all(0 <= ms < 1e9 for ms in (self.latency_ms, self.token_latency_ms))
        if self.turns < 0 or self.calls_per_turn < 1 or self.tokens < 0 or not fine:
            raise InvalidRequest("turns, tokens and latencies must be at least 0, calls_per_turn at least 1")
        for kind, every in self.faults.items():
            if kind not in FAULTS or every < 1:
                raise InvalidRequest(f"faults: {kind}={every} is none; meant is {'|'.join(FAULTS)}=N, N >= 1")

    def fault(self, number: int) -> Fault | None:
        """The fault of a request, by its number, counted from 1."""
        for kind, every in self.faults.items():
            if number % every == 0:
                return kind
        return None


@dataclass(frozen=True)
class RunningModelServer:
    """A model server that runs.

    Attributes:
        url: its address; the API is below ``{url}/v1``.
        pid: its process.
    """

    url: str
    pid: int

    def stats(self) -> dict[str, Any]:
        """What has happened so far: see `benchmarks.loopback.server.Stats`."""
        with urlopen(f"{self.url}/stats", timeout=10) as answer:
            stats: dict[str, Any] = orjson.loads(answer.read())
        return stats


@contextmanager
def run_model_server(behaviour: Behaviour | None = None, *, port: int = 0) -> Iterator[RunningModelServer]:
    """Run a model server until the block ends; it ends with this process, however that ends.

    Args:
        behaviour: what it does; by default one tool call, then an answer.
        port: where it listens; 0 takes any that is free.

    Raises:
        Unavailable: it did not start; the reason is on standard error.
    """
    options = _options(behaviour or Behaviour())
    command = [sys.executable, "-m", "benchmarks.loopback", f"--port={port}", "--until-eof"]
    with subprocess.Popen([*command, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            url = process.stdout.readline().decode().strip()
            if not url:
                raise Unavailable(f"the model server did not start (exit status {process.wait()})")
            yield RunningModelServer(url, process.pid)
        finally:
            process.stdin.close()  # the end of its input, which it waits for


def _options(behaviour: Behaviour) -> list[str]:
    options = []
    for item in fields(behaviour):
        value = getattr(behaviour, item.name)
        if item.name == "faults":
            options += [f"--fault={kind}={every}" for kind, every in value.items()]
        else:
            options.append(f"--{item.name.replace('_', '-')}={value}")
    return options
