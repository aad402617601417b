"""Where records go: a JSON Lines file, or a folder with one JSON file each.

The output appears under its name only when it is complete: it grows beside its place under a
hidden name, which is removed if the export fails.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson

from gym_serve.interop.export.report import Tally
from gym_serve.rollouts.files import check_folder
from gym_serve.types.requests import JSON

__all__ = ["Sink", "Write", "json_files", "json_lines", "replacing"]

Write = Callable[[JSON], None]
"""Takes one record."""


@dataclass(frozen=True)
class Sink:
    """A kind of output."""

    suffix: str
    """Of its name; empty for a folder."""
    open: Callable[[Path, Tally], AbstractContextManager[Write]]
    """Opens the output at a path; leaving it completes the output, an exception discards it."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A hidden name beside ``path`` that becomes ``path`` if the block succeeds.

    Raises:
        BadRequest: there is no such folder.
    """
    check_folder(path)
    partial = path.with_name(f".{path.name[:100]}.{uuid.uuid4().hex}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
        partial.unlink(missing_ok=True)


@contextmanager
def _json_lines(path: Path, tally: Tally) -> Iterator[Write]:
    with replacing(path) as partial, open(partial, "wb") as file:

        def write(record: JSON) -> None:
            file.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
            tally.records += 1

        yield write


json_lines = Sink(".jsonl", _json_lines)
"""A file with one record a line."""


def json_files(id_key: str) -> Sink:
    """A folder with one file a record, ``000001_{id}.json``, numbered in order.

    Args:
        id_key: key of the record that holds its id.
    """

    @contextmanager
    def folder(path: Path, tally: Tally) -> Iterator[Write]:
        with replacing(path) as partial:
            partial.mkdir()

            def write(record: JSON) -> None:
                tally.records += 1
                # The id comes from the data: it must not choose another folder.
                name = re.sub(r"[^A-Za-z0-9._-]", "_", str(record[id_key]))[:80]
                file = partial / f"{tally.records:06d}_{name}.json"
                file.write_bytes(orjson.dumps(record))

            yield write

    return Sink("", folder)
