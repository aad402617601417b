"""Starting Ray and Serve where the machine is slow or busy: what they are told, and a second try."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gym_serve.types.errors import Unavailable

__all__ = ["ENVIRONMENT", "START_LOG", "try_twice"]

T = TypeVar("T")

ENVIRONMENT = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}
"""Variables of a Ray that is started here; the user's go first. Serve would kill a proxy after 5 seconds."""


START_LOG = "gym_serve.start"
"""Name of the logger that tells each phase of a start, at level INFO."""


def try_twice(
    what: str, start: Callable[[], T], undo: Callable[[], object], is_own: Callable[[Exception], bool]
) -> T:
    """Start something of Ray's, and start it again if it fails by itself.

    Args:
        what: its name, for the error.
        start: starts it.
        undo: takes away what is left of a start that has failed.
        is_own: whether Ray itself failed, and not what it was asked for.

    Raises:
        Unavailable: it failed twice.
    """
    try:
        return start()
    except Exception as error:
        if not is_own(error):
            raise
        undo()
    try:
        return start()
    except Exception as error:
        undo()
        reason = " ".join(str(error).split())[:250].rstrip(".")
        raise Unavailable(
            f"{what} did not start, in two tries: {type(error).__name__}: {reason}. The machine may be too "
            "busy: try again later, or see Ray's logs, in session_latest/logs of its folder (/tmp/ray)"
        ) from error
