"""`Journal`: the record of a run on disk, from which it continues after a crash at any instant.

The output files are the journal: a rollout is scored when it is in ``out.jsonl``, at most once, and an
attempt has failed when it is in ``out_failures.jsonl``. The `Header` says what the run is made of: its rows,
how they are expanded, and the graph. Resuming with anything else is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson
from pydantic import TypeAdapter, ValidationError
from typing_extensions import Self

from gym_serve.rollouts.files import RecordFile, replacing, split_name
from gym_serve.rollouts.rows import METADATA_KEYS, RUN_ID, rollout_key
from gym_serve.rollouts.tables import IntTable
from gym_serve.types.endings import is_failure
from gym_serve.types.errors import BadRequest, Conflict
from gym_serve.types.exact import exact_bytes, exact_json
from gym_serve.types.requests import JSON, problems_of
from gym_serve.types.rows import failed_rollout

_FORMAT = 1
_COMPARED = ("input", "expansion", "graph")
_SHOWN = 8


@dataclass(frozen=True)
class Outputs:
    """The files of ``collect``, next to each other."""

    rollouts: Path  # the scored rollouts, ``out.jsonl``
    failures: Path  # one line per failed attempt, ``out_failures.jsonl``
    inputs: Path  # every materialized row, ``out_materialized_inputs.jsonl``
    metrics: Path  # ``out_aggregate_metrics.json``
    header: Path  # the `Header`, ``out_run.json``

    @property
    def comparisons(self) -> Path:
        """The answers of ``compare``, one line per group, ``out_comparisons.jsonl``; see `GroupStage`."""
        stem, suffix = split_name(self.rollouts)
        return self.rollouts.with_name(f"{stem}_comparisons{suffix}")

    @classmethod
    def of(cls, path: str | Path) -> Outputs:
        """The files of a run by its main file. Raises `BadRequest`: the path ends with no name."""
        # A link and its target are one run.
        path = Path(os.path.realpath(path)) if os.path.islink(path) else Path(path)
        if path.name in ("", ".."):
            raise BadRequest(f"{path} is a folder: name a file in it, e.g. {path / 'out.jsonl'}")
        stem, suffix = split_name(path)
        others = (f"failures{suffix}", f"materialized_inputs{suffix}", "aggregate_metrics.json", "run.json")
        return cls(path, *(path.with_name(f"{stem}_{name}") for name in others))


@dataclass(frozen=True)
class Header:
    """The header of a run, ``out_run.json``.

    The parts that take all rows to know are None while rows are read.

    Attributes:
        forgiven: how many failed attempts, the first ones of ``out_failures.jsonl``, no longer count, because
            failed rollouts were to be retried (``retry_failed``).
        prices: of the graph's models, by model server, when the run began; for people, never compared.
    """

    run: str
    created: str
    expansion: JSON
    graph: JSON  # the parts of the graph that decide what a rollout is
    source: str  # where the rows came from; for people, never compared
    input: JSON | None = None  # `fingerprint` of the rows
    rollouts: int | None = None
    problems: int | None = None  # how many rows were skipped because they could not be used
    forgiven: int = 0
    format: int = _FORMAT
    prices: JSON = field(default_factory=dict)
    output: str = ""  # name of the main file, since ``out.jsonl`` and ``out.jsonl.gz`` would share the others

    @classmethod
    def new(cls, **content: Any) -> Header:
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return cls(run=uuid4().hex[:16], created=now, **content)

    @classmethod
    def read(cls, path: Path) -> Header | None:
        """The header in a file; None if there is none. Raises `Conflict` if it is of another version, or
        none."""
        try:
            content = exact_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise Conflict(f"{path} is not the header of a run: {error}") from error
        if isinstance(content, dict) and content.get("format", _FORMAT) != _FORMAT:
            raise Conflict(f"{path} was written by another version of gym_serve; resume with that version")
        try:
            return _HEADER.validate_python(content)
        except ValidationError as error:
            raise Conflict(
                f"{path} is not the header of a run: {'; '.join(problems_of(error, 'the header'))}"
            ) from error

    def write(self, path: Path) -> None:
        with replacing(path) as file:
            file.write(exact_bytes(asdict(self), orjson.OPT_INDENT_2))

    def check(self, path: Path, **now: JSON | None) -> None:
        """Raise a `Conflict` that says which of ``now`` (``input``, ``expansion``, ``graph``) changed since
        the header was written. ``path`` is the main file, for the message."""
        then = {part: getattr(self, part) for part in _COMPARED}
        changes = [
            "the rows or their prompts are others" if change.startswith("input.digest") else change
            for change in differences(then, exact_json(exact_bytes(now)))
        ]
        if changes:
            more = [f"and {len(changes) - _SHOWN} more"] if len(changes) > _SHOWN else []
            lines = "".join(f"\n  - {change}" for change in changes[:_SHOWN] + more)
            raise Conflict(
                f"{path} was started on {self.created} with other settings; one file holds one run:{lines}\n"
                "Resume with the original settings, or write to another file."
            )


_HEADER = TypeAdapter(Header)


def differences(then: Any, now: Any, path: str = "") -> Iterator[str]:
    """The places where two JSON values differ, in words."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*then, *now]):
            place = f"{path}.{key}" if path else str(key)
            if key not in now:
                yield f"{place}: was {_short(then[key])}, is missing"
            elif key not in then:
                yield f"{place}: is new, {_short(now[key])}"
            else:
                yield from differences(then[key], now[key], place)
    elif then != now:
        yield f"{path}: was {_short(then)}, is {_short(now)}"


