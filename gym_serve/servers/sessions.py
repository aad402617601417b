"""The sessions of one resources server instance: a pure table, no tasks and no clock of its own.

An id is ``"{replica}.{random}"``. The part before the dot names the instance that issued it, so
that a router can pin every later call to it; the rest cannot be guessed.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from gym_serve.servers.usage import UsageMeter
from gym_serve.types.errors import SessionLost, SessionNotFound

__all__ = ["OpenSession", "SessionTable", "replica_of"]

S = TypeVar("S")


@dataclass(eq=False, slots=True)
class OpenSession(Generic[S]):
    """A session, from seed until its close hook has run.

    Attributes:
        id: its id.
        state: the environment's own state.
        used: moment of its last call, in the caller's clock (seconds).
        seeded: the fields that seeding it gave; None for one that was not seeded here.
        version: number of snapshots that were taken of it.
        of_client: whether it was opened over HTTP, not by an episode.
        running: calls in progress; such a session does not expire.
        closed: whether it has left the table: no further call may begin.
        turn: held by a call that has to be alone.
        meter: the model calls that were made for it.
        row: the row's own keys, where a tool of the environment reads them.
        quiet: set, where somebody waits for it, when the last call of a closed session has ended.
    """

    id: str
    state: S
    used: float
    seeded: dict[str, Any] | None = None
    version: int = 0
    running: int = 0
    closed: bool = False
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    meter: UsageMeter = field(default_factory=UsageMeter)
    row: Any = None
    quiet: asyncio.Event | None = None
    of_client: bool = False


def replica_of(session_id: str) -> str:
    """The replica that issued a session id; empty if it names none."""
    return session_id.partition(".")[0] if "." in session_id else ""


class SessionTable(Generic[S]):
    """Sessions by id.

    Args:
        replica: name of this instance, without a dot.
        ttl: seconds without a call after which a session expires.
    """

    def __init__(self, replica: str, ttl: float) -> None:
        if "." in replica:
            raise ValueError(f"a replica's name has no dot: {replica!r}")
        self.replica = replica
        self.ttl = ttl
        self._sessions: dict[str, OpenSession[S]] = {}
        self.of_clients = 0
        """How many of them were opened over HTTP, not by an episode."""

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, state: S, now: float, version: int = 0, *, of_client: bool = False) -> OpenSession[S]:
        """Open a session with a fresh id; ``version`` is that of the snapshot it goes on from."""
        session_id = f"{self.replica}.{secrets.token_urlsafe(16)}"
        session = OpenSession(session_id, state, now, version=version, of_client=of_client)
        self._sessions[session.id] = session
        self.of_clients += of_client
        return session

    def get(self, session_id: str, now: float) -> OpenSession[S]:
        """The live session of an id; its time to live starts again.

        Raises:
            SessionLost: another instance issued it: it died, or this call was misrouted.
            SessionNotFound: it was closed, has expired, or never was.
        """
        session = self._sessions.get(session_id)
        if session is not None:
            session.used = now
            return session
        owner = replica_of(session_id)
        if owner and owner != self.replica:
            raise SessionLost(f"session {session_id[:64]} lived on replica {owner}, which is gone")
        raise SessionNotFound(f"no session {session_id[:64]}: it was closed, has expired, or never was")

    def pop(self, session_id: str) -> OpenSession[S] | None:
        """Take a session out; None if it is not live. Whoever gets it closes it, so: once."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            session.closed = True
            self.of_clients -= session.of_client
        return session

    def ids(self) -> list[str]:
        """Ids of all live sessions."""
        return list(self._sessions)

    def expired(self, now: float) -> list[str]:
        """Ids of the sessions that outlived their time to live and run no call."""
        return [s.id for s in self._sessions.values() if not s.running and now - s.used > self.ttl]
