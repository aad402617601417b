"""`Runs`: rollouts of many rows that a gateway makes for clients over HTTP.

A run is one of two kinds. A *scheduled* run has all its rows from the start; its gateway repeats and retries
them as `Gym.rollouts` does in a driver. To an *open* run the client adds rows while it goes on, and each is
one attempt: a client that schedules itself, as `Gym.connect` does, sees what ``POST /run`` would have
answered.

Both write into the run's `RunLog`. One client reads it at a time: a newer reader takes the place of one whose
connection is half dead. While the log is full, the run begins no further rollouts: a client that does not
read costs a bounded amount of memory. If nobody asks for the run for a while (`GatewayOptions.run_ttl`), it
is dropped, and what still runs of it is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from functools import partial
from typing import NamedTuple

import msgspec

from gym_serve.graph.run_log import RunLog
from gym_serve.rollouts import Job, Run, RunnerOptions
from gym_serve.rollouts.runner import RolloutRunner
from gym_serve.servers.context import wait_until
from gym_serve.servers.transport import Call, encode
from gym_serve.types.endings import is_failure
from gym_serve.types.errors import Conflict, GymError, Overloaded, SessionNotFound
from gym_serve.types.requests import JSON

logger = logging.getLogger("gym_serve")

Episode = Callable[[str | None, Call], Awaitable[bytes]]
"""Runs one episode by the agent of this name; the rollout as one line of JSON. Raises `GymError`."""

_WINDOW = 16 * 2**20  # bytes of unread rollouts from which on a run begins no more
_PAGE = 4 * 2**20  # bytes of one response: the next request acknowledges them, long before the window is full
_CHUNK = 2**18  # bytes that are sent together
_LINGER_SECONDS = 0.01  # for which lines are gathered: each chunk costs Serve's proxy a millisecond
_BEAT_SECONDS = 5.0  # between two signs of life: a client knows a dead connection by their absence
_RETRY_SECONDS = 5.0  # the hint of a gateway that takes no more
_ROWS_HELD = 4  # rows that wait in all runs together, in ``max_request_bytes``


class AddedRow(NamedTuple):
    """A row of an open run.

    Attributes:
        agent: who runs it; None if nothing says who.
        row: its JSON.
        traceparent: the span of the client that it is a part of.
    """

    agent: str | None
    row: bytes
    traceparent: str | None = None


class _Ids(msgspec.Struct, rename={"rollout": "_ng_rollout_id"}):
    rollout: str | int | None = None


class StoredRun:
    """A run, as long as its gateway keeps it.

    Args:
        id: its id, which cannot be guessed: whoever has it may read the run.
        expire: called when nobody has asked for it for ``ttl`` seconds.
    """

    def __init__(self, id: str, ttl: float, expire: Callable[[StoredRun], None]) -> None:
        self.id = id
        self.log = RunLog(_WINDOW)
        self.held = 0
        """Bytes of its rows that are not done."""
        self.delivered = False
        """Whether a reader has got the last line."""
        self._ttl = ttl
        self._expire = expire
        self._expiry: asyncio.TimerHandle | None = None
        self._readers = 0
        self._newest = 0
        self._dropped = False
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self.touch()

    def touch(self) -> None:
        """The client has asked for the run: it lives on."""
        if self._expiry is not None:
            self._expiry.cancel()
        idle = not (self._readers or self._dropped)
        self._expiry = asyncio.get_running_loop().call_later(self._ttl, self._expire, self) if idle else None

    async def room(self) -> None:
        """Wait until further rollouts may begin."""
        await self._room.wait()

    def put(self, fields: bytes, *, last: bool = False) -> None:
        """Append a line; see `RunLog.add`."""
        self.log.add(fields, last=last)
        self._news.set()
        if self.log.full:
            self._room.clear()

    def end(self, error: GymError | None = None, counts: JSON | None = None) -> None:
        """Append the last line."""
        failed = {} if error is None else error.to_body()
        self.put(encode({"end": counts or {}, **failed})[1:-1], last=True)

    async def read(
        self, after: int | None, seconds: float | None, leaving: Callable[[], bool]
    ) -> AsyncGenerator[bytes, None]:
        """The lines behind a cursor, as they come: a part of them, then the client asks for the next ones.

        Args:
            after: the last cursor that the client has; it acknowledges the lines up to there. None for none.
            seconds: for which to wait for lines; None for as long as the run goes on.
            leaving: whether the gateway is being stopped, which would have to wait for this reader.

        Raises:
            InvalidRequest, Conflict: see `RunLog.acknowledge`.
        """
        cursor = self.log.acknowledged if after is None else after
        self.log.acknowledge(cursor)
        if not self.log.full:
            self._room.set()
            self._advance()
        self._readers += 1
        mine = self._newest = self._newest + 1
        self.touch()
        self._news.set()  # the reader before this one sees that it is not the newest
        ends = None if seconds is None else asyncio.get_running_loop().time() + seconds
        sent = 0
        try:
            yield b'{"cursor":%d,"run":"%s"}\n' % (cursor, self.id.encode())
            while mine == self._newest and sent < _PAGE and not leaving():
                lines, cursor = self.log.after(cursor, _CHUNK)
                if lines:
                    sent += len(lines)
                    yield lines
                elif self.log.ended:
                    self.delivered = True
                    return
                elif ends is not None and asyncio.get_running_loop().time() >= ends:
                    return
                elif not await self._wait(ends):
                    yield b'{"cursor":%d}\n' % cursor
        finally:
            self._readers -= 1
            self.touch()

    async def _wait(self, ends: float | None) -> bool:
        """Wait for news; False if there were none for so long that a sign of life is due."""
        self._news.clear()
        now = asyncio.get_running_loop().time()
        seconds = _BEAT_SECONDS if ends is None else max(0.0, min(_BEAT_SECONDS, ends - now))
        if not await wait_until(self._news, seconds):
            return False
        await asyncio.sleep(_LINGER_SECONDS)
        return True

    def _advance(self) -> None:
        """Begin what may begin, as the client has made room."""

    async def stop(self) -> None:
        """Cancel what still runs. Readers see the end of their response."""
        self._dropped = True
        self.touch()
        self._newest += 1
        self._news.set()


class ScheduledRun(StoredRun):
    """A run whose rows are all there from the start."""

    def begin(self, jobs: Iterator[list[Job]], run: Run, options: RunnerOptions) -> None:
        """Make its rollouts."""
        self._task = asyncio.ensure_future(self._make(jobs, run, options))

    async def stop(self) -> None:
        await super().stop()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _make(self, jobs: Iterator[list[Job]], run: Run, options: RunnerOptions) -> None:
        counts = {"rollouts": 0, "failed": 0}
        error: GymError | None = None
        runner = RolloutRunner(jobs, run, options)
        try:
            while runner.advance():
                for job, rollout in await runner.results():
                    counts["rollouts"] += 1
                    counts["failed"] += is_failure(rollout)
                    self.put(encode({"row": job.group, "rollout": rollout})[1:-1])
                runner.check()
                await self.room()
        except GymError as failure:
            error = failure
        except Exception as failure:
            logger.exception("the run %s failed", self.id)
            error = GymError(f"the run failed: {type(failure).__name__}: {failure}")
        finally:
            await runner.close()
            self.held = 0
        self.end(error, counts)


class OpenRun(StoredRun):
    """A run to which its client adds rows, until it closes the run.

    Args:
        episode: runs an episode.
        concurrency: how many run at the same time at most.
    """

    def __init__(
        self,
        id: str,
        ttl: float,
        expire: Callable[[StoredRun], None],
        episode: Episode,
        concurrency: int,
    ) -> None:
        super().__init__(id, ttl, expire)
        self._episode = episode
        self._concurrency = concurrency
        self._waiting: deque[tuple[int, AddedRow]] = deque()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._open = True
        self.rows = 0
        """How many rows have come."""
        self._made = self._failed = 0

    def add(self, first: int, rows: list[AddedRow], *, more: bool = True) -> None:
        """Add rows. Those that have come before, in a request whose answer was lost, are left out.

        Args:
            first: number of the first one among all rows of the run, from 0.
            rows: the rows.
            more: whether further ones will follow.

        Raises:
            Conflict: rows before the first one are missing, or the run is closed.
        """
        if first > self.rows:
            raise Conflict(f"`first` must be at most {self.rows}, the number of rows so far, got {first}")
        new = rows[self.rows - first :]
        if new and not self._open:
            raise Conflict(f"the run {self.id} was closed with `open: false`; it takes no more rows")
        for row in new:
            self._waiting.append((self.rows, row))
            self.held += len(row.row)
            self.rows += 1
        self._open = self._open and more
        self._advance()

    def cancel(self, rows: list[int]) -> None:
        """Cancel the rollouts of rows, by their numbers; no lines will come of them."""
        gone = set(rows)
        dropped = [row for number, row in self._waiting if number in gone]
        self.held -= sum(len(row.row) for row in dropped)
        self._waiting = deque(item for item in self._waiting if item[0] not in gone)
        for number in gone & self._running.keys():
            self._running[number].cancel()
        self._advance()

    async def stop(self) -> None:
        await super().stop()
        self._waiting.clear()
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _advance(self) -> None:
        while self._waiting and len(self._running) < self._concurrency and not self.log.full:
            number, row = self._waiting.popleft()
            task = self._running[number] = asyncio.ensure_future(self._make(number, row))
            task.add_done_callback(partial(self._done, number, len(row.row)))
        if not (self._open or self._waiting or self._running or self.log.ended):
            self.end(counts={"rollouts": self._made, "failed": self._failed})

    def _done(self, number: int, size: int, task: asyncio.Task[None]) -> None:
        del self._running[number]
        self.held -= size
        self._advance()

    async def _make(self, number: int, row: AddedRow) -> None:
        call = Call(
            "run", row.row, None, secrets.token_hex(16), _affinity(row.row), traceparent=row.traceparent
        )
        try:
            rollout = await self._episode(row.agent, call)
        except Exception as error:
            if not isinstance(error, GymError):
                logger.exception("a rollout of the run %s failed", self.id)
                error = GymError(f"the gateway failed: {type(error).__name__}: {error}")
            self._failed += 1
            self.put(encode({"row": number, "status": error.status, **error.to_body()})[1:-1])
            return
        self._made += 1
        self.put(b'"row":%d,"rollout":%s' % (number, rollout))


def _affinity(row: bytes) -> str | None:
    try:
        rollout = msgspec.json.decode(row, type=_Ids).rollout
    except (
        msgspec.DecodeError,
        UnicodeDecodeError,
        RecursionError,
    ):  # the agent says what is wrong with the row
        return None
    return None if rollout is None else str(rollout)


class Runs:
    """The runs of one gateway.

    Args:
        replica: name of the gateway's replica, with which the ids of its runs begin.
        episode: runs an episode.
        ttl: seconds without a request after which a run is dropped.
        most: how many runs there may be.
        most_bytes: largest body of a request.
        on_drop: called with the id of each run that is dropped.
    """

    def __init__(
        self,
        replica: str,
        episode: Episode,
        *,
        ttl: float,
        most: int,
        most_bytes: int,
        on_drop: Callable[[str], None] = lambda id: None,
    ) -> None:
        self.replica = replica
        self._on_drop = on_drop
        self._episode = episode
        self._ttl = ttl
        self._most = most
        self._most_held = _ROWS_HELD * most_bytes
        self._runs: dict[str, StoredRun] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def get(self, id: str) -> StoredRun:
        """A run, whose time to live begins anew.

        Raises:
            SessionNotFound: there is none.
        """
        run = self._runs.get(id)
        if run is None:
            raise SessionNotFound(
                f"no run {id[:100]!r}: it was deleted, or nobody has asked for it for {self._ttl:g} s"
            )
        run.touch()
        return run

    def open(self, id: str, concurrency: int) -> OpenRun:
        """Begin an open run."""
        run = self._runs[id] = OpenRun(id, self._ttl, self._expired, self._episode, concurrency)
        return run

    def schedule(
        self, id: str, jobs: Iterator[list[Job]], run: Run, options: RunnerOptions, size: int
    ) -> None:
        """Begin a scheduled run.

        Args:
            id: its id.
            jobs, run, options: see `RolloutRunner`.
            size: bytes of the rows.

        Raises:
            Overloaded: there are too many rows.
        """
        self.reserve(size)
        stored = self._runs[id] = ScheduledRun(id, self._ttl, self._expired)
        stored.held = size
        stored.begin(jobs, run, options)

    def reserve(self, size: int) -> None:
        """Check that there is room for further rows.

        Raises:
            Overloaded: there is none.
        """
        held = sum(run.held for run in self._runs.values())
        if held and held + size > self._most_held:
            raise Overloaded(
                f"the gateway holds {held} bytes of waiting rows, of at most {self._most_held} in all runs; "
                "send these later",
                retry_after=_RETRY_SECONDS,
            )

    async def delete(self, id: str) -> None:
        """Drop a run, and cancel what still runs of it."""
        if (run := self._runs.pop(id, None)) is not None:
            self._on_drop(id)
            await run.stop()

    async def close(self) -> None:
        """Drop all runs."""
        for id in list(self._runs):
            await self.delete(id)
        await asyncio.gather(*self._ending)

    def new_id(self) -> str:
        """The id of a run that is to begin.

        Raises:
            Overloaded: there are too many runs.
        """
        if len(self._runs) >= self._most:
            read = next((run for run in self._runs.values() if run.delivered), None)
            if read is None:
                raise Overloaded(
                    f"the gateway holds {len(self._runs)} runs, of at most {self._most} (gateway.max_runs); "
                    "delete those that you no longer need",
                    retry_after=_RETRY_SECONDS,
                )
            self._expired(read)
        return f"{self.replica}.{secrets.token_urlsafe(24)}"

    def _expired(self, run: StoredRun) -> None:
        self._runs.pop(run.id, None)
        self._on_drop(run.id)
        ending = asyncio.ensure_future(run.stop())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