def _short(value: Any) -> str:
    text = exact_bytes(value).decode()
    return text if len(text) <= 60 else f"{text[:57]}..."


_IDENTITY_KEYS = frozenset({*METADATA_KEYS, "agent_ref"})
_SPARE_BYTES = 1 << 20  # of a line, for keys added later: the rewards of its group, metadata of another run
_SCORED = 2**32 - 1
_TERMINAL = 2**31  # beside the number of failed attempts


class Journal:
    """The files of a run, open for collecting; this process is their only writer. Raises `Conflict` if they
    are being written or cannot be resumed, and `BadRequest` if they cannot be written."""

    def __init__(self, outputs: Outputs, *, resume: bool) -> None:
        self.outputs = outputs
        self.header: Header | None = None  # the run's header; None before `begin` in a new run
        self._past = IntTable()  # failed attempts, or _SCORED
        self._forgiven = IntTable()  # how many of these no longer count
        self._failures = 0
        self._files = [RecordFile(outputs.rollouts, exclusive=True, spare=_SPARE_BYTES)]
        try:
            self._files.append(RecordFile(outputs.failures, spare=_SPARE_BYTES))
            if any(file.size for file in self._files):
                if not resume:
                    raise Conflict(
                        f"{outputs.rollouts} holds a run; resume it (--resume), or write to another file (-o)"
                    )
                self.header = Header.read(outputs.header)
                if self.header is None:
                    raise Conflict(f"{outputs.rollouts} cannot be resumed: {outputs.header.name} is missing")
            self._check_owner()
        except BaseException:
            self.close()
            raise

    def _check_owner(self) -> None:
        """Raise a `Conflict` if the files beside the main one are those of another run."""
        rollouts, path = self.outputs.rollouts, self.outputs.header
        header = self.header or (Header.read(path) if path.exists() else None)
        owner = rollouts.name if header is None else header.output or rollouts.name
        if owner != rollouts.name and rollouts.with_name(owner).exists():
            raise Conflict(f"{path} belongs to the run in {owner}: write {rollouts.name} under another name")

    def begin(self, header: Header) -> None:
        """Write the header of the run, or what is known of it by now."""
        self.header = replace(header, output=self.outputs.rollouts.name)
        self.header.write(self.outputs.header)

    def recover(self) -> Iterator[JSON]:
        """Read the files; yields the records, for counting. Raises `Conflict`: a record is damaged, belongs
        to another run, or is there twice."""
        assert self.header is not None
        rollouts, failures = self._files
        for record in rollouts.recover():
            key = self._known(record)
            if self._past.get(key) == _SCORED:
                raise Conflict(f"{self.outputs.rollouts} holds rollout {_name(record)} twice")
            self._past[key] = _SCORED
            yield record
        for record in failures.recover():
            key = self._known(record)
            self._failures += 1
            past = self._past.get(key) or 0
            if past != _SCORED:
                terminal = _TERMINAL * bool(record.get("_ng_failure_terminal"))
                self._past[key] = past + 1 | terminal
                if self._failures <= self.header.forgiven:
                    self._forgive(key)
            yield record

    def forgive(self) -> None:
        """Give every rollout that is not scored all of its attempts again; call it after `recover`.

        When this returns, it holds for every process that resumes the run; until then, for none.
        """
        assert self.header is not None
        self.sync()  # the header must not outlive a failure that it counts
        self.header = replace(self.header, forgiven=self._failures)
        self.header.write(self.outputs.header)
        for key, past in self._past.items():
            if past != _SCORED:
                self._forgive(key)

    def _forgive(self, key: int) -> None:
        self._past[key] = self._forgiven[key] = (self._past.get(key) or 0) & ~_TERMINAL

    def failed_attempts(self, row: JSON, allowed: int) -> tuple[int, int] | None:
        """How many attempts at a row have failed, and how many of them no longer count; None if the row needs
        no further attempt."""
        key = rollout_key(row)
        past, forgiven = self._past.get(key) or 0, self._forgiven.get(key) or 0
        return None if past - forgiven >= allowed else (past, forgiven)

    def finished(self, allowed: int) -> int:
        return sum(past - (self._forgiven.get(key) or 0) >= allowed for key, past in self._past.items())

    def append(self, row: JSON, rollout: JSON) -> JSON:
        """Record the result of an attempt; when this returns, it survives this process.

        Returns the record: the rollout, or a failure if the rollout cannot be stored as JSON.
        """
        assert self.header is not None
        run = {RUN_ID: self.header.run}
        record = {**rollout, **run}
        try:
            self._file_of(record).append(record)
        except (RecursionError, TypeError, ValueError) as error:
            # Nested too deep, say: a foreign server may answer anything.
            failure = BadRequest(f"the rollout cannot be stored as JSON: {error}")
            record = {**failed_rollout(row, failure), **run}
            try:
                self._file_of(record).append(record)
            except ValueError:  # the row leaves no room for the failure; it is in the inputs
                record = {key: record[key] for key in record if key not in row or key in _IDENTITY_KEYS}
                self._file_of(record).append(record)
        return record

    def sync(self) -> None:
        for file in self._files:
            file.sync()

    def check(self) -> None:
        """Raise `Conflict` if a file of the run was deleted, replaced or changed since it was opened."""
        for file in self._files:
            file.check()
        if self.header is not None:
            for path in (self.outputs.header, self.outputs.inputs):
                if not path.exists():
                    raise Conflict(f"{path} was deleted during the run, which cannot be resumed without it")

    def close(self) -> None:
        try:
            self.sync()
        finally:
            for file in reversed(self._files):  # the lock goes last
                file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _file_of(self, record: JSON) -> RecordFile:
        return self._files[is_failure(record)]

    def _known(self, record: JSON) -> int:
        assert self.header is not None
        if record.get(RUN_ID) != self.header.run:
            raise Conflict(
                f"{self.outputs.rollouts}: rollout {_name(record)} in it, or among its failures, "
                f"is of run {record.get(RUN_ID)!r}, not of {self.header.run!r}"
            )
        return rollout_key(record)


def _name(record: JSON) -> str:
    return f"{record.get('_ng_task_index')}-{record.get('_ng_rollout_index')}"
