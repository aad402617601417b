"""The report of a collection: summary, headline metrics and failures, as tables or as JSON.

The tables are computed from the output files, so that an interrupted run has them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gym_serve.cli.printing import new_console, print_json, table_of
from gym_serve.metrics import (
    SUMMARY_COLUMNS,
    Aggregator,
    Failures,
    SummaryRow,
    failure_class,
    summarize,
)
from gym_serve.metrics.aggregator import INTERVALS, interval_text, mean_of
from gym_serve.rollouts import Outputs, Report
from gym_serve.rollouts.analysis import Asked, read_asked
from gym_serve.rollouts.files import read_records
from gym_serve.types.requests import JSON
from gym_serve.types.rows import agent_name

_DETAIL = 200  # characters shown of the first failure of a class
_PROBLEMS = 20


@dataclass
class FailureClass:
    """The failed attempts of one class."""

    kind: str
    """``_ng_failure_class``, e.g. ``model_timeout``."""
    stage: str
    """Stage of the episode."""
    attempts: int
    """Number of failed attempts, including those of rollouts that succeeded later."""
    terminal: int
    """How many of them will not be retried."""
    rollouts: int
    """Number of rollouts without a score whose last attempt is one of them."""
    first: str
    """Detail of the first one."""

    def cells(self) -> tuple[str, ...]:
        """The class as text, under `FAILURE_COLUMNS`."""
        return self.kind, self.stage, str(self.attempts), str(self.rollouts), self.first


FAILURE_COLUMNS = ("failure", "stage", "failed attempts", "failed rollouts", "first detail")
"""Headings of `FailureClass.cells`."""


def failures_of(runs: Iterable[Path]) -> list[FailureClass]:
    """The failed attempts of runs by class and stage, the most frequent first."""
    classes: dict[tuple[str, str], FailureClass] = {}
    for run in map(Outputs.of, runs):
        last: dict[tuple[Any, ...], FailureClass] = {}
        for record in read_records(run.failures):
            failure = record.get("failure")
            failure = failure if isinstance(failure, dict) else {}
            kind, stage = str(failure_class(record)), str(failure.get("stage", ""))
            if (kind, stage) not in classes:
                first = " ".join(str(failure.get("detail", "")).split())[:_DETAIL]
                classes[kind, stage] = FailureClass(kind, stage, 0, 0, 0, first)
            classes[kind, stage].attempts += 1
            classes[kind, stage].terminal += bool(record.get("_ng_failure_terminal"))
            last[_rollout(record)] = classes[kind, stage]
        for record in read_records(run.rollouts) if last else ():
            last.pop(_rollout(record), None)
        for last_class in last.values():
            last_class.rollouts += 1
    return sorted(classes.values(), key=lambda last_class: -last_class.attempts)


def _rollout(record: JSON) -> tuple[Any, ...]:
    return record.get("_ng_task_index"), record.get("_ng_rollout_index")


def report_json(report: Report, failures: Failures = "mask") -> JSON:
    """The report of a collection as JSON; complete and interrupted runs have the same keys."""
    progress = report.progress
    rows, asked = _summary(report, failures)
    return {
        "ok": report.complete and not (progress.failed or report.unusable),
        "complete": report.complete,
        "rollouts": {
            "total": progress.total,
            "finished": progress.finished,
            "scored": progress.scored,
            "failed": progress.failed,
            "earlier": progress.earlier,
        },
        "mean_reward": mean_of(rows),
        "coverage": {"scored": progress.scored, "masked": progress.masked, "asked": progress.total},
        "failed_count_as": failures,
        "agents": [asdict(row) for row in rows],
        "model_usage": report.spent.usage,
        "tokens": report.spent.tokens,
        "cost": report.spent.cost,
        "budget_spent": report.exhausted,
        "waiting": None if progress.waiting is None else asdict(progress.waiting),
        "fault": None if report.operator_error is None else report.operator_error.to_body()["error"],
        "failures": [asdict(failure) for failure in failures_of([report.outputs.rollouts])],
        "metrics": report.metrics,
        "left_out": report.problems,
        "uncompared": report.uncompared,
        "notes": [*report.notes, *asked.notes],
        "files": {name: str(path) for name, path in asdict(report.outputs).items()},
    }


def print_report(
    report: Report, console: Console | None = None, *, as_json: bool = False, failures: Failures = "mask"
) -> None:
    """Print the report of a collection: tables to the console (stdout by default), or JSON to stdout."""
    if as_json:
        print_json(report_json(report, failures))
        return
    console = console or new_console()
    rows, asked = _summary(report, failures)
    for table in _tables(report, rows, failures):
        console.print(table, markup=False, highlight=False, soft_wrap=isinstance(table, str))
        console.print()
    for line in _lines(report, asked):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _summary(report: Report, failures: Failures) -> tuple[list[SummaryRow], Asked]:
    asked = read_asked([report.outputs.rollouts])
    aggregators: dict[str, Aggregator] = {}
    for path in (report.outputs.rollouts, report.outputs.failures):
        for record in read_records(path):
            aggregators.setdefault(agent_name(record) or "-", Aggregator()).add(record)
    return summarize(dict(sorted(aggregators.items())), asked.rollouts, failures), asked


def _about(rows: Sequence[SummaryRow], metrics: list[JSON], failures: Failures) -> Iterator[str]:
    if failures == "zero" and rows:
        yield "mean reward, pass@k: a failed rollout counts as 0"
    methods = {row.interval.get("method") for row in rows} | {method for *_, method in _headlines(metrics)}
    if texts := [text for method, text in INTERVALS.items() if method in methods]:
        yield f"95% intervals: {', '.join(texts)}"


def _lines(report: Report, asked: Asked) -> Iterator[str]:
    for note in (*report.notes, *asked.notes):
        yield f"note: {note}"
    for what, items, unit in (
        ("left out", report.problems, ""),
        ("not compared", report.uncompared, " groups"),
    ):
        yield from (f"{what}: {item}" for item in items[:_PROBLEMS])
        if (more := len(items) - _PROBLEMS) > 0:
            yield f"{what}: at least {more} more{unit}"
    progress = report.progress
    masked = f"{progress.masked:,} masked, " if progress.masked else ""
    yield (
        f"{progress.finished:,} of {progress.total:,} rollouts: {progress.scored:,} scored, {masked}"
        f"{progress.failed:,} failed; {report.outputs.rollouts}"
    )


def _tables(report: Report, rows: Sequence[SummaryRow], failures: Failures) -> Iterator[Table | str]:
    if rows:
        yield table_of(SUMMARY_COLUMNS, [row.cells() for row in rows])
    if metrics := [cells for *cells, _ in _headlines(report.metrics)]:
        yield table_of(("agent", "metric, by NeMo Gym's definition", "value", "95% interval"), metrics)
    if about := "\n".join(_about(rows, report.metrics, failures)):
        yield about
    if used := [_used(*row) for row in report.spent.rows()]:
        yield table_of(
            ("stage", "model", "calls", "input tokens", "of them cached", "output tokens", "cost"), used
        )
    if failed := failures_of([report.outputs.rollouts]):
        yield table_of(FAILURE_COLUMNS, [one.cells() for one in failed])


def _headlines(metrics: list[JSON]) -> Iterator[tuple[str, ...]]:
    for entry in metrics:
        values, confidence = entry.get("key_metrics"), entry.get("confidence")
        for key, value in values.items() if isinstance(values, dict) else ():
            if key.split("/")[-1].startswith("_ng_"):
                continue
            interval = confidence.get(key) if isinstance(confidence, dict) else None
            method = str(interval.get("method", "")) if isinstance(interval, dict) else ""
            yield str(entry["agent_ref"]["name"]), key, _number(value), interval_text(interval), method


def _used(stage: str, server: str, counts: Mapping[str, int], cost: float | None) -> tuple[str, ...]:
    names = ("calls", "input_tokens", "cached_tokens", "output_tokens")
    return stage, server, *(f"{counts[name]:,}" for name in names), "" if cost is None else f"{cost:.4f}"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)
