"""`EgressProxy`: hosts of its list are reached, and nothing else is, whatever a program in a box sends."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import aiohttp
import pytest
import trustme
from aiohttp import web
from support.sandboxes import needs_bubblewrap
from yarl import URL

from gym_serve.sandbox import Listens, SandboxSpec, egress, find_provider
from gym_serve.sandbox.egress import EgressProxy

HERE = "127.0.0.1"
NAMES = {
    "named.test": [HERE],
    "also.named.test": [HERE],
    "private.test": ["127.0.0.2"],  # not in the list, as the first address is
    "several.test": ["10.0.0.1", "127.0.0.3", HERE],
    "other.test": [HERE],
    HERE: [HERE],
    "127.0.0.2": ["127.0.0.2"],
}
LIST = ("named.test", "*.named.test", "private.test", "several.test", "gone.test", HERE)


class Internet:
    """Hosts at this machine: one of HTTP and one of TLS; names that were looked up, requests that came."""

    def __init__(self) -> None:
        self.looked_up: list[str] = []
        self.asked: list[tuple[str, str, dict[str, str], bytes]] = []
        self.connections = 0
        self.ports = (0, 0)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.asked.append((request.method, request.raw_path, headers, await request.read()))
        if request.raw_path == "/moved":
            return web.Response(status=302, headers={"location": "http://other.test/"})
        response = web.StreamResponse(headers={"x-answer": "a", "connection": "x-secret", "x-secret": "b"})
        await response.prepare(request)
        await response.write(b"hello ")
        await response.write(request.raw_path.encode())
        return response


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
async def internet(monkeypatch: pytest.MonkeyPatch, authority: trustme.CA) -> AsyncIterator[Internet]:
    there = Internet()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("named.test", "also.named.test", "other.test", HERE).configure_cert(context)
    loop = asyncio.get_running_loop()

    def lookup(host: Any, port: Any, *rest: Any, **more: Any) -> list[Any]:
        there.looked_up.append(host)
        if host not in NAMES:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in NAMES[host]]

    class Counted(web.Server):
        def __call__(self) -> Any:
            there.connections += 1
            return super().__call__()

    servers = [await loop.create_server(Counted(there.answer), HERE, 0, ssl=each) for each in (None, context)]
    there.ports = tuple(server.sockets[0].getsockname()[1] for server in servers)  # type: ignore[assignment]
    monkeypatch.setattr(egress, "_HTTP", there.ports[0])
    monkeypatch.setattr(egress, "_HTTPS", there.ports[1])
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    yield there
    for server in servers:
        server.close()


@pytest.fixture
async def proxy(internet: Internet) -> AsyncIterator[str]:
    listener = socket.create_server((HERE, 0))
    url = f"http://{HERE}:{listener.getsockname()[1]}"
    async with EgressProxy(listener, LIST):
        yield url


async def sent(proxy: str, *parts: bytes, end: bool = False) -> bytes:
    """What the proxy answers to bytes, until it ends the connection."""
    reader, writer = await asyncio.open_connection(HERE, int(proxy.rpartition(":")[2]))
    answer = b""
    with suppress(OSError):  # the proxy has ended it
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        if end:
            writer.write_eof()
    with suppress(ConnectionResetError):
        while chunk := await asyncio.wait_for(reader.read(1 << 16), 20):
            answer += chunk
    writer.close()
    return answer


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def hello(name: str | None) -> bytes:
    """The first message of a client of TLS that asks for a host."""
    context = ssl.create_default_context()
    context.check_hostname = False
    out = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return out.read()


@pytest.mark.parametrize("host", ["named.test", "NAMED.test.", "also.named.test", HERE, "several.test"])
async def test_a_host_of_the_list_by_http(internet: Internet, proxy: str, host: str) -> None:
    async with aiohttp.ClientSession() as client:
        url = URL(f"http://{host}:{internet.ports[0]}/a?b=c%2Fd", encoded=True)
        headers = {"X-Given": "1", "Proxy-Authorization": "p", "Connection": "x-hop", "X-Hop": "2"}
        async with client.post(url, data=b"text" * 100_000, headers=headers, proxy=proxy) as answer:
            assert (answer.status, await answer.text()) == (200, "hello /a?b=c%2Fd")
            assert answer.headers["x-answer"] == "a"
            assert "x-secret" not in answer.headers
    [(method, path, seen, body)] = internet.asked
    assert (method, path, body) == ("POST", "/a?b=c%2Fd", b"text" * 100_000)
    assert seen["x-given"] == "1"
    assert not {"proxy-authorization", "x-hop"} & set(seen)


@pytest.mark.parametrize("host", ["named.test", "also.named.test", HERE])
async def test_a_host_of_the_list_by_https(
    internet: Internet, proxy: str, authority: trustme.CA, host: str
) -> None:
    async with aiohttp.ClientSession() as client:
        url = f"https://{host}:{internet.ports[1]}/a"
        async with client.post(url, data=b"text" * 100_000, proxy=proxy, ssl=trusting(authority)) as answer:
            assert await answer.text() == "hello /a"
    assert internet.asked[0][3] == b"text" * 100_000


async def test_a_redirect_is_the_programs_to_follow(internet: Internet, proxy: str) -> None:
    async with aiohttp.ClientSession() as client:
        url = f"http://named.test:{internet.ports[0]}/moved"
        async with client.get(url, proxy=proxy, allow_redirects=False) as answer:
            assert (answer.status, answer.headers["location"]) == (302, "http://other.test/")
    assert len(internet.asked) == 1


@pytest.mark.parametrize(
    ("head", "status"),
    [
        # another host
        ("GET http://other.test:HTTP/ HTTP/1.1", 403),
        ("GET http://named.test.other.test:HTTP/ HTTP/1.1", 403),
        ("GET http://xnamed.test:HTTP/ HTTP/1.1", 403),
        ("CONNECT other.test:HTTPS HTTP/1.1", 403),
        ("CONNECT secret-of-the-box.other.test:HTTPS HTTP/1.1", 403),
        # addresses
        ("GET http://127.0.0.2:HTTP/ HTTP/1.1", 403),
        ("GET http://2130706434:HTTP/ HTTP/1.1", 403),
        ("GET http://0x7f.1:HTTP/ HTTP/1.1", 403),
        ("GET http://[::1]:HTTP/ HTTP/1.1", 403),
        ("GET http://[::ffff:127.0.0.2]:HTTP/ HTTP/1.1", 403),
        ("GET http://localhost:HTTP/ HTTP/1.1", 403),
        ("GET http://0:HTTP/ HTTP/1.1", 403),
        ("CONNECT 127.0.0.2:HTTPS HTTP/1.1", 403),
        ("CONNECT [::1]:HTTPS HTTP/1.1", 403),
        ("CONNECT [::ffff:169.254.169.254]:HTTPS HTTP/1.1", 403),
        # a name of the list that leads inside, or nowhere
        ("GET http://private.test:HTTP/ HTTP/1.1", 403),
        ("CONNECT private.test:HTTPS HTTP/1.1", 403),
        ("GET http://gone.test:HTTP/ HTTP/1.1", 502),
        # other ports and schemes
        ("CONNECT named.test:22 HTTP/1.1", 403),
        ("CONNECT named.test:HTTP HTTP/1.1", 403),
        ("CONNECT named.test HTTP/1.1", 403),
        ("CONNECT named.test:0HTTPS HTTP/1.1", 403),
        ("GET http://named.test:25/ HTTP/1.1", 403),
        ("GET http://named.test:HTTPS/ HTTP/1.1", 403),
        ("GET https://named.test:HTTPS/ HTTP/1.1", 400),
        ("GET ftp://named.test:HTTP/ HTTP/1.1", 400),
        ("GET file:///etc/passwd HTTP/1.1", 400),
        # what is no request to a proxy
        ("GET / HTTP/1.1", 400),
        ("GET //named.test:HTTP/ HTTP/1.1", 400),
        ("OPTIONS * HTTP/1.1", 400),
        ("GET http://named.test@other.test:HTTP/ HTTP/1.1", 400),
        ("GET http://other.test#@named.test:HTTP/ HTTP/1.1", 403),
        ("GET http://other.test\\@named.test:HTTP/ HTTP/1.1", 400),
        ("GET http://named.test:HTTP%00.other.test/ HTTP/1.1", 400),
        ("GET http://named.test:99999/ HTTP/1.1", 400),
        ("GET http://:HTTP/ HTTP/1.1", 400),
    ],
)
async def test_what_is_refused(internet: Internet, proxy: str, head: str, status: int) -> None:
    head = head.replace("HTTPS/", f"{internet.ports[1]}/").replace("HTTPS ", f"{internet.ports[1]} ")
    head = head.replace(":HTTP/", f":{internet.ports[0]}/").replace(":HTTP ", f":{internet.ports[0]} ")
    head = head.replace(":HTTP%", f":{internet.ports[0]}%")
    answer = await sent(proxy, f"{head}\r\nHost: named.test\r\n\r\n".encode())
    assert answer.split()[1:2] == [str(status).encode()], answer
    assert internet.connections == 0
    assert set(internet.looked_up) <= {"private.test", "gone.test"}


@pytest.mark.parametrize("given", ["other.test", "127.0.0.1", "named.test\r\nHost: other.test", ""])
async def test_the_host_of_a_request_is_that_of_its_target(
    internet: Internet, proxy: str, given: str
) -> None:
    target = f"http://named.test:{internet.ports[0]}/"
    answer = await sent(proxy, f"GET {target} HTTP/1.1\r\nHost: {given}\r\n\r\n".encode())
    hosts = [headers["host"] for _, _, headers, _ in internet.asked]
    assert hosts == ([] if "\r" in given else ["named.test"]), answer


@pytest.mark.parametrize(
    "framing",
    [
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 60",
        "Content-Length: 5\r\nContent-Length: 60",
        "Transfer-Encoding: xchunked",
        "Transfer-Encoding: chunked, identity",
        "Transfer-Encoding : chunked",
        "Content-Length: 5\r\nConnection: content-length",
    ],
)
async def test_no_request_is_hidden_in_another(internet: Internet, proxy: str, framing: str) -> None:
    """What follows the first request of a connection, however long that says it is, reaches no host."""
    first = f"POST http://named.test:{internet.ports[0]}/first HTTP/1.1\r\nHost: a\r\n{framing}\r\n\r\n"
    hidden = "0\r\n\r\nGET /hidden HTTP/1.1\r\nHost: other.test\r\n\r\n"
    await sent(proxy, first.encode(), hidden.encode(), end=True)
    assert [path for _, path, _, _ in internet.asked] in ([], ["/first"])
    assert all(headers["host"].startswith("named.test") for _, _, headers, _ in internet.asked)


async def test_an_upgrade_is_not_passed_on(internet: Internet, proxy: str) -> None:
    upgrade = "Host: named.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nExpect: 100-continue"
    head = f"GET http://named.test:{internet.ports[0]}/ HTTP/1.1\r\n{upgrade}\r\n\r\n"
    assert b" 200 " in (await sent(proxy, head.encode()))
    assert not {"upgrade", "expect"} & set(internet.asked[0][2])


@pytest.mark.parametrize(
    "begun",
    [
        [hello("other.test")],
        [hello(None)],
        [hello("named.test.other.test")],
        [b"GET / HTTP/1.1\r\nHost: named.test\r\n\r\n"],
        [b"SSH-2.0-OpenSSH_9.2\r\n"],
        [b"\x16\x03\x01\xff\xff" + bytes(1 << 17)],
        [b"named.test" * 10_000],
        [hello("other.test")[:30], hello("other.test")[30:]],
        [hello("named.test")[:40], b"\0" * 600],
        [hello("named.test").replace(b"named.test", b"n\xfcmed.test")],
        [hello("named.test")[:-1]],  # and then nothing
    ],
)
async def test_a_tunnel_is_for_tls_with_its_own_host(
    internet: Internet, proxy: str, begun: list[bytes]
) -> None:
    head = f"CONNECT named.test:{internet.ports[1]} HTTP/1.1\r\nHost: named.test\r\n\r\n".encode()
    answer = await sent(proxy, head, *begun, end=True)
    assert answer.partition(b"\r\n\r\n")[2] == b"", answer  # nothing of the host
    assert internet.asked == []


async def test_the_first_message_may_come_with_the_request_and_in_parts(
    internet: Internet, proxy: str
) -> None:
    head = f"CONNECT named.test:{internet.ports[1]} HTTP/1.1\r\nHost: a\r\n\r\n".encode()
    whole = head + hello("Named.Test")
    parts = [whole[: len(head) + 9], whole[len(head) + 9 : len(head) + 100], whole[len(head) + 100 :]]
    answer = await sent(proxy, *parts, end=True)
    assert answer.partition(b"\r\n\r\n")[2][:1] == b"\x16", answer  # the host's first message


async def test_a_first_message_is_read_once_in_however_many_parts(
    internet: Internet, proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = 0

    def counted(*arguments: Any) -> Any:
        nonlocal fields
        fields += 1
        return field(*arguments)

    field = egress._field
    monkeypatch.setattr(egress, "_field", counted)
    head = f"CONNECT named.test:{internet.ports[1]} HTTP/1.1\r\nHost: a\r\n\r\n".encode()
    records = b"\x16\x03\x01\0\0" * 20  # which are empty
    await sent(proxy, head, *[records] * 50, end=True)
    assert fields <= 1000


async def test_what_is_checked_is_what_is_connected_to(
    internet: Internet, proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that has a good address when it is looked up first, and another one ever after."""
    opened: list[str] = []
    connect = asyncio.open_connection

    async def noted(host: str, port: int) -> Any:
        opened.append(host)
        NAMES["rebound.named.test"] = ["127.0.0.2"]
        return await connect(host, port)

    monkeypatch.setitem(NAMES, "rebound.named.test", [HERE])
    monkeypatch.setattr(egress.asyncio, "open_connection", noted)
    head = f"GET http://rebound.named.test:{internet.ports[0]}/ HTTP/1.1\r\nHost: a\r\n\r\n".encode()
    port = int(proxy.rpartition(":")[2])
    for status in (b"200", b"403"):
        reader, writer = await connect(HERE, port)
        writer.write(head)
        assert (await reader.read()).split()[1] == status
        writer.close()
    assert opened == [HERE]
    assert [host for host in internet.looked_up if host != HERE] == ["rebound.named.test"] * 2


