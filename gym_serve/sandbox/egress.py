"""`EgressProxy`: programs in a box reach the hosts of a list by HTTP and HTTPS, and nothing else.

The programs are hostile. The box has no network and looks no name up: it asks this proxy, which looks up
names of the list alone, checks the address, and connects to that one. Requests of HTTP are read and written
anew by h11, for the host that was asked for. Of HTTPS, which only its two ends can read, the first message
must name that host.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import h11
from yarl import URL

from gym_serve.sandbox.hosts import HostList, address_of

PORT = 3128
"""Where the proxy is on the loopback of a box."""

_HTTP, _HTTPS = 80, 443
_MOST_CONNECTIONS = 64
_MOST_LOOKUPS = 4  # names that are looked up at the same time
_WAIT_SECONDS = 30.0  # for the beginning of a request, for a name, and for a connection
_MOST_BEGUN = 1 << 16  # bytes of the first message of TLS
_CHUNK = 1 << 16
_NOT_PASSED_ON = {
    *(b"host", b"connection", b"keep-alive", b"te", b"trailer", b"upgrade", b"expect"),
    *(b"proxy-connection", b"proxy-authorization", b"proxy-authenticate"),
}


def proxy_variables() -> dict[str, str]:
    """The environment variables in which programs find the proxy."""
    url = f"http://127.0.0.1:{PORT}"
    named = {"HTTP_PROXY": url, "HTTPS_PROXY": url, "NO_PROXY": "localhost,127.0.0.1"}
    return {**named, **{name.lower(): value for name, value in named.items()}}


class EgressProxy:
    """Answers at a socket as a proxy does; an async context manager.

    Args:
        listener: where the programs ask; closed at the end.
        hosts: those that they may reach; see `HostList`.
    """

    def __init__(self, listener: socket.socket, hosts: Iterable[str]) -> None:
        self._listener = listener
        self._hosts = HostList(hosts)
        self._tasks: set[asyncio.Task[None]] = set()
        # Of its own: names that are slow, which a program may choose, make nobody else wait.
        self._resolver = ThreadPoolExecutor(_MOST_LOOKUPS, "names")

    async def __aenter__(self) -> EgressProxy:
        self._server = await asyncio.start_server(self._accept, sock=self._listener)
        return self

    async def __aexit__(self, *raised: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._resolver.shutdown(wait=False, cancel_futures=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= _MOST_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._answer(_Side(h11.SERVER, reader, writer)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, client: _Side) -> None:
        try:
            request = await asyncio.wait_for(client.head(400), _WAIT_SECONDS)
            if isinstance(request, h11.Request):
                await (self._tunnel if request.method == b"CONNECT" else self._pass_on)(client, request)
        except _Refusal as refusal:
            with suppress(OSError):
                await client.refuse(refusal)
        except (OSError, asyncio.TimeoutError, h11.ProtocolError):
            pass  # the program, or the host, does not speak HTTP or has left: it sees the connection end
        finally:
            client.writer.transport.abort() if client.failed else client.writer.close()

    async def _connected(self, host: str, port: int, role: Any) -> _Side:
        """A connection to a host of the list. Raises `_Refusal`."""
        if not self._hosts.has(host):
            raise _Refusal(403, f"{host} is not one of the hosts that this box may reach")
        addresses = [host] if address_of(host) else await self._admitted(host, port)
        for address in addresses:  # never the name: it could have another address by now
            try:
                opened = await asyncio.wait_for(asyncio.open_connection(address, port), _WAIT_SECONDS)
            except (OSError, asyncio.TimeoutError):
                continue
            return _Side(role, *opened)
        raise _Refusal(502, f"{host} does not answer")

    async def _admitted(self, host: str, port: int) -> list[str]:
        """The addresses of a name of the list that may be connected to. Raises `_Refusal`: there is none."""
        look = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        looked_up = asyncio.get_running_loop().run_in_executor(self._resolver, look)
        try:
            resolved = await asyncio.wait_for(looked_up, _WAIT_SECONDS)
        except (OSError, UnicodeError, asyncio.TimeoutError):
            raise _Refusal(502, f"there is no {host}") from None
        addresses = dict.fromkeys(str(each[4][0]) for each in resolved)
        if not (admitted := [each for each in addresses if self._hosts.admits(each)]):
            raise _Refusal(403, f"{host} has no public address, and the list has none of its others")
        return admitted

    async def _tunnel(self, client: _Side, request: h11.Request) -> None:
        host, _, port = request.target.decode("ascii").rpartition(":")
        host = _plain(host)
        if port != str(_HTTPS):
            raise _Refusal(403, f"CONNECT is for HTTPS, at port {_HTTPS}")
        if not isinstance(await client.next(), h11.EndOfMessage):
            raise _Refusal(400, "CONNECT has no body")
        server = await self._connected(host, _HTTPS, h11.CLIENT)
        try:
            await client.send(h11.Response(status_code=200, headers=[]))
            begun = await asyncio.wait_for(_hello(client, host), _WAIT_SECONDS)
            if begun is None:
                client.failed = True
                return
            server.writer.write(begun)
            await asyncio.gather(_copy(client, server), _copy(server, client))
        finally:
            server.writer.transport.abort()

    async def _pass_on(self, client: _Side, request: h11.Request) -> None:
        try:
            url = URL(request.target.decode("ascii"), encoded=True)
            port, host = url.port, _plain(url.raw_host or "")
        except ValueError:
            raise _Refusal(400, "the target is no URL") from None
        if url.scheme != "http" or not host or url.user is not None:
            raise _Refusal(400, "this is a proxy: it takes http://HOST/..., and CONNECT")
        if port != _HTTP:
            raise _Refusal(403, f"HTTP is for port {_HTTP}")
        server = await self._connected(host, _HTTP, h11.CLIENT)
        try:
            named = f"[{host}]" if ":" in host else host
            headers = [(b"host", named.encode()), *_passed_on(request.headers)]
            await server.send(h11.Request(method=request.method, target=url.raw_path_qs, headers=headers))
            if client.http.they_are_waiting_for_100_continue:
                await client.send(h11.InformationalResponse(status_code=100, headers=[]))
            body = asyncio.create_task(client.give_body(server))
            try:
                await self._pass_back(server, client)
            finally:
                body.cancel()
                await asyncio.gather(body, return_exceptions=True)
        finally:
            server.writer.transport.abort()

    async def _pass_back(self, server: _Side, client: _Side) -> None:
        while isinstance(answer := await server.head(502), h11.InformationalResponse):
            pass
        if not isinstance(answer, h11.Response):
            raise _Refusal(502, "the host gave no answer")
        headers = [(b"connection", b"close"), *_passed_on(answer.headers)]
        await client.send(h11.Response(status_code=answer.status_code, headers=headers, reason=answer.reason))
        await server.give_body(client)


class _Refusal(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Side:
    """A connection, and HTTP as it is spoken there."""

    def __init__(self, role: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.http = h11.Connection(role)
        self.reader = reader
        self.writer = writer
        self.failed = False
        """Whether the other end must not take what it has got for all."""

    async def next(self) -> Any:
        while (event := self.http.next_event()) is h11.NEED_DATA:
            self.http.receive_data(await self.reader.read(_CHUNK))
        return event

    async def head(self, status: int) -> Any:
        """What a message begins with. Raises `_Refusal` with this status: it is not HTTP."""
        try:
            return await self.next()
        except h11.RemoteProtocolError as error:
            raise _Refusal(status, f"this is not HTTP: {error}") from None

    async def send(self, event: Any) -> None:
        if data := self.http.send(event):
            self.writer.write(data)
            await self.writer.drain()

    async def give_body(self, other: _Side) -> None:
        """Pass on what follows the head of a message, to its end."""
        while isinstance(event := await self.next(), h11.Data):
            await other.send(h11.Data(data=event.data))
        if not isinstance(event, h11.EndOfMessage):
            raise ConnectionError("the message has no end")
        await other.send(h11.EndOfMessage())

    async def refuse(self, refusal: _Refusal) -> None:
        if self.http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.failed = True
            return
        text = f"{refusal}\n".encode()
        headers = [("content-length", str(len(text))), ("connection", "close")]
        await self.send(h11.Response(status_code=refusal.status, headers=headers))
        await self.send(h11.Data(data=text))
        await self.send(h11.EndOfMessage())


def _plain(host: str) -> str:
    """A host as `HostList` compares it."""
    return host.removeprefix("[").removesuffix("]").lower().rstrip(".")


def _passed_on(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers of a message that are for its receiver; its length is told once."""
    fields = list(headers)
    left_out = _NOT_PASSED_ON | {
        word.strip().lower() for name, value in fields if name == b"connection" for word in value.split(b",")
    }
    if any(name == b"transfer-encoding" for name, _ in fields):
        left_out.add(b"content-length")
    left_out -= {b"transfer-encoding"}
    return [(name, value) for name, value in fields if name not in left_out]


