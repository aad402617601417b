"""Snapshots of sessions, sealed for the way to the caller and on to another replica.

A sealed state is bytes: the version (8 bytes, big-endian), the length of the row's own keys (4 bytes) and
these keys as JSON, if tools read them, one byte for the form of the snapshot, and the snapshot. The version
counts the snapshots of a session, so that a caller that gets replies out of order knows the latest one. JSON
is written by the standard library, which unlike faster encoders keeps numbers that are not finite and
integers of any length.
"""

from __future__ import annotations

import base64
import json
from typing import Any

from gym_serve.types.errors import InvalidRequest

__all__ = ["RESTORE", "restore_request", "seal", "state_of", "unseal", "version_of"]

RESTORE = "restore_session"
"""The operation that opens a session from a sealed state. It has no HTTP route, because snapshots are
trusted."""

_BYTES, _JSON = b"b", b"j"
_VERSION, _LENGTH = 8, 4


def seal(version: int, snapshot: Any, row: Any = None) -> bytes:
    """A snapshot as sealed state.

    Args:
        version: number of the snapshot within its session.
        snapshot: bytes, or anything that JSON can hold.
        row: the row's own keys; None if no tool reads them.

    Raises:
        TypeError: the snapshot is neither.
    """
    raw = isinstance(snapshot, bytes)
    payload = snapshot if raw else json.dumps(snapshot, separators=(",", ":")).encode()
    keys = b"" if row is None else json.dumps(row, separators=(",", ":")).encode()
    head = version.to_bytes(_VERSION, "big") + len(keys).to_bytes(_LENGTH, "big") + keys
    return head + (_BYTES if raw else _JSON) + payload


def version_of(state: bytes) -> int:
    """The version of a sealed state."""
    return int.from_bytes(state[:_VERSION], "big")


def unseal(state: bytes) -> tuple[int, Any, Any]:
    """Version, snapshot and row of a sealed state.

    Raises:
        InvalidRequest: it is not a sealed state.
    """
    start = _VERSION + _LENGTH
    length = int.from_bytes(state[_VERSION:start], "big")
    keys, kind, payload = (
        state[start : start + length],
        state[start + length :][:1],
        state[start + length + 1 :],
    )
    try:
        row = json.loads(keys) if keys else None
        if kind == _BYTES:
            return version_of(state), payload, row
        if kind == _JSON:
            return version_of(state), json.loads(payload), row
    except ValueError as error:
        raise InvalidRequest(f"the state of the session is broken: {error}") from None
    raise InvalidRequest("the state of the session is broken")


def restore_request(state: bytes) -> dict[str, str]:
    """The body of `RESTORE` for a sealed state."""
    return {"state": base64.b64encode(state).decode()}


def state_of(body: Any) -> bytes:
    """The sealed state in the body of `RESTORE`.

    Raises:
        InvalidRequest: it is missing.
    """
    state: Any = body.get("state") if isinstance(body, dict) else None
    try:
        return base64.b64decode(state, validate=True)
    except (TypeError, ValueError):
        raise InvalidRequest("`state` must be the sealed state of a session, in base64") from None
