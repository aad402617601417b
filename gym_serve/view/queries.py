"""The table of rollouts, the table of tasks, and facets, over several runs.

Every run has its own index. A page of one run is a query; of several, each gives its first rows, which are
merged.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from typing import Any, TypedDict, cast

from gym_serve.view.expression import BadExpression, check, unknown
from gym_serve.view.runs import Reading, Run

MOST_ROWS = 1000
"""The most rows of a page."""
MOST_FACETS = 500
"""The most values of a facet."""
_SHOWN_ATTEMPTS = 64
_FAR = 20_000  # rows
_TASK_SORTS = ("task", "attempts", "solved", "mean_reward", "spread", "longest", "rate")
_ROW = (
    *("n", "task", "attempt", "agent", "environment", "reward", "failure", "turns", "tools"),
    *("input_tokens", "output_tokens", "seconds", "version", "last_version", "behind"),
)


class RolloutRow(TypedDict):
    """A rollout as a row of the table."""

    run: str
    """Id of its run; `View.runs` has their names."""
    n: int
    """Its number in the run."""
    id: str
    """``_ng_rollout_id``."""
    task: str
    attempt: int | None
    """Which of the task's rollouts it is, from 0."""
    agent: str | None
    environment: str | None
    reward: float | None
    """None if it failed or is masked."""
    failure: str | None
    """Why it has no reward: the class of its failure, or ``masked`` by its environment."""
    turns: int | None
    """Model calls of the agent."""
    tools: list[str]
    """Names of the tools that were called."""
    tokens: int | None
    """``input_tokens`` and ``output_tokens`` together, of all model calls of the agent."""
    input_tokens: int | None
    output_tokens: int | None
    seconds: float | None
    version: str | None
    """Version of the weights at its first model call."""
    last_version: str | None
    """Version of the weights at its last model call."""
    behind: int | None
    """How many versions older ``version`` is than the newest one of the rollouts up to this one in the file,
    which are in order of completion; None if versions are no integers."""
    prompt: str
    """The first 200 characters of the last user message of the row."""
    marks: list[str]
    """Tags that people gave it."""
    fields: dict[str, Any]
    """The verifier's own scalars."""


class _Key:
    """A place in a sort; what is missing comes last."""

    __slots__ = ("down", "value")

    def __init__(self, value: Any, down: bool) -> None:
        self.value = (value is None, isinstance(value, str), value)
        self.down = down

    def __lt__(self, other: _Key) -> bool:
        if self.value[0] or other.value[0]:
            return bool(self.value[0] < other.value[0])
        mine, its = self.value[1:], other.value[1:]
        return bool(its < mine if self.down else mine < its)


def read_rollouts(
    runs: Sequence[Run], where: str = "", sort: str | None = None, offset: int = 0, limit: int = 100
) -> dict[str, Any]:
    """A page of the table. Raises BadExpression: the filter or the sort cannot be understood."""
    with reading_all(runs, where, sort=sort) as readings:
        total = sum(reading.count(where) for reading in readings)
        rows = _page(readings, where, sort, offset, limit)
        return {"total": total, "columns": shown_columns(readings), "rows": rows}


@contextmanager
def reading_all(runs: Sequence[Run], *filters: str, sort: str | None = None) -> Iterator[list[Reading]]:
    """The indices of some runs as they are now, for filters and a sort whose names are in one of them. Raises
    BadExpression: a filter or the sort cannot be understood."""
    with ExitStack() as stack:
        readings = [stack.enter_context(run.reading()) for run in runs]
        names = {name for reading in readings for name in reading.own}
        indexed = all(reading.state.get("done") for reading in readings)
        for expression in filters:
            check(expression, sorted(names) if indexed else None)
        name = (sort or "").removeprefix("-")
        if indexed and "." in name and name not in names:
            raise BadExpression(unknown(name, sorted(names)))
        yield readings


def numeric_fields(readings: Iterable[Reading]) -> dict[str, bool]:
    """The verifier's fields, and whether each is a number wherever it is."""
    numeric: dict[str, bool] = {}
    for reading in readings:
        for name in reading.fields:
            numeric[name] = numeric.get(name, True) and f"fields.{name}" in reading.numeric
    return numeric


def shown_columns(readings: Iterable[Reading]) -> list[dict[str, str]]:
    """The verifier's fields as columns of the page's table."""
    fields = numeric_fields(readings)
    return [{"name": name, "type": "number" if number else "text"} for name, number in fields.items()]


