"""TLS of the connections between replicas, with Ray's own certificates where Ray runs with TLS.

Both ends show a certificate of the cluster's CA, and a caller checks that the replica's names the address
that it has called, as Ray's own connections do (https://docs.ray.io/en/latest/ray-core/configure.html).
"""

from __future__ import annotations

import asyncio
import os
import ssl
from functools import lru_cache

__all__ = ["caller_context", "check_certificate", "listener_context"]

_CERTIFICATE, _KEY, _CA = "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"


def caller_context() -> ssl.SSLContext | None:
    """What a caller connects with; None where Ray runs without TLS.

    Raises:
        OSError: a file of Ray's TLS settings cannot be read (`ssl.SSLError`: or is no certificate or key).
        KeyError: one of the settings is missing.
    """
    return _context(ssl.Purpose.SERVER_AUTH) if _is_on() else None


def listener_context() -> ssl.SSLContext | None:
    """What a replica listens with; see `caller_context`."""
    return _context(ssl.Purpose.CLIENT_AUTH) if _is_on() else None


async def check_certificate(host: str, port: int) -> None:
    """Connect to this process's own listener as others do, so that it is told at once if they cannot.

    Raises:
        ConnectionError: they would refuse the certificate; says why.
    """
    context = caller_context()
    if context is None:
        return
    try:
        reader, writer = await asyncio.open_connection(host, port, ssl=context)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        await reader.read(1)  # by TLS 1.3 the other end may refuse as late as this
    except (ssl.SSLError, ConnectionError) as error:
        raise ConnectionError(
            f"other replicas refuse the certificate {os.environ[_CERTIFICATE]} of this node: {error}; "
            f"it must be signed by {os.environ[_CA]} and name the IP address {host} (subjectAltName)"
        ) from error
    writer.close()


def _is_on() -> bool:
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


@lru_cache
def _context(purpose: ssl.Purpose) -> ssl.SSLContext:
    context = ssl.create_default_context(purpose, cafile=os.environ[_CA])
    context.load_cert_chain(os.environ[_CERTIFICATE], os.environ[_KEY])
    context.verify_mode = ssl.CERT_REQUIRED
    return context
