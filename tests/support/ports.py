"""Ports of loopback for servers that cannot be told to choose one themselves."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

__all__ = ["free_port"]

_PORTS = range(20_000, 30_000)
"""Below those that the kernel gives to connections (32768 and up on Linux), so that none of the hundreds that
a starting Ray opens takes the port before its server is up; and above those that Ray gives to its workers."""


def free_port() -> int:
    """A port that nobody listens on; another process that asks at the same time gets another one, mostly."""
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")
