"""`WebPages`: fetches pages of the public internet, by URLs that a model wrote.

- Every socket is checked as it is made, for the very address that it will be connected to. So it does not
  matter how the address came about: a literal in any notation, a name, a name that resolves to something else
  the second time, a redirect, a mapped IPv6 address.
- Only http and https, on ports 80 and 443, without credentials; no proxy, no cookies, and redirects are
  followed one by one under the same rules.
- The body is read, and decompressed, up to a limit. Only text that a person would read is taken.

What goes wrong is an error that the model may read; its own addresses it learns nothing about.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from gym_serve.environments.google_search.addresses import is_public
from gym_serve.environments.google_search.retrying import with_retries
from gym_serve.servers.context import current
from gym_serve.types.errors import Overloaded, ToolFailed, Unavailable

__all__ = ["AddressInfo", "Page", "WebPages", "checked_url"]

AddressInfo = tuple[Any, ...]
"""What ``getaddrinfo`` gives: family, type, protocol, name, socket address."""

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
    """A page as it was fetched.

    Attributes:
        content_type: its media type, without parameters.
        charset: the character set that its header names.
        body: its bytes, decompressed.
    """

    content_type: str
    charset: str | None
    body: bytes


def checked_url(text: str) -> URL:
    """The URL that a model wrote, without its fragment.

    Raises:
        ToolFailed: it is none, or one that is not fetched.
    """
    if len(text) > _MAX_URL:
        raise ToolFailed(f"the URL has more than {_MAX_URL} characters")
    try:
        url = URL(text.strip()).with_fragment(None)
        port = url.port
    except ValueError:
        raise ToolFailed("this is no URL") from None
    if url.scheme not in _PORTS or not url.raw_host:
        raise ToolFailed("the URL must begin with http:// or https://")
    if url.user is not None or url.password is not None:
        raise ToolFailed("a URL with credentials is not fetched")
    if port != _PORTS[url.scheme]:
        raise ToolFailed(f"only port {_PORTS[url.scheme]} is fetched by {url.scheme}")
    return url


def _joined(url: URL, location: str) -> str:
    try:
        return str(url.join(URL(location)))
    except ValueError:
        raise ToolFailed("the page redirects to what is no URL") from None


def _open_socket(info: AddressInfo) -> socket.socket:
    return socket.socket(info[0], info[1], info[2])


class WebPages:
    """The web, as far as a model may see it.

    Args:
        max_bytes: limit of a page, decompressed.
        timeout: seconds for one page, redirects included.
        max_retries: further attempts after a server was busy or away.
        resolver: finds the addresses of a name; the system's by default.
        open_socket: makes a socket for an address that passed the check.
    """

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
        """Make ready; needs a running event loop."""
        connector = aiohttp.TCPConnector(
            resolver=self._resolver or aiohttp.ThreadedResolver(),
            use_dns_cache=False,
            force_close=True,  # a page a connection: most are of different hosts
            socket_factory=self._checked_socket,
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=_HEADERS,
            auto_decompress=False,
        )

    async def stop(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, url: URL) -> Page:
        """The page behind a URL.

        Raises:
            ToolFailed: it cannot be had, or is not what can be read; says why.
            Overloaded, Unavailable: its server was busy or away to the last attempt.
        """
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
            raise ToolFailed(f"the page did not come within {seconds:.3g} s") from None
        except (aiohttp.InvalidURL, UnicodeError):
            raise ToolFailed("this is no URL") from None
        except aiohttp.ClientConnectorDNSError:
            raise ToolFailed(f"no host {url.host} is known") from None
        except aiohttp.ClientConnectorCertificateError:
            raise ToolFailed(f"the certificate of {url.host} is not valid") from None
        except aiohttp.ClientConnectorError as error:
            if error.errno == errno.EACCES:
                raise ToolFailed("this address is not on the public internet") from None
            raise Unavailable(f"{url.host} cannot be reached") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"{url.host} broke off ({type(error).__name__})") from None

    async def _follow(self, url: URL) -> Page:
        if self._session is None:
            raise Unavailable("the web is not open: call start() first")
        for _ in range(_MAX_REDIRECTS + 1):
            async with self._session.get(
                url, allow_redirects=False, timeout=aiohttp.ClientTimeout(total=None)
            ) as response:
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
            raise ToolFailed(f"the page is {content_type[:100]}; only HTML and plain text are read")
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
            raise ToolFailed(f"the page is compressed by {encoding[:40]}, which was not asked for")
        plain = bytearray()
        for number in range(_MAX_PARTS):
            part = zlib.decompressobj(_GZIP_OR_ZLIB)
            try:
                plain += part.decompress(body, self._max_bytes + 1 - len(plain))
            except zlib.error:
                if number:
                    break  # what follows is no part
                raise ToolFailed("the page is compressed wrongly") from None
            if len(plain) > self._max_bytes:
                raise self._too_large()
            if not (body := part.unused_data):
                break
        return bytes(plain)

    def _too_large(self) -> ToolFailed:
        return ToolFailed(f"the page has more than {self._max_bytes} bytes")
