"""`HttpClient`: JSON requests to an external agent or harness, and their failures as typed errors.

A request is sent once: it is unknown whether a peer that disconnected has done its work. Redirects are not
followed. Cancelling a request closes its connection. Secrets that a peer repeats are masked, as rollouts are
kept.

Proxies follow the rules of requests. aiohttp's ``trust_env`` has others, and reads the environment and
``~/.netrc`` anew for every request, which costs as much as the request; here each base URL is looked up once.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import resource
from collections.abc import Iterable, Mapping
from functools import lru_cache
from inspect import signature
from typing import Annotated, Any

import aiohttp
import orjson
from pydantic import AfterValidator, SecretStr
from yarl import URL

from gym_serve.servers.context import time_limit
from gym_serve.servers.transport import encode
from gym_serve.types.errors import (
    STAGES,
    BadRequest,
    DeadlineExceeded,
    EndpointAccessDenied,
    EndpointMisconfigured,
    GymError,
    Overloaded,
    Unavailable,
    error_from_body,
    own_error,
)
from gym_serve.types.exact import foreign_json, no_json
from gym_serve.types.model_endpoint import NO_ADDRESS, is_address
from gym_serve.types.protocols import wait_of
from gym_serve.types.protocols.refusals import Meaning, meaning_of


@lru_cache(maxsize=1024)
def proxy_of(base_url: str) -> URL | None:
    """The proxy's URL, with its credentials; None for a direct connection. Raises EndpointMisconfigured: the
    environment names a proxy that is none of HTTP.
    """
    from requests.utils import get_environ_proxies, select_proxy

    direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    direct = direct.replace("[", "").replace("]", "")  # as requests has the hosts of IPv6
    named = select_proxy(base_url, get_environ_proxies(base_url, direct or None))
    if not named:
        return None
    try:
        url = URL(named if "://" in named else f"http://{named}")
    except ValueError:
        url = URL()
    if url.scheme not in ("http", "https") or not url.host:
        shown = f"{url.scheme}://{url.host}" if url.host else "an unreadable address"
        raise EndpointMisconfigured(
            f"the proxy of the environment for {base_url} must be an HTTP proxy, got {shown}: change "
            "http_proxy, https_proxy or all_proxy, or name the host in no_proxy"
        )
    return url


def shown_error(error: Exception) -> str:
    """What an HTTP error says, but for the URL in a proxy's refusal, which has its credentials in it."""
    if isinstance(error, aiohttp.ClientResponseError):
        return f"HTTP {error.status}: {error.message}"
    return str(error)


_PAUSE, _MAX_PAUSE = 0.5, 20.0  # seconds; the first is doubled with every attempt


def redirected(url: str, headers: Mapping[str, str], setting: str) -> EndpointMisconfigured:
    """The error for a redirect, which is not followed: it would take the key elsewhere. ``setting`` is the
    address.
    """
    where = headers.get("Location", "")[:200]
    return EndpointMisconfigured(f"{url} redirects to {where!r}: set {setting} to where it leads")


def pause_after(error: GymError, failed: int) -> float:
    """Seconds to wait after a failure when ``failed`` attempts failed before it."""
    # Added, so that callers who were told the same do not come back at the same moment.
    return (error.retry_after or 0.0) + random.uniform(0.0, min(_MAX_PAUSE, _PAUSE * 2**failed))


def _address(url: str) -> str:
    if not is_address(url):
        raise ValueError(NO_ADDRESS)
    return url.rstrip("/")


BaseUrl = Annotated[str, AfterValidator(_address)]


def _sendable(secret: SecretStr) -> SecretStr:
    value = secret.get_secret_value().strip()
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in value):
        raise ValueError("must be one line without control characters")
    return SecretStr(value)


HeaderSecret = Annotated[SecretStr, AfterValidator(_sendable)]
"""A secret in a header, without the white space around it that files and shells leave there."""

_CONNECT_SECONDS = 10.0
_PROBE_SECONDS = 2.0
_OTHER_FILES = 96  # of a process beside its connections: modules, journals, pipes
_MAX_HEADER = 64 << 10  # bytes: gateways send their policies and traces
_HEADERS: dict[str, Any] = (  # aiohttp before 3.14 has no limit of their number
    {"max_headers": 1000} if "max_headers" in signature(aiohttp.ClientSession).parameters else {}
)
_MEANINGS: Mapping[Meaning, tuple[type[GymError], str]] = {
    Meaning.OVERFLOW: (BadRequest, ""),
    Meaning.ROW: (BadRequest, ""),
    Meaning.KEY: (EndpointAccessDenied, " (see headers)"),
    Meaning.SETTING: (EndpointMisconfigured, " (see url and headers)"),
    Meaning.WAIT: (Overloaded, ""),
    Meaning.RETRY: (Unavailable, ""),
}
_SHORTEST_SECRET = 6  # characters; shorter ones, such as ``none``, are words that may occur in any text


def open_session() -> aiohttp.ClientSession:
    """A connection pool; needs a running event loop. It keeps no cookies: a load balancer's would send the
    calls of all episodes to one engine.
    """
    limit = _open_files()
    most = 0 if limit == resource.RLIM_INFINITY else max(limit - _OTHER_FILES, 1)  # 0 is any number
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=most),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
        max_line_size=_MAX_HEADER,
        max_field_size=_MAX_HEADER,
        **_HEADERS,
    )


