"""`gym-serve profile`, `diff` and `calibrate`: what stored rollouts say about policy, change and verifier."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_serve.cli.options import FailuresOption, JsonOption
from gym_serve.cli.printing import (
    bar,
    echo,
    print_json,
    print_json_stream,
    print_problems,
    print_table,
    shortened,
    sparkline,
)
from gym_serve.cli.run_report import FAILURE_COLUMNS, FailureClass, failures_of
from gym_serve.metrics import SUMMARY_COLUMNS, Coverage
from gym_serve.metrics.aggregator import interval_text
from gym_serve.rollouts.analysis import (
    Asked,
    Comparison,
    Estimate,
    RewardProfile,
    RunScores,
    TaskKey,
    TaskProfile,
    prompts_of_tasks,
    read_asked,
    read_rollouts,
    rows_of_tasks,
)
from gym_serve.rollouts.analysis.comparison import ComparisonSummary
from gym_serve.rollouts.analysis.reading import ProfileSummary
from gym_serve.rollouts.files import read_records, readable_line, replacing
from gym_serve.rollouts.rows import Problems
from gym_serve.types.errors import InvalidRequest
from gym_serve.types.requests import JSON

if TYPE_CHECKING:
    from gym_serve.judging import Calibration

KeyOption = Annotated[
    str,
    typer.Option(
        metavar="FIELD", help="Field of the rows that identifies a task; by default the index in the run."
    ),
]
SolvedAtOption = Annotated[float, typer.Option(metavar="REWARD", help="Minimum reward of a solved rollout.")]
TopOption = Annotated[int, typer.Option(min=0, help="Number of tasks to print.")]


def profile(
    rollouts: Annotated[
        list[Path],
        typer.Argument(metavar="ROLLOUTS...", help="Main files of runs over the same tasks, from collect."),
    ],
    *,
    solved_at: SolvedAtOption = 1.0,
    key: KeyOption = "_ng_task_index",
    top: TopOption = 20,
    failures: FailuresOption = "mask",
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="ROWS", help="File for the rows to train on next."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print pass rates by task, tasks by difficulty, the worst rollouts and why, and what to train on next.

    Difficulty is the pass rate p: never 0, hard below 0.25, medium up to 0.75,
    easy below 1, always 1. Train next on the tasks whose rollouts differ in
    reward (neither always nor never solved): the others have no advantage to
    learn from.

    Exit status: 0, or 1 if a file cannot be read or has invalid lines.

    Example: gym-serve profile out.jsonl -o train_next.jsonl
    """
    if output is not None and (key != "_ng_task_index" or len(rollouts) > 1):
        raise typer.BadParameter("--output needs a single run, without --key")
    problems, rewards = Problems(), RewardProfile(solved_at, failures, worst=top)
    task_key = TaskKey(key)
    for rollout in read_rollouts(rollouts, task_key, problems):
        rewards.add(rollout)
    asked = read_asked(rollouts, task_key)
    written = None
    if output is not None:
        written = _write_rows(rollouts[0], rewards, output)
    summary = rewards.summary(top, asked.rollouts)
    failed = failures_of(rollouts)
    if as_json:
        _print_profile_json(rewards, summary, asked, failed, problems)
    else:
        _print_profile(rollouts[0] if key == "_ng_task_index" else None, rewards, summary, asked, failed)
    if written is not None:
        echo(f"{written:,} rows to train on next: {output}", err=as_json)
    if not as_json:
        print_problems(problems)
    if problems.count or not summary.tasks:
        raise typer.Exit(1)


def _write_rows(run: Path, rewards: RewardProfile, output: Path) -> int:
    written = 0
    with replacing(output) as file:
        for row in rows_of_tasks(run, rewards.trainable_tasks()):
            file.write(readable_line(row))
            written += 1
    return written