async def _hello(client: _Side, host: str) -> bytes | None:
    """The first bytes of a tunnel, if a client of TLS asks for this host there; else None. Each byte is read
    once, in however many parts it comes."""
    begun, message, at = bytearray(client.http.trailing_data[0]), bytearray(), 0

    async def has(size: int) -> bool:
        while len(begun) < size <= _MOST_BEGUN and (chunk := await client.reader.read(_CHUNK)):
            begun.extend(chunk)
        return len(begun) >= size

    while len(message) < 4 or len(message) < 4 + int.from_bytes(message[1:4], "big"):
        if not await has(at + 1) or begun[at] != 0x16 or not await has(at + 5):
            return None  # no handshake
        start, at = at + 5, at + 5 + int.from_bytes(begun[at + 3 : at + 5], "big")
        if not await has(at):
            return None
        message += begun[start:at]
        if message and message[0] != 1:
            return None  # a client does not begin with it
    try:
        return bytes(begun) if _asks_for(bytes(message), host) else None
    except EOFError:
        return None


def _asks_for(message: bytes, host: str) -> bool:
    """Whether the first message of TLS (RFC 8446, 4.1.2) names a host, or none if that is an address (RFC
    6066, 3). Raises EOFError: a field is longer than what it is in."""
    hello, _ = _field(message, 1, 3)
    at = 34  # version, random
    for size in (1, 2, 1):  # session, ciphers, compressions
        _, at = _field(hello, at, size)
    extensions, _ = _field(hello, at, 2)
    named, at = [], 0
    while at < len(extensions):
        kind = extensions[at : at + 2]
        content, at = _field(extensions, at + 2, 2)
        if kind == b"\0\0":
            named.append(content.lower())
    name = b"\0" + len(host).to_bytes(2, "big") + host.encode()
    return named == ([] if address_of(host) else [len(name).to_bytes(2, "big") + name])


def _field(data: bytes, at: int, size: int) -> tuple[bytes, int]:
    """A field with its length in front, which has ``size`` bytes; and where it ends."""
    start = at + size
    end = start + int.from_bytes(data[at:start], "big")
    if not start <= end <= len(data):
        raise EOFError
    return data[start:end], end


async def _copy(source: _Side, target: _Side) -> None:
    while data := await source.reader.read(_CHUNK):
        target.writer.write(data)
        await target.writer.drain()
    if target.writer.can_write_eof():
        target.writer.write_eof()
