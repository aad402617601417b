"""The log of a replica: one line per record, with the rollout, session and request that it belongs to.

`write_log` sends the records of all loggers of the process to a file of its own beside that of Ray Serve
(and warnings to stderr as well), as text or as JSON. Long before a disk is full, old files are dropped.

A graph that breaks breaks thousands of times a minute. So faults are limited: `admits` lets the first few of
a kind pass, and counts the others.

`read_log` is the way back: records of these files, and of Serve's own, for `gym-serve logs`.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import orjson

Format = Literal["text", "json"]
Level = Literal["debug", "info", "warning", "error"]

LEVELS: dict[str, int] = {"debug": 10, "info": 20, "warning": 30, "error": 40}
"""The levels by name."""

ACCESS = logging.getLogger("gym_serve.access")
"""Has a line for every call, if the graph asks for that."""
ACCESS.setLevel(logging.CRITICAL)

_FAULTS = logging.getLogger("gym_serve.faults")
_FAULTS.addHandler(logging.NullHandler())  # outside of replicas, only who configures logging sees them
_BURST, _PERIOD = 5, 60.0
_MAX_BYTES, _BACKUPS = 64 * 2**20, 5  # Ray's variables for all of its logs replace these
_SUFFIX = "_events.log"
_FIELDS = ("rollout", "session", "request")


class _Kind:
    """How often a kind of fault has happened in the present period."""

    __slots__ = ("held", "passed", "since")

    def __init__(self, since: float) -> None:
        self.since, self.passed, self.held = since, 0, 0


_kinds: dict[tuple[str, ...], _Kind] = {}


def admits(*kind: str, now: float | None = None) -> str | None:
    """Whether a fault of this kind may be logged: the first 5 a minute.

    Args:
        now: the time, in seconds of the monotonic clock.

    Returns:
        None if not; else what to append to its message: how many were held back before it.
    """
    now = time.monotonic() if now is None else now
    counts = _kinds.get(kind)
    if counts is None:
        counts = _kinds[kind] = _Kind(now)
    elif now - counts.since >= _PERIOD:
        counts.since, counts.passed = now, 0
    if counts.passed >= _BURST:
        counts.held += 1
        return None
    counts.passed += 1
    held, counts.held = counts.held, 0
    return f" ({held} more like this were not logged)" if held else ""


def fault(
    server: str | None, kind: str, message: str, level: int = logging.WARNING, rollout: str | None = None
) -> None:
    """Log a fault, unless there were too many of its kind lately. ``server``: where it happened; None for the
    server of the process; ``rollout``: which one met it; None for that of the context."""
    if _FAULTS.isEnabledFor(level) and (more := admits(server or "", kind)) is not None:
        _FAULTS.log(level, "%s%s", message, more, extra={"server": server, "rollout": rollout})


def write_log(
    directory: Path,
    about: tuple[str, str, str],
    *,
    format: Format,
    level: Level,
    access: bool,
    context: Callable[[], Mapping[str, str | None]],
) -> None:
    """Write the log of this process from now on. ``level``: the least that gym_serve's own records must have;
    other loggers keep their levels; ``access``: whether every call is logged; ``context``: the ``rollout``,
    ``session`` and ``request`` that this thread or task works for."""
    graph, server, replica = about
    formatter = (_JsonFormatter if format == "json" else _TextFormatter)(about, context)
    directory.mkdir(parents=True, exist_ok=True)
    file = RotatingFileHandler(
        directory / f"replica_{graph}_{server}_{replica}{_SUFFIX}",
        maxBytes=int(os.environ.get("RAY_ROTATION_MAX_BYTES", _MAX_BYTES)),
        backupCount=int(os.environ.get("RAY_ROTATION_BACKUP_COUNT", _BACKUPS)),
        encoding="utf-8",
        errors="backslashreplace",
        delay=True,
    )
    console = logging.StreamHandler(sys.stderr)
    console.setLevel(logging.WARNING)
    for handler in (file, console):
        handler.setFormatter(formatter)
        logging.getLogger().addHandler(handler)
    logging.getLogger("gym_serve").setLevel(LEVELS[level])
    ACCESS.setLevel(logging.INFO if access else logging.CRITICAL)


class _Formatter(logging.Formatter):
    def __init__(self, about: tuple[str, str, str], context: Callable[[], Mapping[str, str | None]]) -> None:
        super().__init__()
        self._graph, self._server, self._replica = about
        self._context = context

    def fields(self, record: logging.LogRecord) -> dict[str, str]:
        context = self._context()
        return {
            name: value for name in _FIELDS if (value := getattr(record, name, None) or context.get(name))
        }

    def trace(self, record: logging.LogRecord) -> str:
        """Its traceback; empty without one."""
        return self.formatException(record.exc_info) if record.exc_info else ""


class _TextFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        server = getattr(record, "server", None) or self._server
        fields = " ".join(f"{name}={value}" for name, value in self.fields(record).items())
        lines = [*record.getMessage().splitlines(), *self.trace(record).splitlines()] or [""]
        # The fields end the first line, where `read_log` looks for them.
        lines[0] = f"{self.formatTime(record)} {record.levelname} {server} {lines[0]}" + (
            f" [{fields}]" if fields else ""
        )
        # A message may hold what a model wrote: none of its lines can pass for a record.
        return "\n  ".join(lines)


class _JsonFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "message": record.getMessage(),
            "logger": record.name,
            "graph": self._graph,
            "server": getattr(record, "server", None) or self._server,
            "replica": self._replica,
            **self.fields(record),
        }
        if trace := self.trace(record):
            entry["traceback"] = trace
        return orjson.dumps(entry, default=str).decode()


class Record(NamedTuple):
    """A record that was read. ``time``: when it was written: ``2026-11-23 06:00:00,123``; ``text``: as it
    stands in the file, without the last line end."""

    time: str
    text: str


_HEAD = re.compile(r"(?:([A-Z]+) )?(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[,.]\d+) (?:([A-Z]+) )?")


def read_log(
    directory: Path,
    servers: list[tuple[str, str]],
    positions: Mapping[str, int],
    *,
    level: Level = "debug",
    rollout: str | None = None,
    last: int | None = None,
) -> tuple[list[Record], dict[str, int]]:
    """Records of servers, those of replicas that are gone and of files that were rotated too.

    Args:
        positions: where to begin, by the file (see `_identity`); others are read from their begin.
        level: the least level of a record.
        rollout: only records of this rollout, with all of its attempts.
        last: only so many of each replica.

    Returns:
        the records by time, and the positions to go on from.
    """
    merged: list[Record] = []
    ends = dict(positions)
    for files in _by_replica(directory, servers).values():
        records: list[Record] = []
        for path in files:
            with path.open("rb") as file:
                identity = _identity(file)
                file.seek(positions.get(identity, 0))
                content = file.read()
            whole = content[: content.rfind(b"\n") + 1]  # the rest of a line may still come
            ends[identity] = positions.get(identity, 0) + len(whole)
            records += _records(whole.decode("utf-8", "replace"), LEVELS[level], rollout)
        records.sort(key=lambda record: record.time)
        merged += records if last is None else records[len(records) - last :] if last else []
    return sorted(merged, key=lambda record: record.time), ends


def _identity(file: BinaryIO) -> str:
    """What a log file keeps when it is rotated: its inode and its first line.

    The inode alone is not enough: a new file often gets that of the oldest one, which was just removed.
    """
    return f"{os.fstat(file.fileno()).st_ino} {zlib.crc32(file.readline())}"


def _by_replica(directory: Path, servers: list[tuple[str, str]]) -> dict[str, list[Path]]:
    names = "|".join(re.escape(f"{graph}_{server}") for graph, server in servers)
    wanted = re.compile(rf"(replica_(?:{names})_[^_.]+)(?:{re.escape(_SUFFIX)}|\.log)(?:\.(\d+))?")
    files: dict[str, list[tuple[int, Path]]] = {}
    for path in sorted(directory.glob("replica_*.log*")):
        if match := wanted.fullmatch(path.name):
            files.setdefault(match.group(1), []).append((int(match.group(2) or 0), path))
    # The oldest first: records of the same millisecond keep this order.
    return {replica: [path for _, path in sorted(dated, reverse=True)] for replica, dated in files.items()}


def _records(text: str, level: int, rollout: str | None) -> Iterator[Record]:
    # An attempt after the first has the rollout's id with a suffix.
    of_rollout = None if rollout is None else re.compile(rf"{re.escape(rollout)}(?:-a\d+)?")
    time, lines, is_shown = "", list[str](), True
    for line in text.split("\n")[:-1]:  # not `splitlines`: it knows more ends of a line
        entry = _json(line) if line.startswith("{") else None
        head = None if entry is not None else _HEAD.match(line)
        if entry is None and (head is None or not (head.group(1) or head.group(3))):
            lines.append(line)  # goes on
            continue
        if lines and is_shown:
            yield Record(time, "\n".join(lines))
        if entry is not None:
            time, name, of = str(entry.get("time")), str(entry.get("level")), entry.get("rollout")
        else:
            assert head is not None
            time, name = head.group(2), head.group(1) or head.group(3)
            of = match.group(1) if (match := _ROLLOUT.search(line)) else None
        lines = [line]
        is_shown = LEVELS.get(name.lower(), logging.CRITICAL) >= level
        is_shown = is_shown and (of_rollout is None or bool(of_rollout.fullmatch(str(of))))
    if lines and is_shown:
        yield Record(time, "\n".join(lines))


_ROLLOUT = re.compile(r" \[rollout=(\S+?)(?: [a-z]+=\S+)*\]$")


def _json(line: str) -> dict[str, Any] | None:
    try:
        entry = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return entry if isinstance(entry, dict) else None
