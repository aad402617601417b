"""What a run is made of: its rows, how they are expanded, and the graph. Resuming with others is refused.

The header is written once, before the first rollout; rollouts of two different runs can then never
stand in one file unnoticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson

from gym_serve.rollouts.outputs import replacing
from gym_serve.types.errors import Conflict, InvalidRequest
from gym_serve.types.requests import JSON

__all__ = ["RUN_ID", "Header", "differences", "fingerprint"]

RUN_ID = "_ng_run_id"
"""Stamp on every line of the output files: the run that it belongs to."""

_FORMAT = 1
_COMPARED = ("input", "expansion", "graph")
_SHOWN = 8


@dataclass(frozen=True)
class Header:
    """The header of a run, ``out_run.json``.

    Attributes:
        run: id of the run.
        created: when it began, in UTC.
        input: `fingerprint` of the rows.
        expansion: how they are expanded.
        graph: the graph as far as it decides what a rollout is.
        rollouts: how many there are to make.
        problems: how many rows were left out because they could not be used.
        source: where the rows came from; for people, never compared.
        forgiven: how many failed attempts, the first ones of ``out_failures.jsonl``, count no more, as failed
            rollouts were to be made again.
        format: version of these files.
    """

    run: str
    created: str
    input: JSON
    expansion: JSON
    graph: JSON
    rollouts: int
    problems: int
    source: str
    forgiven: int = 0
    format: int = _FORMAT

    @classmethod
    def new(cls, **content: Any) -> Header:
        """A header with an id of its own."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return cls(run=uuid4().hex[:16], created=now, **content)

    @classmethod
    def read(cls, path: Path) -> Header | None:
        """The header in a file; None if there is no file.

        Raises:
            Conflict: it is no header, or one of another version.
        """
        try:
            content = orjson.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, orjson.JSONDecodeError) as error:
            raise Conflict(f"{path} is no header of a run: {error}") from error
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise Conflict(f"{path} was written by another version of gym_serve, which has to finish the run")
        try:
            return cls(**content)
        except TypeError as error:
            raise Conflict(f"{path} is no header of a run: {error}") from error

    def write(self, path: Path) -> None:
        """Write it, all at once."""
        with replacing(path) as file:
            file.write(orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2))

    def check(self, path: Path, **now: JSON) -> None:
        """Compare it with what the run is made of now.

        Args:
            path: the main file of the run, for the message.
            now: ``input``, ``expansion`` and ``graph``.

        Raises:
            Conflict: something changed; says what.
        """
        then = {part: getattr(self, part) for part in _COMPARED}
        changes = list(differences(then, orjson.loads(orjson.dumps(now))))
        if changes:
            more = [f"and {len(changes) - _SHOWN} more"] if len(changes) > _SHOWN else []
            lines = "".join(f"\n  - {change}" for change in changes[:_SHOWN] + more)
            raise Conflict(
                f"{path} was begun on {self.created} with something else; one file holds one run:{lines}\n"
                "resume with what it was begun with, or write to another file"
            )


def fingerprint(path: Path) -> JSON:
    """The length and a digest of a file, as it is stored.

    Raises:
        InvalidRequest: it cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    length = 0
    try:
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
                length += len(chunk)
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error
    return {"bytes": length, "digest": digest.hexdigest()}


def differences(then: Any, now: Any, path: str = "") -> Iterator[str]:
    """The places where two JSON values differ, in words."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*then, *now]):
            place = f"{path}.{key}" if path else str(key)
            if key not in now:
                yield f"{place}: was {_short(then[key])}, is gone"
            elif key not in then:
                yield f"{place}: is new, {_short(now[key])}"
            else:
                yield from differences(then[key], now[key], place)
    elif then != now:
        yield f"{path}: was {_short(then)}, is {_short(now)}"


def _short(value: Any) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= 60 else f"{text[:57]}..."
