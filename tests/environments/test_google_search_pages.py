"""Pages: what is fetched and what is not, against a real HTTP server behind public addresses."""

from __future__ import annotations

import asyncio
import gzip
import socket
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from support.addresses import PRIVATE, PUBLIC
from support.tables import each
from support.websites import Names, rerouted, website
from yarl import URL

from gym_serve.environments.google_search import pages
from gym_serve.environments.google_search.pages import (
    Page,
    PageText,
    WebPages,
    checked_url,
    decoded,
    shortened,
)
from gym_serve.types.errors import GymError, Overloaded, ToolFailed, Unavailable

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@given(st.text(max_size=60) | st.builds("http://{}".format, st.text(max_size=40)))
def test_any_text_is_a_url_or_is_refused(text: str) -> None:
    try:
        url = checked_url(text)
    except ToolFailed:
        return
    assert (url.scheme, url.port) in {("http", 80), ("https", 443)}
    assert url.host


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *each("http://", "", "page", "//host/x", "file:///etc/passwd", "ftp://host/x", "gopher://host:80/x"),
        *each("http://", "javascript:alert(1)", "http://"),
        *each("port 80", "http://host:8080/", "http://host:443/"),
        ("https://host:22/", "port 443"),
        *each("credentials", "https://user:secret@host/", "http://user@host/"),
        *each("not a URL", "http://[::1/", "http://host:99999/"),
        ("http://host/" + "x" * 3000, "2048 characters"),
    ],
)
def test_a_url_that_is_not_fetched(text: str, why: str) -> None:
    with pytest.raises(ToolFailed, match=why):
        checked_url(text)


def test_a_url_loses_its_fragment() -> None:
    assert str(checked_url(" https://Host.example/a?b=c#d ")) == "https://host.example/a?b=c"


# Fetching


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_PAUSE", 0.0)


class Internet:
    """Pages behind a table of names, and what was asked for."""

    def __init__(self, pages: WebPages, names: Names, opened: list[str], requests: list[web.Request]) -> None:
        self.pages = pages
        self.names = names
        self.opened = opened
        self.requests = requests

    async def get(self, url: str) -> Page:
        return await self.pages.get(checked_url(url))


@asynccontextmanager
async def internet(
    handler: Handler, *, names: dict[str, list[list[str]]] | None = None, timeout: float = 20
) -> AsyncIterator[Internet]:
    requests: list[web.Request] = []
    opened: list[str] = []

    async def noted(request: web.Request) -> web.StreamResponse:
        requests.append(request)
        return await handler(request)

    async with website(noted) as port:
        table = Names({"site.example": [[PUBLIC]], "inside.example": [["10.0.0.1"]], **(names or {})})
        pages = WebPages(10_000, timeout, 2, resolver=table, open_socket=rerouted(port, opened))
        await pages.start()
        try:
            yield Internet(pages, table, opened, requests)
        finally:
            await pages.stop()


async def hello(request: web.Request) -> web.Response:
    return web.Response(text="<p>Hello</p>", content_type="text/html")


async def failure(internet: Internet, url: str) -> str:
    with pytest.raises(GymError) as caught:
        await internet.get(url)
    return caught.value.message


async def test_a_page_is_fetched() -> None:
    async with internet(hello) as net:
        page = await net.get("http://site.example/a")
        assert page == Page("text/html", "utf-8", b"<p>Hello</p>")
        assert net.opened == [PUBLIC]
        (request,) = net.requests
        assert request.headers["Host"] == "site.example"
        assert "Cookie" not in request.headers


@pytest.mark.parametrize("address", PRIVATE)
async def test_a_name_that_leads_inside_is_not_fetched(address: str) -> None:
    async with internet(hello, names={"evil.example": [[address]]}) as net:
        assert "not on the public internet" in await failure(net, "http://evil.example/")
        assert net.opened == net.requests == []


@pytest.mark.parametrize("host", [f"[{a}]" if ":" in a else a for a in PRIVATE])
async def test_a_literal_address_inside_is_not_fetched(host: str) -> None:
    async with internet(hello) as net:
        assert "not on the public internet" in await failure(net, f"http://{host}/latest/meta-data/")
        assert net.opened == net.requests == []


@pytest.mark.parametrize(
    "host", ["127.1", "0x7f000001", "2130706433", "0177.0.0.1", "localhost", "①②⑦.⓪.⓪.①", "127.0.0.1."]
)
async def test_a_disguised_address_is_not_fetched(host: str) -> None:
    """By the system's resolver, which reads addresses in notations of its own."""
    opened: list[str] = []
    pages = WebPages(10_000, 20, 0, open_socket=rerouted(9, opened))
    await pages.start()
    try:
        with pytest.raises(ToolFailed):
            await pages.get(checked_url(f"http://{host}/"))
        assert opened == []
    finally:
        await pages.stop()


