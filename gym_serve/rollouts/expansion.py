"""From rows to rollouts: prompt templates, agent, overrides, repeats, seeds, and the metadata that identify
each (docs/formats.md, Metadata); a row that has them is *materialized*.

Expansion is deterministic: the same rows with the same `Expansion` give the same rollouts in the same order;
resuming relies on it. Equal rows share a task. Tasks are numbered before a shard is taken.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import orjson
import yaml
from typing_extensions import Self

from gym_serve.rollouts.files import (
    CORRUPT,
    RecordFile,
    fingerprint,
    open_decompressed,
    readable_line,
    run_in_threads,
)
from gym_serve.rollouts.rows import (
    MAX_ROLLOUT_INDEX,
    LocatedRow,
    Problems,
    Rows,
    ignore_problem,
    raise_problem,
    read_rows,
    rollout_index,
    task_index,
)
from gym_serve.rollouts.tables import IntTable, digest
from gym_serve.types.errors import Conflict, GymError, InvalidRequest
from gym_serve.types.exact import exact_json
from gym_serve.types.model_endpoint import MODEL_FIELD, endpoint_of, public_row
from gym_serve.types.requests import JSON
from gym_serve.types.rows import agent_name, check_row, with_prompt

_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_FIELD = re.compile(r"[^\W\d][\w-]*")


@dataclass(frozen=True)
class PromptTemplate:
    """Makes the ``input`` of a row: a user's message, after a system message if there is one.

    It substitutes the names of the row's top-level fields and nothing else: rows are data, so no attribute is
    looked up and no format specification is run. Literal braces are doubled.

    Raises:
        InvalidRequest: a placeholder that is not a plain name, or a single brace; names all of them.
    """

    user: str
    system: str | None = None

    def __post_init__(self) -> None:
        problems = [
            f"{key}: {part.group()!r} at {part.start()} is not a {{field}}; double a literal brace"
            for key, template in self._templates()
            for part in _PART.finditer(template)
            if part.group() not in ("{{", "}}") and not _FIELD.fullmatch(part.group(1) or "")
        ]
        if problems:
            raise InvalidRequest(f"prompt template: {'; '.join(problems)}")

    @classmethod
    def of(cls, source: str | Path | Mapping[str, Any] | PromptTemplate) -> PromptTemplate:
        """A template from the path of a YAML file, or from what such a file holds.

        Raises:
            InvalidRequest: the file cannot be read, or does not hold a template.
        """
        if isinstance(source, PromptTemplate):
            return source
        where, content = "prompt template", source
        if isinstance(source, str | Path):
            where = str(source)
            try:
                content = yaml.safe_load(Path(source).read_text("utf-8"))
            except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
                raise InvalidRequest(f"cannot read {where}: {error}") from error
        if not isinstance(content, Mapping) or not isinstance(content.get("user"), str):
            raise InvalidRequest(f"{where} must be a mapping with 'user' and optionally 'system'")
        if unknown := ", ".join(sorted(map(str, content.keys() - {"user", "system"}))):
            raise InvalidRequest(f"{where}: unknown keys {unknown}; a template has 'user' and 'system'")
        if not isinstance(content.get("system"), str | None):
            raise InvalidRequest(f"{where}: 'system' must be a string")
        return cls(content["user"], content.get("system"))

    @property
    def fields(self) -> list[str]:
        names = (part.group(1) for _, template in self._templates() for part in _PART.finditer(template))
        return list(dict.fromkeys(name for name in names if name))

    def apply(self, row: JSON) -> JSON:
        """The row with the messages as its ``input``, which it must not have. Raises `InvalidRequest`."""
        params = params_of(row)
        if params.get("input"):
            problem = "`responses_create_params.input` must be left out: the prompt template makes it"
            raise InvalidRequest(problem)
        return {**row, "responses_create_params": {**params, "input": self.messages(row)}}

    def messages(self, row: JSON) -> list[JSON]:
        """The messages for a row. Raises `InvalidRequest`, which names all fields that the row lacks."""
        if missing := [name for name in self.fields if name not in row]:
            raise InvalidRequest(
                f"the prompt template needs the keys {', '.join(missing)}; the row has {', '.join(row)}"
            )

        def substitute(part: re.Match[str]) -> str:
            name = part.group(1)
            return part.group()[0] if name is None else str(row[name])

        return [
            {"role": role, "content": _PART.sub(substitute, template)} for role, template in self._templates()
        ]

    def _templates(self) -> list[tuple[str, str]]:
        user = [("user", self.user)]
        return user if self.system is None else [("system", self.system), *user]


def params_of(row: JSON) -> JSON:
    """The ``responses_create_params`` of a row; empty where it has none. Raises `InvalidRequest`."""
    params = row.get("responses_create_params") or {}
    if not isinstance(params, dict):
        raise InvalidRequest("`responses_create_params` must be a JSON object")
    return params


@dataclass(frozen=True)
class Expansion:
    """How rows become rollouts.

    Attributes:
        repeats: rollouts per row; one number, or a number per agent: ``{"agent": 8, "_default": 1}``.
        seed: sampling seed of a row's first rollout; each further rollout has the next number. It is sent in
            ``metadata.extra_body``. None for no seed.
        shard: ``(i, n)``: the i-th of n parts, 1 <= i <= n; identical rows are in one part.
        params: keys that override those of every row's ``responses_create_params``.

    Raises:
        InvalidRequest: a value is out of its range.
    """

    agent: str | None = None  # the agent of all rows; None for each row's ``agent_ref.name``
    default_agent: str | None = None
    repeats: int | Mapping[str, int] = 1
    seed: int | None = None
    limit: int | None = None
    shard: tuple[int, int] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    prompt: PromptTemplate | None = None  # makes the ``input`` of the rows, which must not have one

    def __post_init__(self) -> None:
        counts = [self.repeats] if isinstance(self.repeats, int) else self.repeats.values()
        if not all(1 <= count <= MAX_ROLLOUT_INDEX for count in counts):
            raise InvalidRequest(f"`repeats` must be 1 to {MAX_ROLLOUT_INDEX:,}, got {self.repeats!r}")
        if self.limit is not None and self.limit < 1:
            raise InvalidRequest(f"`limit` must be at least 1, got {self.limit}")
        if self.shard is not None and not 1 <= self.shard[0] <= self.shard[1]:
            raise InvalidRequest(f"`shard` must be 1/n to n/n, got {self.shard[0]}/{self.shard[1]}")

    def agent_of(self, row: Mapping[str, Any]) -> str | None:
        return self.agent or agent_name(row) or self.default_agent or None

    def to_json(self) -> JSON:
        return asdict(self)


def expand(
    rows: Rows,
    expansion: Expansion,
    *,
    problem: Callable[[str], None],
    check: Callable[[JSON], None] = lambda row: None,
    note: Callable[[str], None] = lambda text: None,
    unique: bool = False,
) -> Iterator[list[JSON]]:
    """The materialized rows of each usable row; the given rows are not changed.

    Args:
        problem: called with each row that is skipped and why; it may raise.
        check: raises a `GymError` for a row that cannot be run; the row is complete except for its metadata.
    """
    numbering = _Numbering(unique=unique)
    unused = set() if isinstance(expansion.repeats, int) else set(expansion.repeats) - {"_default"}
    taken = 0
    for where, row, reason in read_rows(rows, note):
        if row is None:
            problem(f"{where}: {reason}")
            continue
        try:
            prepared = _prepared(row, expansion)
            check(prepared)
            repeats = _repeats(prepared, expansion)
            unused.discard(expansion.agent_of(prepared))
            task = numbering.task(row)
            own_id = row.get("_ng_rollout_id") if repeats == 1 else None
            indices = numbering.rollouts(task, row, repeats)
            materialized = [_materialized(prepared, task, i, own_id, expansion.seed) for i in indices]
        except GymError as error:
            problem(f"{where}: {error.message}")
            continue
        taken += 1
        if expansion.shard is None or task % expansion.shard[1] == expansion.shard[0] - 1:
            yield materialized
        if taken == expansion.limit:
            break
    if unused:
        note(f"`repeats`: no row has the agent {', '.join(sorted(unused))}")


class _Numbering:
    """Assigns task and rollout indices, in a few bytes a row."""

    def __init__(self, *, unique: bool) -> None:
        self._tasks = IntTable()  # of rows without an index of their own, by digest
        self._next = IntTable()  # the next free rollout index, by task
        self._assigned = IntTable() if unique else None

    def task(self, row: JSON) -> int:
        if row.get("_ng_task_index") is not None:
            return task_index(row)
        try:
            content = digest(_without_endpoint(row))
        except TypeError as error:
            raise InvalidRequest(f"not JSON: {error}") from None
        task = self._tasks.get(content)
        if task is None:
            self._tasks[content] = task = len(self._tasks)
        return task

    def rollouts(self, task: int, row: JSON, repeats: int) -> range:
        start = self._next.get(task) or 0
        if row.get("_ng_rollout_index") is not None and repeats == 1:
            start = rollout_index(row)
        end = start + repeats
        if end > MAX_ROLLOUT_INDEX:
            raise InvalidRequest(f"task {task} must have at most {MAX_ROLLOUT_INDEX:,} rollouts, has {end:,}")
        if self._assigned is not None:
            for index in range(start, end):
                key = task << 23 | index
                if self._assigned.get(key):
                    raise InvalidRequest(f"rollout {index} of task {task} is there twice")
                self._assigned[key] = 1
        self._next[task] = max(end, self._next.get(task) or 0)
        return range(start, end)


def _without_endpoint(row: JSON) -> JSON:
    """A row without the endpoint of its model, which is no part of the task."""
    return row if MODEL_FIELD not in row else {key: row[key] for key in row if key != MODEL_FIELD}


def _storable(row: JSON) -> JSON:
    endpoint = endpoint_of(row)
    if endpoint is not None and (endpoint.api_key or endpoint.headers):  # they are written to no file
        raise ValueError(
            f"`{MODEL_FIELD}` must have no `api_key` and no `headers` where rollouts are collected into "
            "files; give them as `endpoint=`"
        )
    return public_row(row)


def _prepared(row: JSON, expansion: Expansion) -> JSON:
    prepared = dict(row)
    if (endpoint := endpoint_of(row)) is not None:
        prepared[MODEL_FIELD] = endpoint  # an object that no writer can store by mistake
    if (agent := expansion.agent_of(row)) is not None:
        ref = row.get("agent_ref")
        own = ref if isinstance(ref, dict) else {}
        prepared["agent_ref"] = {"type": "responses_api_agents", **own, "name": agent}
    prepared = with_prompt(prepared) if expansion.prompt is None else expansion.prompt.apply(prepared)
    if expansion.params:
        prepared["responses_create_params"] = {**params_of(prepared), **expansion.params}
    return prepared


def _repeats(row: JSON, expansion: Expansion) -> int:
    if isinstance(expansion.repeats, int):
        return expansion.repeats
    agent = expansion.agent_of(row)
    repeats = expansion.repeats.get(agent or "", expansion.repeats.get("_default"))
    if repeats is None:
        raise InvalidRequest(f"`repeats` must have {agent!r} or '_default'")
    return repeats


def _materialized(row: JSON, task: int, rollout: int, own_id: Any, seed: int | None) -> JSON:
    ids = {
        "_ng_task_index": task,
        "_ng_rollout_index": rollout,
        "_ng_rollout_id": own_id or f"{task}-{rollout}",
    }
    return {**row, **ids} if seed is None else _seeded({**row, **ids}, seed + rollout)


def _seeded(row: JSON, seed: int) -> JSON:
    if isinstance(extra := row.get("extra_body"), dict) and "seed" in extra:
        return {**row, "extra_body": {**extra, "seed": seed}}  # it takes precedence over the metadata
    params = row.get("responses_create_params")
    if not isinstance(params, dict):
        raise InvalidRequest("`responses_create_params` must be a JSON object")
    metadata = params.get("metadata") or {}
    try:
        stored = orjson.loads(metadata.get("extra_body") or "{}")
        merged = orjson.dumps({**stored, "seed": seed}).decode()
    except (AttributeError, TypeError, orjson.JSONDecodeError):
        raise InvalidRequest("`metadata.extra_body` must be a JSON object as a string") from None
    return {**row, "responses_create_params": {**params, "metadata": {**metadata, "extra_body": merged}}}


FIRST = 1000  # rows of a run that are checked before anything starts


class Inputs:
    """The rows of a run: checked, and expanded into ``out_materialized_inputs.jsonl``, from which they run.

    The first `FIRST` are read before anything starts, so that a file of bad rows is refused, and the others
    while rollouts run. Rows that can be iterated only once need no special case.
    """

    def __init__(self, rows: Rows, expansion: Expansion, check: Callable[[JSON], None]) -> None:
        self.rows = rows
        self.problems = Problems()
        self.rollouts = 0  # how many have been read
        self.ended = False  # whether all rows have been read
        self._expansion = expansion
        self._check = check
        self._drawn = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self._file: RecordFile | None = None
        self._stored: Iterator[JSON] = iter(())  # what an earlier process of the run has read
        self._recalled = True
        self._steps = self._read()
        self._state = self._file_state()

    @property
    def source(self) -> str:
        return str(self.rows) if isinstance(self.rows, str | Path) else "rows of the caller"

    def store(self, path: Path, *, anew: bool) -> None:
        """Write what is read into a file. If it is not begun anew, it must hold the same so far."""
        self._file = RecordFile(path)
        if anew:
            self._file.clear()
        else:
            self._stored, self._recalled = self._file.recover(), False

    async def read(self, usable: int | None = None) -> None:
        """Read rows in threads, until so many more can be used and all that are stored have been compared;
        None for all rows. Raises `Conflict`: they are not those that are stored."""

        def steps() -> Generator[None, None, None]:
            for number, _ in enumerate(self._steps, 1):
                yield
                if usable is not None and number >= usable and self._recalled:
                    return

        await run_in_threads(steps())

    def refuse(self, *, skip_invalid: bool) -> None:
        """Raise `InvalidRequest` where rows that were read cannot be used, or there are none at all."""
        if not skip_invalid:
            self.problems.raise_if_any(f"{self.problems.count} rows cannot be used, so nothing was started")
        if self.ended and not self.rollouts and self._expansion.shard is None:
            self.problems.raise_if_any(f"{self.source}: no row can be used")
            self.problems.add(f"{self.source}: empty")
            self.problems.raise_if_any("there are no rows, so nothing was started")

    def _read(self) -> Generator[None, None, None]:
        rows = self.rows if isinstance(self.rows, str | Path) else self._digested(self.rows)
        groups = expand(
            rows,
            self._expansion,
            problem=self.problems.add,
            check=self.check_row,
            note=self.problems.notes.append,
            unique=True,
        )
        for group in groups:
            try:
                lines = [readable_line(_storable(row)) for row in group]
            except ValueError as error:
                self.problems.add(f"task {group[0]['_ng_task_index']}: {error}")
                continue
            for row, line in zip(group, lines, strict=True):
                self._keep(row["_ng_rollout_id"], line)
            self.rollouts += len(group)
            yield
        if next(self._stored, None) is not None:
            raise Conflict(f"{self.source} has fewer rows than when the run began; {_AS_BEFORE}")
        self._recalled = self.ended = True

    def _keep(self, rollout: str, line: bytes) -> None:
        if self._file is None:
            return
        if not self._recalled:
            if (stored := next(self._stored, None)) is not None:
                if readable_line(stored) != line:
                    problem = f"rollout {rollout} is another one than when the run began"
                    raise Conflict(f"{self.source}: {problem}; {_AS_BEFORE}")
                return
            self._recalled = True
        self._file.append_line(line)

    def sync(self) -> None:
        if self._file is not None:
            self._file.sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._steps.close()
        if self._file is not None:
            self._file.close()

    def fingerprint(self) -> JSON:
        """Identifies the rows: those of a file as it is stored, other rows as they were read, to the end.
        Raises `Conflict`: the file has changed since it was first read."""
        if not isinstance(self.rows, str | Path):
            if not self.ended:
                for _ in self._digested(self.rows):
                    pass
            return {"rows": self._drawn, "digest": self._digest.hexdigest()}
        present = fingerprint(Path(self.rows))
        if self._file_state() != self._state:
            raise Conflict(f"{self.source} was changed while its rows were read; {_AS_BEFORE}")
        return present

    def _file_state(self) -> tuple[int, int] | None:
        """What changes when a file of rows is written; None if there is none."""
        try:
            stat = os.stat(self.rows) if isinstance(self.rows, str | Path) else None
        except OSError:
            return None
        return None if stat is None else (stat.st_size, stat.st_mtime_ns)

    def _digested(self, rows: Iterable[Any]) -> Iterator[Any]:
        """The caller's rows; their fingerprint is computed on the way."""
        self._digest, self._drawn = hashlib.blake2b(digest_size=16), 0
        for row in rows:
            content: Any = (row.row or row.problem) if isinstance(row, LocatedRow) else row
            try:
                data = orjson.dumps(_without_endpoint(content))
            except TypeError:
                data = repr(content).encode("utf-8", "replace")
            self._digest.update(data)
            self._drawn += 1
            yield row

    def check_row(self, row: JSON) -> None:
        """Check one row against the row format and the graph. Raises `GymError`: the row cannot be run."""
        check_row(row)
        self._check(row)


