"""Reward profile: how a policy fares on each task of a data set, and how much was collected.

Joins the materialized inputs of a collection (one row for each rollout asked for) with the
rollouts that it gave, by task and rollout index.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from gym_serve.metrics.describe import describe
from gym_serve.metrics.records import (
    ROLLOUT_INDEX,
    TASK_INDEX,
    Group,
    RolloutRecord,
    failure_class,
    read_record,
    read_stamp,
)
from gym_serve.metrics.report import field_columns, group_metrics
from gym_serve.metrics.spec import STATISTICS_ONLY
from gym_serve.types.errors import InvalidRequest
from gym_serve.types.rows import agent_name

__all__ = ["completion_summary", "reward_profile"]

_Key = tuple[int, int]


def reward_profile(
    rows: Iterable[Mapping[str, Any]],
    results: Iterable[Mapping[str, Any]],
    *,
    allow_partial: bool = False,
) -> dict[str, Any]:
    """Statistics of each task (with its row as ``sample``) and of each agent, and the completion.

    Args:
        rows: materialized inputs: rows with task and rollout index, and ``agent_ref``.
        results: rollouts; failed ones count as missing.
        allow_partial: profile what there is where results are missing.

    Returns:
        ``group_level_metrics``, ``agent_level_metrics`` and ``completion``.

    Raises:
        InvalidRequest: two rows or two results have the same indices, a result has no row, or
            a row has no result and ``allow_partial`` is false.
    """
    row_of, result_of = _by_key(rows, "row"), _by_key(results, "result")
    if extra := sorted(result_of.keys() - row_of.keys()):
        raise InvalidRequest(f"{len(extra)} results have no materialized row: {_listed(extra)}")
    if not allow_partial and (missing := sorted(row_of.keys() - result_of.keys())):
        raise InvalidRequest(
            f"{len(missing)} rows have no result: {_listed(missing)}; "
            "allow partial rollouts to profile the others"
        )
    expected = Counter(task for task, _ in row_of)
    groups: dict[int, Group] = {}
    agents: defaultdict[str, list[RolloutRecord]] = defaultdict(list)
    for task, index in sorted(result_of):
        row = row_of[task, index]
        record = read_record(result_of[task, index], index, STATISTICS_ONLY)
        sample = {key: value for key, value in row.items() if key not in (TASK_INDEX, ROLLOUT_INDEX)}
        groups.setdefault(task, Group(task, [], expected[task], sample)).rollouts.append(record)
        agents[agent_name(row) or "agent"].append(record)
    return {
        "group_level_metrics": [group_metrics(group) for group in groups.values()],
        "agent_level_metrics": [
            {**describe(field_columns(rollouts), len(rollouts)), "agent_ref": {"name": name}}
            for name, rollouts in sorted(agents.items())
        ],
        "completion": _completion(row_of.keys(), result_of.keys()),
    }


def completion_summary(
    rows: Iterable[Mapping[str, Any]], results: Iterable[Mapping[str, Any]]
) -> dict[str, int | float]:
    """How many of the rollouts that ``rows`` ask for are among ``results``, and of how many tasks.

    Raises:
        InvalidRequest: two rows or two results have the same indices.
    """
    return _completion(_by_key(rows, "row").keys(), _by_key(results, "result").keys())


def _completion(rows: Iterable[_Key], results: Iterable[_Key]) -> dict[str, int | float]:
    asked, got = set(rows), set(results)
    done = asked & got
    asked_of, done_of = Counter(task for task, _ in asked), Counter(task for task, _ in done)
    complete = sum(1 for task, count in asked_of.items() if done_of[task] == count)
    return {
        "expected_rollout_rows": len(asked),
        "completed_rollout_rows": len(done),
        "missing_rollout_rows": len(asked) - len(done),
        "extra_rollout_rows": len(got - asked),
        "reward_profile_completion_pct": 100.0 * len(done) / len(asked) if asked else 100.0,
        "total_input_rows": len(asked_of),
        "complete_input_rows": complete,
        "partial_input_rows": len(done_of) - complete,
        "missing_input_rows": len(asked_of) - len(done_of),
    }


def _by_key(lines: Iterable[Mapping[str, Any]], what: str) -> dict[_Key, Mapping[str, Any]]:
    indexed: dict[_Key, Mapping[str, Any]] = {}
    for line in lines:
        if what == "result" and failure_class(line) is not None:
            continue
        key = read_stamp(line, TASK_INDEX), read_stamp(line, ROLLOUT_INDEX)
        if key in indexed:
            raise InvalidRequest(f"there are two {what}s for rollout {key[1]} of task {key[0]}")
        indexed[key] = line
    return indexed


def _listed(keys: list[_Key]) -> str:
    shown = ", ".join(f"{task}:{index}" for task, index in keys[:10])
    return shown + (", ..." if len(keys) > 10 else "")
