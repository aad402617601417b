"""`CustomSearch`: Google's Custom Search JSON API.

Key and engine id are sent to Google and appear nowhere else: in no result, no message and no log. Of an
answer the model sees title, address and summary of each result; the rest repeats the request.

Source: https://developers.google.com/custom-search/v1/reference/rest/v1/cse/list
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
from pydantic import SecretStr

from gym_serve.environments.google_search.retrying import with_retries
from gym_serve.servers.context import current
from gym_serve.servers.transport import encode
from gym_serve.types.errors import Overloaded, ToolFailed, Unavailable

__all__ = ["ENDPOINT", "CustomSearch"]

ENDPOINT = "https://www.googleapis.com/customsearch/v1"

_SHOWN = ("title", "link", "displayLink", "snippet")
_MAX_ANSWER = 4 << 20
_DAY = 86400.0  # seconds
_MAX_WAIT = 30.0  # seconds; a longer Retry-After is a quota of the day


class CustomSearch:
    """A search engine.

    Args:
        api_key, engine: Google's key and the id of the Programmable Search Engine (``cx``).
        timeout: seconds for one attempt.
        max_retries: further attempts after a 429, a 5xx and a broken connection.
        endpoint: where the API is.
    """

    def __init__(
        self,
        api_key: SecretStr,
        engine: SecretStr,
        timeout: float,
        max_retries: int,
        *,
        endpoint: str = ENDPOINT,
    ) -> None:
        self._api_key = api_key
        self._engine = engine
        self._timeout = timeout
        self._max_retries = max_retries
        self._endpoint = endpoint
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Open the connections; needs a running event loop."""
        # Through the proxy that the environment names, if there is one: the address is Google's.
        self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), trust_env=True)

    async def stop(self) -> None:
        """Close them."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def search(self, query: str) -> str:
        """Up to ten results, as JSON text: ``{"items": [{"title", "link", "displayLink", "snippet"}]}``.

        Raises:
            ToolFailed: Google refuses the request; has Google's message.
            Overloaded: a quota is used up (429).
            Unavailable: Google was away to the last attempt.
        """
        return await with_retries(lambda: self._attempt(query), self._max_retries)

    async def _attempt(self, query: str) -> str:
        if self._session is None:
            raise Unavailable("the search is not open: call start() first")
        seconds = current().timeout(self._timeout)
        key, engine = self._api_key.get_secret_value(), self._engine.get_secret_value()
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._session.get(
                self._endpoint, params={"key": key, "cx": engine, "q": query}, timeout=timeout
            ) as response:
                body = await response.content.read(_MAX_ANSWER)
        except asyncio.TimeoutError:
            raise Unavailable(f"Google did not answer within {seconds:.3g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"Google cannot be reached ({type(error).__name__})") from None
        if response.status == 200:
            return _results(body)
        message = f"Google answers {response.status}: {_message(body)}".replace(key, "***").replace(
            engine, "***"
        )
        if response.status == 429:
            wait = _seconds(response.headers.get("Retry-After"))
            if wait is not None and wait > _MAX_WAIT:
                raise ToolFailed(message)
            raise Overloaded(message, retry_after=wait)
        if response.status >= 500:
            raise Unavailable(message)
        raise ToolFailed(message)


def _results(body: bytes) -> str:
    answer = _decoded(body)
    if not isinstance(answer, dict):
        raise Unavailable("Google's answer is no JSON object")
    items = answer.get("items") or []
    if not isinstance(items, list):
        raise Unavailable("Google's answer has no list of results")
    shown: dict[str, Any] = {
        "items": [
            {key: item[key] for key in _SHOWN if key in item} for item in items if isinstance(item, dict)
        ]
    }
    spelling = answer.get("spelling")
    if isinstance(spelling, dict) and spelling.get("correctedQuery"):
        shown["correctedQuery"] = spelling["correctedQuery"]
    return encode(shown).decode()


def _message(body: bytes) -> str:
    answer = _decoded(body)
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return str(message)[:500] if message else "no reason was given"


def _decoded(body: bytes) -> Any:
    try:
        return json.loads(body)  # not orjson: the summary of a page may be cut within a character
    except (ValueError, RecursionError):
        return None


def _seconds(header: str | None) -> float | None:
    """Seconds of a ``Retry-After``, a day at most; None without one. Google sends no dates there."""
    return min(float(header), _DAY) if header and header.isascii() and header.isdigit() else None
