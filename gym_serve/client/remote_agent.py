"""`RemoteAgent`: an agent of a graph at a URL, whose episodes travel in batches.

The rows that callers have at the same time go out in one request, and their rollouts come back in its stream
(`gym_serve.gateway.batch`). So a rollout costs neither side a request of its own.

Which rollouts to make, and when to retry, is decided in this process as for any other graph. A connection
may break at any time: the rows whose rollouts are missing are sent again. A caller gets one answer whatever
comes twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from urllib.request import getproxies

import aiohttp
import msgspec

from gym_serve.servers.context import time_limit
from gym_serve.servers.transport import Call, Reply, encode
from gym_serve.transports import HttpTransport, misdirected, with_endpoint, without
from gym_serve.types.errors import (
    BadRequest,
    DeadlineExceeded,
    GymError,
    InvalidRequest,
    TooLarge,
    Unavailable,
)

logger = logging.getLogger("gym_serve")

_ROWS = 512  # of one request at most
_BYTES = 4 * 2**20
_CONCURRENCY = 4096  # the callers of this process have limits of their own
_LINGER_SECONDS = 0.01  # for which rows are gathered
_IDLE_SECONDS = 2.0  # without rows after which the connections are closed
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=20.0)
"""A connection that is silent for so long is dead: the gateway gives a sign of life every five seconds."""
_PATIENCE_SECONDS = 15.0  # for which a gateway may not be reached
_PAUSES = (0.0, 0.05, 0.2, 0.5, 1.0)  # seconds before missing rows are sent again
_CUTS = 5  # how often the response to a row alone may be cut off: it may be the row that ends its gateway


class _Line(msgspec.Struct):
    row: int | None = None
    rollout: msgspec.Raw = msgspec.Raw()
    status: int = 500
    error: msgspec.Raw = msgspec.Raw()


_LINES = msgspec.json.Decoder(_Line)
_BROKEN = (aiohttp.ClientError, OSError, asyncio.TimeoutError, msgspec.DecodeError)
"""What a connection that breaks raises, also where a proxy writes a page of its own into the stream."""


class _Waiting:
    __slots__ = ("agent", "answer", "cuts", "row", "traceparent")

    def __init__(self, agent: str, row: bytes, traceparent: str | None) -> None:
        self.agent = agent
        self.row = row
        self.traceparent = traceparent
        self.cuts = 0
        self.answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()


class Batcher:
    """Sends the rows of this process to a graph at a URL, in batches. Use it in one event loop."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url = f"{url}/rollouts"
        self._headers = {**headers, "content-type": "application/json"}
        self._unsent: deque[_Waiting] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._batches: dict[asyncio.Task[None], list[_Waiting]] = {}
        self._http: aiohttp.ClientSession | None = None

    async def episode(self, agent: str, row: bytes, traceparent: str | None = None) -> Reply:
        """One episode of a row. Cancelling all callers of a batch cancels its episodes. Returns what
        ``POST /{agent}/run`` answers. Where the graph cannot be reached, that is a failure, too."""
        waiting = _Waiting(agent, row, traceparent)
        self._unsent.append(waiting)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.ensure_future(self._send_soon())
        try:
            return await waiting.answer
        except asyncio.CancelledError:
            waiting.answer.cancel()
            for task, batch in list(self._batches.items()):
                if all(one.answer.done() for one in batch):
                    task.cancel()
            raise

    async def close(self) -> None:
        """Cancel the rollouts that still run."""
        tasks = [*self._batches, *([self._sending] if self._sending else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def _send_soon(self) -> None:
        # Nothing is gained by waiting for others where none is under way: only the end of a response may be.
        if any(not one.answer.done() for batch in self._batches.values() for one in batch):
            await asyncio.sleep(_LINGER_SECONDS)
        while batch := self._next_batch():
            self._begin(batch)

    def _next_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        size = 0
        while self._unsent and len(batch) < _ROWS and size < _BYTES:
            if batch and self._unsent[0].agent != batch[0].agent:
                break
            waiting = self._unsent.popleft()
            if not waiting.answer.done():
                size += len(waiting.row)
                batch.append(waiting)
        return batch

    def _begin(self, batch: list[_Waiting]) -> None:
        task = asyncio.ensure_future(self._run(batch))
        self._batches[task] = batch
        task.add_done_callback(self._ended)

    def _halve(self, batch: list[_Waiting]) -> None:
        """Send a batch as two: which row is refused, or ends its gateway, shows when it is alone."""
        half = len(batch) // 2
        self._begin(batch[:half])
        self._begin(batch[half:])

    async def _run(self, batch: list[_Waiting]) -> None:
        """Send a batch, and again those of its rows that are missing."""
        heard, tries = time.monotonic(), 0
        try:
            while batch:
                began, before = False, len(batch)
                try:
                    async for line in self._lines(batch):
                        began, heard = True, time.monotonic()
                        if line:
                            _answer(batch, line)
                    failure: GymError = Unavailable(f"{self._url}: the response was cut off")
                except (BadRequest, InvalidRequest, TooLarge):
                    if len(batch) == 1:
                        raise
                    self._halve(batch)
                    return
                except _BROKEN as error:
                    failure = Unavailable(f"{self._url} was not reached: {type(error).__name__}: {error}")
                except Unavailable as error:
                    failure = error
                batch = [one for one in batch if not one.answer.done()]
                if began and 1 < len(batch) == before:
                    self._halve(batch)
                    return
                if began and len(batch) == 1:
                    batch[0].cuts += 1
                if time.monotonic() - heard > _PATIENCE_SECONDS or any(one.cuts > _CUTS for one in batch):
                    raise failure
                tries = tries + 1 if len(batch) == before else 0
                await asyncio.sleep(max(_PAUSES[min(tries, len(_PAUSES) - 1)], failure.retry_after or 0.0))
        except GymError as error:
            _fail(batch, error)
        except Exception as error:  # nobody must wait for ever
            logger.exception("the rollouts of %s failed", self._url)
            _fail(batch, GymError(f"{self._url}: {type(error).__name__}: {error}"))

    async def _lines(self, batch: Sequence[_Waiting]) -> AsyncIterator[bytes]:
        """The lines of one response; the first one is empty, and says that the gateway has taken the rows."""
        spans = {str(n): one.traceparent for n, one in enumerate(batch) if one.traceparent is not None}
        members = {"agent": batch[0].agent, "concurrency": _CONCURRENCY, "traceparents": spans}
        body = b'%s,"rows":[%s]}' % (encode(members)[:-1], b",".join(one.row for one in batch))
        if self._http is None:
            # For each request, `trust_env` reads the variables again, and ~/.netrc in another thread.
            proxies = bool(getproxies())
            self._http = aiohttp.ClientSession(headers=self._headers, timeout=_TIMEOUT, trust_env=proxies)
        async with self._http.post(self._url, data=body, allow_redirects=False) as answer:
            if answer.status != 200:
                content = await answer.read()
                if (error := misdirected(self._url, answer.status, answer.headers, content)) is not None:
                    raise error
                Reply(answer.status, content).json()  # raises what it is
            yield b""
            rest = b""
            async for chunk in answer.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield line

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._batches[task]
        if not self._batches:  # nobody else closes the connections
            asyncio.get_running_loop().call_later(_IDLE_SECONDS, self._disconnect)

    def _disconnect(self) -> None:
        if not self._batches and self._http is not None:
            self._closing = asyncio.ensure_future(self._http.close())
            self._http = None


class RemoteAgent(HttpTransport):
    """Reaches an agent of a graph at a URL: its episodes in batches, all else by a request each."""

    def __init__(self, server: str, url: str, headers: Mapping[str, str], batcher: Batcher) -> None:
        super().__init__(server, f"{url}/{server}", headers)
        self._batcher = batcher

    async def call(self, call: Call) -> Reply:
        if call.op != "run":
            return await super().call(call)
        hidden: list[str] = []
        if call.endpoint is not None:
            hidden, call = call.endpoint.secrets, with_endpoint(call)
        try:
            with time_limit(call.timeout):
                reply = await self._batcher.episode(self.server, call.body, call.traceparent)
        except (asyncio.TimeoutError, TimeoutError):
            raise DeadlineExceeded(
                f"{self.url} did not answer run within {call.timeout:.6g} s", server=self.server
            ) from None
        return reply._replace(body=without(hidden, reply.body))

    async def close(self) -> None:
        await self._batcher.close()
        await super().close()


def _answer(batch: Sequence[_Waiting], data: bytes) -> None:
    """Give a line to the caller that waits for it."""
    line = _LINES.decode(data)
    if line.row is None or batch[line.row].answer.done():
        return
    if line.rollout:
        reply = Reply(200, bytes(line.rollout))
    else:
        reply = Reply(line.status, b'{"error":%s}' % bytes(line.error))
    batch[line.row].answer.set_result(reply)


def _fail(batch: Sequence[_Waiting], error: GymError) -> None:
    for one in batch:
        if not one.answer.done():
            one.answer.set_result(Reply.failed(error))
