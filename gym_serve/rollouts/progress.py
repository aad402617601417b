"""How far a run is, what it has used and cost, and `Budget`, which limits it.

Every attempt counts as used, failed ones and those of earlier processes of the same run included. When a
budget is spent, nothing more is started and running rollouts may end, so a run can cost a little more, by at
most what was in flight. It can be resumed with a higher budget.

The metrics of a finished run, ``out_aggregate_metrics.json``: computed from its files, agent by agent.

So a resumed run, a merged one and an uninterrupted one give the same numbers, each rollout counted once. An
agent is asked for the metrics of up to `MAX_ROLLOUTS_SENT` rollouts, because its environment may define its
own. That sends all of them in one body, so beyond that number they are computed here, by the environment's
`MetricSpec`, in a few bytes a rollout.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from gym_serve.metrics import MASKED, STATISTICS_ONLY, Aggregator, MetricSpec, failure_class
from gym_serve.rollouts.files import read_records, replacing
from gym_serve.rollouts.journal import Outputs
from gym_serve.rollouts.rows import rollout_key
from gym_serve.rollouts.tables import TaskMeans
from gym_serve.servers.transport import encode
from gym_serve.servers.usage import USAGE_FIELD, Prices, UsageMeter
from gym_serve.types.errors import GymError, InvalidRequest
from gym_serve.types.requests import JSON
from gym_serve.types.rows import agent_name


def clock_time(seconds: float) -> str:
    """The local date and time so many seconds from now, with its offset from UTC."""
    return datetime.fromtimestamp(time.time() + seconds).astimezone().isoformat(" ", "seconds")


@dataclass(frozen=True)
class Waiting:
    """What a run waits for, in which nothing runs, or one of its comparisons."""

    server: str | None  # the server of the graph that refuses, or is away; None if that is unknown
    reason: str
    seconds: float
    until: str

    @classmethod
    def of(cls, server: str | None, reason: str, seconds: float) -> Waiting:
        return cls(server, reason, seconds, clock_time(seconds))


@dataclass(frozen=True)
class Progress:
    """The counts of a collection at one moment.

    Attributes:
        total: rollouts to make, of the rows that have been read.
        reading: whether there are more rows, so that ``total`` grows.
        left_out: rows that cannot be used.
        finished: rollouts that are scored or whose last attempt failed.
        scored: rollouts that have a score.
        masked: rollouts that did not fail, but that their environment leaves out of scores.
        earlier: rollouts that had finished before this process began, in a resumed run.
        running: attempts in flight.
        failed_attempts: failed attempts by class, including those that a later attempt made good.
        mean_reward: mean over tasks of the mean reward of their scored rollouts; None if there is none.
        comparing: groups whose comparison has not ended; 0 until all rollouts have ended, and if none are
            compared.
        stopping: the operator error that ends the run, once there is one: no further attempt starts.
        tokens: tokens that model calls have used, prompts and generations together.
        waiting: what the run waits for, if nothing runs, or what a comparison waits for.
    """

    total: int
    finished: int
    scored: int
    earlier: int
    running: int
    failed_attempts: Mapping[str, int]
    mean_reward: float | None
    comparing: int = 0
    stopping: str | None = None
    tokens: int = 0
    masked: int = 0
    waiting: Waiting | None = None
    reading: bool = False
    left_out: int = 0

    @property
    def failed(self) -> int:
        return self.finished - self.scored - self.masked

    @property
    def remaining(self) -> int:
        return self.total - self.finished


class Tally:
    """Keeps count."""

    def __init__(self, total: int = 0) -> None:
        self.total = total
        self.reading = False
        self.left_out = 0
        self._finished = 0
        self._scored = 0
        self._earlier = 0
        self._masked = 0
        self._failed_attempts: Counter[str] = Counter()
        self._rewards = TaskMeans()

    def add(self, record: JSON) -> None:
        failure = failure_class(record)
        if failure is None:
            self._scored += 1
            self._rewards.add(record.get("_ng_task_index") or 0, record["reward"])
        elif failure == MASKED:
            self._masked += 1
        else:
            self._failed_attempts[failure] += 1

    def finish(self, rollouts: int) -> None:
        self._finished += rollouts

    def begin(self) -> None:
        self._earlier = self._finished

    def progress(
        self, running: int = 0, stopping: str | None = None, tokens: int = 0, waiting: Waiting | None = None
    ) -> Progress:
        return Progress(
            total=self.total,
            finished=self._finished,
            scored=self._scored,
            earlier=self._earlier,
            running=running,
            failed_attempts=dict(self._failed_attempts),
            mean_reward=self._rewards.mean,
            stopping=stopping,
            tokens=tokens,
            masked=self._masked,
            waiting=waiting,
            reading=self.reading,
            left_out=self.left_out,
        )


_UNKNOWN = "-"  # the model server of rollouts that do not name theirs: those of foreign agents


@dataclass(frozen=True)
class Budget:
    """The limits of a run; None for no limit.

    Attributes:
        max_cost: cost, in the currency of the models' ``prices``.
        max_tokens: tokens of prompts and generations together, those of judges included.
        max_seconds: seconds since this process began it; rollouts that run by then may end.
    """

    max_cost: float | None = None
    max_tokens: int | None = None
    max_seconds: float | None = None

    def check(self, prices: Mapping[str, Prices]) -> None:
        """Raise `InvalidRequest` if a limit is not a positive number, or no model of the graph has prices."""
        for name, limit in asdict(self).items():
            if limit is not None and not limit > 0:
                raise InvalidRequest(f"`{name}` must be a positive number, got {limit}")
        if self.max_cost is not None and not prices:
            problem = "no model has any; set models.<name>.prices (eval: --price MODEL=INPUT/OUTPUT)"
            raise InvalidRequest(f"`max_cost` needs prices, and {problem}")


@dataclass(frozen=True)
class Spent:
    """What a run has used so far."""

    usage: JSON  # counts by stage and model server; see `gym_serve.servers.usage`
    tokens: int = 0  # tokens of prompts and generations together
    cost: float | None = None  # cost of the models that have prices; None if none has
    costs: Mapping[tuple[str, str], float] | None = None

    def rows(self) -> Iterator[tuple[str, str, Mapping[str, int], float | None]]:
        for stage, servers in self.usage.items():
            for server, counts in servers.items():
                yield stage, server, counts, (self.costs or {}).get((stage, server))


class Spending:
    """Counts what a run uses."""

    def __init__(self, prices: Mapping[str, Prices] | None = None, budget: Budget | None = None) -> None:
        self._prices = prices or {}
        self._budget = budget or Budget()
        self._meter = UsageMeter()
        self.tokens = 0  # of prompts and generations together
        self._cost = 0.0
        self._began = time.monotonic()

    def add(self, record: JSON) -> None:
        """Count an attempt: a rollout, or any record with ``model_usage``."""
        attempt = UsageMeter()
        attempt.merge(record.get(USAGE_FIELD))
        response = record.get("response")
        if USAGE_FIELD not in record and isinstance(response, dict) and response.get("usage"):
            attempt.record("model", _UNKNOWN, response["usage"])
        for _, server, counts in attempt:
            self.tokens += counts["input_tokens"] + counts["output_tokens"]
            if server in self._prices:
                self._cost += self._prices[server].cost(counts)
        self._meter.merge(attempt.to_json())

    @property
    def exhausted(self) -> str | None:
        """The limit that is reached, as a sentence; None if none is."""
        budget = self._budget
        if budget.max_cost is not None and self._cost >= budget.max_cost:
            return f"the run has cost {self._cost:.4f} of at most {budget.max_cost:g}"
        if budget.max_tokens is not None and self.tokens >= budget.max_tokens:
            return f"the run has used {self.tokens:,} of at most {budget.max_tokens:,} tokens"
        if (left := self.seconds_left) is not None and left <= 0:
            return f"the run has lasted {budget.max_seconds:g} seconds, which is the most it may"
        return None

    @property
    def seconds_left(self) -> float | None:
        """Until ``max_seconds`` are over; None without that limit."""
        most = self._budget.max_seconds
        return None if most is None else self._began + most - time.monotonic()

    def spent(self) -> Spent:
        costs = {
            (stage, server): self._prices[server].cost(counts)
            for stage, server, counts in self._meter
            if server in self._prices
        }
        return Spent(self._meter.to_json(), self.tokens, self._cost if self._prices else None, costs)


def prices_of(graph: Mapping[str, Any]) -> dict[str, Prices]:
    """The prices of a graph's models, by server."""
    models = graph.get("models") or {}
    return {name: Prices(**model["prices"]) for name, model in models.items() if model.get("prices")}