def _print_profile_json(
    rewards: RewardProfile,
    summary: ProfileSummary,
    asked: Asked,
    failed: list[FailureClass],
    problems: Problems,
) -> None:
    head = {
        "ok": not problems.count,
        **summary._asdict(),
        "coverage": summary.coverage._asdict(),
        "train_next": [task.task_index for task in summary.train_next],
        "worst": [rollout._asdict() for rollout in summary.worst],
        "solved_at": rewards.solved_at,
        "failed_count_as": rewards.failures,
        "reward_edges": rewards.bin_edges,
        "agents": [asdict(row) for row in rewards.agents(asked.rollouts)],
        "failures": [asdict(one) for one in failed],
        "notes": asked.notes,
        "problems": problems.kept,
    }
    tasks = (
        {
            **asdict(task),
            "pass_rate": 100 * task.pass_rate,
            "bucket": task.bucket,
            "trainable": task.trainable,
        }
        for task in rewards.tasks()
    )
    print_json_stream(head, "per_task", tasks)


def _print_profile(
    run: Path | None,
    rewards: RewardProfile,
    summary: ProfileSummary,
    asked: Asked,
    failed: list[FailureClass],
) -> None:
    if not summary.tasks:
        echo("No scored rollouts.", err=True)
        print_table(FAILURE_COLUMNS, (one.cells() for one in failed))
        return
    print_table(SUMMARY_COLUMNS, (row.cells() for row in rewards.agents(asked.rollouts)))
    echo()
    for note in asked.notes:
        echo(f"note: {note}")
    figures = (
        ("mean reward", summary.mean_reward),
        (f"pass rate % (reward of {rewards.solved_at:g} or more)", summary.pass_rate),
    )
    print_table(
        (f"over {summary.tasks:,} tasks", "", "95% interval", "method"),
        (
            (name, f"{figure['value']:.4g}", interval_text(figure), figure.get("method", ""))
            for name, figure in figures
        ),
    )
    counted = ", and each failed one counts as 0" if rewards.failures == "zero" else ""
    echo(f"{summary.coverage} rollouts are scored{counted}")
    if summary.unscored_tasks:
        echo(f"{summary.unscored_tasks:,} tasks have no scored rollout, because all failed or are masked")
    echo()
    print_table(("difficulty", "tasks", ""), _bars(summary.buckets.items()))
    echo()
    steps = [f"{10 * step}-{10 * step + 10} %" for step in range(len(summary.pass_rate_histogram))]
    print_table(("pass rate", "tasks", ""), _bars(list(zip(steps, summary.pass_rate_histogram, strict=True))))
    if summary.worst:
        echo("\nthe lowest rewards, and why")
        print_table(
            ("rollout", "agent", "reward", "reason"),
            (
                (one.rollout_id, one.agent, f"{one.reward:.3f}", one.reason or "the verifier gives none")
                for one in summary.worst
            ),
        )
    if failed:
        echo("\nattempts that failed")
        print_table(FAILURE_COLUMNS, (one.cells() for one in failed))
    echo(f"\nto train on next: {summary.trainable_tasks:,} of {summary.tasks:,} tasks")
    indices = [task.task_index for task in summary.train_next]
    prompts = prompts_of_tasks(run, indices) if run is not None else {}
    low, high = rewards.bin_edges[0], rewards.bin_edges[-1]
    print_table(
        ("task", "agent", "solved", "mean", "std", f"rewards {low:g}..{high:g}", "prompt"),
        ([*_profile_cells(task), shortened(prompts.get(task.task_index, ""))] for task in summary.train_next),
    )


def _bars(counts: Iterable[tuple[str, int]]) -> list[tuple[str, str, str]]:
    pairs = list(counts)
    most = max(count for _, count in pairs)
    return [(name, f"{count:,}", bar(count, most)) for name, count in pairs]


def _profile_cells(task: TaskProfile) -> tuple[str, ...]:
    return (
        str(task.task_index),
        task.agent,
        f"{task.solved}/{task.rollouts}",
        f"{task.mean:.3f}",
        f"{task.std:.3f}",
        sparkline(task.histogram),
    )


