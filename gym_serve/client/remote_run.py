"""`RemoteRun`: the rollouts of this process on a graph that is reached over HTTP, all in one run.

The episodes of all agents travel together: rows go out in batches, as many as have come while the batch
before them was on its way, and rollouts come back in one stream (``POST /rollouts`` with ``open``,
docs/http.md). So a rollout costs neither side a request of its own.

Which rollouts to make, and when to retry, is decided in this process as for any other graph. Connections may
break at any time: each row has a number, by which the gateway knows one that has come before, and each line a
cursor, behind which it goes on. If the gateway that holds the run is gone, the rows whose rollouts are
missing go into a new run. A caller gets one answer whatever comes twice.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from contextlib import suppress
from itertools import count
from typing import Any

import aiohttp
import msgspec

from gym_serve.routing.http import HttpTransport, misdirected, with_endpoint, without
from gym_serve.servers.context import time_limit, wait_until
from gym_serve.servers.transport import Call, Reply, encode
from gym_serve.types.errors import (
    BadRequest,
    DeadlineExceeded,
    GymError,
    InvalidRequest,
    Overloaded,
    SessionLost,
    SessionNotFound,
    TooLarge,
    Unavailable,
)
from gym_serve.types.requests import JSON

logger = logging.getLogger("gym_serve")

_ROWS = 512  # of one request at most
_BYTES = 4 * 2**20
_CONCURRENCY = 4096  # the callers of this process have limits of their own
_IDLE_SECONDS = 2.0  # without rollouts after which the run is deleted
_SILENT_SECONDS = 20.0  # after which a connection is dead: the gateway gives a sign of life every five
_PATIENCE_SECONDS = 15.0  # for which a gateway may not be reached
_PAUSES = (0.0, 0.05, 0.2, 0.5, 1.0)  # seconds before a request is tried again
_MOVES = 3  # how often a row may go into a new run: it may be the row that ends its gateway
_DELETE_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
_GONE = (SessionNotFound, SessionLost)


class _Line(msgspec.Struct):
    cursor: int
    row: int | None = None
    rollout: msgspec.Raw = msgspec.Raw()
    status: int = 500
    error: msgspec.Raw = msgspec.Raw()


_LINES = msgspec.json.Decoder(_Line)
_BROKEN = (aiohttp.ClientError, OSError, asyncio.TimeoutError, msgspec.DecodeError)
"""What a connection that breaks raises, also where a proxy writes a page of its own into the stream."""


class _Waiting:
    """A caller that waits for a rollout."""

    __slots__ = ("agent", "answer", "moves", "number", "row", "traceparent")

    def __init__(self, agent: str, row: bytes, traceparent: str | None) -> None:
        self.agent = agent
        self.row = row
        self.traceparent = traceparent
        self.number = -1
        self.moves = 0
        self.answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()


class RemoteRun:
    """The run of this process on a graph at a URL. Use it in one event loop.

    Args:
        url: of the graph.
        headers: of every request.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url = f"{url}/rollouts"
        self._headers = {**headers, "content-type": "application/json"}
        self._unsent: deque[_Waiting] = deque()
        self._sent: dict[int, _Waiting] = {}
        self._cancelled: list[int] = []
        self._next = 0
        self._most = _ROWS
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def episode(self, agent: str, row: bytes, traceparent: str | None = None) -> Reply:
        """One episode of a row; cancelling it cancels the episode.

        Args:
            agent: who runs it.
            row: its JSON.
            traceparent: the span that it is a part of.

        Returns:
            what ``POST /{agent}/run`` answers. Where the graph cannot be reached, that is a failure, too.
        """
        waiting = _Waiting(agent, row, traceparent)
        self._unsent.append(waiting)
        self._wake.set()
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._serve())
        try:
            return await waiting.answer
        except asyncio.CancelledError:
            if self._sent.get(waiting.number) is waiting:
                del self._sent[waiting.number]
                self._cancelled.append(waiting.number)
                self._wake.set()
            else:
                with suppress(ValueError):
                    self._unsent.remove(waiting)
            raise

    async def close(self) -> None:
        """Delete the run; its rollouts are cancelled."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _serve(self) -> None:
        """Send rows and take rollouts until there are none any more."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=_SILENT_SECONDS)
        while self._unsent or self._sent:
            async with aiohttp.ClientSession(headers=self._headers, timeout=timeout, trust_env=True) as http:
                self._http = http
                try:
                    while self._unsent or self._sent:
                        with suppress(*_GONE):  # what is missing goes into a new run
                            await self._run()
                except GymError as error:
                    self._end(error)
                except Exception as error:  # nobody must wait for ever
                    logger.exception("the rollouts of %s failed", self._url)
                    self._end(GymError(f"{self._url}: {type(error).__name__}: {error}"))

    async def _run(self) -> None:
        """One run, until nothing is left for a while.

        Raises:
            SessionNotFound, SessionLost: the gateway does not hold the run any more.
            GymError: the graph cannot be reached, or refuses requests.
        """
        body = encode({"open": True, "concurrency": _CONCURRENCY})
        key = {"idempotency-key": secrets.token_hex(16)}
        run = (await self._ask("POST", "", body, **key))["run"]
        self._begin()
        try:
            await _first(self._send(run), self._receive(run))
        finally:
            await self._delete(run)

    def _begin(self) -> None:
        """All rows whose rollouts are missing belong to a new run."""
        missing = list(self._sent.values())
        self._sent.clear()
        self._cancelled.clear()
        self._next = 0
        for waiting in missing:
            waiting.moves += 1
        lost = [waiting for waiting in missing if waiting.moves > _MOVES]
        _fail(lost, Unavailable(f"{self._url}: {_MOVES + 1} gateways have died with this rollout"))
        self._unsent.extendleft(reversed([waiting for waiting in missing if waiting.moves <= _MOVES]))

    async def _send(self, run: str) -> None:
        """Send rows and cancellations until nothing is left for a while."""
        while True:
            if self._cancelled:
                gone, self._cancelled = self._cancelled, []
                await self._ask("POST", f"/{run}/cancel", encode({"rows": gone}))
            elif batch := self._batch():
                await self._post(run, batch)
            else:
                self._wake.clear()
                if await wait_until(self._wake, _IDLE_SECONDS):
                    continue
                if not (self._sent or self._unsent or self._cancelled):
                    return

    def _batch(self) -> list[_Waiting]:
        """Rows of one agent, which are numbered now."""
        batch: list[_Waiting] = []
        size = 0
        while self._unsent and len(batch) < self._most and size < _BYTES:
            if batch and self._unsent[0].agent != batch[0].agent:
                break
            waiting = self._unsent.popleft()
            waiting.number = self._next
            self._sent[self._next] = waiting
            self._next += 1
            size += len(waiting.row)
            batch.append(waiting)
        return batch

    async def _post(self, run: str, batch: list[_Waiting]) -> None:
        first = batch[0].number
        spans = {str(w.number): w.traceparent for w in batch if w.traceparent is not None}
        members = {"agent": batch[0].agent, "first": first, **({"traceparents": spans} if spans else {})}
        body = b'%s,"rows":[%s]}' % (encode(members)[:-1], b",".join(w.row for w in batch))
        try:
            await self._ask("POST", f"/{run}/rows", body)
        except (BadRequest, InvalidRequest, Overloaded, TooLarge) as error:
            # None of them has come, so their numbers are free again. After any other failure, nobody knows.
            self._next = first
            self._cancelled = [number for number in self._cancelled if number < first]
            left = [w for w in batch if self._sent.pop(w.number, None) is not None]
            if isinstance(error, TooLarge) and len(batch) > 1:
                self._most = len(batch) // 2
                self._unsent.extendleft(reversed(left))
            else:
                _fail(left, error)

    async def _receive(self, run: str) -> None:
        """Take lines, for ever."""
        cursor, tries, heard = 0, 0, time.monotonic()
        while True:
            before = cursor
            try:
                async for line in self._lines(f"/{run}?after={cursor}"):
                    cursor, heard = self._take(line), time.monotonic()
            except (*_BROKEN, Overloaded, Unavailable) as error:
                if time.monotonic() - heard > _PATIENCE_SECONDS:
                    raise (error if isinstance(error, GymError) else self._unreachable(error)) from error
            tries = 0 if cursor > before else tries + 1
            await asyncio.sleep(_PAUSES[min(tries, len(_PAUSES) - 1)])

    async def _lines(self, path: str) -> AsyncIterator[bytes]:
        async with self._request("GET", path) as answer:
            if answer.status != 200:
                self._checked(answer, await answer.read())
            rest = b""
            async for chunk in answer.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield line

    def _take(self, data: bytes) -> int:
        """Give a line to the caller that waits for it; its cursor."""
        line = _LINES.decode(data)
        if line.row is not None and (waiting := self._sent.pop(line.row, None)) is not None:
            if line.rollout:
                reply = Reply(200, bytes(line.rollout))
            else:
                reply = Reply(line.status, b'{"error":%s}' % bytes(line.error))
            if not waiting.answer.done():
                waiting.answer.set_result(reply)
        return line.cursor

    async def _ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> JSON:
        """What the gateway answers; a request whose answer is lost is sent again.

        Raises:
            Unavailable: it was not reached for a while.
            GymError: its refusal.
        """
        give_up = time.monotonic() + _PATIENCE_SECONDS
        for tries in count():
            pause = _PAUSES[min(tries, len(_PAUSES) - 1)]
            failure: GymError
            try:
                async with self._request(method, path, data=body, headers=headers) as answer:
                    return self._checked(answer, await answer.read())
            except _BROKEN as error:
                failure = self._unreachable(error)
            except (Overloaded, Unavailable) as error:
                failure, pause = error, max(pause, error.retry_after or 0.0)
            if time.monotonic() + pause > give_up:
                raise failure
            await asyncio.sleep(pause)
        raise AssertionError

    def _request(self, method: str, path: str, **options: Any) -> Any:
        return self._http.request(method, f"{self._url}{path}", allow_redirects=False, **options)

    def _checked(self, answer: aiohttp.ClientResponse, content: bytes) -> JSON:
        if (error := misdirected(self._url, answer.status, answer.headers, content)) is not None:
            raise error
        body: JSON = Reply(answer.status, content).json()
        return body

    def _unreachable(self, error: Exception) -> Unavailable:
        return Unavailable(f"{self._url} was not reached: {type(error).__name__}: {error}")

    async def _delete(self, run: str) -> None:
        with suppress(*_BROKEN):  # nobody asks for it any more, so its gateway drops it later
            async with self._request("DELETE", f"/{run}", timeout=_DELETE_TIMEOUT):
                pass

    def _end(self, error: GymError) -> None:
        """Answer all callers with an error."""
        waiting = [*self._sent.values(), *self._unsent]
        self._sent.clear()
        self._unsent.clear()
        self._cancelled.clear()
        _fail(waiting, error)


