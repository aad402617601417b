"""Where records are written: a JSON Lines file, a folder with one JSON file each, or Parquet.

The output appears under its name only when it is complete. Arrow fills what a message lacks with null, which
for a chat template often differs from a missing key. So records are first written to a temporary file, and a
column's messages get only the fields that some message in it uses. Memory stays bounded.

From rollouts to records: every rollout that was read is in the output, or counted with a reason.

A rollout with several conversations (`Rollout.conversations`) counts as exported if one of them is in the
output; the others are counted separately.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import orjson

from gym_serve.rollouts.files import check_folder
from gym_serve.training.rollout import NotExportable, Rollout
from gym_serve.types.errors import InvalidRequest
from gym_serve.types.exact import exact_bytes, exact_json
from gym_serve.types.requests import JSON

T = TypeVar("T")

_MAX_REASONS = 100  # names of failures come from the file: a hostile one must not fill the memory


@dataclass
class Dropped:
    """The rollouts that were left out for one reason."""

    count: int
    example: str  # id of the first of them
    detail: str  # what was wrong with the first of them


@dataclass
class ExportReport:
    """The account of an export; at its end ``read == exported + sum of dropped counts``."""

    format: str
    path: str
    read: int = 0  # rollouts that came in
    exported: int = 0  # rollouts that are in the output
    masked: int = 0  # of those, how many carry a mask that keeps them out of the loss
    records: int = 0  # lines, rows or files written
    dropped: dict[str, Dropped] = field(default_factory=dict)  # why rollouts were left out, by reason
    dropped_branches: dict[str, Dropped] = field(default_factory=dict)
    """Why conversations of exported rollouts were left out, by reason."""
    notes: list[str] = field(default_factory=list)  # what the reader of the output should know

    def to_json(self) -> JSON:
        return asdict(self)

    def reading(self, rollouts: Iterable[Any], min_reward: float | None = None) -> Iterator[Rollout]:
        for raw in rollouts:
            self.read += 1
            try:
                rollout = Rollout.read(raw)
                if min_reward is not None and not rollout.masked and rollout.reward < min_reward:
                    raise NotExportable("low_reward", f"the reward is lower than {min_reward:g}")
            except NotExportable as error:
                id_ = raw.get("_ng_rollout_id") if isinstance(raw, dict) else None
                _count(self.dropped, error, str(id_ or f"#{self.read}")[:100])
            else:
                yield rollout

    def attempt(self, convert: Callable[..., T], rollout: Rollout, **options: Any) -> T | None:
        """``convert(rollout)``, or None if it is not exportable, which is counted."""
        try:
            return convert(rollout, **options)
        except NotExportable as error:
            _count(self.dropped, error, rollout.id)
            return None


def _count(dropped: dict[str, Dropped], error: NotExportable, rollout_id: str) -> None:
    is_new = error.reason not in dropped
    reason = "other" if is_new and len(dropped) >= _MAX_REASONS else error.reason
    dropped.setdefault(reason, Dropped(0, rollout_id, error.message[:500])).count += 1


Records = Callable[..., Iterator[JSON]]  # ``(rollouts, report, **options)`` -> the records of a format


def each(convert: Callable[..., JSON]) -> Records:
    """The records of a format that turns each conversation into one; its mask is that of its rollout's
    branches.
    """

    @wraps(convert)
    def records(rollouts: Iterable[Rollout], report: ExportReport, **options: Any) -> Iterator[JSON]:
        for rollout in rollouts:
            converted: list[JSON] = []
            failures: list[tuple[NotExportable, str]] = []
            for conversation in rollout.conversations():
                try:
                    converted.append(convert(conversation, **options))
                except NotExportable as error:
                    failures.append((error, conversation.id))
            if not converted:
                _count(report.dropped, failures[0][0], rollout.id)
                continue
            report.exported += 1
            report.masked += rollout.masked
            for failure in failures:
                _count(report.dropped_branches, *failure)
            yield from converted

    return records


def whole(convert: Callable[..., JSON], *, has_mask: bool = False) -> Records:
    """The records of a format that makes one of each rollout; ``has_mask``: a record says if it is masked."""

    @wraps(convert)
    def records(rollouts: Iterable[Rollout], report: ExportReport, **options: Any) -> Iterator[JSON]:
        for rollout in rollouts:
            record = report.attempt(convert, rollout, **options)
            if record is not None:
                report.exported += 1
                report.masked += has_mask and rollout.masked
                yield record

    return records


Write = Callable[[JSON], None]  # takes one record


@dataclass(frozen=True)
class Sink:
    """A kind of output."""

    suffix: str  # of its name; empty for a folder
    open: Callable[[Path, ExportReport], AbstractContextManager[Write]]
    """Opens the output at a path; leaving it completes the output, an exception discards it."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A hidden name beside ``path`` that becomes ``path`` if the block succeeds. Raises BadRequest: there is
    no such folder.
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
def _json_lines(path: Path, report: ExportReport) -> Iterator[Write]:
    with replacing(path) as partial, open(partial, "wb") as file:

        def write(record: JSON) -> None:
            file.write(exact_bytes(record, orjson.OPT_APPEND_NEWLINE))
            report.records += 1

        yield write


json_lines = Sink(".jsonl", _json_lines)  # a file with one record a line


