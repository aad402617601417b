"""`LiveSessions`: the sessions of one environment, the calls in them, and how they end.

An id is ``"{replica}.{random}"``: the router sends every later call to that replica. However calls,
cancellations, expiry and closing interleave:

- Whoever removes a session from the table closes it, so its close hook runs exactly once, in its own task.
- The hook runs after the calls of the session, never beside one. Calls that still wait are refused.
- A method in a thread cannot be stopped. Its session stays in use until the thread has finished, even if the
  caller is gone, so that the next call never runs beside it on the same state.

The state of a session can be sealed into bytes, and open a session on another replica. Sealed are: the
version (8 bytes, big-endian), which counts the snapshots of a session; the length of the row's own keys (4
bytes) and these keys as JSON, if tools read them; one byte for the form of the snapshot; and the snapshot.
JSON is written by the standard library, which keeps numbers that are not finite and integers of any length.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from gym_serve.observe.cpu import measured_in_thread
from gym_serve.observe.timeline import OCCUPIED, QUEUED, Recorder, microseconds
from gym_serve.servers.base import place_of
from gym_serve.servers.containment import contained
from gym_serve.servers.context import CALLER, current
from gym_serve.servers.threads import Threads
from gym_serve.servers.usage import UsageMeter
from gym_serve.types.errors import (
    GymError,
    InvalidRequest,
    Overloaded,
    SessionLost,
    SessionNotFound,
    Unavailable,
)

S = TypeVar("S")

_SWEEP_SECONDS = 5.0
_ORPHAN_SECONDS = 60.0  # how long a session is kept whose opener has died: another process may go on with it
_STOP_SECONDS = 10.0  # seconds that a stopping server waits for running calls before it closes their sessions
_CLOSE_SECONDS = 30.0  # that it waits for a close hook whose caller has set no deadline
_GRACE_SECONDS = 1.0  # that a close hook has which is cancelled then

logger = logging.getLogger("gym_serve")

RESTORE = "restore_session"  # opens a session from a sealed state; without HTTP route: snapshots are trusted

_BYTES, _JSON = b"b", b"j"
_VERSION, _LENGTH = 8, 4


@dataclass(eq=False, slots=True)
class OpenSession(Generic[S]):
    """A session, from seed until its close hook has run."""

    id: str
    state: S
    used: float  # time of its last call, in seconds of the caller's clock
    seeded: dict[str, Any] | None = None  # the fields that `seed` returned; None if it was not seeded here
    version: int = 0
    running: int = 0  # number of calls in progress; a session with any does not expire
    closed: bool = False  # whether it has left the table, so that no further call may begin
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # lock of calls that must run alone
    meter: UsageMeter = field(default_factory=lambda: UsageMeter(Recorder(texts=True)))
    row: Any = None  # the row's own keys, if a tool of the environment reads them
    due: float = 0.0  # `time.monotonic()` moment until which a stopping server waits for its close hook
    quiet: asyncio.Event | None = None  # if something waits for it: the last call of a closed one has ended
    of_client: bool = False  # whether a client opened it over HTTP, not an episode
    opener: str = ""  # the process that opened it, if that is another one; empty for a client's session
    # The span that it was opened in; calls from outside without one, as a harness's, belong to its trace.
    traceparent: str | None = None


def replica_of(session_id: str) -> str:
    """The replica that issued a session id; an empty text if the id names none."""
    return session_id.partition(".")[0] if "." in session_id else ""


class SessionTable(Generic[S]):
    """Sessions by id; ``ttl`` is seconds without a call after which one expires."""

    def __init__(self, replica: str, ttl: float) -> None:
        if "." in replica:
            raise ValueError(f"a replica's name must not contain a dot, got {replica!r}")
        self.replica = replica
        self.ttl = ttl
        self._sessions: dict[str, OpenSession[S]] = {}
        self._orphans: dict[str, float] = {}
        self.of_clients = 0  # how many of them clients opened over HTTP

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, state: S, now: float, version: int = 0, *, of_client: bool = False) -> OpenSession[S]:
        """Open a session with a new id; ``version`` is that of the snapshot that it continues from."""
        session_id = f"{self.replica}.{secrets.token_urlsafe(16)}"
        session = OpenSession(session_id, state, now, version=version, of_client=of_client)
        session.traceparent = current().traceparent
        session.opener = "" if of_client else CALLER.get()
        self._sessions[session.id] = session
        self.of_clients += of_client
        return session

    def get(self, session_id: str, now: float) -> OpenSession[S]:
        """The open session of an id; its time to live starts again.

        Raises `SessionLost` if another replica issued it, which died, and else `SessionNotFound`.
        """
        session = self._sessions.get(session_id)
        if session is not None:
            session.used = now
            self._orphans.pop(session_id, None)  # whoever calls it, has taken it over
            return session
        owner = replica_of(session_id)
        if owner and owner != self.replica:
            raise SessionLost(f"session {session_id[:64]} lived on replica {owner}, which is gone")
        raise SessionNotFound(f"no session {session_id[:64]}: it was closed, has expired, or never existed")

    def traceparent(self, session_id: str) -> str | None:
        """See `OpenSession.traceparent`; None for an id that is not open."""
        session = self._sessions.get(session_id)
        return None if session is None else session.traceparent

    def pop(self, session_id: str) -> OpenSession[S] | None:
        """Remove a session; None if it is not open. The caller closes it, so that happens once."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            session.closed = True
            self._orphans.pop(session_id, None)
            self.of_clients -= session.of_client
        return session

    def ids(self) -> list[str]:
        return list(self._sessions)

    @property
    def wanted(self) -> int:
        """How many sessions are open, without those whose opener is gone."""
        return len(self._sessions) - len(self._orphans)

    def orphan(self, opener: str, now: float) -> None:
        """A process is gone: the sessions that it opened expire soon, unless somebody calls them."""
        orphans = [s.id for s in self._sessions.values() if s.opener == opener]
        self._orphans.update(dict.fromkeys(orphans, now))

    def expired(self, now: float) -> list[str]:
        """Ids of the sessions whose time to live, or that of orphans, is over and that run no call."""
        return [
            s.id
            for s in self._sessions.values()
            if not s.running
            and (now - s.used > self.ttl or now - max(s.used, self._orphans.get(s.id, now)) > _ORPHAN_SECONDS)
        ]


