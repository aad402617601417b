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
    GymError,
    Overloaded,
    SessionLost,
    Unavailable,
    VerifierFailed,
)
from gym_serve.types.protocols import TOKEN_KEYS
from gym_serve.types.requests import JSON

__all__ = ["asked", "check_response", "rollout_of"]

_RESULTS = frozenset({"response", "reward", "mask_sample", "failure", "error"})
_STAGES = ("seed", "model", "tool", "verify", "close")
_KINDS: dict[str, type[GymError]] = {
    cls.code: cls for cls in (BadRequest, DeadlineExceeded, Overloaded, SessionLost, VerifierFailed)
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
    check_response(answer.get("response"))
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


def check_response(response: Any) -> JSON:
    """``response`` if it is a Response object with sound items.

    Raises:
        Unavailable: it is not.
    """
    output = response.get("output") if isinstance(response, dict) else None
    if not isinstance(output, list) or not all(isinstance(item, dict) for item in output):
        raise Unavailable(f"the agent answered no Response object: {str(response)[:200]!r}")
    for index, item in enumerate(output):
        if not isinstance(item.get("type", "message"), str):
            raise Unavailable(f"the agent answered output[{index}] with a type that is no text")
        if any(key in item for key in TOKEN_KEYS) and not _is_bundle(*(item.get(key) for key in TOKEN_KEYS)):
            raise Unavailable(f"the agent answered output[{index}] with token ids that do not fit together")
    whole: JSON = response
    return whole


def _is_bundle(prompt: Any, generation: Any, log_probs: Any) -> bool:
    if not (isinstance(prompt, list) and isinstance(generation, list) and isinstance(log_probs, list)):
        return False
    return (
        len(generation) == len(log_probs)
        and all(type(token) is int and token >= 0 for token in prompt)
        and all(type(token) is int and token >= 0 for token in generation)
        and all(_is_number(value) for value in log_probs)
    )


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
    if answer.get("_ng_failure_terminal") is True:
        cls: type[GymError] = BadRequest
    else:
        cls = DeadlineExceeded if kind.endswith("_timeout") else _KINDS.get(kind, Unavailable)
    return cls(
        f"the agent failed ({kind}): {detail}",
        stage=stage if stage in _STAGES else None,
        retry_after=min(max(wait, 0.0), 3600.0) if _is_number(wait) else None,
    )
