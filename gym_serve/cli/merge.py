"""`gym-serve merge`: joins the shards of a collection to one run."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gym_serve.cli.collect import OutputOption
from gym_serve.cli.options import (
    AddressOption,
    AttachOption,
    FailuresOption,
    JsonOption,
    Target,
    TokenOption,
    UrlOption,
)
from gym_serve.cli.printing import echo
from gym_serve.types.errors import GraphError

if TYPE_CHECKING:
    from gym_serve.client import Gym
    from gym_serve.metrics import MetricSpec
    from gym_serve.rollouts import Outputs, Report
    from gym_serve.rollouts.run_metrics import Aggregate
    from gym_serve.types.requests import JSON

_ATTEMPTS = 3  # of collect
_UNFINISHED = 3


def merge(
    shards: Annotated[
        list[Path],
        typer.Argument(metavar="SHARDS...", help="Main files of all shards, from collect --shard."),
    ],
    *,
    output: OutputOption,
    attach: AttachOption = None,
    address: AddressOption = None,
    url: UrlOption = None,
    auth_token: TokenOption = None,
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
    # Imported here, so that --help starts fast.
    from gym_serve.cli.run_report import print_report
    from gym_serve.rollouts import Outputs
    from gym_serve.rollouts import merge as merge_runs

    outputs = Outputs.of(output)
    with ExitStack() as stack:
        own_metrics = None
        if attach is not None or url is not None:
            target = Target(None, attach, url, address, auth_token)
            own_metrics = _aggregate_of(stack.enter_context(target.open()))
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
    from gym_serve.graph.classes import find_class
    from gym_serve.metrics import STATISTICS_ONLY
    from gym_serve.rollouts.journal import Header
    from gym_serve.servers.resources import ResourcesServer

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
    from gym_serve.rollouts import Report
    from gym_serve.rollouts.journal import Journal
    from gym_serve.rollouts.progress import Tally

    with Journal(outputs, resume=True) as journal:
        assert journal.header is not None
        tally = Tally(journal.header.rollouts)
        for record in journal.recover():
            tally.add(record)
        tally.finish(journal.finished(_ATTEMPTS))
    progress = tally.progress()
    return Report(outputs, progress, metrics, [], [], complete=not progress.remaining)