def diff(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="Rollouts before the change, from collect.")],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help="Rollouts after the change.")],
    *,
    solved_at: SolvedAtOption = 1.0,
    key: KeyOption = "_ng_task_index",
    top: TopOption = 20,
    failures: FailuresOption = "mask",
    as_json: JsonOption = False,
) -> None:
    """Compare two runs over the same tasks: the difference B - A, and the tasks that flipped.

    Tasks are paired; a task that only one run has scored is left out, and so is one
    with different prompts in the two runs, unless --key says what identifies it.
    The 95% interval is that of the difference (paired bootstrap over tasks). The
    difference is clear if that excludes 0, and a sign-flip test has p below 0.05. A
    run solves a task if more than half of its rollouts are solved. B fixed or broke
    the tasks that only one run solves.

    Exit status: 0, or 1 if B is clearly worse in mean reward, if the runs share no
    task, or if a file has problems.

    Example: gym-serve diff before.jsonl after.jsonl
    """

    problems, names = Problems(), TaskKey(key)
    runs = [RunScores(solved_at, failures) for _ in range(2)]
    for scores, path in zip(runs, (run_a, run_b), strict=True):
        scores.add(read_rollouts([path], names, problems))
    by_index = key == "_ng_task_index"
    comparison = Comparison(*runs, by_prompt=by_index)
    asked = [read_asked([path], names) for path in (run_a, run_b)]
    coverage = [
        Coverage(scored, max(known, of.rollouts.total()))
        for (scored, known), of in zip((scores.coverage() for scores in runs), asked, strict=True)
    ]
    notes = [f"{run}: {note}" for run, of in zip("AB", asked, strict=True) for note in of.notes]
    summary = comparison.summary(top)
    if as_json:
        head = {
            "ok": not problems.count and bool(summary.estimates),
            **summary._asdict(),
            "coverage": {run: of._asdict() for run, of in zip("ab", coverage, strict=True)},
            "estimates": [{**vars(estimate), "verdict": estimate.verdict} for estimate in summary.estimates],
            "flips": [task.task_index for task in summary.flips],
            "solved_at": solved_at,
            "failed_count_as": failures,
            "notes": notes,
            "problems": problems.kept,
        }
        keys = ("task_index", "agent", "difference", "flip")
        tasks = (
            {**{key: getattr(task, key) for key in keys}, "a": task.a._asdict(), "b": task.b._asdict()}
            for task in comparison.tasks()
        )
        print_json_stream(head, "per_task", tasks)
    else:
        _print_diff(run_a if by_index else None, summary, coverage, notes)
        print_problems(problems)
        if not summary.paired_tasks:
            echo("The runs share no task. Identify tasks by a field of the rows: --key FIELD", err=True)
    if problems.count or not summary.estimates or summary.estimates[0].verdict == "worse":
        raise typer.Exit(1)


def _print_diff(
    run: Path | None, summary: ComparisonSummary, coverage: list[Coverage], notes: list[str]
) -> None:
    print_table(
        ("metric", "agent", "tasks", "A", "B", "B - A", "95% interval", "p", "B is"),
        (_estimate_cells(estimate) for estimate in summary.estimates),
    )
    if any(estimate.low is not None for estimate in summary.estimates):
        echo("95% interval of B - A: paired bootstrap over tasks; p: sign-flip test")
    echo(f"scored: A {coverage[0]} rollouts, B {coverage[1]} rollouts")
    echo(
        f"\n{summary.paired_tasks:,} tasks in both runs ({summary.only_a:,} in A alone, "
        f"{summary.only_b:,} in B alone): {summary.fixed:,} fixed, {summary.broken:,} broken"
    )
    for note in notes:
        echo(f"note: {note}")
    if summary.different_prompts and run is not None:
        echo(
            f"left out: {summary.different_prompts:,} tasks with the same number, but another prompt in B. "
            "If they are the same tasks, identify them by a field of the rows: --key FIELD"
        )
    elif summary.different_prompts:
        echo(f"note: {summary.different_prompts:,} of them have another prompt in B")
    indices = [int(task.task_index) for task in summary.flips]
    prompts = prompts_of_tasks(run, indices) if run is not None else {}
    print_table(
        ("task", "agent", "", "A solved", "B solved", "A mean", "B mean", "prompt"),
        (
            (
                str(task.task_index),
                task.agent,
                task.flip or "",
                f"{task.a.solved}/{task.a.rollouts}",
                f"{task.b.solved}/{task.b.rollouts}",
                f"{task.a.mean:.3f}",
                f"{task.b.mean:.3f}",
                shortened(prompts.get(int(task.task_index), "")),
            )
            for task in summary.flips
        ),
    )


