"""`serve`: the viewer as a process: the server, and beside it the process that indexes.

`export_site`: the page as files, for any file server.
"""

from __future__ import annotations

import errno
import secrets
import shutil
import socket
import threading
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import permutations
from pathlib import Path
from typing import Any

import orjson
import uvicorn

from gym_serve.gateway.access import is_loopback
from gym_serve.servers.usage import Prices
from gym_serve.types.errors import BadRequest, InvalidRequest
from gym_serve.view.conversation import read_rollout
from gym_serve.view.following import start_following
from gym_serve.view.index import drop_stale
from gym_serve.view.queries import RolloutRow, each_rollout, read_tasks, reading_all, shown_columns
from gym_serve.view.server import STATIC, Guard, application, names_of, runs_json
from gym_serve.view.sources import cache_folder
from gym_serve.view.statistics import compare_runs, read_summary
from gym_serve.view.tokens import read_tokens
from gym_serve.view.view import View


def serve(
    paths: Sequence[Path],
    *,
    host: str,
    port: int | None,
    default_port: int,
    browser: bool,
    say: Callable[[str], None],
    prices: Mapping[str, Prices] | None = None,
) -> None:
    """Show the runs of some paths until the process is interrupted.

    Args:
        port: which port; None for ``default_port``, or a free one if that is taken.
        default_port: see ``port``.
        browser: whether to open the page.
        prices: see `View`.

    Raises:
        InvalidRequest: a path does not exist, or is a file of another kind.
        BadRequest: the port is taken, or the index cannot be kept.
    """
    cache = cache_folder()
    view = View(paths, cache, prices)
    drop_stale(cache)
    listening = _listen(host, port, default_port)
    token = None if is_loopback(host) else secrets.token_urlsafe(24)
    indexing = start_following(paths, cache)
    try:
        shown = f"[{host}]" if ":" in host else host
        if host in ("0.0.0.0", "::"):
            shown = socket.gethostname()
        url = f"http://{shown}:{listening.getsockname()[1]}/" + (f"#token={token}" if token else "")

        def answering() -> None:
            say(url)
            if browser:
                threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()

        with suppress(KeyboardInterrupt):
            _Server(application(view, token), answering).run(sockets=[listening])
    finally:
        listening.close()
        view.close()
        if indexing.stdin is not None:
            indexing.stdin.close()
        indexing.wait()


class _Server(uvicorn.Server):
    """Says when it answers."""

    def __init__(self, app: Guard, answering: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                lifespan="off",
                timeout_graceful_shutdown=1,
            )
        )
        self._answering = answering

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._answering()


def _listen(host: str, port: int | None, default_port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for wanted in (default_port, 0) if port is None else (port,):
        listening = socket.socket(family)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, wanted))
            return listening
        except OSError as error:
            listening.close()
            if port is None and wanted and error.errno == errno.EADDRINUSE:
                continue
            raise BadRequest(f"cannot listen at {host}:{wanted}: {error.strerror}") from error
    raise BadRequest(f"no port of {host} is free")


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
