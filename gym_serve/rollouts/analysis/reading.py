"""Reading stored rollouts, the failures beside them, and the rows of their tasks
(``out_materialized_inputs.jsonl``).

A line that is not a rollout is a problem to report, not the end. Two runs number their tasks alike only if
they read the same rows in the same order, so a task may be identified by a field of the rows instead
(`TaskKey`).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from gym_serve.metrics.records import TASK_INDEX
from gym_serve.rollouts.journal import Header, Outputs
from gym_serve.rollouts.rows import (
    METADATA_KEYS,
    Problems,
    ignore_problem,
    raise_problem,
    read_rows,
    rollout_key,
    task_index,
)
from gym_serve.rollouts.tables import IntTable, digest
from gym_serve.types.endings import failure_class
from gym_serve.types.errors import GymError, InvalidRequest
from gym_serve.types.requests import JSON
from gym_serve.types.rows import agent_name, check_reward


class TaskKey:
    """Identifies tasks: by the task index of their run, or by a field of the rows.

    One object numbers the tasks of all files that are read with it. Rollouts without any metadata, as NeMo
    Gym records them for its data sets, are told apart by what the model was asked, and counted as they come.
    """

    def __init__(self, field: str = TASK_INDEX) -> None:
        self.field = field
        self._numbers = IntTable()
        self._seen = IntTable()

    def apply(self, rollout: JSON) -> JSON:
        """The rollout with the metadata of the task that it belongs to by this key; `InvalidRequest`
        without."""
        is_bare = "response" in rollout and rollout.keys().isdisjoint(METADATA_KEYS)
        index = 0 if is_bare else rollout_key(rollout)
        if self.field == TASK_INDEX and not is_bare:
            return rollout
        value = rollout.get("responses_create_params" if self.field == TASK_INDEX else self.field)
        if value is None:
            raise InvalidRequest(f"`{self.field}`, the field that identifies the task, is missing")
        number = self._number(digest(value))
        if is_bare:
            index = self._seen[number] = (self._seen.get(number) or 0) + 1
        # The row's own index keeps the rollouts apart of two rows with the same key.
        return {**rollout, TASK_INDEX: number, "_ng_rollout_index": index}

    def _number(self, key: int) -> int:
        number = self._numbers.get(key)
        if number is None:
            self._numbers[key] = number = len(self._numbers)
        return number


def read_rollouts(paths: Iterable[Path], key: TaskKey, problems: Problems) -> Iterator[JSON]:
    """The rollouts of runs, scored and failed, one at a time. Raises `InvalidRequest`: a file cannot be
    opened."""
    for path in paths:
        failures = Outputs.of(path).failures
        for file in [path, *([failures] if failures.exists() else [])]:
            for where, line, problem in read_rows(file):
                try:
                    if line is None:
                        raise InvalidRequest(str(problem))
                    yield _checked(key.apply(line))
                except GymError as error:
                    problems.add(f"{where}: {error.message}")


class Asked(NamedTuple):
    """What runs asked for, read from the rows beside their files; nothing of a run without those."""

    rollouts: Counter[str]  # how many rollouts, by agent
    rows: int  # how many rows of the data set they are of
    tasks: int  # how many tasks these are

    @property
    def notes(self) -> list[str]:
        if self.rows <= self.tasks:
            return []
        return [
            f"{self.rows:,} rows are {self.tasks:,} tasks: rows that are equal, or have the same key, are "
            "attempts at one task, and the mean reward is over tasks"
        ]


def read_asked(paths: Iterable[Path], key: TaskKey | None = None) -> Asked:
    """What runs asked for."""
    key = key or TaskKey()
    rollouts: Counter[str] = Counter()
    rows, tasks = 0.0, IntTable()
    for outputs in map(Outputs.of, paths):
        if not outputs.inputs.exists():
            continue
        header = Header.read(outputs.header)
        repeats = header.expansion.get("repeats") if header is not None else None
        for _, row, _ in read_rows(outputs.inputs):
            agent = agent_of(row or {})
            rollouts[agent] += 1
            of_agent = repeats.get(agent, repeats.get("_default")) if isinstance(repeats, dict) else repeats
            with suppress(InvalidRequest):  # a row that lacks its metadata, or the key
                if row is not None and of_agent:
                    rows += 1 / of_agent
                    tasks[task_index(key.apply(row))] = 1
    return Asked(rollouts, round(rows), len(tasks))


def agent_of(rollout: JSON) -> str:
    """Name of the agent that made a rollout; ``-`` if it does not say."""
    return agent_name(rollout) or "-"


def _checked(rollout: JSON) -> JSON:
    if failure_class(rollout) is None:
        check_reward(rollout.get("reward"))
    return rollout


def rows_of_tasks(path: Path, tasks: Iterable[int]) -> Iterator[JSON]:
    """One row of each of some tasks, as a data set for another run: without metadata and the run's seeds.

    Raises `InvalidRequest`: the run's inputs are not beside its main file, ``path``.
    """
    outputs = Outputs.of(path)
    if not outputs.inputs.exists():
        raise InvalidRequest(f"{outputs.inputs}, which has the rows of {path.name}, does not exist")
    header = Header.read(outputs.header)
    seeded = header is not None and header.expansion.get("seed") is not None
    for _, materialized in _first_rows(outputs.inputs, set(tasks), raise_problem):
        row = {key: value for key, value in materialized.items() if key not in METADATA_KEYS}
        yield _unseeded(row) if seeded else row


def prompts_of_tasks(path: Path, tasks: Iterable[int]) -> dict[int, str]:
    """The `prompt_text` of each of some tasks, of the run's inputs or, without those, its main file
    ``path``."""
    inputs = Outputs.of(path).inputs
    source = inputs if inputs.exists() else path
    return {task: prompt_text(row) for task, row in _first_rows(source, set(tasks), ignore_problem)}


def prompt_text(row: JSON) -> str:
    """The last user message of a row, in one line; empty if there is none."""
    params = row.get("responses_create_params")
    prompt: Any = params.get("input") if isinstance(params, dict) else None
    if isinstance(prompt, list):
        users = [item for item in prompt if isinstance(item, dict) and item.get("role") == "user"]
        prompt = users[-1].get("content") if users else None
    if isinstance(prompt, list):
        prompt = " ".join(str(part["text"]) for part in prompt if isinstance(part, dict) and "text" in part)
    return " ".join(prompt.split()) if isinstance(prompt, str) else ""


def _first_rows(inputs: Path, left: set[int], problem: Callable[[str], None]) -> Iterator[tuple[int, JSON]]:
    for where, row, reason in read_rows(inputs):
        if not left:
            return
        try:
            if row is None:
                raise InvalidRequest(str(reason))
            task = task_index(row)
        except InvalidRequest as error:
            problem(f"{where}: {error.message}")
            continue
        if task in left:
            left.remove(task)
            yield task, row


def _unseeded(row: JSON) -> JSON:
    """The row without a rollout's sampling seed, with which all rollouts of the next run would be equal."""
    row = copy.deepcopy(row)
    metadata = row["responses_create_params"].get("metadata")
    if isinstance(row.get("extra_body"), dict):
        row["extra_body"].pop("seed", None)
    if isinstance(metadata, dict) and isinstance(metadata.get("extra_body"), str):
        with suppress(ValueError, AttributeError):
            extra = orjson.loads(metadata["extra_body"])
            extra.pop("seed", None)
            metadata["extra_body"] = orjson.dumps(extra).decode()
    return row
