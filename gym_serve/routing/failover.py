"""`FailoverTransport`: a session whose replica dies goes on in another one, from its last acknowledged state.

It stands before any other transport to a resources server. Every reply brings the state in which the call
left the session, and the transport holds the last one. When a call finds the session lost, the state is
restored through the same transport, which chooses a replica that lives, and the call runs again there: as
it was not acknowledged, the state is the one before it. Callers may go on with the id they have; replies
bring the new one. A session of which no state is held is lost.

A call that loses its replica again and again may be what kills it: it is run again only so often.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

from gym_serve.routing.snapshot_cache import Held, SnapshotCache, split_token
from gym_serve.servers.snapshots import RESTORE, restore_request
from gym_serve.servers.transport import Call, Reply, Transport, encode
from gym_serve.types.errors import GymError, Retryable, SessionLost

__all__ = ["FailoverTransport"]

_CLOSE = "close_session"
_RERUNS = 2
_PATIENCE_SECONDS = 60.0  # for a replica to restore in: starting a new one takes that long with large imports
_FIRST_PAUSE, _LAST_PAUSE = 0.05, 2.0  # seconds between two tries to restore


class FailoverTransport:
    """Keeps the sessions of a resources server alive when its replicas die.

    Args:
        transport: reaches the server; calls without a session go to any replica that lives.
        max_bytes: bound of the states that are held; those not used for longest are dropped first.
        ttl: seconds without a call after which a state is dropped.
    """

    def __init__(self, transport: Transport, *, max_bytes: int = 1 << 28, ttl: float = 3600.0) -> None:
        self.server = transport.server
        self.states = SnapshotCache(max_bytes, ttl)
        self._transport = transport

    async def call(self, call: Call) -> Reply:
        """See `Transport.call`.

        Raises:
            SessionLost: no state of the session is held, a stale one is, or it could not be restored.
        """
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
        """Close the transport behind this one."""
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
        """Run an interrupted call again in another replica."""
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
                reply = await self._transport.call(
                    Call(RESTORE, body, request_id=call.request_id, timeout=left)
                )
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
        """The reply as the caller gets it, its state being kept here."""
        if reply.session is None:
            return reply
        if reply.state is not None:
            self.states.keep(reply.session, reply.state)
        held = self.states.get(reply.session)
        asked, version = split_token(call.session or "")
        if held is not None and held.version >= version:
            return reply._replace(session=held.token, state=None)
        # A token of another gateway stays as it is.
        return reply._replace(session=call.session if asked == reply.session else reply.session, state=None)
