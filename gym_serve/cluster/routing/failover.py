"""`FailoverTransport`: a session whose replica dies continues on another one.

Every reply carries the state in which the call left the session, and the `SnapshotCache` keeps the last one.
When a call finds its session lost, the state before the call is restored on a running replica, and the call
runs again there, a few times: it may be the cause. A session without a cached state is lost.

The id that a caller gets is a *token*, ``"{id}~{version}"``, and it may keep using an old one. A client of
several gateways sends back the latest version that it was told, so a gateway that missed some calls knows
that its state is stale.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from gym_serve.servers.sessions import RESTORE, restore_request, version_of
from gym_serve.servers.transport import Call, Reply, Transport, encode
from gym_serve.types.errors import GymError, Retryable, SessionLost

_MARK = "~"
_KEPT_SECONDS = 3600.0  # after the last call of a session
_OVERHEAD = 1024  # bytes of an entry beside its state, about

_CLOSE = "close_session"
_RERUNS = 2
_PATIENCE_SECONDS = 60.0  # for a replica to restore in: starting a new one takes that long with large imports
_FIRST_PAUSE, _LAST_PAUSE = 0.05, 2.0  # seconds between two tries to restore


class FailoverTransport:
    """Keeps the sessions of a resources server alive when its replicas die. Of the states, which take at most
    ``max_bytes``, those not used for longest are dropped first."""

    def __init__(self, transport: Transport, *, max_bytes: int = 1 << 28) -> None:
        self.server = transport.server
        self.states = SnapshotCache(max_bytes, _KEPT_SECONDS)
        self._transport = transport

    async def call(self, call: Call) -> Reply:
        """See `Transport.call`. Raises `SessionLost` if no fresh state is held, or it cannot be restored."""
        if call.session is None:
            return self._kept(call, await self._transport.call(call))
        session_id, version = split_token(call.session)
        held = self.states.get(session_id)
        deadline = None if call.timeout is None else time.monotonic() + call.timeout
        sent = call._replace(session=session_id if held is None else held.id)
        try:
            try:
                reply = await self._deliver(sent)
            except SessionLost as lost:
                if held is None or held.version < version:
                    raise
                reply = await self._elsewhere(held, sent, lost, deadline)
        finally:
            if call.op == _CLOSE:
                self.states.drop(session_id)
        return reply if call.op == _CLOSE else self._kept(call, reply)

    def stream(self, call: Call) -> AsyncGenerator[bytes, None]:
        """See `Transport.stream`; no operation of a session has a stream."""
        return self._transport.stream(call)

    async def close(self) -> None:
        await self._transport.close()

    async def _deliver(self, call: Call) -> Reply:
        """Make a call; that its session is lost is raised, whoever said it."""
        reply = await self._transport.call(call)
        if reply.status == SessionLost.status and (lost := self._loss(reply)) is not None:
            raise lost
        return reply

    def _loss(self, reply: Reply) -> SessionLost | None:
        try:
            reply.json()
        except GymError as error:
            # Its own: the server may have lost a session with a server behind it.
            if isinstance(error, SessionLost) and error.server in (None, self.server):
                return error
        return None

    async def _elsewhere(self, held: Held, call: Call, lost: SessionLost, deadline: float | None) -> Reply:
        for _ in range(_RERUNS):
            async with held.moving:
                if held.id == call.session:  # else another call has moved the session by now
                    self.states.move(held, await self._restore(held, call, lost, deadline))
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            call = call._replace(session=held.id, timeout=left)
            try:
                return await self._deliver(call)
            except SessionLost as again:
                lost = again
        raise lost

    async def _restore(self, held: Held, call: Call, lost: SessionLost, deadline: float | None) -> str:
        """Open a session from a held state; its id."""
        last = time.monotonic() + _PATIENCE_SECONDS
        last = last if deadline is None else min(last, deadline)
        body = encode(restore_request(held.state))
        pause = _FIRST_PAUSE
        while True:
            left = max(0.0, last - time.monotonic())
            try:
                restore = Call(RESTORE, body, request_id=call.request_id, timeout=left)
                reply = await self._transport.call(restore._replace(traceparent=call.traceparent))
                reply.json()
                return reply.session or ""
            except GymError as error:
                pause = max(pause, error.retry_after or 0.0)
                if not isinstance(error, Retryable) or left <= pause:
                    message = f"{lost.message}; it could not be restored elsewhere: {error.message}"
                    raise SessionLost(message, server=self.server) from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)

    def _kept(self, call: Call, reply: Reply) -> Reply:
        if reply.session is None:
            return reply
        if reply.state is not None:
            self.states.keep(reply.session, reply.state)
        held = self.states.get(reply.session)
        session_id, version = split_token(call.session or "")
        if held is not None and held.version >= version:
            return reply._replace(session=held.token, state=None)
        # A token of another gateway stays as it is.
        return reply._replace(
            session=call.session if session_id == reply.session else reply.session, state=None
        )


@dataclass(eq=False, slots=True)
class Held:
    """The state of one session."""

    ids: list[str]  # its ids, in the order in which it got them; it lives under the last one
    state: bytes
    used: float  # moment of its last use, in seconds
    moving: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def id(self) -> str:
        return self.ids[-1]

    @property
    def version(self) -> int:
        return version_of(self.state)

    @property
    def token(self) -> str:
        return f"{self.id}{_MARK}{self.version}"


def split_token(token: str) -> tuple[str, int]:
    """Id and version of a token; version 0 where it names none."""
    session_id, _, version = token.partition(_MARK)
    return session_id, int(version) if version.isdecimal() and len(version) < 20 else 0


class SnapshotCache:
    """The last acknowledged state of every session. No tasks, no calls.

    A session may have several ids, one for each replica that it lived in; all of them lead to its state. The
    cache is bounded in bytes and in time (``ttl``, seconds): the least recently used states go first.
    """

    def __init__(self, max_bytes: int, ttl: float) -> None:
        self.bytes = 0
        self._max_bytes = max_bytes
        self._ttl = ttl
        self._by_id: dict[str, Held] = {}
        self._by_use: OrderedDict[Held, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_use)

    def get(self, session_id: str) -> Held | None:
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
        held = self._by_id.get(session_id)
        if held is not None:
            self._forget(held)

    def _use(self, held: Held) -> None:
        held.used = time.monotonic()
        self._by_use[held] = None
        self._by_use.move_to_end(held)

    def _bound(self) -> None:
        expired = time.monotonic() - self._ttl
        while self._by_use and (self.bytes > self._max_bytes or next(iter(self._by_use)).used < expired):
            self._forget(next(iter(self._by_use)))

    def _forget(self, held: Held) -> None:
        del self._by_use[held]
        self.bytes -= len(held.state) + _OVERHEAD
        for session_id in held.ids:
            del self._by_id[session_id]