def _open_files() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def check_connection(url: str, error: OSError) -> None:
    """Tell a failure to connect that is not the endpoint's. Raises Overloaded: too many files are open in
    this process; another attempt may succeed. EndpointMisconfigured: its certificate is not trusted, or it
    speaks no TLS.
    """
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        why = getattr(error.certificate_error, "verify_message", "") or error.certificate_error
        raise EndpointMisconfigured(
            f"{url} has a certificate that is not trusted ({why}): call it by the name of its certificate, "
            "or name the file of its authority in the variable SSL_CERT_FILE"
        ) from None
    if isinstance(error, aiohttp.ClientConnectorSSLError) and "WRONG_VERSION" in str(error):
        raise EndpointMisconfigured(f"{url} does not speak HTTPS: is it http://?") from None
    if error.errno in (errno.EMFILE, errno.ENFILE):
        raise Overloaded(
            f"this process may open {_open_files()} files, and all are in use: raise the limit "
            "(`ulimit -n`), or lower the concurrency"
        ) from None


def masked(text: str, secrets: Iterable[SecretStr]) -> str:
    """``text`` without the secrets."""
    for secret in secrets:
        value = secret.get_secret_value()
        if len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, "***")
    return text


class HttpClient:
    """Posts JSON to one peer."""

    def __init__(self, headers: Mapping[str, SecretStr], max_bytes: int) -> None:
        self._headers = headers
        self._max_bytes = max_bytes
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._session = open_session()

    async def stop(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def post(
        self,
        url: str,
        body: Any,
        *,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
        cookies: dict[str, str] | None = None,
        secrets: Iterable[SecretStr] = (),
    ) -> Any:
        """The decoded answer; None if it is empty. ``secrets`` are masked in it; ``cookies`` are sent along,
        and get those of the answer. Raises Unavailable: it broke off, has a status of 500 or more, is too
        large or no JSON; DeadlineExceeded; OperatorError: the peer redirects, refuses the headers, or has no
        such route; GymError: as the error body or the status says.
        """
        if self._session is None:
            raise Unavailable("the connections are not open: call start() first")
        own = {name: value.get_secret_value() for name, value in self._headers.items()}
        try:
            with time_limit(timeout):
                async with self._session.post(
                    url,
                    data=encode(body),
                    headers={**own, "content-type": "application/json", **(headers or {})},
                    cookies=cookies,
                    proxy=proxy_of(url),
                    allow_redirects=False,
                ) as answer:
                    content = await self._read(url, answer)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            check_connection(url, error)
            raise Unavailable(f"no connection to {url}: {error}") from None
        except (asyncio.TimeoutError, TimeoutError):
            raise DeadlineExceeded(f"{url} did not answer in time") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"{url} broke off: {type(error).__name__}: {shown_error(error)}") from None
        if cookies is not None:
            cookies.update({name: morsel.value for name, morsel in answer.cookies.items()})
        if 300 <= answer.status < 400:
            raise redirected(url, answer.headers, "url")
        text = masked(content.decode("utf-8", "replace"), secrets)
        if answer.status >= 400:
            raise _failure(url, answer, masked(text, self._headers.values()))
        try:
            return foreign_json(text.encode()) if text else None
        except ValueError as error:
            raise Unavailable(f"{url} must answer JSON, got {no_json(text.encode(), error)}") from None

    async def answers(self, url: str) -> bool:
        """Whether a server answers a ``GET``, with any status, within two seconds."""
        if self._session is None:
            return False
        own = {name: value.get_secret_value() for name, value in self._headers.items()}
        try:
            with time_limit(_PROBE_SECONDS):
                async with self._session.get(url, headers=own, proxy=proxy_of(url), allow_redirects=False):
                    return True
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            return False

    async def _read(self, url: str, answer: aiohttp.ClientResponse) -> bytes:
        chunks, size = [], 0
        async for chunk in answer.content.iter_chunked(1 << 16):
            size += len(chunk)
            if size > self._max_bytes:
                raise Unavailable(f"{url} answered more than {self._max_bytes} bytes")
            chunks.append(chunk)
        return b"".join(chunks)


def _failure(url: str, answer: aiohttp.ClientResponse, text: str) -> GymError:
    """What a status of 400 or more means: one of our errors as it is, a foreign one by the table of
    refusals.
    """
    try:
        body: Any = orjson.loads(text)
    except orjson.JSONDecodeError:
        body = text
    error = error_from_body(answer.status, body)
    cls, setting = _MEANINGS[meaning_of(answer.status, body)]
    if setting or own_error(body) is None:
        error = cls(f"{error.message}{setting}", retry_after=error.retry_after, stage=error.stage)
    error.message = f"{url}: {error.message[:2000]}"
    error.retry_after = wait_of(answer.headers, body) if error.retry_after is None else error.retry_after
    error.stage = error.stage if error.stage in STAGES else None
    error.server = None  # the peer's name for itself means nothing in this graph
    return error
