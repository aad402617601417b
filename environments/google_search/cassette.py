"""`Cassette`: what the tools answered, in a file, so that an episode runs again without the network.

A line is ``{"tool", "argument", "answer"}``. Queries are the same if they are so but for case and spaces; the
first answer to a query counts. Memory holds a digest of each line and where it stands, not the answers. Lines
are appended whole, so that the replicas on a machine can record into one file.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import orjson

from gym_serve.types.errors import GraphError

__all__ = ["EXAMPLE", "Cassette"]

EXAMPLE = Path(__file__).with_name("cassette.jsonl")
"""The answers for the example rows."""


class Cassette:
    """An open cassette.

    Args:
        path: the file.
        record: whether new answers are appended; else the file is only read, and has to be there.

    Raises:
        GraphError: the file cannot be opened, or has a line that is none.
    """

    def __init__(self, path: Path, *, record: bool) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT if record else os.O_RDONLY
        try:
            self._file = os.open(path, flags | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise GraphError(f"cassette: {path} cannot be opened: {error.strerror}") from None
        try:
            self._places = _places(path)
        except GraphError:
            os.close(self._file)
            raise

    def get(self, tool: str, argument: str) -> str | None:
        """The recorded answer of a tool; None if there is none."""
        place = self._places.get(_digest(tool, argument))
        if place is None:
            return None
        answer: str = orjson.loads(os.pread(self._file, place[1], place[0]))["answer"]
        return answer

    def put(self, tool: str, argument: str, answer: str) -> None:
        """Record an answer, unless there is one."""
        digest = _digest(tool, argument)
        if digest in self._places:
            return
        line = orjson.dumps({"tool": tool, "argument": argument, "answer": answer}) + b"\n"
        # One write appends a line as a whole, also beside other processes; its place is where it ends.
        os.write(self._file, line)
        self._places[digest] = (os.lseek(self._file, 0, os.SEEK_CUR) - len(line), len(line))

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def _places(path: Path) -> dict[bytes, tuple[int, int]]:
    places: dict[bytes, tuple[int, int]] = {}
    offset = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                entry = orjson.loads(line)
                tool, argument, answer = entry["tool"], entry["argument"], entry["answer"]
                if not isinstance(answer, str):
                    raise TypeError("`answer` must be a string")
                places.setdefault(_digest(tool, argument), (offset, len(line)))
            except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
                raise GraphError(f"cassette: line {number} of {path} is none ({error})") from None
            offset += len(line)
    return places


def _digest(tool: str, argument: str) -> bytes:
    same = " ".join(argument.split())
    same = same.casefold() if tool == "search" else same
    return hashlib.blake2b(f"{tool}\n{same}".encode("utf-8", "replace"), digest_size=16).digest()
