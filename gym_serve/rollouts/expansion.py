"""From a row to its rollouts: agent, prompt, overrides, repeats, seeds, and the stamps that name each.

Stamps (docs/formats.md, Stamps): ``_ng_task_index`` is the caller's, else assigned in order of first
appearance, so that identical rows share one; ``_ng_rollout_index`` counts the rollouts of a task;
``_ng_rollout_id`` is ``"{task}-{rollout}"``, and is the episode's affinity key.

Expansion is deterministic: the same rows with the same `Expansion` give the same rollouts in the same
order, which is what resuming relies on. Tasks are numbered before a shard is taken, so
shards of one data set never use an index twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson

from gym_serve.rollouts.digests import digest
from gym_serve.rollouts.int_table import IntTable
from gym_serve.rollouts.prompts import PromptTemplate, params_of
from gym_serve.rollouts.rows import Rows, located
from gym_serve.rollouts.stamps import MAX_ROLLOUT_INDEX, rollout_index, task_index
from gym_serve.types.errors import GymError, InvalidRequest
from gym_serve.types.requests import JSON
from gym_serve.types.rows import agent_name, with_prompt

__all__ = ["Expansion", "expand"]

_AGENT_TYPE = "responses_api_agents"


@dataclass(frozen=True)
class Expansion:
    """How rows become rollouts.

    Attributes:
        agent: the agent of all rows; else each row's ``agent_ref.name``.
        default_agent: the agent of the rows that name none.
        repeats: rollouts per row, or that by agent, ``{"agent": 8, "_default": 1}``.
        seed: sampling seed of a row's first rollout, the next one's is one more; None for none.
            It travels in ``metadata.extra_body``.
        limit: take this many rows only.
        shard: ``(i, n)``: the i-th of n parts, 1 <= i <= n; identical rows are in one part.
        params: replace keys of every row's ``responses_create_params``.
        prompt: makes the ``input`` of rows, which then must not have one.

    Raises:
        InvalidRequest: a value out of its range.
    """

    agent: str | None = None
    default_agent: str | None = None
    repeats: int | Mapping[str, int] = 1
    seed: int | None = None
    limit: int | None = None
    shard: tuple[int, int] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    prompt: PromptTemplate | None = None

    def __post_init__(self) -> None:
        counts = {"repeats": self.repeats} if isinstance(self.repeats, int) else self.repeats
        if wrong := [name for name, count in counts.items() if not 1 <= count <= MAX_ROLLOUT_INDEX]:
            raise InvalidRequest(f"repeats: {', '.join(wrong)} must be at least 1")
        if self.limit is not None and self.limit < 1:
            raise InvalidRequest(f"`limit` must be at least 1, got {self.limit}")
        if self.shard is not None and not 1 <= self.shard[0] <= self.shard[1]:
            raise InvalidRequest(f"`shard` must be 1/n to n/n, got {self.shard[0]}/{self.shard[1]}")

    def agent_of(self, row: Mapping[str, Any]) -> str | None:
        """Name of the agent of a row; None if nothing says which."""
        return self.agent or agent_name(row) or self.default_agent or None

    def described(self) -> JSON:
        """The settings as JSON, to tell whether two runs had the same."""
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
    """The rollouts of each row that can be used, as stamped rows; the given rows are not changed.

    Args:
        rows: rows, or the path of a JSONL file.
        expansion: what to make of them.
        problem: told of each row that is left out, with its place; it may raise.
        check: raises a `GymError` for a row, complete but for its stamps, that cannot be run.
        note: told of what is harmless but worth knowing.
        unique: leave out a row whose own stamps name a rollout that another one has named.
    """
    numbering = _Numbering(unique=unique)
    unused = set() if isinstance(expansion.repeats, int) else set(expansion.repeats) - {"_default"}
    taken = 0
    for where, row, reason in located(rows, note):
        if row is None:
            problem(f"{where}: {reason}")
            continue
        try:
            prepared = _prepared(row, expansion)
            check(prepared)
            repeats = _repeats(prepared, expansion)
            unused.discard(expansion.agent_of(prepared))
            task = numbering.task(row)
            indices = numbering.rollouts(task, row, repeats)
            given = row.get("_ng_rollout_id") if repeats == 1 else None
            stamped = [_stamped(prepared, task, index, given, expansion.seed) for index in indices]
        except GymError as error:
            problem(f"{where}: {error.message}")
            continue
        taken += 1
        if expansion.shard is None or task % expansion.shard[1] == expansion.shard[0] - 1:
            yield stamped
        if taken == expansion.limit:
            break
    if unused:
        note(f"repeats: no row has the agent {', '.join(sorted(unused))}")


class _Numbering:
    """Gives out task and rollout indices, in a few bytes a row."""

    def __init__(self, *, unique: bool) -> None:
        self._tasks = IntTable()  # of rows without an index of their own, by digest
        self._next = IntTable()  # the next free rollout index, by task
        self._given_out = IntTable() if unique else None

    def task(self, row: JSON) -> int:
        if row.get("_ng_task_index") is not None:
            return task_index(row)
        try:
            content = digest(row)
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
            raise InvalidRequest(f"task {task} has more than {MAX_ROLLOUT_INDEX} rollouts")
        if self._given_out is not None:
            for index in range(start, end):
                key = task << 23 | index
                if self._given_out.get(key):
                    raise InvalidRequest(f"rollout {index} of task {task} was named before")
                self._given_out[key] = 1
        self._next[task] = max(end, self._next.get(task) or 0)
        return range(start, end)


def _prepared(row: JSON, expansion: Expansion) -> JSON:
    """The row with its agent, prompt and overrides."""
    prepared = dict(row)
    agent = expansion.agent_of(row)
    if agent is not None:
        ref = row.get("agent_ref")
        prepared["agent_ref"] = {"type": _AGENT_TYPE, **(ref if isinstance(ref, dict) else {}), "name": agent}
    prepared = with_prompt(prepared) if expansion.prompt is None else expansion.prompt.apply(prepared)
    if not expansion.params:
        return prepared
    prepared["responses_create_params"] = {**params_of(prepared), **expansion.params}
    return prepared


def _repeats(row: JSON, expansion: Expansion) -> int:
    if isinstance(expansion.repeats, int):
        return expansion.repeats
    agent = expansion.agent_of(row)
    repeats = expansion.repeats.get(agent or "", expansion.repeats.get("_default"))
    if repeats is None:
        raise InvalidRequest(f"repeats: neither {agent!r} nor '_default' is given")
    return repeats


def _stamped(row: JSON, task: int, rollout: int, given: Any, seed: int | None) -> JSON:
    stamped = {
        **row,
        "_ng_task_index": task,
        "_ng_rollout_index": rollout,
        "_ng_rollout_id": given or f"{task}-{rollout}",
    }
    return stamped if seed is None else _seeded(stamped, seed + rollout)


def _seeded(row: JSON, seed: int) -> JSON:
    if isinstance(extra := row.get("extra_body"), dict) and "seed" in extra:
        return {**row, "extra_body": {**extra, "seed": seed}}  # it would win over the metadata
    params = row.get("responses_create_params")
    if not isinstance(params, dict):
        raise InvalidRequest("`responses_create_params` must be a JSON object")
    metadata = params.get("metadata") or {}
    try:
        stored = orjson.loads(metadata.get("extra_body") or "{}")
        merged = orjson.dumps({**stored, "seed": seed}).decode()
    except (AttributeError, TypeError, orjson.JSONDecodeError):
        raise InvalidRequest("metadata.extra_body must be a JSON object as a string") from None
    return {**row, "responses_create_params": {**params, "metadata": {**metadata, "extra_body": merged}}}
