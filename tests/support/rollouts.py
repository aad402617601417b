"""Rows and fake agents for the rollout runner: episodes without a graph."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from gym_serve.rollouts import Backoff, Collection, Expansion, RolloutBackend, RunnerOptions
from gym_serve.rollouts.groups import Compare
from gym_serve.rollouts.progress import Aggregate
from gym_serve.servers.usage import Prices
from gym_serve.types.errors import GymError

JSON = dict[str, Any]

AT_ONCE = Backoff(first=0.0)
"""Retries do not wait."""


def row(number: int, **keys: Any) -> JSON:
    return {"responses_create_params": {"input": f"question {number}"}, "number": number, **keys}


def rows(count: int) -> list[JSON]:
    return [row(number) for number in range(count)]


def write_jsonl(path: Path, lines: Iterable[JSON]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return path


def read_jsonl(path: Path) -> list[JSON]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def scored(row: JSON, reward: float = 1.0) -> JSON:
    return {**row, "response": {"output": [], "usage": {"output_tokens": 1}}, "reward": reward}


def keys(rollouts: Iterable[JSON]) -> list[tuple[int, int]]:
    return sorted((r["_ng_task_index"], r["_ng_rollout_index"]) for r in rollouts)


class FakeAgent:
    """Scores every row at once, unless told otherwise.

    Args:
        act: what it does before it answers; may raise.
        errors: what to raise at the attempts of a rollout, by its key: the first ones of them.
    """

    def __init__(
        self,
        act: Callable[[JSON], Awaitable[None]] | None = None,
        errors: dict[tuple[int, int], list[GymError]] | None = None,
    ) -> None:
        self.ran: list[JSON] = []
        self.running = 0
        self.most_running = 0
        self.cancelled: list[JSON] = []
        self._act = act
        self._errors = errors or {}

    async def __call__(self, row: JSON) -> JSON:
        self.ran.append(row)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await (self._act(row) if self._act else asyncio.sleep(0))
            errors = self._errors.get((row["_ng_task_index"], row["_ng_rollout_index"]))
            if errors:
                raise errors.pop(0)
            return scored(row)
        except asyncio.CancelledError:
            self.cancelled.append(row)
            raise
        finally:
            self.running -= 1

    @property
    def attempts(self) -> Counter[tuple[int, int]]:
        """How often each rollout was tried."""
        return Counter((row["_ng_task_index"], row["_ng_rollout_index"]) for row in self.ran)


@dataclass(frozen=True)
class FakeBackend(RolloutBackend):
    """Runs rows by a function."""

    episode: Callable[[JSON], Awaitable[JSON]]
    graph: JSON = field(default_factory=dict)
    checks: Callable[[JSON], None] = lambda row: None
    comparing: Callable[[], Awaitable[Compare | None]] | None = None
    costs: Mapping[str, Prices] = field(default_factory=dict)
    aggregate: Aggregate | None = None

    async def run(self, row: JSON, /) -> JSON:
        return await self.episode(row)

    def check(self, row: JSON, /) -> None:
        self.checks(row)

    def description(self) -> JSON:
        return self.graph

    def prices(self) -> Mapping[str, Prices]:
        return self.costs

    async def comparer(self) -> Compare | None:
        return None if self.comparing is None else await self.comparing()

    def aggregator(self) -> Aggregate | None:
        return self.aggregate


def collection(run: Callable[[JSON], Awaitable[JSON]], **options: Any) -> Collection:
    """A collection by one agent; further options are those of `Expansion`."""
    runner_options = RunnerOptions(concurrency=options.pop("concurrency", 8), attempts=3, backoff=AT_ONCE)
    graph = options.pop("graph", {"agents": {"agent": {"max_steps": 3}}})
    return Collection(FakeBackend(run, graph), Expansion(default_agent="agent", **options), runner_options)


def with_backend(collection: Collection, **changes: Any) -> Collection:
    """The collection with other attributes of its `FakeBackend`."""
    assert isinstance(collection.backend, FakeBackend)
    return replace(collection, backend=replace(collection.backend, **changes))
