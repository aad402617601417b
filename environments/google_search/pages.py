"""`WebPages` fetches pages of the public internet by URLs that a model wrote; `PageText` extracts their text.

Every socket's address is checked when the socket is opened, wherever it came from: a literal in any notation,
a name that resolves differently the second time, a redirect. Only http and https on ports 80 and 443 are
allowed, without credentials, proxies and cookies. The body is read, and decompressed, up to a limit.

Trafilatura and the detection of character sets run in a process with limits of memory and time. Trafilatura
gets decoded text, because it would decompress any amount of bytes.

Errors are texts that the model may read. They tell nothing about this machine's own addresses.
"""

from __future__ import annotations

import asyncio
import codecs
import errno
import random
import re
import resource
import socket
import zlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import aiohttp
import anyio
import anyio.to_process
from aiohttp.abc import AbstractResolver
from yarl import URL

from gym_serve.grading import replace_surrogates
from gym_serve.sandbox.hosts import is_public
from gym_serve.servers.context import current, time_limit
from gym_serve.types.errors import Overloaded, Retryable, ToolFailed, Unavailable

T = TypeVar("T")

_PAUSE, _MAX_PAUSE = 0.5, 8.0  # seconds; the first is doubled with every attempt


async def with_retries(attempt: Callable[[], Awaitable[T]], max_retries: int) -> T:
    """The result of ``attempt``, repeated while it raises `Retryable`, after a random exponential wait.
    Raises GymError: what the last attempt raised; a wait that would not end in time is not begun.
    """
    failed = 0
    while True:
        try:
            return await attempt()
        except Retryable as error:
            pause = (error.retry_after or 0.0) + random.uniform(0.0, min(_MAX_PAUSE, _PAUSE * 2**failed))
            failed += 1
            left = current().timeout()
            if failed > max_retries or (left is not None and pause >= left):
                raise
        await asyncio.sleep(pause)


AddressInfo = tuple[Any, ...]  # what ``getaddrinfo`` gives: family, type, protocol, name, socket address

_PORTS = {"http": 80, "https": 443}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_GONE = frozenset({502, 503, 504})
_CONTENT_TYPES = frozenset({"text/html", "application/xhtml+xml", "text/plain"})
_MAX_URL = 2048
_MAX_REDIRECTS = 5
_MAX_PARTS = 64  # of a gzip body, each of which costs a copy of the rest
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS  # by what its first bytes say
_HEADERS = {
    "Accept": "text/html,application/xhtml+xml,text/plain;q=0.8",
    "Accept-Encoding": "gzip",
    "User-Agent": "Mozilla/5.0 (compatible; gym-serve)",
}


class Page(NamedTuple):
    """A page as it was fetched, decompressed, with the media type and character set that its header names."""

    content_type: str
    charset: str | None
    body: bytes


def checked_url(text: str) -> URL:
    """The URL that a model wrote, without its fragment. Raises ToolFailed: it is not a URL, or must not be
    fetched.
    """
    if len(text) > _MAX_URL:
        raise ToolFailed(f"the URL has more than {_MAX_URL} characters")
    try:
        url = URL(text.strip()).with_fragment(None)
        port = url.port
    except ValueError:
        raise ToolFailed("this is not a URL") from None
    if url.scheme not in _PORTS or not url.raw_host:
        raise ToolFailed("the URL must begin with http:// or https://")
    if url.user is not None or url.password is not None:
        raise ToolFailed("URLs with credentials are not fetched")
    if port != _PORTS[url.scheme]:
        raise ToolFailed(f"{url.scheme} URLs are fetched from port {_PORTS[url.scheme]} only")
    return url


def _joined(url: URL, location: str) -> str:
    try:
        return str(url.join(URL(location)))
    except ValueError:
        raise ToolFailed("the page redirects to an invalid URL") from None


def _open_socket(info: AddressInfo) -> socket.socket:
    return socket.socket(info[0], info[1], info[2])