logger = logging.getLogger("gym_serve")

MAX_ROLLOUTS_SENT = 20_000
_ANSWER_SECONDS = 600.0

Aggregate = Callable[[str, list[JSON]], Awaitable[JSON]]
"""Asks an agent, by its name, for the metrics of its rollouts (``POST /aggregate_metrics``)."""

MetricSpecOf = Callable[[str], MetricSpec]
"""Returns the metrics of an agent's environment, as far as this process knows them."""

_HEAVY = ("response", "responses_create_params", "_ng_attempt_index", USAGE_FIELD)
_GROUPS = "group_level_metrics"


async def summarize_run(
    outputs: Outputs,
    aggregate: Aggregate | None = None,
    metric_spec: MetricSpecOf = lambda agent: STATISTICS_ONLY,
) -> list[JSON]:
    """Compute the metrics of a run from its files, and write them; ``aggregate`` asks an agent for its own.
    Returns an entry for each agent, without its ``group_level_metrics``, which only the file has."""
    agents = await asyncio.to_thread(_read, outputs, metric_spec, keep=aggregate is not None)
    entries = []
    with replacing(outputs.metrics) as file:
        file.write(b"[")
        for position, (name, agent) in enumerate(sorted(agents.items())):
            overall, groups = await agent.metrics(name, aggregate)
            entry = {
                "agent_ref": {"name": name},
                **overall,
                "coverage": agent.aggregator.coverage()._asdict(),
                "failures": dict(sorted(agent.aggregator.failures.items())),
                **({USAGE_FIELD: agent.meter.to_json()} if agent.meter else {}),
            }
            entries.append(entry)
            file.write(b",\n" * (position > 0) + encode(entry)[:-1])
            await asyncio.to_thread(_write_groups, file, groups)
        file.write(b"]\n")
    return entries


