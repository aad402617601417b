"""What people noted of rollouts: tags, a comment, a corrected verdict.

They are kept beside the file of the run, in ``NAME.annotations.jsonl``, a line for each change. The last line
of a rollout counts. A line names the rollout by its number and its id, so that it is not taken for another
one when the file was replaced.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter

from gym_serve.rollouts.files import split_name
from gym_serve.types.errors import BadRequest, InvalidRequest
from gym_serve.types.requests import parse
from gym_serve.view.sources import open_regular, shown

_MOST_TAGS = 50
_LONGEST_TAG = 100
_LONGEST_COMMENT = 100_000
EMPTY: dict[str, Any] = {"tags": [], "comment": "", "reward": None, "by": "", "at": None}


class Annotations:
    """The annotations of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._revision = 0
        self._known: dict[int, dict[str, Any]] = {}
        self._seen: tuple[int, int, int] | None = None
        self._lock = Lock()

    @property
    def revision(self) -> int:
        """Changes with the annotations."""
        self._read()
        return self._revision

    def of(self, n: int, id_: str) -> dict[str, Any]:
        """The annotation of a rollout, an empty one without any."""
        note = self._read().get(n)
        if note is None or note["id"] != id_:
            return EMPTY
        return {key: note[key] for key in EMPTY}

    def tags(self, n: int, id_: str) -> list[str]:
        tags: list[str] = self.of(n, id_)["tags"]
        return tags

    def tagged(self, tag: str) -> list[int]:
        """The numbers of the rollouts with a tag."""
        return [n for n, note in self._read().items() if tag in note["tags"]]

    def all_tags(self) -> list[str]:
        return sorted({tag for note in self._read().values() for tag in note["tags"]})

    def lines(self) -> Iterator[dict[str, Any]]:
        """The annotations, one for each rollout that has one."""
        for n, note in sorted(self._read().items()):
            if any(note[key] for key in ("tags", "comment")) or note["reward"] is not None:
                yield {"n": n, **note}

    def put(self, n: int, id_: str, given: Any) -> dict[str, Any]:
        """Note something of a rollout, in place of what was noted before. Raises InvalidRequest: it is no
        annotation; BadRequest: the file cannot be written."""
        note = {"n": n, "id": id_, **_checked(given), "at": round(time.time(), 3)}
        with self._lock:
            try:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
                descriptor = os.open(self.path, flags, 0o666)
                try:
                    os.write(descriptor, orjson.dumps(note, option=orjson.OPT_APPEND_NEWLINE))
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise BadRequest(f"cannot write {shown(self.path)}: {error.strerror}") from error
        return self.of(n, id_)

    def _read(self) -> dict[int, dict[str, Any]]:
        with self._lock:
            try:
                status = self.path.lstat()
                if not stat.S_ISREG(status.st_mode):
                    raise FileNotFoundError(self.path)
            except OSError:
                if self._known:
                    self._known, self._revision = {}, self._revision + 1
                self._seen = None
                return self._known
            identity = (status.st_ino, status.st_size, status.st_mtime_ns)
            if identity != self._seen:
                self._seen = identity
                self._known = dict(_records(self.path))
                self._revision += 1
            return self._known


def annotations_of(main: Path) -> Path:
    """The file of the annotations of a run: ``out.jsonl.gz`` has ``out.annotations.jsonl``."""
    return main.with_name(f"{split_name(main)[0]}.annotations.jsonl")


def read_annotations(path: Path) -> dict[int, dict[str, Any]]:
    """The annotations of a file by the rollout's number: ``id``, ``tags``, ``comment``, ``reward``, ...; none
    if the file does not exist."""
    return dict(_records(path.resolve())) if path.is_file() else {}


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with open(open_regular(path), "rb") as file:
        for line in file:
            try:
                record = orjson.loads(line)
                yield record["n"], {"id": str(record["id"]), **_checked(record), "at": record.get("at")}
            except (ValueError, TypeError, KeyError, InvalidRequest):
                continue  # a torn line, or one of another program


_Short = Annotated[str, Field(max_length=_LONGEST_TAG)]


class Annotation(BaseModel):
    """What a person says of a rollout."""

    model_config = ConfigDict(strict=True)

    tags: Annotated[list[Annotated[_Short, Field(min_length=1)]], Field(max_length=_MOST_TAGS)] = []
    comment: Annotated[str, Field(max_length=_LONGEST_COMMENT)] = ""
    reward: FiniteFloat | None = None
    by: _Short = ""


_NOTE = TypeAdapter(Annotation)


def _checked(given: Any) -> dict[str, Any]:
    if isinstance(given, dict):
        given = {key: value for key, value in given.items() if value is not None}
    note: Annotation = parse(_NOTE, given, "annotation")
    return {**note.model_dump(), "tags": list(dict.fromkeys(note.tags))}