class WebPages:
    """The web, as far as a model may see it: pages of up to ``max_bytes``, each in ``timeout`` seconds."""

    def __init__(
        self,
        max_bytes: int,
        timeout: float,
        max_retries: int,
        *,
        resolver: AbstractResolver | None = None,
        open_socket: Callable[[AddressInfo], socket.socket] = _open_socket,
    ) -> None:
        self._max_bytes = max_bytes
        self._timeout = timeout
        self._max_retries = max_retries
        self._resolver = resolver
        self._open_socket = open_socket
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        connector = aiohttp.TCPConnector(
            resolver=self._resolver or aiohttp.ThreadedResolver(),
            use_dns_cache=False,
            force_close=True,  # a page a connection: most are of different hosts
            socket_factory=self._checked_socket,
        )
        self._session = aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), headers=_HEADERS, auto_decompress=False
        )

    async def stop(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, url: URL) -> Page:
        """The page behind a URL."""
        return await with_retries(lambda: self._within_time(url), self._max_retries)

    def _checked_socket(self, info: AddressInfo) -> socket.socket:
        if not is_public(info[4][0]):
            raise OSError(errno.EACCES, "not an address of the public internet")
        return self._open_socket(info)

    async def _within_time(self, url: URL) -> Page:
        seconds = current().timeout(self._timeout)
        try:
            return await asyncio.wait_for(self._follow(url), seconds)
        except asyncio.TimeoutError:
            raise ToolFailed(f"the page did not load within {seconds:.3g} s") from None
        except (aiohttp.InvalidURL, UnicodeError):
            raise ToolFailed("this is not a URL") from None
        except aiohttp.ClientConnectorDNSError:
            raise ToolFailed(f"the host {url.host} is unknown") from None
        except aiohttp.ClientConnectorCertificateError:
            raise ToolFailed(f"the certificate of {url.host} is not valid") from None
        except aiohttp.ClientConnectorError as error:
            if error.errno == errno.EACCES:
                raise ToolFailed("this address is not on the public internet") from None
            raise Unavailable(f"{url.host} cannot be reached") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"the connection to {url.host} broke ({type(error).__name__})") from None

    async def _follow(self, url: URL) -> Page:
        if self._session is None:
            raise Unavailable("the connections are not open: call start() first")
        for _ in range(_MAX_REDIRECTS + 1):
            limit = aiohttp.ClientTimeout(total=None)
            async with self._session.get(url, allow_redirects=False, timeout=limit) as response:
                location = response.headers.get("Location")
                if response.status not in _REDIRECTS or location is None:
                    return await self._read(response)
                url = checked_url(_joined(url, location))
        raise ToolFailed(f"the page redirects more than {_MAX_REDIRECTS} times")

    async def _read(self, response: aiohttp.ClientResponse) -> Page:
        status, content_type = response.status, response.content_type
        if status == 429:
            raise Overloaded("the page's server answers 429: too many requests")
        if status in _GONE:
            raise Unavailable(f"the page's server answers {status}")
        if status != 200:
            raise ToolFailed(f"the page's server answers {status}")
        if "Content-Type" in response.headers and content_type not in _CONTENT_TYPES:
            raise ToolFailed(f"the page is {content_type[:100]}; only HTML and plain text can be read")
        if (response.content_length or 0) > self._max_bytes:
            raise self._too_large()
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > self._max_bytes:
                raise self._too_large()
        encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
        if "Content-Type" not in response.headers:
            content_type = "text/html"
        return Page(content_type, response.charset, self._decompressed(bytes(body), encoding))

    def _decompressed(self, body: bytes, encoding: str) -> bytes:
        if encoding in ("identity", ""):
            return body
        if encoding not in ("gzip", "x-gzip", "deflate"):
            raise ToolFailed(f"the page is compressed by {encoding[:40]}, which is not supported")
        plain = bytearray()
        for number in range(_MAX_PARTS):
            part = zlib.decompressobj(_GZIP_OR_ZLIB)
            try:
                plain += part.decompress(body, self._max_bytes + 1 - len(plain))
            except zlib.error:
                if number:
                    break  # the rest is not a gzip part
                raise ToolFailed("the page's compressed data is broken") from None
            if len(plain) > self._max_bytes:
                raise self._too_large()
            if not (body := part.unused_data):
                break
        return bytes(plain)

    def _too_large(self) -> ToolFailed:
        return ToolFailed(f"the page has more than {self._max_bytes} bytes")