async def test_slow_names_make_nobody_else_wait(
    internet: Internet, proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookup, answered = socket.getaddrinfo, threading.Event()

    def slow(host: Any, *rest: Any, **more: Any) -> Any:
        assert not host.startswith("slow") or answered.wait(60)
        return lookup(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slow)

    def head(name: str) -> bytes:
        return f"GET http://{name}.test:{internet.ports[0]}/ HTTP/1.1\r\nHost: a\r\n\r\n".encode()

    connections = [await asyncio.open_connection(HERE, int(proxy.rpartition(":")[2])) for _ in range(64)]
    for number, (_, writer) in enumerate(connections):
        writer.write(head(f"slow{number}.named"))
    await asyncio.sleep(0.5)
    listener = socket.create_server((HERE, 0))
    async with EgressProxy(listener, LIST):
        asked = sent(f"http://{HERE}:{listener.getsockname()[1]}", head("named"))
        work = asyncio.gather(asyncio.to_thread(int), asked)
        try:
            _, answer = await asyncio.wait_for(work, 20)
        finally:
            answered.set()
    assert answer.startswith(b"HTTP/1.1 200")
    for _, writer in connections:
        writer.close()


async def test_connections_are_few_and_end_with_the_proxy(internet: Internet) -> None:
    listener = socket.create_server((HERE, 0))
    port = listener.getsockname()[1]
    async with EgressProxy(listener, LIST):
        opened = [await asyncio.open_connection(HERE, port) for _ in range(80)]
        ended = [asyncio.create_task(reader.read()) for reader, _ in opened]
        _, waiting = await asyncio.wait(ended, timeout=1)
        assert len(waiting) == 64
    await asyncio.wait_for(asyncio.gather(*ended, return_exceptions=True), 20)
    for _, writer in opened:
        writer.close()


async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nthe model")
    writer.close()


@needs_bubblewrap
async def test_a_box_with_a_list(internet: Internet, authority: trustme.CA) -> None:
    http, https = internet.ports
    box = await find_provider("bubblewrap").create(
        SandboxSpec(network="allowlist", allowed_hosts=("named.test", HERE), env={"OWN": "1"})
    )
    await box.write("/ca.pem", authority.cert_pem.bytes())

    async def says(command: str) -> str:
        return (await box.exec(command, timeout=60)).text

    assert await says(f"curl -s http://named.test:{http}/a") == "hello /a"
    assert await says(f"curl -s --cacert /ca.pem https://named.test:{https}/b") == "hello /b"
    code = f"import urllib.request as u; print(u.urlopen('http://named.test:{http}/c').read())"
    assert await says(f'python3 -c "{code}"') == "b'hello /c'\n"
    assert len(internet.asked) == 3
    assert isinstance(box, Listens)
    async with await asyncio.start_server(greet, sock=await box.listen()) as model:
        port = model.sockets[0].getsockname()[1]
        assert await says(f"curl -s http://127.0.0.1:{port}/") == "the model"
    for refused in (
        f"curl -sf http://other.test:{http}/",
        f"curl -sf --cacert /ca.pem https://other.test:{https}/",
        f"curl -sf --cacert /ca.pem --connect-to other.test:{https}:named.test:{https} https://other.test:{https}/",
        f"curl -sf --noproxy '*' http://127.0.0.1:{http}/",
        f"curl -sf --noproxy '*' http://named.test:{http}/",
        f"curl -sf --proxytunnel http://named.test:{http}/",
        f"curl -sf --socks5-hostname 127.0.0.1:3128 http://named.test:{http}/",
        "getent hosts named.test",
        "ls /sys/class/net | grep -v lo; ip route 2>/dev/null | grep .",
    ):
        assert not (await box.exec(refused, timeout=60)).ok, refused
    assert len(internet.asked) == 3
    await box.close()
