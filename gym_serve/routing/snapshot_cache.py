"""`SnapshotCache`: the last acknowledged state of every session, at the caller. No tasks, no calls.

A session may have several ids, one for each replica it lived in; all of them lead to its state. What is
kept is bounded in bytes and in time, so that sessions that nobody closes do not pile up: the states that
were not used for longest go first, and their sessions are lost with their replica, as any without a state.

The id that a caller gets is a *token*, ``"{id}~{version}"``. A client of several gateways brings back the
version it was told last, and so a gateway that missed some calls knows that its state is stale.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from gym_serve.servers.snapshots import version_of

__all__ = ["Held", "SnapshotCache", "split_token"]

_MARK = "~"
_OVERHEAD = 1024  # bytes of an entry beside its state, about


@dataclass(eq=False, slots=True)
class Held:
    """The state of one session.

    Attributes:
        ids: its ids, in the order in which it got them; it lives under the last one.
        state: its last acknowledged state, sealed.
        used: moment of its last use, in seconds.
        moving: held by the call that restores it elsewhere.
    """

    ids: list[str]
    state: bytes
    used: float
    moving: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def id(self) -> str:
        """The id under which it lives."""
        return self.ids[-1]

    @property
    def version(self) -> int:
        """Version of its state."""
        return version_of(self.state)

    @property
    def token(self) -> str:
        """What its caller gets for an id."""
        return f"{self.id}{_MARK}{self.version}"


def split_token(token: str) -> tuple[str, int]:
    """Id and version of a token; version 0 where it names none."""
    session_id, _, version = token.partition(_MARK)
    return session_id, int(version) if version.isdecimal() and len(version) < 20 else 0


class SnapshotCache:
    """States by session.

    Args:
        max_bytes: bound of all states together.
        ttl: seconds without a use after which a state is dropped.
        clock: gives the moment, in seconds.
    """

    def __init__(self, max_bytes: int, ttl: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes = 0
        self._max_bytes = max_bytes
        self._ttl = ttl
        self._clock = clock
        self._by_id: dict[str, Held] = {}
        self._by_use: OrderedDict[Held, None] = OrderedDict()

    def __len__(self) -> int:
        """How many sessions have a state here."""
        return len(self._by_use)

    def get(self, session_id: str) -> Held | None:
        """The state of the session with this id, one of its earlier ids included."""
        held = self._by_id.get(session_id)
        if held is not None:
            self._use(held)
        return held

    def keep(self, session_id: str, state: bytes) -> None:
        """Keep the state that a session was left in, unless a later one is here already."""
        held = self._by_id.get(session_id)
        if held is None:
            held = self._by_id[session_id] = Held([session_id], state, 0.0)
            self.bytes += len(state) + _OVERHEAD
        elif version_of(state) > held.version:
            self.bytes += len(state) - len(held.state)
            held.state = state
        self._use(held)
        self._bound()

    def move(self, held: Held, session_id: str) -> None:
        """Let a session go on under a new id; its earlier ones lead there."""
        held.ids.append(session_id)
        if held in self._by_use:
            self._by_id[session_id] = held

    def drop(self, session_id: str) -> None:
        """Forget a session, with all of its ids."""
        held = self._by_id.get(session_id)
        if held is not None:
            self._forget(held)

    def _use(self, held: Held) -> None:
        held.used = self._clock()
        self._by_use[held] = None
        self._by_use.move_to_end(held)

    def _bound(self) -> None:
        expired = self._clock() - self._ttl
        while self._by_use and (self.bytes > self._max_bytes or next(iter(self._by_use)).used < expired):
            self._forget(next(iter(self._by_use)))

    def _forget(self, held: Held) -> None:
        del self._by_use[held]
        self.bytes -= len(held.state) + _OVERHEAD
        for session_id in held.ids:
            del self._by_id[session_id]
