"""Where rows come from: a file, a data set of the Hugging Face hub, or a function that makes them.

JSONL and CSV are read by gym_serve itself. Parquet, Arrow and the hub, and URLs, also of S3 or GCS, are read
by ``datasets``, an extra: as a stream where a few rows are asked for, else downloaded once and kept in its
cache.

A column of CSV is numbers or booleans only if all of its values are written as those are: an answer of 1.50,
007 or None stays a text, since a right answer would not be equal to 1.5, 7 or nothing.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, datetime, time
from itertools import islice
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from typing_extensions import Self

from gym_serve.rollouts.files import MAX_ROW_BYTES
from gym_serve.rollouts.rows import LocatedRow, read_rows
from gym_serve.types.errors import InvalidRequest, Unavailable
from gym_serve.types.media import data_url
from gym_serve.types.requests import JSON

_CSV = (".csv", ".tsv")
_JSONL = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_FORMATS = {  # by suffix, as `datasets` calls them
    **{".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".arrow": "arrow", ".json": "json"},
    **dict.fromkeys(_JSONL, "json"),
}


class Source(BaseModel):
    """Where the rows of a benchmark are: one of ``dataset``, ``file`` and ``function``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dataset: str | None = None
    """A data set of the Hugging Face hub, ``openai/gsm8k``."""
    name: str | None = None
    """Its configuration."""
    revision: str | None = None
    """Its commit, tag or branch."""
    file: str | None = None
    """A file, relative to that of the benchmark, or a URL: JSONL, Parquet, CSV, Arrow or JSON. ``{split}`` in
    it is what ``splits`` says of the split."""
    function: str | None = None
    """``package.module:function``, called with ``split`` and ``arguments``, which returns rows."""
    arguments: dict[str, Any] = {}
    splits: dict[str, str] = {"test": "test"}
    """What the source calls ``train`` and ``test``."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(place is not None for place in (self.dataset, self.file, self.function)) != 1:
            raise ValueError("give one of dataset, file and function")
        if self.file is not None and len(self.splits) > 1 and "{split}" not in self.file:
            raise ValueError(f"file must have {{split}}, as there are {', '.join(self.splits)}")
        return self

    @property
    def label(self) -> str:
        """The source in a word, for reports."""
        name = f" ({self.name})" if self.name else ""
        revision = f" at {self.revision}" if self.revision else ""
        return f"{self.dataset or self.file or self.function}{name}{revision}"

    def check(self, split: str) -> None:
        """Raise InvalidRequest if there is no such split."""
        if split not in self.splits:
            raise InvalidRequest(f"{self.label} has no split {split!r}; it has {', '.join(self.splits)}")

    def rows(self, split: str, folder: Path, limit: int | None = None) -> Iterator[LocatedRow]:
        """The rows of a split, as they are. ``folder``: what a relative file is relative to.

        Raises:
            InvalidRequest: there is no such split or file; or a package is missing, which is named.
            Unavailable: the source cannot be reached.
        """
        self.check(split)
        if self.function is not None:
            result = resolve_name(self.function)(split=split, **self.arguments)
            return _located(self.label, islice(result, limit))
        if self.file is not None:
            file = self.file.replace("{split}", self.splits[split])
            return islice(file_rows(_place(file, folder)), limit)
        files = {"path": self.dataset, "name": self.name, "revision": self.revision}
        loaded = _load(self.label, {**files, "split": self.splits[split]}, streaming=limit is not None)
        return _located(self.label, islice(loaded, limit))


def is_file_of_rows(file: str) -> bool:
    """Whether a path or a URL has the suffix of a format that is read here."""
    return file.lower().endswith(tuple(_FORMATS))


def file_rows(file: str) -> Iterator[LocatedRow]:
    """The rows of a file or a URL. Raises InvalidRequest: it is of no format that is read here."""
    if not is_file_of_rows(file):
        raise InvalidRequest(f"{file}: rows must be in a file of {', '.join(_FORMATS)}")
    if file.lower().endswith(_JSONL) and "://" not in file:
        return read_rows(file)
    delimiter = "\t" if file.lower().endswith(".tsv") else ","
    if file.lower().endswith(_CSV) and "://" not in file:
        return _csv_rows(file, delimiter)
    kind = next(kind for suffix, kind in _FORMATS.items() if file.lower().endswith(suffix))
    options = {"delimiter": delimiter} if file.lower().endswith(_CSV) else {}
    loaded = _load(file, {"path": kind, "data_files": file, "split": "train", **options}, streaming=True)
    return _located(file, loaded)


def _csv_rows(file: str, delimiter: str) -> Iterator[LocatedRow]:
    """The rows of a file, which is read twice: first for what its columns are."""
    try:
        names, rows = _records(file, delimiter)
        if len(set(names)) < len(names):
            raise InvalidRequest(f"{file}: two columns have the same name")
        readers: list[tuple[_Reader, ...]] = [_READERS] * len(names)
        for fields in rows:
            for place, text in enumerate(fields[: len(names)]):
                if text:
                    readers[place] = tuple(read for read in readers[place] if _keeps(read, text))
        _, rows = _records(file, delimiter)
        for number, fields in enumerate(rows, 1):
            where = f"{file}:{number}"
            if len(fields) > len(names):
                problem = f"it has {len(fields)} values, and there are {len(names)} columns"
                yield LocatedRow(where, None, problem)
                continue
            values = (read[0](text) if text else None for read, text in zip(readers, fields, strict=False))
            yield LocatedRow(where, dict.fromkeys(names) | dict(zip(names, values, strict=False)))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidRequest(f"cannot read {file}: {error}") from None


def _records(file: str, delimiter: str) -> tuple[list[str], Iterator[list[str]]]:
    """The names of the columns, and the rows that are not blank."""
    csv.field_size_limit(MAX_ROW_BYTES)

    def records() -> Iterator[list[str]]:
        with open(file, encoding="utf-8-sig", newline="") as lines:
            yield from filter(None, csv.reader(lines, delimiter=delimiter))

    rows = records()
    return next(rows, []), rows


_Reader = Callable[[str], Any]


def _number(text: str) -> int | float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number of JSON")
    return int(text) if text.lstrip("-").isdecimal() else number


def _boolean(text: str) -> bool:
    return {"True": True, "False": False}[text]


_READERS: tuple[_Reader, ...] = (_number, _boolean, str)


def _keeps(read: _Reader, text: str) -> bool:
    """Whether a value says all that its text does."""
    try:
        return str(read(text)) == text
    except (ValueError, KeyError):
        return False


def _place(file: str, folder: Path) -> str:
    return file if "://" in file else str(folder / file)


def _located(label: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[LocatedRow]:
    for number, row in enumerate(rows, 1):
        yield LocatedRow(f"{label}:{number}", {key: _plain(value) for key, value in row.items()})


def _load(label: str, options: Mapping[str, Any], *, streaming: bool) -> Iterable[JSON]:
    try:
        import datasets
    except ImportError:
        raise InvalidRequest(
            f"{label} is read by datasets, which is not installed: pip install 'gym-serve[data]'"
        ) from None
    datasets.disable_progress_bars()
    try:
        loaded: Any = datasets.load_dataset(**options, streaming=streaming)
    # What it raises has many classes, of several packages; what they have in common is the message.
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise Unavailable(
            f"cannot load {label}: {reason}. If its rows are on this machine: --rows NAME=FILE"
        ) from None
    features = loaded.features or {}
    for column, feature in features.items():
        if isinstance(feature, datasets.Image | datasets.Audio):
            loaded = loaded.cast_column(column, type(feature)(decode=False))  # the file's bytes, as they are
    return loaded  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    """A value as JSON has it: media are data URLs, times are texts."""
    if isinstance(value, Mapping):
        if value.keys() == {"bytes", "path"}:
            data = value["bytes"]
            return data_url(Path(value["path"]).read_bytes() if data is None else data)
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, date | datetime | time):
        return value.isoformat()
    if isinstance(value, bytes):
        return data_url(value)
    return value
