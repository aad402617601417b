"""`Listener`: the replica's end of the connections. Each carries the calls of one other process.

A caller that goes away cancels its calls. `stop` first answers every call that was read, then closes with
1001 ("going away"): a call without a reply was never begun, and is safe to retry on another replica.
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import msgspec
from aiohttp import web

from gym_serve.cluster.routing.rpc.channel import (
    CANCEL,
    FULL,
    LOAD,
    TAKEN,
    WINDOW,
    Message,
    Notification,
    Outbox,
    Part,
    QueueFullError,
    Request,
    Response,
    StreamRequest,
    decode,
)
from gym_serve.cluster.routing.rpc.network import (
    CALLER_HEADER,
    Address,
    check_certificate,
    enable_keepalive,
    listener_context,
)
from gym_serve.servers.context import CALLER, closing, time_limit
from gym_serve.servers.transport import Call, Reply
from gym_serve.types.errors import DeadlineExceeded, GymError

_OPENING_SECONDS = 10.0
_MOST_OPENING = 1024
"""A connection without the token is closed after 10 seconds, or once there are 1,024 younger ones."""

_LOAD_SECONDS = 1.0  # between two reports of the load, if it changed


class _Connection:
    def __init__(self, socket: web.WebSocketResponse, caller: str) -> None:
        self.socket = socket
        self.caller = caller
        self.outbox = Outbox(socket.send_bytes)
        self.calls: dict[int, asyncio.Task[None]] = {}
        self.streams: dict[int, asyncio.Semaphore] = {}  # room for parts on their way
        self.load = 0

    def cancel(self, id: int) -> None:
        call = self.calls.get(id)
        if call is not None:
            call.cancel()
            if inspect.getcoroutinestate(call.get_coro()) == inspect.CORO_CREATED:  # type: ignore[arg-type]
                self.ended(id)  # it came together with its cancellation, and will never run

    def taken(self, id: int, count: int) -> None:
        if (room := self.streams.get(id)) is not None:
            for _ in range(count):
                room.release()

    def ended(self, id: int) -> None:
        del self.calls[id]
        self.streams.pop(id, None)


class Listener:
    """Answers the calls of other processes. A call that raises `QueueFullError` was not begun; ``lost`` is
    told the name of a caller whose last connection has ended."""

    def __init__(
        self,
        dispatch: Callable[[Call], Awaitable[Reply]],
        stream: Callable[[Call], AsyncIterator[bytes]],
        load: Callable[[], int],
        lost: Callable[[str], None] = lambda caller: None,
    ) -> None:
        self._dispatch = dispatch
        self._stream = stream
        self._load = load
        self._lost = lost
        self._token = secrets.token_urlsafe(32)
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._opening: dict[web.RequestHandler, None] = {}
        self._reports: asyncio.Task[None] | None = None
        self._connections: set[_Connection] = set()
        self._stopping = False

    @property
    def calls(self) -> int:
        return sum(len(connection.calls) for connection in self._connections)

    def is_connected(self, caller: str) -> bool:
        return any(connection.caller == caller for connection in self._connections)

    async def start(self, host: str) -> Address:
        """Listen on a free port of ``host``, an address of this machine. Raises `ConnectionError` if Ray runs
        with TLS, and callers would refuse this node's certificate."""
        application = web.Application()
        application.router.add_get("/", self._accept)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        tls = listener_context()
        self._server = await asyncio.get_running_loop().create_server(
            self._connected,
            host,
            0,
            ssl=tls,
            backlog=_MOST_OPENING,
            ssl_handshake_timeout=_OPENING_SECONDS if tls else None,
        )
        port = self._server.sockets[0].getsockname()[1]
        await check_certificate(host, port)
        self._reports = asyncio.create_task(self._report())
        return Address(host, port, self._token)

    async def stop(self) -> None:
        self._stopping = True
        if self._reports is not None:
            self._reports.cancel()
        connections = list(self._connections)
        await asyncio.gather(
            *(task for connection in connections for task in connection.calls.values()),
            return_exceptions=True,
        )
        for connection in connections:
            await connection.outbox.flush()
            await connection.socket.close(code=aiohttp.WSCloseCode.GOING_AWAY)
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def _connected(self) -> web.RequestHandler:
        assert self._runner is not None
        assert self._runner.server is not None
        handler = self._runner.server()
        self._opening[handler] = None
        asyncio.get_running_loop().call_later(_OPENING_SECONDS, self._give_up, handler)
        if len(self._opening) > _MOST_OPENING:
            self._give_up(next(iter(self._opening)))
        return handler

    def _give_up(self, handler: web.RequestHandler) -> None:
        if handler in self._opening:
            del self._opening[handler]
            if handler.transport is not None:
                handler.transport.abort()

    async def _accept(self, request: web.Request) -> web.StreamResponse:
        shown = request.headers.get("authorization", "").encode()
        if self._stopping or not hmac.compare_digest(shown, f"Bearer {self._token}".encode()):
            return web.Response(status=503 if self._stopping else 401)
        self._opening.pop(request.protocol, None)
        if request.transport is not None:
            enable_keepalive(request.transport.get_extra_info("socket"))
        socket = web.WebSocketResponse(max_msg_size=0, compress=False)
        await socket.prepare(request)
        connection = _Connection(socket, request.headers.get(CALLER_HEADER, ""))
        CALLER.set(connection.caller)  # of the tasks that are made here: its calls
        self._connections.add(connection)
        writer = asyncio.create_task(connection.outbox.run())
        try:
            async for frame in socket:
                if frame.type is aiohttp.WSMsgType.BINARY:
                    messages = decode(frame.data)
                    self._read(connection, messages)
                    if len(messages) == FULL:
                        # These calls begin before the next ones are read: of thousands that begin at the
                        # same moment, each would leave 3 KB in the heap, of opening its connection.
                        await asyncio.sleep(0)
        except msgspec.DecodeError:
            await socket.close(code=aiohttp.WSCloseCode.UNSUPPORTED_DATA)
        finally:
            self._connections.discard(connection)
            writer.cancel()
            for task in connection.calls.values():
                task.cancel()
            await asyncio.gather(writer, *connection.calls.values(), return_exceptions=True)
            if connection.caller and not self._stopping and not self.is_connected(connection.caller):
                self._lost(connection.caller)
        return socket

    def _read(self, connection: _Connection, messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, Request):
                if not self._stopping:
                    if isinstance(message, StreamRequest):
                        connection.streams[message.id] = asyncio.Semaphore(WINDOW)
                    task = asyncio.create_task(self._run(connection, message))
                    connection.calls[message.id] = task
            elif isinstance(message, Notification) and message.method == CANCEL:
                connection.cancel(message.params[0])
            elif isinstance(message, Notification) and message.method == TAKEN:
                connection.taken(*message.params)

    async def _run(self, connection: _Connection, request: Request) -> None:
        try:
            if isinstance(request, StreamRequest):
                reply = await self._send_parts(connection, request.id, request.call)
            else:
                reply = await self._dispatch(request.call)
            connection.outbox.put(Response(request.id, None, reply))
        except QueueFullError as error:
            connection.outbox.put(Response(request.id, str(error), None))
        finally:
            connection.ended(request.id)

    async def _send_parts(self, connection: _Connection, id: int, call: Call) -> Reply:
        room = connection.streams[id]
        try:
            with time_limit(call.timeout):  # also for a reader that takes nothing
                async with closing(self._stream(call)) as parts:
                    async for part in parts:
                        await room.acquire()
                        connection.outbox.put(Part(id, part))
        except (asyncio.TimeoutError, TimeoutError):
            return Reply.failed(DeadlineExceeded(f"{call.op} took over {call.timeout:.3g} s"), call.session)
        except GymError as error:
            return Reply.failed(error, call.session)
        return Reply(200, b"", call.session)

    async def _report(self) -> None:
        """Report the load to idle callers as well, whose knowledge would be outdated otherwise."""
        while True:
            await asyncio.sleep(_LOAD_SECONDS)
            load = self._load()
            for connection in self._connections:
                if load != connection.load:
                    connection.load = load
                    connection.outbox.put(Notification(LOAD, [load]))