_MEMORY = 2 << 30
_CHARSET = re.compile(
    rb"""<(?:meta[^>]{0,200}?charset=|\?xml[^>]{0,200}?encoding=)["']?([\w-]{1,40})""", re.IGNORECASE
)
_CHARSET_WITHIN = 2048  # bytes; HTML's own limit is 1024
_GUESSED_FROM = 1 << 16  # bytes
_CHARSETS = ["cp1252", "cp1251", "cp932", "euc_jp", "gb18030", "big5", "cp949"]  # HTML's default first
_WORD = re.compile(r"\S+")
_MAX_CHARS_PER_WORD = 12  # on average, else a page without spaces would have no limit


class PageText:
    """Extracts the text of ``processes`` pages at a time; of over ``max_words``, the middle is left out."""

    def __init__(self, max_words: int, timeout: float, processes: int) -> None:
        self._max_words = max_words
        self._timeout = timeout
        self._turns = asyncio.Semaphore(processes)  # waiting for a turn does not count as the page's time
        self._limiter = anyio.CapacityLimiter(processes)

    async def of(self, page: Page) -> str | None:
        """The text of a page; None if it has none. Raises ToolFailed: no text was found in time."""
        run = partial(anyio.to_process.run_sync, cancellable=True, limiter=self._limiter)
        try:
            async with self._turns:
                with time_limit(self._timeout):
                    text = (await run(_text_of, page)).strip()
        except (asyncio.TimeoutError, TimeoutError, anyio.BrokenWorkerProcess, MemoryError):
            raise ToolFailed("the page is too complex to extract its text") from None
        return shortened(text, self._max_words) if text else None


def decoded(page: Page) -> str:
    """The characters of a page: as its header, first bytes, ``meta`` element or XML declaration say, else
    UTF-8, else as they look; wrong bytes become marks.
    """
    marked = "utf-16" if page.body[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else None
    written = _CHARSET.search(page.body[:_CHARSET_WITHIN])
    for charset in (page.charset, marked, written and written.group(1).decode("ascii")):
        try:
            text = page.body.decode(codecs.lookup(charset or "").name, "replace")
            break
        except (LookupError, ValueError):  # an unknown character set, or not a text encoding
            continue
    else:
        text = _undeclared(page.body)
    return replace_surrogates(text.replace("\0", "").removeprefix("\ufeff"))  # some encodings have them


def _undeclared(body: bytes) -> str:
    text = body.decode("utf-8", "replace")
    wrong = text.count("\ufffd")
    if not wrong:
        return text
    right = len(text) - len(text.encode("ascii", "ignore")) - wrong
    if right > wrong:  # else one broken character would make all the others wrong
        return text
    import charset_normalizer  # comes with trafilatura

    guess = charset_normalizer.from_bytes(body[:_GUESSED_FROM], cp_isolation=_CHARSETS).best()
    return body.decode(guess.encoding if guess is not None else _CHARSETS[0], "replace")


def shortened(text: str, max_words: int) -> str:
    """``text`` with at most about ``max_words`` words: its first half and its last."""
    max_chars = max_words * _MAX_CHARS_PER_WORD
    if len(text) > max_chars:
        text = f"{text[: max_chars // 2]} ... {text[-(max_chars // 2) :]}"
    words = [word.span() for word in _WORD.finditer(text)]
    if len(words) <= max_words:
        return text
    half = max(1, max_words // 2)
    return f"{text[: words[half - 1][1]]} ... {text[words[-half][0] :]}"


def _text_of(page: Page) -> str:
    # Runs in the worker process.
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    text = decoded(page)
    if page.content_type == "text/plain":
        return text
    import trafilatura

    return trafilatura.extract(text) or ""