def table_row(reading: Reading, n: int) -> dict[str, Any]:
    """One row of the table."""
    return next(iter(_rows(reading, [n])))


def each_rollout(runs: Sequence[Run], where: str = "", sort: str | None = None) -> Iterator[RolloutRow]:
    """All rows that a filter selects, run by run, a thousand at a time. Raises BadExpression: the filter or
    the sort cannot be understood."""
    with reading_all(runs, where, sort=sort) as readings:
        for reading in readings:
            query = f"SELECT n FROM rollouts WHERE {reading.where(where)} ORDER BY {reading.order(sort)[1]}"
            rows = [n for (n,) in reading.sql(query)]
            for at in range(0, len(rows), MOST_ROWS):
                yield from cast(Iterator[RolloutRow], _rows(reading, rows[at : at + MOST_ROWS]))


def _page(
    readings: Sequence[Reading], where: str, sort: str | None, offset: int, limit: int
) -> list[dict[str, Any]]:
    if len(readings) == 1:
        return list(_rows(readings[0], _numbers(readings[0], where, sort, offset, limit)))
    down = bool(sort and sort.startswith("-"))
    streams = []
    for place, reading in enumerate(readings):
        key, order = reading.order(sort)
        query = f"SELECT {key}, n FROM rollouts WHERE {reading.where(where)} ORDER BY {order} LIMIT ?"
        streams.append([(_Key(k, down), place, n) for k, n in reading.sql(query, (offset + limit,))])
    merged = heapq.merge(*streams, key=lambda entry: entry[0]) if sort else (e for s in streams for e in s)
    chosen = [(place, n) for _, place, n in islice(merged, offset, offset + limit)]
    rows = {
        (place, row["n"]): row
        for place, reading in enumerate(readings)
        for row in _rows(reading, [n for at, n in chosen if at == place])
    }
    return [rows[entry] for entry in chosen]


def _numbers(reading: Reading, where: str, sort: str | None, offset: int, limit: int) -> Sequence[int]:
    """The rollouts of a page. Far down a table, its whole order is kept: the next page is there at once."""
    query = f"SELECT n FROM rollouts WHERE {reading.where(where)} ORDER BY {reading.order(sort)[1]}"
    if offset <= _FAR:
        return [n for (n,) in reading.sql(f"{query} LIMIT ? OFFSET ?", (limit, offset))]
    numbers: array[int] = reading.once(
        ("order", where, sort), lambda: array("q", (n for (n,) in reading.sql(query)))
    )
    return numbers[offset : offset + limit]


