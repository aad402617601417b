"""`export_site`: the page as files, for any file server."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import orjson

from gym_serve.servers.usage import Prices
from gym_serve.types.errors import BadRequest, InvalidRequest
from gym_serve.view.conversation import read_rollout
from gym_serve.view.queries import RolloutRow, each_rollout, read_tasks, reading_all, shown_columns
from gym_serve.view.server import STATIC, names_of, runs_json
from gym_serve.view.statistics import compare_runs, read_summary
from gym_serve.view.tokens import read_tokens
from gym_serve.view.view import View

MOST_EXPORTED = 20_000
"""The most rollouts of a site: each is three files."""


def export_site(
    paths: Sequence[Path], folder: Path, where: str = "", prices: Mapping[str, Prices] | None = None
) -> int:
    """Write a static site: the page, and what the API answers as files; how many rollouts it has.

    Args:
        folder: where to; it must not exist, or be empty.
        prices: see `View`.

    Raises:
        InvalidRequest: a path cannot be read, the filter cannot be understood, or it selects too many.
        BadRequest: the folder cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadRequest(f"{folder} must be a new or an empty folder")
    with View(paths, prices=prices) as view:
        view.index()
        runs = list(view.runs.values())
        rows = list(each_rollout(runs, where))
        if len(rows) > MOST_EXPORTED:
            raise InvalidRequest(
                f"a site must have at most {MOST_EXPORTED:,} rollouts, got {len(rows):,}; see --where"
            )
        try:
            _write_all(view, rows, folder, where)
        except OSError as error:
            raise BadRequest(f"cannot write {error.filename or folder}: {error.strerror}") from error
    return len(rows)


def _write_all(view: View, rows: list[RolloutRow], folder: Path, where: str) -> None:
    runs = list(view.runs.values())
    _copy_page(folder)
    listed = runs_json(view)
    for run in listed["runs"]:
        run["path"] = run["name"]  # a site is shared; folders of this machine are not
    _write(folder / "api" / "runs.json", listed)
    _write(folder / "api" / "summary.json", read_summary(runs, where))
    with reading_all(runs) as readings:
        shown = shown_columns(readings)
    _write(folder / "api" / "rollouts.json", {"total": len(rows), "columns": shown, "rows": rows})
    _write(folder / "api" / "tasks.json", read_tasks(runs, where, limit=MOST_EXPORTED))
    for left, right in permutations(runs, 2):
        _write(folder / "api" / "compare" / left.id / f"{right.id}.json", compare_runs(left, right, where))
    _write(folder / "api" / "suggestions.json", {"names": names_of(view)})
    for row in rows:
        with view.reading(row["run"]) as reading:
            n = row["n"]
            place = folder / "api" / "rollout" / row["run"]
            _write(place / f"{n}.json", read_rollout(reading, n))
            _write(place / str(n) / "tokens.json", read_tokens(reading, n))
            (place / str(n) / "raw.txt").write_bytes(reading.line(n))
            kept = reading.run.annotations.of(n, row["id"])
            _write(folder / "api" / "annotations" / row["run"] / f"{n}.json", kept)


def _copy_page(folder: Path) -> None:
    page = STATIC / "index.html"
    if not page.exists():
        raise BadRequest(f"{page} is missing: gym_serve is not installed whole")
    shutil.copytree(
        STATIC, folder / "static", ignore=shutil.ignore_patterns("index.html", "live*.js", "*.map")
    )
    html = page.read_text(encoding="utf-8")
    html = html.replace(
        '<meta name="gym-serve" content="server">', '<meta name="gym-serve" content="static">'
    )
    (folder / "index.html").write_text(html, encoding="utf-8")


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(value))