class LiveSessions(Generic[S]):
    """The sessions of one environment. The hook ``close`` receives the state of every session at its end."""

    def __init__(
        self,
        replica: str,
        ttl: float,
        close: Callable[[S], Any] | None,
        *,
        exclusive: bool = False,
        max_of_clients: int | None = None,
    ) -> None:
        self.clock = time.monotonic  # returns the time in seconds
        self.threads = Threads()
        self.exclusive = exclusive
        self._max_of_clients = max_of_clients
        self._table: SessionTable[S] = SessionTable(replica, ttl)
        self._hook = close
        self._closing: dict[asyncio.Task[None], OpenSession[S]] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self._stopped = False

    def __len__(self) -> int:
        return len(self._table)

    @property
    def wanted(self) -> int:
        """How many sessions are open, without those whose opener is gone."""
        return self._table.wanted

    def orphan(self, opener: str) -> None:
        self._table.orphan(opener, self.clock())

    def open(self, state: S, version: int = 0, *, of_client: bool = False) -> OpenSession[S]:
        """Open a session. Raises `Unavailable` while stopping, `Overloaded` where clients have too many
        open."""
        if self._stopped:
            raise Unavailable(f"replica {self._table.replica} is stopping and opens no more sessions")
        if of_client and self._max_of_clients is not None and self._table.of_clients >= self._max_of_clients:
            raise Overloaded(
                f"clients have {self._table.of_clients} sessions open (max_client_sessions): close some, or "
                f"wait until they expire, {self._table.ttl:.6g} s after their last call"
            )
        return self._table.open(state, self.clock(), version, of_client=of_client)

    def get(self, session_id: str) -> OpenSession[S]:
        """The open session of an id; see `SessionTable.get`. A stopped server has lost all sessions."""
        if self._stopped:
            raise self.gone(session_id)
        return self._table.get(session_id, self.clock())

    def traceparent(self, session_id: str) -> str | None:
        return self._table.traceparent(session_id)

    def gone(self, session_id: str) -> GymError:
        if self._stopped:
            held = f"replica {self._table.replica}, which held session {session_id[:64]},"
            return SessionLost(f"{held} is stopping")
        return SessionNotFound(f"session {session_id[:64]} was closed while the call waited for its turn")

    async def close(self, session_id: str) -> OpenSession[S] | None:
        """Close a session if it is open; returns it after its hook has run."""
        session, task = self._close(session_id)
        if task is not None:
            await asyncio.shield(task)
        return session

    def sweep(self) -> None:
        for session_id in self._table.expired(self.clock()):
            self._close(session_id)

    def start(self) -> None:
        self._sweeper = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        self._stopped = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._sweeper
        for session_id in self._table.ids():
            self._close(session_id)
        if busy := [task for task, session in self._closing.items() if session.running]:
            await asyncio.wait(busy, timeout=_STOP_SECONDS)
        for session in self._closing.values():
            if session.quiet is not None:
                session.due = time.monotonic() + _CLOSE_SECONDS
                session.quiet.set()
        while self._closing and (left := self._last_due() - time.monotonic()) > 0:
            await asyncio.wait(self._closing, timeout=left)
        if self._closing:
            await self._give_up()

    def _last_due(self) -> float:
        return max(session.due for session in self._closing.values())

    async def _give_up(self) -> None:
        """End the hooks that hang; one in a thread stays in it."""
        assert self._hook is not None
        hook = f"{self._hook.__qualname__} ({place_of(self._hook)})"
        for task, session in self._closing.items():
            logger.error("%s hangs: the server stops without waiting for session %s", hook, session.id)
            task.cancel()
        await asyncio.wait(self._closing, timeout=_GRACE_SECONDS)

    def _close(self, session_id: str) -> tuple[OpenSession[S] | None, asyncio.Task[None] | None]:
        """The session, if it was open, and the task that closes it, if there is anything to wait for."""
        session = self._table.pop(session_id)
        if session is None or not (self._hook or session.running):
            return session, None
        session.due = time.monotonic() + (current().timeout() or _CLOSE_SECONDS)
        task = asyncio.create_task(self._end(session))
        self._closing[task] = session
        task.add_done_callback(self._closed)
        return session, task

    async def _end(self, session: OpenSession[S]) -> None:
        if session.running:
            session.quiet = asyncio.Event()
            await session.quiet.wait()
        if inspect.iscoroutinefunction(self._hook):
            await self._hook(session.state)
        elif self._hook is not None:
            await self.threads.run(partial(self._hook, session.state))

    def _closed(self, task: asyncio.Task[None]) -> None:
        session = self._closing.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the close hook of session %s failed", session.id, exc_info=error)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(_SWEEP_SECONDS, self._table.ttl))
            self.sweep()


