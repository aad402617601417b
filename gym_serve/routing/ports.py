"""Ports of this machine for servers that cannot choose one themselves."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

__all__ = ["HTTP_PORT", "free_port"]

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
