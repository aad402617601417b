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
    AddressOption,
    ApplicationOption,
    AttachOption,
    DashboardOption,
    FailuresOption,
    JsonOption,
    PromptOption,
    RayOption,
    SandboxOption,
    SetOption,
    Target,
    TokenOption,
    UrlOption,
    YesOption,
    parse_pairs,
    read_model,
)
from gym_serve.graph import classes
from gym_serve.graph.spec import nearest

if TYPE_CHECKING:
    from gym_serve.client.rollout_client import RolloutOptions
    from gym_serve.rollouts import Budget

OutputOption = Annotated[
    Path,
    typer.Option(
        "-o",
        "--output",
        metavar="OUT",
        help="Scored rollouts: .jsonl, .jsonl.gz or .jsonl.zst. Failures, inputs and metrics go beside it.",
    ),
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Continue the run in OUT, if there is one.")]
RetryOption = Annotated[
    bool,
    typer.Option(
        "--retry-failed",
        help="Like --resume, and retry the rollouts of OUT that have failed permanently.",
    ),
]
MaxFailuresOption = Annotated[
    int,
    typer.Option(
        min=1,
        help="Stop after this many rollouts in a row with an error that only you can fix: an endpoint has no "
        "such model or path, or redirects. A refused key stops at once. --resume runs their rows again.",
    ),
]
ConcurrencyOption = Annotated[int, typer.Option(min=1, help="Maximum number of rollouts at the same time.")]
LimitOption = Annotated[int | None, typer.Option(min=1, help="Use only this many rows.")]
SkipOption = Annotated[
    bool,
    typer.Option(
        "--skip-invalid",
        help="Skip invalid rows; by default nothing starts if one of the first 1,000 is, and later ones are "
        "left out and make the exit status 3.",
    ),
]


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
    attach: AttachOption = None,
    address: AddressOption = None,
    url: UrlOption = None,
    auth_token: TokenOption = None,
    no_ray: RayOption = False,
    dashboard: DashboardOption = False,
    set_: SetOption = None,
    model: Annotated[
        str | None,
        typer.Option("-m", "--model", metavar="MODEL", help=f"The model of all agents: {MODEL_HELP}"),
    ] = None,
    yes: YesOption = False,
    sandbox: SandboxOption = None,
    application: ApplicationOption = None,
    agent: Annotated[
        str | None,
        typer.Option(help="Agent for all rows; by default each row names its own."),
    ] = None,
    repeats: Annotated[
        str, typer.Option(metavar="N", help="Rollouts per row, or by agent: math=8,_default=1.")
    ] = "1",
    seed: Annotated[
        int | None,
        typer.Option(help="Sampling seed of a row's first rollout; each further rollout adds one."),
    ] = None,
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
    concurrency: ConcurrencyOption = 128,
    timeout: Annotated[
        float | None, typer.Option(help="Time limit of one attempt at a rollout, in seconds.")
    ] = None,
    max_cost: Annotated[
        float | None,
        typer.Option(min=0, help="Stop once model calls have cost this much, at the graph's prices."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Stop once model calls have used this many tokens.")
    ] = None,
    max_failures: MaxFailuresOption = 5,
    track: Annotated[
        str | None,
        typer.Option(metavar="TRACKER", help="Follow the run in wandb, mlflow or tensorboard."),
    ] = None,
    resume: ResumeOption = False,
    retry_failed: RetryOption = False,
    skip_invalid: SkipOption = False,
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
    without_rows = len(paths) == 1 and attach is None and url is None and source is None
    if without_rows and not classes.is_graph(paths[0]):
        raise typer.BadParameter(
            f"{paths[0]} is no graph{nearest(paths[0], classes.names())}\nIf it has rows, say which graph "
            "makes rollouts of them: a graph file before it, --attach NAME, or --url URL"
        )
    rows, graph = paths[-1], paths[0] if len(paths) == 2 or without_rows else None
    if source is not None and len(paths) == 1 and attach is None and url is None:
        graph = classes.graph_file(source[0].graph)
    target = Target(
        graph,
        attach,
        url,
        address,
        auth_token,
        set_ or (),
        application,
        ray=not no_ray,
        dashboard=dashboard,
    )
    if model is not None:
        target = target.with_model(read_model(model, yes=yes))
    if sandbox is not None:
        target = target.with_sandbox(sandbox)
    if without_rows and (resolved := target.resolved()) is not None:
        rows = example_rows(resolved, agent or default_agent(resolved), "ROWS")
    options: RolloutOptions = {
        "agent": agent,
        "repeats": _repeats(repeats),
        "seed": seed,
        "limit": limit,
        "shard": _shard(shard),
        "params": parse_pairs(param or (), "--param temperature=0.7"),
        "prompt": prompt,
        "concurrency": concurrency,
        "timeout": timeout,
        "max_failures": max_failures,
        "skip_invalid": skip_invalid,
    }
    # Imported here, so that --help and usage errors start fast.
    from gym_serve.cli.printing import echo, is_quiet
    from gym_serve.cli.run_collection import report_and_exit, run_collection
    from gym_serve.client import AsyncGym
    from gym_serve.rollouts import Budget
    from gym_serve.rollouts.files import regular
    from gym_serve.rollouts.trackers import check_tracker

    if track is not None:
        check_tracker(track)
    budget = Budget(max_cost, max_tokens)
    with regular(rows) if source is None else file_of_rows(*source) as rows:
        _check(target, rows, output, options, budget, resume=resume or retry_failed)
        with target.open() as gym:
            if dashboard:
                echo(f"Ray's dashboard: {gym.dashboard_url}", err=True)
            if gym.url and not is_quiet():
                echo(f"Episodes are shown at {gym.url}/ui", err=True)
            outcome = run_collection(
                lambda progress, stopping: AsyncGym.of(gym).collect(
                    rows,
                    output,
                    resume=resume,
                    retry_failed=retry_failed,
                    progress=progress,
                    stop=stopping,
                    budget=budget,
                    track=track,
                    **options,
                ),
                output,
            )
            # Before the graph is taken down, which takes seconds.
            report_and_exit(*outcome, as_json=as_json, failures=failures)


def _check(
    target: Target, rows: Path, output: Path, options: RolloutOptions, budget: Budget, *, resume: bool
) -> None:
    """Check rows and output before the graph is started, which takes seconds."""
    from gym_serve.client.rollout_client import RolloutClient
    from gym_serve.rollouts import Collection, check_run

    if (graph := target.resolved()) is None:
        return
    client = RolloutClient(graph.public(), graph.default_agent, _no_transport, graph, str(target.graph))
    collection = Collection(
        backend=client,
        expansion=client.expansion(options),
        budget=budget,
    )
    skip_invalid = options.get("skip_invalid", False)
    asyncio.run(check_run(rows, output, collection, resume=resume, skip_invalid=skip_invalid))


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
