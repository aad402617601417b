"""The metrics of a finished run, ``out_aggregate_metrics.json``: computed from its files, agent by agent.

So a resumed run, a merged one and an uninterrupted one give the same numbers, each rollout counted once. An
agent is asked for the metrics of up to `MAX_ROLLOUTS_SENT` rollouts, because its environment may define its
own. That sends all of them in one body, so beyond that number they are computed here, by the environment's
`MetricSpec`, in a few bytes a rollout.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from gym_serve.metrics import STATISTICS_ONLY, Aggregator, MetricSpec
from gym_serve.rollouts.files import read_records, replacing
from gym_serve.rollouts.journal import Outputs
from gym_serve.rollouts.rows import rollout_key
from gym_serve.servers.transport import encode
from gym_serve.servers.usage import USAGE_FIELD, UsageMeter
from gym_serve.types.errors import GymError
from gym_serve.types.requests import JSON
from gym_serve.types.rows import agent_name

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
