"""Failures of a model's backend as errors of the tree, and when to try again."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Mapping
from email.utils import parsedate_to_datetime

from gym_serve.types.errors import BadRequest, GymError, Overloaded, Unavailable, error_from_body

__all__ = ["failure", "pause_after", "retry_after"]

_PAUSE, _MAX_PAUSE = 0.5, 20.0  # seconds; the first is doubled with every attempt


def failure(url: str, status: int, headers: Mapping[str, str], text: str, secrets: Iterable[str]) -> GymError:
    """The error for a backend's HTTP status of 400 or more.

    Args:
        url: what was called.
        headers: of the answer; ``Retry-After`` counts.
        text: its body.
        secrets: taken out of the message, should the backend repeat them.
    """
    for secret in filter(None, secrets):
        text = text.replace(secret, "***")
    try:
        body = json.loads(text)
    except ValueError:
        body = text
    error = error_from_body(status, body)
    message = f"{url}: {error.message}"
    if status in (401, 403):
        return BadRequest(f"{message} (the backend refuses the key in this server's api_key setting)")
    wait = error.retry_after if error.retry_after is not None else retry_after(headers)
    if status == 429:
        return Overloaded(message, retry_after=wait)
    if status >= 500:
        return Unavailable(message, retry_after=wait)
    return BadRequest(message)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that a ``Retry-After`` header asks for, as a number or as a date; None without one."""
    value = headers.get("Retry-After")
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return max(0.0, seconds) if seconds < float("inf") else None


def pause_after(error: GymError, failed: int) -> float:
    """Seconds to wait after a failure when ``failed`` attempts failed before it."""
    # Added, so that callers who were told the same do not come back at the same moment.
    return (error.retry_after or 0.0) + random.uniform(0.0, min(_MAX_PAUSE, _PAUSE * 2**failed))