async def test_a_name_that_changes_is_checked_each_time() -> None:
    async with internet(hello, names={"rebind.example": [[PUBLIC], ["127.0.0.1"]]}) as net:
        await net.get("http://rebind.example/")
        assert "not on the public internet" in await failure(net, "http://rebind.example/")
        assert net.names.asked == ["rebind.example"] * 2  # nothing is resolved after the check
        assert net.opened == [PUBLIC]


async def test_only_the_public_one_of_several_addresses_is_connected_to() -> None:
    async with internet(hello, names={"both.example": [["10.0.0.1", PUBLIC]]}) as net:
        assert (await net.get("http://both.example/")).body == b"<p>Hello</p>"
        assert net.opened == [PUBLIC]


@pytest.mark.parametrize(
    "target",
    [
        "http://inside.example/",
        "http://127.0.0.1/",
        "http://[::ffff:127.0.0.1]/",
        "http://169.254.169.254/latest/meta-data/",
        "//inside.example/",
        "http://site.example:22/",
        "file:///etc/passwd",
        "http://user:secret@site.example/",
        "http://[",
    ],
)
async def test_a_redirect_leads_nowhere_else(target: str) -> None:
    async def redirect(request: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": target})

    async with internet(redirect) as net:
        with pytest.raises(ToolFailed):
            await net.get("http://site.example/")
        assert len(net.requests) == 1


async def test_redirects_are_followed_but_not_for_ever() -> None:
    async def count(request: web.Request) -> web.Response:
        left = int(request.path.strip("/"))
        return (
            await hello(request)
            if left == 0
            else web.Response(status=301, headers={"Location": f"/{left - 1}"})
        )

    async with internet(count) as net:
        assert (await net.get("http://site.example/5")).body == b"<p>Hello</p>"
        assert "redirects more than 5 times" in await failure(net, "http://site.example/6")


@pytest.mark.parametrize("content_type", ["application/pdf", "image/png", "application/json", "text/csv"])
async def test_only_html_and_text_are_read(content_type: str) -> None:
    async def typed(request: web.Request) -> web.Response:
        return web.Response(body=b"x", content_type=content_type)

    async with internet(typed) as net:
        assert content_type in await failure(net, "http://site.example/")


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_page_that_is_too_large(chunked: bool) -> None:
    async def large(request: web.Request) -> web.StreamResponse:
        if not chunked:
            return web.Response(text="x" * 10_001, content_type="text/html")
        response = web.StreamResponse(headers={"Content-Type": "text/html"})
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * 1000)
        except ConnectionError:
            return response

    async with internet(large) as net:
        assert "more than 10000 bytes" in await failure(net, "http://site.example/")


async def test_a_bomb_is_not_decompressed() -> None:
    bomb, page = gzip.compress(b"x" * 5_000_000), gzip.compress(b"<p>Hello</p>")

    async def compressed(request: web.Request) -> web.Response:
        body = {
            "/bomb": bomb,
            "/bombs": gzip.compress(b"x" * 9_000) * 2,
            "/parts": page * 2,
            "/padded": page + b"\0" * 20,
            "/many": gzip.compress(b"") * 50_000,
            "/broken": b"\x1f\x8bxx",
            "/deflate": zlib.compress(b"<p>Hello</p>"),
            "/page": page,
        }.get(request.path, b"x")
        encoding = {"/brotli": "br", "/deflate": "deflate"}.get(request.path, "gzip")
        return web.Response(body=body, headers={"Content-Type": "text/html", "Content-Encoding": encoding})

    async with internet(compressed) as net:
        assert (await net.get("http://site.example/page")).body == b"<p>Hello</p>"
        assert (await net.get("http://site.example/parts")).body == b"<p>Hello</p>" * 2
        assert (await net.get("http://site.example/padded")).body == b"<p>Hello</p>"
        assert (await net.get("http://site.example/deflate")).body == b"<p>Hello</p>"
        assert "more than 10000 bytes" in await failure(net, "http://site.example/many")  # as it came
        assert "more than 10000 bytes" in await failure(net, "http://site.example/bomb")
        assert "more than 10000 bytes" in await failure(net, "http://site.example/bombs")
        assert "compressed data is broken" in await failure(net, "http://site.example/broken")
        assert "compressed by br" in await failure(net, "http://site.example/brotli")


async def test_a_page_that_does_not_come() -> None:
    async def slow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/html"})
        await response.prepare(request)
        await asyncio.sleep(30)
        return response

    async with internet(slow, timeout=1.0) as net:
        assert "did not load within 1 s" in await failure(net, "http://site.example/")
        assert len(net.requests) == 1  # a slow page is not asked for again


