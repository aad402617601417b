"""`gym-serve collect`: collects rollouts of rows into files, and resumes interrupted runs."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from gym_serve.cli.examples import default_agent, example_rows, file_of_rows, row_source
from gym_serve.cli.options import (
    MODEL_HELP,
    FailuresOption,
    JsonOption,
    LimitOption,
    OutputOption,
    PromptOption,
    RunOptions,
    SandboxOption,
    Target,
    YesOption,
    parse_pairs,
    read_model,
)
from gym_serve.cli.printing import echo, is_quiet
from gym_serve.cli.run_collection import collect_into, report_and_exit
from gym_serve.graph import classes
from gym_serve.graph.spec import nearest
from gym_serve.rollouts import Budget, Collection, check_run
from gym_serve.rollouts.files import regular
from gym_serve.rollouts.trackers import check_tracker

if TYPE_CHECKING:
    from gym_serve.client.core import CollectOptions


def collect(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="[GRAPH] [ROWS]",
            help="Graph to deploy (not with --attach or --url): a file, or a name of gym-serve list graph. "
            "Rows: .jsonl[.gz or .zst], by default the example rows of the graph's environment; or "
            "harbor:FOLDER or swe_bench:FOLDER, a folder of tasks, or harbor:NAME@VERSION, a data set of "
            "Harbor's registry, by default with the graph workspace.",
        ),
    ],
    *,
    output: OutputOption,
    target: Target,
    dashboard: Annotated[
        bool,
        typer.Option("--dashboard", help="Start the new local Ray with its dashboard, and print its URL."),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option("-m", "--model", metavar="MODEL", help=f"The model of all agents: {MODEL_HELP}"),
    ] = None,
    yes: YesOption = False,
    sandbox: SandboxOption = None,
    agent: Annotated[
        str | None,
        typer.Option(help="Agent for all rows; by default each row names its own."),
    ] = None,
    repeats: Annotated[
        str, typer.Option(metavar="N", help="Rollouts per row, or by agent: math=8,_default=1.")
    ] = "1",
    limit: LimitOption = None,
    shard: Annotated[
        str | None, typer.Option(metavar="I/N", help="Only the I-th of N parts of the rows, counted from 1.")
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="Override a key of responses_create_params, e.g. temperature=0.7."
        ),
    ] = None,
    prompt: PromptOption = None,
    run: RunOptions,
    track: Annotated[
        str | None,
        typer.Option(metavar="TRACKER", help="Follow the run in wandb, mlflow or tensorboard."),
    ] = None,
    failures: FailuresOption = "mask",
    as_json: JsonOption = False,
) -> None:
    """Collect rollouts of rows into files; --resume continues after a stop or a crash.

    A first run: gym-serve collect simple_weather -o out.jsonl --no-ray

    Completed rollouts are never lost or repeated. --retry-failed retries failed
    ones. Ctrl-C (or SIGTERM) waits for running rollouts and starts no more; a
    second Ctrl-C cancels them.

    Exit status:
    0    every rollout is scored
    1    the graph, the rows or OUT cannot be used (nothing was started), or OUT was deleted during the run
    2    wrong usage
    3    complete, but some rollouts have failed permanently, rows after the first 1,000 are
         invalid, or groups could not be compared
    4    stopped by --max-cost or --max-tokens; resume it with a higher limit
    5    stopped: an endpoint refuses the key, or has no such model or path; fix that, then resume
    130  stopped by Ctrl-C (143: by SIGTERM); resume it

    Example: gym-serve collect graphs/math.yaml rows.jsonl -o out.jsonl --repeats 8
    """
    if len(paths) > 2:
        raise typer.BadParameter(f"expected at most a graph file and a file of rows, got {len(paths)} files")
    source = row_source(paths[-1])
    is_alone = len(paths) == 1 and target.attach is None and target.url is None
    without_rows = is_alone and source is None
    if without_rows and not classes.is_graph(paths[0]):
        raise typer.BadParameter(
            f"{paths[0]} is no graph{nearest(paths[0], classes.names())}\nIf it has rows, say which graph "
            "makes rollouts of them: a graph file before it, --attach NAME, or --url URL"
        )
    rows, graph = paths[-1], paths[0] if len(paths) == 2 or without_rows else None
    if source is not None and is_alone:
        graph = classes.graph_file(source[0].graph)
    target = target.of(graph, dashboard=dashboard)
    if model is not None:
        target = target.with_model(read_model(model, yes=yes))
    if sandbox is not None:
        target = target.with_sandbox(sandbox)
    if without_rows and (resolved := target.resolved()) is not None:
        rows = example_rows(resolved, agent or default_agent(resolved), "ROWS")
    options: CollectOptions = {
        **run.of(),
        "agent": agent,
        "repeats": _repeats(repeats),
        "limit": limit,
        "shard": _shard(shard),
        "params": parse_pairs(param or (), "--param temperature=0.7"),
        "prompt": prompt,
        "track": track,
    }
    if track is not None:
        check_tracker(track)
    with regular(rows) if source is None else file_of_rows(*source) as rows:
        _check(target, rows, output, options)
        with target.open() as gym:
            if dashboard:
                echo(f"Ray's dashboard: {gym.dashboard_url}", err=True)
            if gym.url and not is_quiet():
                echo(f"Episodes are shown at {gym.url}/ui", err=True)
            outcome = collect_into(output, gym, rows, options)
            # Before the graph is taken down, which takes seconds.
            report_and_exit(*outcome, as_json=as_json, failures=failures)


def _check(target: Target, rows: Path, output: Path, options: CollectOptions) -> None:
    """Check rows and output before the graph is started, which takes seconds."""
    from gym_serve.client.rollout_client import RolloutClient

    if (graph := target.resolved()) is None:
        return
    client = RolloutClient(graph.public(), graph.default_agent, _no_transport, graph, str(target.graph))
    collection = Collection(client, client.expansion(options), budget=options["budget"] or Budget())
    resume = options["resume"] or options["retry_failed"]
    asyncio.run(check_run(rows, output, collection, resume=resume, skip_invalid=options["skip_invalid"]))


def _no_transport(server: str) -> NoReturn:
    raise AssertionError(f"{server} is not started")


def _repeats(text: str) -> int | dict[str, int]:
    if text.isdecimal():
        return int(text)
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(name and count.isdecimal() for name, _, count in pairs):
        raise typer.BadParameter(f"--repeats must be a number, or math=8,_default=1, got {text!r}")
    return {name.strip(): int(count) for name, _, count in pairs}


def _shard(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    parts = re.fullmatch(r"(\d+)/(\d+)", text)
    if parts is None:
        raise typer.BadParameter(f"--shard must be I/N, e.g. 2/8, got {text!r}")
    return int(parts[1]), int(parts[2])