class SessionCall(Generic[S]):
    """One call in a session, from its turn to its end. Raises `SessionNotFound` or `SessionLost` on entry, if
    the session was closed while the call waited for its turn."""

    def __init__(self, sessions: LiveSessions[S], session: OpenSession[S]) -> None:
        self.session = session
        self._sessions = sessions
        self._has_turn = False
        self._thread: asyncio.Future[Any] | None = None
        self._began: float | None = None  # when its thread began to run it

    async def __aenter__(self) -> SessionCall[S]:
        self.session.running += 1
        if self._sessions.exclusive:
            try:
                await self._take_turn()
            except BaseException:
                self._leave()
                raise
        return self

    async def __aexit__(self, *failure: object) -> None:
        if self._thread is None or self._thread.done():
            self._leave()
        else:
            self._thread.add_done_callback(lambda thread: self._leave())

    async def run(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Await a coroutine function, or run a plain one in a thread, alone in its session."""
        if inspect.iscoroutinefunction(method):
            return await contained(method(*args, **kwargs))
        if not self._has_turn:
            await self._take_turn()
        asked = time.monotonic()
        call = self._sessions.threads.call(partial(self._in_thread, partial(method, *args, **kwargs)))
        self._thread = call.result
        try:
            return await self._sessions.threads.wait(call)
        except asyncio.CancelledError:
            waited, notes = (self._began or time.monotonic()) - asked, current().notes
            notes[QUEUED] = notes.get(QUEUED, 0) + microseconds(waited)  # for a thread of this process
            raise

    def _in_thread(self, work: Callable[[], Any]) -> Any:
        self._began = time.monotonic()
        return measured_in_thread(work)

    async def _take_turn(self) -> None:
        turn = self.session.turn
        if turn.locked():
            began = time.monotonic()
            try:
                await turn.acquire()
            finally:
                current().notes[OCCUPIED] = time.monotonic() - began
        else:
            await turn.acquire()
        self._has_turn = True
        if self.session.closed:
            raise self._sessions.gone(self.session.id)

    def _leave(self) -> None:
        session = self.session
        session.running -= 1
        session.used = self._sessions.clock()
        if self._has_turn:
            session.turn.release()
        if session.quiet is not None and not session.running:
            session.quiet.set()


def seal(version: int, snapshot: Any, row: Any = None) -> bytes:
    """A snapshot, bytes or JSON, as sealed state, with the row's own keys if a tool reads them."""
    raw = isinstance(snapshot, bytes)
    payload = snapshot if raw else json.dumps(snapshot, separators=(",", ":")).encode()
    keys = b"" if row is None else json.dumps(row, separators=(",", ":")).encode()
    head = version.to_bytes(_VERSION, "big") + len(keys).to_bytes(_LENGTH, "big") + keys
    return head + (_BYTES if raw else _JSON) + payload


def version_of(state: bytes) -> int:
    """The version of a sealed state."""
    return int.from_bytes(state[:_VERSION], "big")


def unseal(state: bytes) -> tuple[int, Any, Any]:
    """Version, snapshot and row of a sealed state. Raises `InvalidRequest` if it is not a sealed state."""
    start = _VERSION + _LENGTH
    length = int.from_bytes(state[_VERSION:start], "big")
    keys, kind = state[start : start + length], state[start + length :][:1]
    payload = state[start + length + 1 :]
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
    """The sealed state in the body of `RESTORE`. Raises `InvalidRequest` if it is missing."""
    state: Any = body.get("state") if isinstance(body, dict) else None
    try:
        return base64.b64decode(state, validate=True)
    except (TypeError, ValueError):
        raise InvalidRequest("`state` must be the sealed state of a session, in base64") from None