class RemoteAgent(HttpTransport):
    """Reaches an agent of a graph at a URL: its episodes by a run, all else by a request each.

    Args:
        server: its name.
        url: of the graph.
        headers: of every request.
        run: the run.
    """

    def __init__(self, server: str, url: str, headers: Mapping[str, str], run: RemoteRun) -> None:
        super().__init__(server, f"{url}/{server}", headers)
        self._run = run

    async def call(self, call: Call) -> Reply:
        """See `Transport.call`."""
        if call.op != "run":
            return await super().call(call)
        hidden: list[str] = []
        if call.endpoint is not None:
            hidden, call = call.endpoint.secrets, with_endpoint(call)
        try:
            with time_limit(call.timeout):
                reply = await self._run.episode(self.server, call.body, call.traceparent)
        except (asyncio.TimeoutError, TimeoutError):
            raise DeadlineExceeded(
                f"{self.url} did not answer run within {call.timeout:.6g} s", server=self.server
            ) from None
        return reply._replace(body=without(hidden, reply.body))

    async def close(self) -> None:
        """See `Transport.close`."""
        await self._run.close()
        await super().close()


def _fail(waiting: Iterable[_Waiting], error: GymError) -> None:
    for one in waiting:
        if not one.answer.done():
            one.answer.set_result(Reply.failed(error))


async def _first(*work: Coroutine[Any, Any, None]) -> None:
    """Run both until one ends or raises."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
