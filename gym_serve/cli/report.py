"""The report of a collection: summary, headline metrics and failures, as tables or as JSON.

The tables are computed from the output files, so that an interrupted run has them too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from gym_serve.cli.printing import new_console, print_json, table_of
from gym_serve.metrics import SUMMARY_COLUMNS, Aggregator, summarize
from gym_serve.rollouts.files import read_records
from gym_serve.types.rows import agent_name

if TYPE_CHECKING:
    from gym_serve.rollouts import Outputs, Report
    from gym_serve.types.requests import JSON

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
    first: str
    """Detail of the first one."""


def failures_of(outputs: Outputs) -> list[FailureClass]:
    """The failed attempts of a run by class and stage, the most frequent first."""
    classes: dict[tuple[str, str], FailureClass] = {}
    for record in read_records(outputs.failures):
        failure = record.get("failure")
        failure = failure if isinstance(failure, dict) else {}
        kind, stage = str(record.get("_ng_failure_class")), str(failure.get("stage", ""))
        if (kind, stage) not in classes:
            first = " ".join(str(failure.get("detail", "")).split())[:_DETAIL]
            classes[kind, stage] = FailureClass(kind, stage, 0, 0, first)
        classes[kind, stage].attempts += 1
        classes[kind, stage].terminal += bool(record.get("_ng_failure_terminal"))
    return sorted(classes.values(), key=lambda found: -found.attempts)


def report_json(report: Report) -> JSON:
    """The report of a collection as JSON; complete and interrupted runs have the same keys."""
    progress = report.progress
    return {
        "ok": report.complete and not progress.failed,
        "complete": report.complete,
        "rollouts": {
            "total": progress.total,
            "finished": progress.finished,
            "scored": progress.scored,
            "failed": progress.failed,
            "earlier": progress.earlier,
        },
        "mean_reward": progress.mean_reward,
        "model_usage": report.spent.usage,
        "tokens": report.spent.tokens,
        "cost": report.spent.cost,
        "budget_spent": report.exhausted,
        "fault": None if report.operator_error is None else report.operator_error.to_body()["error"],
        "failures": [asdict(found) for found in failures_of(report.outputs)],
        "metrics": report.metrics,
        "left_out": report.problems,
        "uncompared": report.uncompared,
        "notes": report.notes,
        "files": {name: str(path) for name, path in asdict(report.outputs).items()},
    }


def print_report(report: Report, console: Console | None = None, *, as_json: bool = False) -> None:
    """Print the report of a collection: tables to the console (stdout by default), or JSON to stdout."""
    if as_json:
        print_json(report_json(report))
        return
    console = console or new_console()
    for table in _tables(report):
        console.print(table, markup=False, highlight=False)
        console.print()
    for line in _lines(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _lines(report: Report) -> Iterator[str]:
    for note in report.notes:
        yield f"note: {note}"
    for what, items, unit in (
        ("left out", report.problems, ""),
        ("not compared", report.uncompared, " groups"),
    ):
        yield from (f"{what}: {item}" for item in items[:_PROBLEMS])
        if (more := len(items) - _PROBLEMS) > 0:
            yield f"{what}: at least {more} more{unit}"
    progress = report.progress
    yield (
        f"{progress.finished:,} of {progress.total:,} rollouts: {progress.scored:,} scored, "
        f"{progress.failed:,} failed; {report.outputs.rollouts}"
    )


def _tables(report: Report) -> Iterator[Table]:
    rows = summarize(_by_agent(report.outputs))
    if rows:
        yield table_of(SUMMARY_COLUMNS, [row.cells() for row in rows])
    if metrics := list(_headlines(report.metrics)):
        yield table_of(("agent", "metric", "value", "95% interval"), metrics)
    if used := [_used(*row) for row in report.spent.rows()]:
        yield table_of(
            ("stage", "model", "calls", "input tokens", "of them cached", "output tokens", "cost"), used
        )
    if failures := failures_of(report.outputs):
        cells = [(f.kind, f.stage, str(f.attempts), str(f.terminal), f.first) for f in failures]
        yield table_of(("failure", "stage", "attempts", "terminal", "first detail"), cells)


def _by_agent(outputs: Outputs) -> dict[str, Aggregator]:
    aggregators: dict[str, Aggregator] = {}
    for path in (outputs.rollouts, outputs.failures):
        for record in read_records(path):
            aggregators.setdefault(agent_name(record) or "-", Aggregator()).add(record)
    return dict(sorted(aggregators.items()))


def _headlines(metrics: list[JSON]) -> Iterator[tuple[str, ...]]:
    for entry in metrics:
        values, confidence = entry.get("key_metrics"), entry.get("confidence")
        for key, value in values.items() if isinstance(values, dict) else ():
            if key.split("/")[-1].startswith("_ng_"):
                continue
            interval = confidence.get(key) if isinstance(confidence, dict) else None
            yield str(entry["agent_ref"]["name"]), key, _number(value), _interval(interval)


def _used(stage: str, server: str, counts: Mapping[str, int], cost: float | None) -> tuple[str, ...]:
    names = ("calls", "input_tokens", "cached_tokens", "output_tokens")
    return stage, server, *(f"{counts[name]:,}" for name in names), "" if cost is None else f"{cost:.4f}"


def _interval(interval: Any) -> str:
    if not isinstance(interval, dict) or "low" not in interval or "high" not in interval:
        return ""
    return f"{_number(interval['low'])} to {_number(interval['high'])}"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)