def json_files(id_key: str) -> Sink:
    """A folder with one file a record, ``000001_{id}.json``, numbered in order."""

    @contextmanager
    def folder(path: Path, report: ExportReport) -> Iterator[Write]:
        with replacing(path) as partial:
            partial.mkdir()

            def write(record: JSON) -> None:
                report.records += 1
                # The id comes from the data: it must not choose another folder.
                name = re.sub(r"[^A-Za-z0-9._-]", "_", str(record[id_key]))[:80]
                file = partial / f"{report.records:06d}_{name}.json"
                file.write_bytes(exact_bytes(record))

            yield write

    return Sink("", folder)


_BATCH_BYTES = 8 << 20  # of JSON; several times that as Python objects

_MAX_TOOL_SETS = 64


@dataclass
class Seen:
    """What the records of a file hold."""

    columns: list[str] = field(default_factory=list)  # the keys of the records, in order of appearance
    filled: set[str] = field(default_factory=set)
    """The columns that are neither null nor an empty list everywhere."""
    keys: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """By column: the keys that have a value in any of the objects listed in it."""
    tools: set[bytes] | None = field(default_factory=set)
    """The distinct lists of tools as JSON; None if there are too many."""

    def observe(self, record: JSON) -> None:
        for column, value in record.items():
            if column not in self.columns:
                self.columns.append(column)
            if value is not None and value != []:
                self.filled.add(column)
            for entry in value if isinstance(value, list) else ():
                if not isinstance(entry, dict):
                    break
                self.keys[column].update(key for key, held in entry.items() if held is not None)
        if self.tools is not None and record.get("tools"):
            self.tools.add(exact_bytes(record["tools"]))
            if len(self.tools) > _MAX_TOOL_SETS:
                self.tools = None


def pyarrow() -> Any:
    """The pyarrow module. Raises InvalidRequest: it is not installed."""
    try:
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise InvalidRequest(
            f"Parquet files need pyarrow ({error}); pip install 'gym-serve[export]'"
        ) from None


def message_list(keys: set[str]) -> Any:
    """Arrow type of a list of chat messages that use these keys."""
    pa = pyarrow()
    function = pa.struct({"name": pa.string(), "arguments": pa.string()})
    call = pa.struct({"id": pa.string(), "type": pa.string(), "function": function})
    types = {
        "role": pa.string(),
        "content": pa.string(),
        "reasoning_content": pa.string(),
        "tool_calls": pa.list_(call),
        "tool_call_id": pa.string(),
    }
    always = ("role", "content")
    return pa.list_(pa.struct({k: t for k, t in types.items() if k in keys or k in always}))


def exact_type(samples: Iterable[bytes]) -> Any | None:
    """The Arrow type that holds these JSON lists to the letter, None if Arrow would change one."""
    pa = pyarrow()
    values = [exact_json(sample) for sample in samples]
    try:
        array = pa.array(values)
    except (pa.ArrowException, OverflowError):
        return None
    same = exact_bytes(array.to_pylist()) == exact_bytes(values)
    return array.type if same and not _has_empty_struct(pa, array.type) else None


def _has_empty_struct(pa: Any, type_: Any) -> bool:
    # Parquet cannot store an object without any key.
    if pa.types.is_struct(type_):
        return type_.num_fields == 0 or any(_has_empty_struct(pa, inner.type) for inner in type_)
    return pa.types.is_list(type_) and _has_empty_struct(pa, type_.value_type)


def parquet(schema: Callable[[Seen, ExportReport], Any]) -> Sink:
    """Parquet; ``schema`` makes the Arrow schema when all records were seen, and names the keys that are
    written.
    """

    @contextmanager
    def table(path: Path, report: ExportReport) -> Iterator[Write]:
        pyarrow()  # say that it is missing before any work is done
        contents = Seen()
        with replacing(path) as partial, tempfile.TemporaryFile(dir=path.parent) as spool:

            def write(record: JSON) -> None:
                contents.observe(record)
                spool.write(exact_bytes(record, orjson.OPT_APPEND_NEWLINE))
                report.records += 1

            yield write
            spool.seek(0)
            _write_table(partial, schema(contents, report), spool)

    return Sink(".parquet", table)


def _write_table(path: Path, schema: Any, lines: Iterable[bytes]) -> None:
    pa, pq = pyarrow(), importlib.import_module("pyarrow.parquet")
    plain = pa.schema([(column.name, _buildable(pa, column.type)) for column in schema])

    def write(rows: list[JSON]) -> None:
        built = pa.Table.from_pylist(rows, schema=plain).columns
        # Only where it must be: a cast loses all but the first of several nulls in a list of nothing else.
        cast = [
            column if column.type == field.type else column.cast(field.type)
            for column, field in zip(built, schema, strict=True)
        ]
        writer.write_table(pa.Table.from_arrays(cast, schema=schema))

    with pq.ParquetWriter(path, schema) as writer:
        batch: list[JSON] = []
        size = 0
        for line in lines:
            batch.append(exact_json(line))
            size += len(line)
            if size >= _BATCH_BYTES:
                write(batch)
                batch, size = [], 0
        write(batch)


def _buildable(pa: Any, type_: Any) -> Any:
    # Arrow builds no lists of its JSON type from Python, but casts lists of strings to it.
    is_json = pa.types.is_list(type_) and isinstance(type_.value_type, pa.BaseExtensionType)
    return pa.list_(pa.string()) if is_json else type_
