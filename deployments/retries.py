"""When to try a refused call again, and what a redirect is."""

from __future__ import annotations

import random
from collections.abc import Mapping

from gym_serve.types.errors import EndpointMisconfigured, GymError

_PAUSE, _MAX_PAUSE = 0.5, 20.0  # seconds; the first is doubled with every attempt


def redirected(url: str, headers: Mapping[str, str], setting: str) -> EndpointMisconfigured:
    """The error for a redirect, which is not followed: it would take the key elsewhere. ``setting`` is the
    address.
    """
    where = headers.get("Location", "")[:200]
    return EndpointMisconfigured(f"{url} redirects to {where!r}: set {setting} to where it leads")


def pause_after(error: GymError, failed: int) -> float:
    """Seconds to wait after a failure when ``failed`` attempts failed before it."""
    # Added, so that callers who were told the same do not come back at the same moment.
    return (error.retry_after or 0.0) + random.uniform(0.0, min(_MAX_PAUSE, _PAUSE * 2**failed))
