"""Starting Ray and Serve: free ports, settings for slow machines, and a second attempt."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from gym_serve.types.errors import Unavailable

__all__ = ["ENVIRONMENT", "HTTP_PORT", "START_LOG", "free_port", "try_twice"]

T = TypeVar("T")

ENVIRONMENT = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}
"""Variables of a Ray that is started here; the user's go first. Serve would kill a proxy after 5 seconds."""


START_LOG = "gym_serve.start"
"""Name of the logger that tells each phase of a start, at level INFO."""


HTTP_PORT = 8000
"""Serve's usual port."""

_PORTS = range(20_000, 30_000)
"""Below those that the kernel gives to connections (32768 and up on Linux), of which a starting Ray opens
hundreds: one of them could take the port before its server is up. And above those of Ray's workers."""


def free_port(*usual: int) -> int:
    """A port of loopback that nothing listens at: the usual one if it is free, else one at random.

    Raises:
        OSError: there is none.
    """
    for port in (*usual, *random.SystemRandom().sample(_PORTS, len(_PORTS))):
        with socket.socket() as probe, suppress(OSError):
            # Connections that have ended do not hold a port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


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
            "busy. Try again later, or see Ray's logs in session_latest/logs of its folder (/tmp/ray)."
        ) from error