RESTORE = "restore the file, or collect into another one"
_AS_BEFORE = "resume with the rows as they were, or write to another file"


def stored_groups(path: Path, grown: Callable[[], int | None] = lambda: None) -> Iterator[list[JSON]]:
    """The rows of a file that `Inputs` wrote, one list for each original row.

    While it grows, ``grown`` tells how many rollouts it has so far, and an empty list says that no more are
    there yet. ``grown`` tells None when it is complete. Raises `Conflict`: the file is damaged.
    """
    while grown() == 0:
        yield []
    rows, read = _stored_rows(path), 0
    while (there := grown()) is not None:
        yield from _groups(islice(rows, there - read))
        read = there
        yield []
    yield from _groups(rows)


def _stored_rows(path: Path) -> Iterator[JSON]:
    number = 0
    try:
        with open_decompressed(path) as file:
            for line in file:
                number += 1
                row = exact_json(line)
                if not isinstance(row, dict):
                    raise InvalidRequest("it must be a JSON object")
                task_index(row), rollout_index(row)
                yield row
    except (*CORRUPT, OSError, ValueError, InvalidRequest) as error:
        raise Conflict(f"{path}:{number} is damaged: {error}; {RESTORE}") from error


def _groups(records: Iterable[JSON]) -> Iterator[list[JSON]]:
    return (list(group) for _, group in groupby(records, key=task_index))


async def checked_groups(
    rows: Rows, expansion: Expansion, check: Callable[[JSON], None], *, skip_invalid: bool
) -> Iterator[list[JSON]]:
    """The materialized rows of each row. A file is checked as a whole before its first row is returned.

    Rows of the caller are read one by one; one that the graph cannot run (``check`` raises a `GymError`)
    becomes a failed rollout. Raises `InvalidRequest`, for a file naming all rows that cannot be used.
    """
    if not isinstance(rows, str | Path):
        return expand(rows, expansion, problem=ignore_problem if skip_invalid else raise_problem)
    inputs = Inputs(rows, expansion, check)
    await inputs.read()
    inputs.refuse(skip_invalid=skip_invalid)
    return expand(rows, expansion, problem=ignore_problem, check=inputs.check_row, unique=True)
