"""Where replicas listen, and how a connection to one is secured and watched.

A caller may need a replica that Serve no longer reports: one that drains still holds its sessions. So the
`Directory` keeps an address in Ray's key-value store until the replica has stopped. That of a killed replica
is removed by the first caller that finds nobody there. Where Ray runs with TLS, so do connections, with Ray's
own certificates at both ends (https://docs.ray.io/en/latest/ray-core/configure.html).
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from functools import lru_cache
from typing import Any

import msgspec

from gym_serve.cluster.serve_compat import kv_delete, kv_get, kv_keys, kv_put

_CERTIFICATE, _KEY, _CA = "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 11_000))


CALLER_HEADER = "x-gym-serve-caller"


class Address(msgspec.Struct, frozen=True):
    """Where a replica listens."""

    host: str
    port: int
    token: str  # what a caller has to send; random per replica


class Directory:
    """Addresses of the replicas of one deployment."""

    def __init__(self, application: str, deployment: str) -> None:
        self._prefix = f"{application}/{deployment}/"

    async def put(self, replica: str, address: Address) -> None:
        await asyncio.to_thread(kv_put, self._key(replica), msgspec.msgpack.encode(address))

    async def get(self, replica: str) -> Address | None:
        value = await asyncio.to_thread(kv_get, self._key(replica))
        return None if value is None else msgspec.msgpack.decode(value, type=Address)

    async def all(self) -> dict[str, Address]:
        """Where every replica listens; killed replicas may still be included."""
        keys = await asyncio.to_thread(kv_keys, self._prefix.encode())
        replicas = [key.decode().removeprefix(self._prefix) for key in keys]
        addresses = await asyncio.gather(*map(self.get, replicas))
        pairs = zip(replicas, addresses, strict=True)
        return {replica: address for replica, address in pairs if address is not None}

    async def remove(self, replica: str) -> None:
        await asyncio.to_thread(kv_delete, self._key(replica))

    def _key(self, replica: str) -> bytes:
        return f"{self._prefix}{replica}".encode()


def enable_keepalive(sock: Any) -> None:
    """Let ``sock`` break about 11 seconds after the machine of its peer is lost.

    A lost machine sends nothing, not even a reset. The kernel's probes find out, also while the event loop of
    the peer is busy, because the peer's kernel answers them.
    """
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if (option := getattr(socket, name, None)) is not None:  # macOS has not all of them
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def caller_context() -> ssl.SSLContext | None:
    """The TLS context of a caller; None where Ray runs without TLS. Raises `OSError` or `KeyError` for
    settings."""
    return _context(ssl.Purpose.SERVER_AUTH) if uses_tls() else None


def listener_context() -> ssl.SSLContext | None:
    """The TLS context of a replica; see `caller_context`."""
    return _context(ssl.Purpose.CLIENT_AUTH) if uses_tls() else None


async def check_certificate(host: str, port: int) -> None:
    """Connect to this process's own listener as callers do, to report a refused certificate at once."""
    context = caller_context()
    if context is None:
        return
    try:
        reader, writer = await asyncio.open_connection(host, port, ssl=context)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        await reader.read(1)  # by TLS 1.3 the other end may refuse as late as this
    except (ssl.SSLError, ConnectionError) as error:
        raise ConnectionError(
            f"Other replicas refuse the certificate {os.environ[_CERTIFICATE]} of this node: {error}. "
            f"It must be signed by {os.environ[_CA]} and name the IP address {host} (subjectAltName)."
        ) from error
    writer.close()


def uses_tls() -> bool:
    """Whether Ray's own connections are encrypted (its variable ``RAY_USE_TLS``)."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


@lru_cache
def _context(purpose: ssl.Purpose) -> ssl.SSLContext:
    context = ssl.create_default_context(purpose, cafile=os.environ[_CA])
    context.load_cert_chain(os.environ[_CERTIFICATE], os.environ[_KEY])
    context.verify_mode = ssl.CERT_REQUIRED
    return context