def _estimate_cells(estimate: Estimate) -> tuple[str, ...]:
    interval = "" if estimate.low is None else f"{estimate.low:+.4g} to {estimate.high:+.4g}"
    return (
        estimate.metric,
        estimate.agent or "all",
        f"{estimate.tasks:,}",
        f"{estimate.a:.4g}",
        f"{estimate.b:.4g}",
        f"{estimate.difference:+.4g}",
        interval,
        f"{estimate.p:.2g}",
        estimate.verdict,
    )


_CORRECTED = "corrected reward"


def calibrate(
    rollouts: Annotated[Path, typer.Argument(help="Rollouts with labels, from collect or reverify.")],
    *,
    label: Annotated[
        str | None,
        typer.Option(
            help="Field with the human label, e.g. human or metadata.human; by default the verdicts "
            "that were corrected on the page of gym-serve view."
        ),
    ] = None,
    score: Annotated[str, typer.Option(help="Field with the verifier's verdict.")] = "reward",
    at: Annotated[
        float | None,
        typer.Option(
            help="Compare whether both values are at least this number; by default compare the values."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare a verifier's verdicts with human labels: agreement, Cohen's kappa, and the counts.

    Labels are a field of the rollouts, or the verdicts that people corrected (or
    confirmed, by the same reward) on the page of gym-serve view.

    Kappa is the agreement beyond chance: 0 for a judge that guesses, 1 for one
    that always agrees with the labels. Rollouts without a label are left out.

    Exit status: 0, or 1 if no rollout has a label, or a value cannot be compared.

    Example: gym-serve calibrate out.jsonl --label human --at 0.5
    """
    from gym_serve.judging import Calibration

    if not rollouts.exists():
        raise InvalidRequest(f"cannot read {rollouts}: no such file")
    records = read_records(rollouts)
    if label is None:
        label, records = _CORRECTED, _corrected(rollouts, records)
    calibration = Calibration.of(_labelled(records, label, score, at))
    if as_json:
        print_json({"ok": True, **calibration.to_json()})
    else:
        _print_calibration(calibration)


def _corrected(rollouts: Path, records: Iterator[JSON]) -> Iterator[JSON]:
    """The rollouts whose verdicts were corrected, each with the right reward."""
    from gym_serve.view.runs import annotations_of, read_annotations

    path = annotations_of(rollouts)
    noted = {n: note for n, note in read_annotations(path).items() if note["reward"] is not None}
    if not noted:
        raise InvalidRequest(
            f"{path} has no corrected verdict: correct some by `gym-serve view {rollouts}`, or name a field "
            "of the rollouts by --label"
        )
    for n, record in enumerate(records):
        note = noted.get(n)
        if note is not None and record.get("_ng_rollout_id", note["id"]) == note["id"]:
            yield {**record, _CORRECTED: note["reward"]}


def _labelled(records: Iterator[JSON], label: str, score: str, at: float | None) -> Iterator[tuple[Any, Any]]:
    for record in records:
        person = _field_at(record, label)
        if person is not None:
            yield _label_of(person, label, at), _label_of(_field_at(record, score), score, at)


def _field_at(record: JSON, path: str) -> Any:
    value: Any = record
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _label_of(value: Any, field: str, at: float | None) -> Any:
    """The label that a value stands for."""
    if at is not None:
        if not isinstance(value, int | float):
            raise InvalidRequest(f"`{field}` must be a number with --at, got {str(value)[:50]!r}")
        return value >= at
    if isinstance(value, list | dict):
        raise InvalidRequest(f"`{field}` must be a text, a number or a boolean, got a {type(value).__name__}")
    return value


def _print_calibration(calibration: Calibration) -> None:
    print_table(
        ("people", "verifier", "rollouts"),
        (
            (str(person), str(judge), f"{n:,}")
            for (person, judge), n in sorted(calibration.pairs.items(), key=repr)
        ),
    )
    kappa = (
        "undefined, because both always give the same label"
        if calibration.kappa is None
        else f"{calibration.kappa:.3f}"
    )
    echo(f"\n{calibration.rows:,} rollouts: agreement {100 * calibration.agreement:.1f} %, kappa {kappa}")
