"""The report of an evaluation: one HTML file that needs nothing beside it, and the cells of a table as
text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import urlencode

from jinja2 import Environment

from gym_serve.evaluation.benchmark import ROW_ID
from gym_serve.evaluation.results import Cell, Difference, Results, Score

_PAGE = Path(__file__).with_name("report.html")


def write_html(results: Results, path: Path, output: Path, viewer: str) -> None:
    """Write the page. What models and rows say is escaped.

    Args:
        output: the run's main file, as it is named there.
        viewer: base URL of a viewer of that file, which rows are links into.
    """
    table = by_benchmark(results)
    compared = sum(cell.difference is not None for cell in results.cells)
    page = Environment(autoescape=True).from_string(_PAGE.read_text("utf-8"))
    text = page.render(
        title=f"Evaluation: {', '.join(table)}",
        made=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        record=results.record,
        cost=results.cost,
        table=table,
        models=[model["label"] for model in results.record["models"]],
        compared=compared,
        has_baseline=compared > 0,
        output=output,
        link=lambda row: f"{viewer}/#/rollouts?{urlencode({'where': _condition(row)})}",
        settings=json.dumps(results.record, indent=2, ensure_ascii=False, default=str),
        percent=percent,
        interval=interval,
        change=change,
        clamp=lambda share: min(max(share, 0.0), 1.0),
    )
    path.write_text(text, "utf-8")


def _condition(row: str) -> str:
    quoted = row.replace("'", "''")
    return f"row.{ROW_ID} = '{quoted}'"


def by_benchmark(results: Results) -> Mapping[str, list[Cell]]:
    """The cells of each benchmark, in the order of the models."""
    table: dict[str, list[Cell]] = {}
    for cell in results.cells:
        table.setdefault(cell.benchmark, []).append(cell)
    return table


def percent(score: Score | None) -> str:
    """``68.4``; a dash without a score."""
    return "-" if score is None else f"{100 * score.mean:.1f}"


def interval(score: Score | None) -> str:
    """``61.2 to 74.0``; empty without one."""
    if score is None or score.low is None or score.high is None:
        return ""
    return f"{100 * score.low:.1f} to {100 * score.high:.1f}"


def change(difference: Difference) -> str:
    """The difference to the baseline, in points."""
    clear = "" if difference.is_clear else ", no clear difference"
    return f"{100 * difference.mean:+.1f} (p {difference.p:.2g}{clear})"
