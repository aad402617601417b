"""Failures of a model's backend as errors of the tree, and when to try again."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from gym_serve.types.errors import (
    BadRequest,
    EndpointAccessDenied,
    EndpointMisconfigured,
    GymError,
    Overloaded,
    Unavailable,
    error_from_body,
)

_PAUSE, _MAX_PAUSE = 0.5, 20.0  # seconds; the first is doubled with every attempt
_NO_ROUTE = "/-/routes for available routes"
"""Serve's proxy says this of every path until it has learnt which applications run."""


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
    told = body.get("error") if isinstance(body, dict) else None
    told = told if isinstance(told, dict) else {}
    codes = (told.get("code"), told.get("type"))
    if status in (401, 402, 403, 407) and not _is_flagged(told):
        return EndpointAccessDenied(
            f"{message} (it refuses the key of this server's api_key, or its account)"
        )
    if "insufficient_quota" in codes:  # a 429 that no waiting ends
        return EndpointAccessDenied(message)
    if status in (404, 405) and _NO_ROUTE not in text:
        return EndpointMisconfigured(f"{message} (see base_url and model)")
    if "model_not_found" in codes:
        return EndpointMisconfigured(f"{message} (see model)")
    wait = error.retry_after if error.retry_after is not None else retry_after(headers)
    if status == 429:
        return Overloaded(message, retry_after=wait)
    if status >= 500 or status == 404:
        return Unavailable(message, retry_after=wait)
    return BadRequest(message)


def redirected(url: str, headers: Mapping[str, str], setting: str) -> EndpointMisconfigured:
    """The error for a redirect, which is not followed: it would take the key elsewhere.

    Args:
        url: what was called.
        headers: of the answer.
        setting: names the address in the graph.
    """
    where = headers.get("Location", "")[:200]
    return EndpointMisconfigured(f"{url} redirects to {where!r}: set {setting} to where it leads")


def _is_flagged(error: Mapping[str, Any]) -> bool:
    """Whether a 403 is about what the request says: OpenRouter's of a moderated input."""
    metadata = error.get("metadata")
    return isinstance(metadata, dict) and bool(metadata.keys() & {"reasons", "flagged_input"})


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