class _Agent:
    """The rollouts of one agent; scored ones are added first."""

    def __init__(self, spec: MetricSpec, *, keep: bool) -> None:
        self.meter = UsageMeter()
        self.aggregator = Aggregator(spec)
        self._scored: dict[int, JSON] = {}
        self._failed: dict[int, JSON] = {}
        self._keep = keep

    def add(self, record: JSON, *, failed: bool) -> None:
        self.meter.merge(record.get(USAGE_FIELD))
        light = _light(record)
        self.aggregator.add(light)
        if not self._keep:
            return
        key = rollout_key(record)
        if not failed:
            self._scored[key] = light
        elif key not in self._scored:
            self._failed[key] = light
        if len(self._scored) + len(self._failed) > MAX_ROLLOUTS_SENT:
            self._keep = False
            self._scored, self._failed = {}, {}

    async def metrics(self, name: str, aggregate: Aggregate | None) -> tuple[JSON, Iterable[JSON]]:
        """The metrics of all tasks together, and those of each group."""
        if aggregate is not None and self._keep:
            # A foreign agent may have no such route; the statistics are useful all the same.
            try:
                metrics_of_all = aggregate(name, [*self._scored.values(), *self._failed.values()])
                answer = await asyncio.wait_for(metrics_of_all, _ANSWER_SECONDS)
                groups = answer.get(_GROUPS) if isinstance(answer, dict) else None
                if isinstance(groups, list):
                    return {key: value for key, value in answer.items() if key != _GROUPS}, groups
                problem = f"`{_GROUPS}` must be a list"
            except GymError as error:
                problem = error.message
            except (asyncio.TimeoutError, TimeoutError):
                problem = f"it did not answer within {_ANSWER_SECONDS:g} s"
            text = "agent %s gave no metrics, so they are computed in this process: %s"
            logger.warning(text, name, problem)
        overall = await asyncio.to_thread(self.aggregator.overall)
        return overall, self.aggregator.iter_group_metrics()


def _read(outputs: Outputs, metric_spec: MetricSpecOf, *, keep: bool) -> dict[str, _Agent]:
    agents: dict[str, _Agent] = {}
    for path in (outputs.rollouts, outputs.failures):
        for record in read_records(path):
            name = agent_name(record) or "-"
            if name not in agents:
                agents[name] = _Agent(metric_spec(name), keep=keep)
            agents[name].add(record, failed=path is outputs.failures)
    return agents


def _light(record: JSON) -> JSON:
    """The part of a record that metrics are computed from: no long values; of the response, its usage."""
    light = {key: value for key, value in record.items() if key not in _HEAVY}
    response = record.get("response")
    if isinstance(response, dict) and response.get("usage"):
        light["response"] = {"usage": response["usage"]}
    return light


def _write_groups(file: Any, groups: Iterable[JSON]) -> None:
    file.write(f',"{_GROUPS}":['.encode())
    for position, group in enumerate(groups):
        file.write(b",\n" * (position > 0) + encode(group))
    file.write(b"]}")
