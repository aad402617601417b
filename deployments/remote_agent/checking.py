"""What an external agent answered, checked before a trainer sees it.

The row is the graph's: an agent cannot change its keys, nor set the stamps that rollouts are counted by. A
reward is a finite number, output items are objects, and token bundles are whole (docs/formats.md).
A failure that the agent reports as a value becomes the error that it stands for.
"""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import orjson

from gym_serve.types.errors import (
    BadRequest,
    DeadlineExceeded,
    EndpointAccessDenied,
    EndpointMisconfigured,
    GymError,
    OperatorError,
    Overloaded,
    SessionLost,
    Unavailable,
    VerifierFailed,
)
from gym_serve.types.protocols import check_response
from gym_serve.types.requests import JSON

__all__ = ["asked", "rollout_of"]

_WHO = "the agent"
_RESULTS = frozenset({"response", "reward", "mask_sample", "failure", "error"})
_STAGES = ("seed", "model", "tool", "verify", "close")
_KINDS: dict[str, type[GymError]] = {
    cls.code: cls
    for cls in (
        BadRequest,
        DeadlineExceeded,
        EndpointAccessDenied,
        EndpointMisconfigured,
        Overloaded,
        SessionLost,
        VerifierFailed,
    )
}


def asked(row: JSON) -> JSON:
    """The row without what an earlier run may have left in it (a rollout is a valid row)."""
    return {key: row[key] for key in row if key not in _RESULTS and not key.startswith("_ng_failure")}


def rollout_of(row: JSON, answer: Any) -> JSON:
    """The rollout that an agent answered to `asked` rows.

    Raises:
        Unavailable: it is none.
        GymError: the failure that it reports.
    """
    if not isinstance(answer, dict):
        raise Unavailable(f"the agent answered no JSON object: {str(answer)[:200]!r}")
    if answer.get("_ng_failure_class") is not None:
        raise _reported(answer)
    check_response(answer.get("response"), _WHO)
    _check_number("reward", answer.get("reward"))
    components = answer.get("reward_components")
    if components is not None:
        if not isinstance(components, dict):
            raise Unavailable("the agent answered reward_components that are no object")
        for name, value in components.items():
            _check_number(f"reward_components.{name[:100]}", value)
    try:
        orjson.dumps(answer)
    except TypeError:
        raise Unavailable("the agent answered what nests too deeply") from None
    own = {key: answer[key] for key in answer if key not in row and not key.startswith("_ng_")}
    return {**row, **own}


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_number(name: str, value: Any) -> None:
    if not _is_number(value):
        raise Unavailable(f"the agent answered no number as {name}: {str(value)[:200]!r}")


def _reported(answer: JSON) -> GymError:
    kind = str(answer["_ng_failure_class"])[:100]
    failure = answer.get("failure")
    failure = failure if isinstance(failure, dict) else {}
    stage, wait = failure.get("stage"), failure.get("retry_after")
    detail = str(failure.get("detail") or answer.get("error") or "it gives no reason")[:2000]
    cls = _KINDS.get(kind)
    if answer.get("_ng_failure_terminal") is True and not (cls and issubclass(cls, OperatorError)):
        cls = BadRequest
    elif cls is None:
        cls = DeadlineExceeded if kind.endswith("_timeout") else Unavailable
    return cls(
        f"the agent failed ({kind}): {detail}",
        stage=stage if stage in _STAGES else None,
        retry_after=min(max(wait, 0.0), 3600.0) if _is_number(wait) else None,
    )