@pytest.mark.parametrize(
    ("status", "error", "asked"), [(503, Unavailable, 3), (429, Overloaded, 3), (404, ToolFailed, 1)]
)
async def test_statuses(status: int, error: type[GymError], asked: int) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status)

    async with internet(answer) as net:
        with pytest.raises(error, match=str(status)):
            await net.get("http://site.example/")
        assert len(net.requests) == asked


async def test_a_server_that_comes_back() -> None:
    async def second(request: web.Request) -> web.Response:
        if request.transport is not None and len(net.requests) == 1:
            request.transport.close()
        return await hello(request)

    async with internet(second) as net:
        assert (await net.get("http://site.example/")).body == b"<p>Hello</p>"
        assert len(net.requests) == 2


async def test_no_such_host_and_nobody_there() -> None:
    async with internet(hello) as net:
        assert await failure(net, "http://nowhere.example/") == "the host nowhere.example is unknown"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    pages = WebPages(10, 20, 0, resolver=Names({"site.example": [[PUBLIC]]}), open_socket=rerouted(port, []))
    await pages.start()
    with pytest.raises(Unavailable, match="cannot be reached"):
        await pages.get(URL("http://site.example/"))
    await pages.stop()


# Text


def page(body: bytes, *, charset: str | None = None, content_type: str = "text/html") -> Page:
    return Page(content_type, charset, body)


@pytest.mark.parametrize(
    "given",
    [
        page("Käse".encode()),
        page("Käse".encode("latin-1"), charset="latin-1"),
        page("Käse".encode(), charset="no-such-charset"),
        page("Käse".encode(), charset="hex"),
        page(b'<meta charset="iso-8859-1">' + "Käse".encode("latin-1")),
        page(b'<?xml version="1.0" encoding="windows-1252"?>' + "Käse".encode("latin-1")),
        page("Käse".encode("utf-16")),
        page(b"\xef\xbb\xbf" + "Käse".encode()),
        page("Käse, Öl und Äpfel ".encode("latin-1") * 9),  # says nothing
        page("Käse, Öl ".encode() + b"\xff"),  # one wrong byte
    ],
)
def test_characters(given: Page) -> None:
    assert "Käse" in decoded(given)


@pytest.mark.parametrize(
    ("text", "charset"),
    [
        ("Die Äste über dem Fluss hängen tief, und der Otter schläft darunter gemütlich. ", "windows-1252"),
        ("Le café où l’élève préférait déjeuner était fermé à Noël, hélas. ", "windows-1252"),
        ("Выдра плавает в реке и ест то, что там находит каждый день. ", "windows-1251"),
        ("カワウソは川で泳ぎ、毎日そこで見つけたものを食べる。", "shift_jis"),
        ("水獭每天在河里游泳，吃它在那里找到的东西。", "gb18030"),
        ("水獺每天在河裡游泳，吃牠在那裡找到的東西。", "big5"),
        ("수달은 강에서 헤엄치며 매일 그곳에서 찾은 것을 먹는다. ", "euc_kr"),
    ],
)
def test_a_character_set_is_guessed_where_a_page_names_none(text: str, charset: str) -> None:
    assert decoded(page(f"<p>{text * 4}</p>".encode(charset))) == f"<p>{text * 4}</p>"


@given(st.binary(max_size=80), st.sampled_from([None, "utf-16", "utf-7", "idna", "base64", "x" * 50]))
def test_any_bytes_are_text(body: bytes, charset: str | None) -> None:
    text = decoded(page(body, charset=charset))
    assert text.encode().decode() == text


@given(st.lists(st.text(alphabet="ab ", min_size=1, max_size=9), max_size=40), st.integers(2, 12))
def test_a_long_text_loses_its_middle(parts: list[str], limit: int) -> None:
    text = " ".join(parts)
    words, kept = text.split(), shortened(text, limit).split()
    if len(words) <= limit and len(text) <= 12 * limit:
        assert kept == words
    else:
        assert len(kept) <= limit + 1
        assert "..." in kept


async def test_the_text_of_a_page() -> None:
    text = PageText(100, 60, 1)
    article = b"<html><nav>Menu</nav><article><h1>Otters</h1>" + b"<p>An otter swims in the river.</p>" * 3
    found = await text.of(page(article + b"</article></html>"))
    assert found is not None
    assert "An otter swims" in found
    assert await text.of(page(b"")) is None
    assert await text.of(page(b" plain \n", content_type="text/plain")) == "plain"


async def test_a_page_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    text = PageText(100, 0.01, 1)
    with pytest.raises(ToolFailed, match="too complex"):
        await text.of(page(b"<p>x</p>" * 1000))
