"""`gym-serve profile`: how hard each task is for the policy, and what to train on next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gym_serve.cli.graph_file import JsonOption
from gym_serve.cli.printing import (
    bar,
    print_json_stream,
    print_problems,
    print_table,
    shortened,
    sparkline,
)
from gym_serve.cli.target import stop
from gym_serve.types.errors import GymError

if TYPE_CHECKING:
    from gym_serve.rollouts.analysis import RewardProfile, TaskProfile
    from gym_serve.rollouts.analysis.profile import ProfileSummary
    from gym_serve.rollouts.problems import Problems
    from gym_serve.types.requests import JSON

__all__ = ["KeyOption", "SolvedAtOption", "TopOption", "profile"]

KeyOption = Annotated[
    str,
    typer.Option(metavar="FIELD", help="Field of the rows that names a task; else the index in the run."),
]
SolvedAtOption = Annotated[
    float, typer.Option(metavar="REWARD", help="Reward from which on a rollout counts as solved.")
]
TopOption = Annotated[int, typer.Option(min=0, help="How many tasks to print.")]


def profile(
    rollouts: Annotated[
        list[Path],
        typer.Argument(metavar="ROLLOUTS...", help="Main files of runs over the same tasks, as of collect."),
    ],
    *,
    solved_at: SolvedAtOption = 1.0,
    key: KeyOption = "_ng_task_index",
    top: TopOption = 20,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="ROWS", help="Write the rows to train on next to this file."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print pass rates by task, tasks by difficulty, and what to train on next.

    Difficulty is the pass rate p: never 0, hard below 0.25, medium up to 0.75,
    easy below 1, always 1. To train on next are the tasks whose rollouts differ
    in reward (neither always solved nor never): the others give no advantage to
    learn from.

    Exit status: 0, or 1 if a file cannot be read or has lines that are no
    rollouts.

    Example: gym-serve profile out.jsonl -o train_next.jsonl
    """
    if output is not None and (key != "_ng_task_index" or len(rollouts) > 1):
        raise typer.BadParameter("--output is for one run, with tasks named by their index")
    # Only now, so that --help needs little.
    from gym_serve.rollouts.analysis import RewardProfile, TaskKey, read_rollouts
    from gym_serve.rollouts.problems import Problems

    problems, found = Problems(), RewardProfile(solved_at)
    try:
        for rollout in read_rollouts(rollouts, TaskKey(key), problems):
            found.add(rollout)
        written = None
        if output is not None:
            written = _write_rows(rollouts[0], found, output)
        summary = found.summary(top)
        if as_json:
            _print_json(found, summary, problems)
        else:
            _print(rollouts[0] if key == "_ng_task_index" else None, found, summary)
    except GymError as error:
        stop(error, as_json=as_json)
    if written is not None:
        typer.echo(f"{written:,} rows to train on next: {output}", err=as_json)
    if not as_json:
        print_problems(problems)
    if problems.count or not summary.tasks:
        raise typer.Exit(1)


def _write_rows(run: Path, found: RewardProfile, output: Path) -> int:
    from gym_serve.rollouts.analysis import rows_of_tasks
    from gym_serve.rollouts.outputs import replacing
    from gym_serve.rollouts.records import readable_line

    written = 0
    with replacing(output) as file:
        for row in rows_of_tasks(run, found.trainable_tasks()):
            file.write(readable_line(row))
            written += 1
    return written


def _print_json(found: RewardProfile, summary: ProfileSummary, problems: Problems) -> None:
    head = {
        "ok": not problems.count,
        **summary._asdict(),
        "train_next": [task.task_index for task in summary.train_next],
        "solved_at": found.solved_at,
        "reward_edges": found.transports,
        "agents": [asdict(row) for row in found.agents()],
        "problems": problems.kept,
    }
    print_json_stream(head, "per_task", (_task_json(task) for task in found.tasks()))


def _task_json(task: TaskProfile) -> JSON:
    return {
        **asdict(task),
        "pass_rate": 100.0 * task.pass_rate,
        "bucket": task.bucket,
        "trainable": task.trainable,
    }


def _print(run: Path | None, found: RewardProfile, summary: ProfileSummary) -> None:
    from gym_serve.metrics import SUMMARY_COLUMNS
    from gym_serve.rollouts.analysis import prompts_of_tasks

    if not summary.tasks:
        typer.echo("no scored rollouts", err=True)
        return
    print_table(SUMMARY_COLUMNS, (row.cells() for row in found.agents()))
    typer.echo()
    for name, figure in (("mean reward", summary.mean_reward), ("pass rate %", summary.pass_rate)):
        interval = f", 95% interval {figure['low']:.4g} to {figure['high']:.4g}" if "low" in figure else ""
        typer.echo(f"{name} over {summary.tasks:,} tasks: {figure['value']:.4g}{interval}")
    if summary.unscored_tasks:
        typer.echo(f"{summary.unscored_tasks:,} tasks have no scored rollout: all of theirs failed")
    typer.echo()
    print_table(("difficulty", "tasks", ""), _bars(summary.buckets.items()))
    typer.echo()
    steps = [f"{10 * step}-{10 * step + 10} %" for step in range(len(summary.pass_rate_histogram))]
    print_table(("pass rate", "tasks", ""), _bars(list(zip(steps, summary.pass_rate_histogram, strict=True))))
    typer.echo(f"\nto train on next: {summary.trainable_tasks:,} of {summary.tasks:,} tasks")
    indices = [task.task_index for task in summary.train_next]
    prompts = prompts_of_tasks(run, indices) if run is not None else {}
    low, high = found.transports[0], found.transports[-1]
    print_table(
        ("task", "agent", "solved", "mean", "std", f"rewards {low:g}..{high:g}", "prompt"),
        ([*_cells(task), shortened(prompts.get(task.task_index, ""))] for task in summary.train_next),
    )


def _bars(counts: Iterable[tuple[str, int]]) -> list[tuple[str, str, str]]:
    pairs = list(counts)
    most = max(count for _, count in pairs)
    return [(name, f"{count:,}", bar(count, most)) for name, count in pairs]


def _cells(task: TaskProfile) -> tuple[str, ...]:
    return (
        str(task.task_index),
        task.agent,
        f"{task.solved}/{task.rollouts}",
        f"{task.mean:.3f}",
        f"{task.std:.3f}",
        sparkline(task.histogram),
    )
