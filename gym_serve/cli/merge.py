"""`gym-serve merge`: joins the shards of a collection to one run.

`gym-serve reverify`: computes the rewards of stored rollouts again, with the current verifier.

No model is called. It is a collection whose rollouts are one ``/verify`` each: with a journal, `--resume`,
and metrics at the end. There is no session, so only verifiers that read none can do it; ``/reverify_mode``
says which.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gym_serve.cli.options import (
    ConcurrencyOption,
    FailuresOption,
    JsonOption,
    LimitOption,
    OutputOption,
    ResumeOption,
    Running,
    SkipOption,
    Target,
)
from gym_serve.cli.printing import echo
from gym_serve.cli.run_collection import report_and_exit, run_collection
from gym_serve.cli.run_report import print_report
from gym_serve.graph.classes import find_class
from gym_serve.metrics import STATISTICS_ONLY, MetricSpec
from gym_serve.rollouts import Collection, Expansion, Outputs, Report, RunnerOptions, collect
from gym_serve.rollouts import merge as merge_runs
from gym_serve.rollouts.journal import Header, Journal
from gym_serve.rollouts.progress import Aggregate, Tally
from gym_serve.servers.resources import ResourcesServer
from gym_serve.servers.usage import USAGE_FIELD, Prices
from gym_serve.types.errors import GraphError, InvalidRequest
from gym_serve.types.requests import JSON
from gym_serve.types.rows import REPLACED, agent_name, replaced, restored

if TYPE_CHECKING:
    from gym_serve.client import Gym


_ATTEMPTS = 3  # of collect
_UNFINISHED = 3


def merge(
    shards: Annotated[
        list[Path],
        typer.Argument(metavar="SHARDS...", help="Main files of all shards, from collect --shard."),
    ],
    *,
    output: OutputOption,
    running: Running,
    failures: FailuresOption = "mask",
    as_json: JsonOption = False,
) -> None:
    """Merge the shards of a collection into one run, with the metrics of the whole.

    The metrics are those that the environments declare. An environment with
    metrics of its own (aggregate) is asked for them if --attach or --url names
    the running graph. To make missing rollouts, resume the merged run: gym-serve
    collect --resume -o OUT, without --shard.

    Exit status:
    0    merged, and every rollout is scored
    1    nothing was merged: the files are not all shards of one collection
    3    merged, but some rollouts have failed permanently or are missing

    Example: gym-serve merge part1.jsonl part2.jsonl -o out.jsonl
    """
    outputs = Outputs.of(output)
    with ExitStack() as stack:
        own_metrics = None
        if running.attach is not None or running.url is not None:
            own_metrics = _aggregate_of(stack.enter_context(running.open()))
        metrics = asyncio.run(
            merge_runs(shards, output, own_metrics, lambda agent: _declared(outputs, agent))
        )
        report = _report(outputs, metrics)
    print_report(report, as_json=as_json, failures=failures)
    if missing := report.progress.remaining:
        echo(f"{missing:,} rollouts are missing. Make them with: gym-serve collect --resume", err=True)
    if missing or report.progress.failed:
        raise typer.Exit(_UNFINISHED)


def _aggregate_of(gym: Gym) -> Aggregate:
    from gym_serve.client import AsyncGym

    async def aggregate(agent: str, rollouts: list[JSON]) -> JSON:
        body = {"verify_responses": rollouts}
        metrics: JSON = await AsyncGym.of(gym).call(agent, "aggregate_metrics", body)
        return metrics

    return aggregate


def _declared(outputs: Outputs, agent: str) -> MetricSpec:
    """The metrics of an agent's environment, whose type the run's header names."""

    header = Header.read(outputs.header)
    graph = header.graph if header is not None else {}
    resources = graph.get("agents", {}).get(agent, {}).get("resources")
    try:
        cls = find_class("resources", graph.get("resources", {}).get(resources, {}).get("type"))
    except GraphError:
        return STATISTICS_ONLY  # a remote server, or a type that is not installed here
    assert issubclass(cls, ResourcesServer)
    return cls.metrics


def _report(outputs: Outputs, metrics: list[JSON]) -> Report:
    with Journal(outputs, resume=True) as journal:
        assert journal.header is not None
        tally = Tally(journal.header.rollouts or 0)
        for record in journal.recover():
            tally.add(record)
        tally.finish(journal.finished(_ATTEMPTS))
    progress = tally.progress()
    return Report(outputs, progress, metrics, [], [], complete=not progress.remaining)


_VERIFY_SECONDS = 300.0  # for an agent that has no `verify_timeout`; that of `AgentServer`
_AGGREGATE_SECONDS = 600.0
_OF_THE_VERDICT = frozenset({"verification_skipped", "mask_sample", "reason"})
"""Keys of a verdict that say something by their absence."""


def reverify(
    rollouts: Annotated[Path, typer.Argument(metavar="ROLLOUTS", help="Scored rollouts, from collect.")],
    *,
    output: OutputOption,
    graph: Annotated[
        Path | None,
        typer.Option("--graph", metavar="FILE", help="Graph file to deploy."),
    ] = None,
    target: Target,
    limit: LimitOption = None,
    concurrency: ConcurrencyOption = 16,
    resume: ResumeOption = False,
    skip_invalid: SkipOption = False,
    failures: FailuresOption = "mask",
    as_json: JsonOption = False,
) -> None:
    """Compute the rewards of stored rollouts again, with the graph's verifiers; no model is called.

    The verifiers must not need a session (their /reverify_mode is "stateless").
    Compare the result with: gym-serve diff ROLLOUTS OUT

    Exit status: as for collect.

    Example: gym-serve reverify out.jsonl -o again.jsonl --graph graphs/math.yaml --no-ray
    """
    target = target.of(graph)
    with target.open() as gym:
        collection = Collection(
            _Verifiers(gym),
            Expansion(limit=limit, default_agent=gym.default_agent),
            RunnerOptions(concurrency=concurrency, attempts=3),
        )
        outcome = run_collection(
            lambda progress, stopping: collect(
                rollouts,
                output,
                collection,
                resume=resume,
                skip_invalid=skip_invalid,
                progress=progress,
                stop=stopping,
            ),
            output,
        )
        report_and_exit(*outcome, as_json=as_json, failures=failures)


class _Verifiers:
    """The `RolloutBackend` of the graph's verifiers."""

    def __init__(self, gym: Gym) -> None:
        from gym_serve.client import AsyncGym

        self._gym, self._awaited = gym, AsyncGym.of(gym)
        self._mode = lru_cache(maxsize=None)(lambda server: gym.call(server, "reverify_mode"))

    def check(self, rollout: JSON) -> None:
        if rollout.get("_ng_failure_class"):
            raise InvalidRequest("`_ng_failure_class` is set: a failed attempt has no response to score")
        if not isinstance(rollout.get("response"), dict):
            raise InvalidRequest("`response` is missing: the file must hold rollouts, not rows")
        server = self._server_of(rollout)
        if (mode := self._mode(server)) != "stateless":
            raise InvalidRequest(
                f"{server} cannot score a stored response: its verify needs the session of the episode "
                f"(reverify_mode is {str(mode)[:50]!r}, not 'stateless')"
            )

    async def run(self, rollout: JSON) -> JSON:

        limit = self._agent_of(rollout).get("verify_timeout", _VERIFY_SECONDS)
        row = restored(rollout)
        verdict = await self._awaited.call(self._server_of(rollout), "verify", row, timeout=limit)
        # Neither the stored reward may stand in for a missing verdict, nor the stored token counts for those
        # of this run.
        if not isinstance(verdict, dict):
            return {"reward": None}
        kept = {k: v for k, v in row.items() if k not in _OF_THE_VERDICT}
        of_the_row = {k: row[k] for k in rollout.get(REPLACED) or ()}
        return {**kept, USAGE_FIELD: {}, **verdict, **replaced(of_the_row, verdict)}

    def description(self) -> JSON:
        return {"resources": self._gym.graph.get("resources") or {}}

    def prices(self) -> dict[str, Prices]:
        return {}

    async def comparer(self) -> None:
        """None: the stored rewards of groups are not computed again."""
        return

    def metric_spec(self, agent: str) -> MetricSpec:
        return STATISTICS_ONLY

    def aggregator(self) -> Aggregate:
        return self.aggregate

    async def aggregate(self, agent: str, rollouts: list[JSON]) -> JSON:
        body = {"verify_responses": rollouts}
        timeout = _AGGREGATE_SECONDS
        metrics: JSON = await self._awaited.call(agent, "aggregate_metrics", body, timeout=timeout)
        return metrics

    def _agent_of(self, rollout: JSON) -> JSON:
        agents: dict[str, JSON] = self._gym.graph.get("agents") or {}
        if (name := agent_name(rollout)) not in agents:
            raise InvalidRequest(
                f"`agent_ref.name` must be one of {', '.join(agents)}, got {str(name)[:100]!r}"
            )
        return agents[str(name)]

    def _server_of(self, rollout: JSON) -> str:
        resources = self._agent_of(rollout).get("resources")
        if not isinstance(resources, str):
            raise InvalidRequest(
                f"agent {agent_name(rollout)!r} has no environment that could score the rollout"
            )
        return resources