def _rows(reading: Reading, numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
    own = list(reading.fields.items())
    chosen = ", ".join(f"rollouts.{name}" for name in (*_ROW, *(column for _, column in own)))
    query = (
        f"SELECT {chosen}, details.id, details.prompt FROM rollouts JOIN details USING (n)"
        f" WHERE n IN ({', '.join('?' * len(numbers))})"
    )
    by_number = {values[0]: values for values in reading.sql(query, numbers)}
    for n in numbers:
        values = by_number[n]
        *fields, id_, prompt = values[len(_ROW) :]
        row = dict(zip(_ROW, values, strict=False))
        inputs, sampled = row.pop("input_tokens"), row.pop("output_tokens")
        yield {
            "run": reading.run.id,
            **row,
            "id": id_,
            "task": str(row["task"]),
            "tools": _names(row["tools"]),
            "version": None if row["version"] is None else str(row["version"]),
            "last_version": None if row["last_version"] is None else str(row["last_version"]),
            "tokens": None if inputs is None and sampled is None else (inputs or 0) + (sampled or 0),
            "input_tokens": inputs,
            "output_tokens": sampled,
            "prompt": prompt,
            "marks": reading.run.annotations.tags(n, id_),
            "fields": {
                name: value for (name, _), value in zip(own, fields, strict=True) if value is not None
            },
        }


def read_tasks(
    runs: Sequence[Run], where: str = "", sort: str | None = None, offset: int = 0, limit: int = 100
) -> dict[str, Any]:
    """A page of the table of tasks: the attempts at a task stand beside one another.

    Rates and means are of the attempts with a score.

    Raises:
        BadExpression: the filter or the sort cannot be understood.
    """
    name = (sort or "task").removeprefix("-")
    if name not in _TASK_SORTS:
        raise BadExpression(f"tasks are sorted by {', '.join(_TASK_SORTS)}, not {name[:40]!r}")
    with reading_all(runs, where) as readings:
        tasks = _tasks(readings, where)
        down = bool(sort and sort.startswith("-"))
        names = _in_order(tasks, _TASK_SORTS.index(name), down)
        rows = [_task_row(readings, where, tasks[task]) for task in names[offset : offset + limit]]
    return {"total": len(names), "rows": rows}


_Task = tuple[int | str, int, int, float | None, float | None, float | None, float, int]


def _tasks(readings: Sequence[Reading], where: str) -> dict[int | str, _Task]:
    """Of each task what `_TASK_SORTS` says, in that order, and how many attempts have a score."""
    tasks: dict[int | str, list[Any]] = {}
    for reading in readings:
        query = (
            "SELECT task, count(*), total(reward >= 1), count(reward), total(reward), min(reward),"
            " max(reward), max(ifnull(input_tokens, 0) + ifnull(output_tokens, 0))"
            f" FROM rollouts WHERE {reading.where(where)} GROUP BY task"
        )
        for task, *numbers in reading.once(("tasks", where), partial(reading.sql, query)):
            entry = tasks.get(task)
            if entry is None:
                tasks[task] = numbers
            else:
                entry[:4] = [a + b for a, b in zip(entry[:4], numbers[:4], strict=True)]
                entry[4] = min((v for v in (entry[4], numbers[4]) if v is not None), default=None)
                entry[5] = max((v for v in (entry[5], numbers[5]) if v is not None), default=None)
                entry[6] = max(entry[6], numbers[6])
    return {
        task: (
            task,
            attempts,
            int(solved),
            total / scored if scored else None,
            high - low if scored else None,
            longest,
            solved / scored if scored else 0.0,
            scored,
        )
        for task, (attempts, solved, scored, total, low, high, longest) in tasks.items()
    }


def _in_order(tasks: dict[int | str, _Task], place: int, down: bool) -> list[int | str]:
    """The tasks by one of their figures; those without it come last."""
    with_value: list[Any] = [task for task in tasks.values() if task[place] is not None]
    with_value.sort(key=lambda task: (isinstance(task[place], str), task[place]), reverse=down)
    return [task[0] for task in with_value] + [task[0] for task in tasks.values() if task[place] is None]


def _task_row(readings: Sequence[Reading], where: str, task: _Task) -> dict[str, Any]:
    attempts: list[dict[str, Any]] = []
    prompt = ""
    for reading in readings:
        rows = reading.sql(
            "SELECT n, reward, failure, details.prompt FROM rollouts JOIN details USING (n)"
            f" WHERE task = ? AND {reading.where(where)}"
            " ORDER BY attempt, n LIMIT ?",
            (task[0], _SHOWN_ATTEMPTS),
        )
        for n, reward, failure, text in rows:
            prompt = prompt or text
            attempts.append({"run": reading.run.id, "n": n, "reward": reward, "failure": failure})
    name, count, solved, mean, spread, longest, _, scored = task
    return {
        "task": str(name),
        "attempts": count,
        "scored": scored,
        "solved": solved,
        "mean_reward": mean,
        "spread": spread,
        "longest": longest,
        "prompt": prompt,
        "rollouts": attempts[:_SHOWN_ATTEMPTS],
    }


def _names(tools: str) -> list[str]:
    return tools.strip("\n").split("\n") if tools else []


def read_facets(reading: Reading, where: str) -> tuple[dict[str, dict[str, int]], int]:
    """How many rollouts have each agent, environment, failure, tool and version, the commonest first; and how
    many changed their version midway."""
    rows = reading.sql(
        "SELECT agent, environment, failure, version, last_version, tools, count FROM"
        f" (SELECT kind, count(*) AS count FROM rollouts WHERE {where} GROUP BY kind)"
        " JOIN kinds ON kinds.number = kind"
    )
    facets: dict[str, Counter[str]] = {
        name: Counter() for name in ("agent", "environment", "failure", "version", "last_version", "tool")
    }
    straddling = 0
    for *values, tools, count in rows:
        straddling += count if values[3] != values[4] else 0
        for name, value in zip(facets, values, strict=False):
            if value is not None:
                facets[name][str(value)] += count
        for tool in _names(tools):
            facets["tool"][tool] += count
    return {name: dict(counts.most_common(MOST_FACETS)) for name, counts in facets.items()}, straddling
