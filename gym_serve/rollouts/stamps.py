"""The stamps that name a rollout, and what they say (docs/formats.md, Stamps)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gym_serve.types.errors import InvalidRequest
from gym_serve.types.requests import JSON

__all__ = [
    "MAX_ROLLOUT_INDEX",
    "MAX_TASK_INDEX",
    "STAMPS",
    "is_failure",
    "key_of",
    "retried",
    "rollout_index",
    "task_index",
]

STAMPS = ("_ng_task_index", "_ng_rollout_index", "_ng_attempt_index", "_ng_rollout_id")

MAX_TASK_INDEX = 2**40 - 1
MAX_ROLLOUT_INDEX = 2**23 - 1


def task_index(row: Mapping[str, Any]) -> int:
    """``_ng_task_index`` of a row.

    Raises:
        InvalidRequest: it is missing, or no integer from 0 to `MAX_TASK_INDEX`.
    """
    return _index(row, "_ng_task_index", MAX_TASK_INDEX)


def rollout_index(row: Mapping[str, Any]) -> int:
    """``_ng_rollout_index`` of a row.

    Raises:
        InvalidRequest: it is missing, or no integer from 0 to `MAX_ROLLOUT_INDEX`.
    """
    return _index(row, "_ng_rollout_index", MAX_ROLLOUT_INDEX)


def key_of(rollout: Mapping[str, Any]) -> int:
    """Task and rollout index as one integer below 2**63, which names the rollout in its run.

    Raises:
        InvalidRequest: it has no such stamps.
    """
    return task_index(rollout) << 23 | rollout_index(rollout)


def retried(row: JSON, attempt: int) -> JSON:
    """The row of attempt number ``attempt``, counted from 0; the first one is not marked as such."""
    if attempt == 0:
        return row
    return {**row, "_ng_attempt_index": attempt, "_ng_rollout_id": f"{row['_ng_rollout_id']}-a{attempt}"}


def is_failure(rollout: Mapping[str, Any]) -> bool:
    """Whether a rollout failed, rather than being scored; one that is only masked did not."""
    return bool(rollout.get("_ng_failure_class"))


def _index(row: Mapping[str, Any], key: str, largest: int) -> int:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= largest:
        raise InvalidRequest(f"{key} must be an integer from 0 to {largest}, got {str(value)[:50]}")
    return value
