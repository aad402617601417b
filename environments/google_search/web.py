"""The two tools as text in, text out. `LiveWeb` uses the network, `RecordedWeb` a `Cassette`.

A failure is an answer that the model reads (``Error: ...``); it is not recorded. The key and the id of
Google's Custom Search JSON API are sent to Google only: they appear in no result, message or log. Source:
https://developers.google.com/custom-search/v1/reference/rest/v1/cse/list
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from pathlib import Path
from typing import Any, Literal, Protocol

import aiohttp
import orjson
from pydantic import SecretStr

from gym_serve.environments.google_search.pages import PageText, WebPages, checked_url, with_retries
from gym_serve.servers.base import missing_package
from gym_serve.servers.context import current
from gym_serve.servers.transport import encode
from gym_serve.types.errors import GraphError, GymError, Overloaded, ToolFailed, Unavailable

ENDPOINT = "https://www.googleapis.com/customsearch/v1"

_SHOWN = ("title", "link", "displayLink", "snippet")
_MAX_ANSWER = 4 << 20
_DAY = 86400.0  # seconds
_MAX_WAIT = 30.0  # seconds; a longer Retry-After is a quota of the day


class CustomSearch:
    """A search engine: Google's, with a key and the id of the Programmable Search Engine (``cx``)."""

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
        # Through the proxy that the environment names, if there is one: the address is Google's.
        self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), trust_env=True)

    async def stop(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def search(self, query: str) -> str:
        """Up to ten results, as JSON text: ``{"items": [{"title", "link", "displayLink", "snippet"}]}``.
        Raises ToolFailed: Google refuses the request; has Google's message; Overloaded: a quota is used up
        (429); Unavailable: Google was away to the last attempt.
        """
        return await with_retries(lambda: self._attempt(query), self._max_retries)

    async def _attempt(self, query: str) -> str:
        if self._session is None:
            raise Unavailable("the connections are not open: call start() first")
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
        message = f"Google answers {response.status}: {_message(body)}"
        message = message.replace(key, "***").replace(engine, "***")
        if response.status == 429:
            header = response.headers.get("Retry-After", "")  # Google sends no dates there
            wait = min(float(header), _DAY) if header.isascii() and header.isdigit() else None
            if wait is not None and wait > _MAX_WAIT:
                raise ToolFailed(message)
            raise Overloaded(message, retry_after=wait)
        if response.status >= 500:
            raise Unavailable(message)
        raise ToolFailed(message)


def _results(body: bytes) -> str:
    answer = _decoded(body)
    if not isinstance(answer, dict):
        raise Unavailable("Google's answer is not a JSON object")
    items = answer.get("items") or []
    if not isinstance(items, list):
        raise Unavailable("Google's answer has no list of results")
    objects = [item for item in items if isinstance(item, dict)]
    shown: dict[str, Any] = {"items": [{key: item[key] for key in _SHOWN if key in item} for item in objects]}
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


EXAMPLE = Path(__file__).with_name("cassette.jsonl")  # the answers for the example rows


class Cassette:
    """An open cassette, to which new answers are appended or not. Raises GraphError: the file cannot be
    opened, or has an invalid line.
    """

    def __init__(self, path: Path, *, record: bool) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT if record else os.O_RDONLY
        try:
            self._file = os.open(path, flags | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise GraphError(f"cassette: {path} cannot be opened: {error.strerror}") from None
        try:
            self._places = _places(path)
        except GraphError:
            os.close(self._file)
            raise

    def get(self, tool: str, argument: str) -> str | None:
        place = self._places.get(_digest(tool, argument))
        if place is None:
            return None
        answer: str = orjson.loads(os.pread(self._file, place[1], place[0]))["answer"]
        return answer

    def put(self, tool: str, argument: str, answer: str) -> None:
        digest = _digest(tool, argument)
        if digest in self._places:
            return
        line = orjson.dumps({"tool": tool, "argument": argument, "answer": answer}) + b"\n"
        # One write appends a line as a whole, also while other processes write; its end tells its place.
        os.write(self._file, line)
        self._places[digest] = (os.lseek(self._file, 0, os.SEEK_CUR) - len(line), len(line))

    def close(self) -> None:
        os.close(self._file)


def _places(path: Path) -> dict[bytes, tuple[int, int]]:
    places: dict[bytes, tuple[int, int]] = {}
    offset = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                entry = orjson.loads(line)
                tool, argument, answer = entry["tool"], entry["argument"], entry["answer"]
                if not isinstance(answer, str):
                    raise TypeError("`answer` must be a string")
                places.setdefault(_digest(tool, argument), (offset, len(line)))
            except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
                where = f"line {number} of {path}"
                raise GraphError(f"cassette: {where} is not a recorded answer ({error})") from None
            offset += len(line)
    return places


def _digest(tool: str, argument: str) -> bytes:
    same = " ".join(argument.split())
    same = same.casefold() if tool == "search" else same
    return hashlib.blake2b(f"{tool}\n{same}".encode("utf-8", "replace"), digest_size=16).digest()


ERROR = "Error: "  # how an answer begins that tells of a failure


class Web(Protocol):
    """What the environment's tools are made of: results for a query as JSON text, and the text of a page."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    async def search(self, query: str) -> str: ...
    async def browse(self, url: str) -> str: ...


class LiveWeb:
    """The web itself."""

    def __init__(self, engine: CustomSearch, pages: WebPages, text: PageText) -> None:
        self._engine = engine
        self._pages = pages
        self._text = text

    async def start(self) -> None:
        if problems := list(missing_package("trafilatura", "gym-serve[google_search]")):
            raise GraphError(problems)
        await self._engine.start()
        await self._pages.start()

    async def stop(self) -> None:
        await self._engine.stop()
        await self._pages.stop()

    async def search(self, query: str) -> str:
        try:
            return await self._engine.search(query)
        except GymError as error:
            return f"{ERROR}{error.message}"

    async def browse(self, url: str) -> str:
        try:
            page = await self._pages.get(checked_url(url))
            return await self._text.of(page) or "No text found"
        except GymError as error:
            return f"{ERROR}{error.message}"


class RecordedWeb:
    """A web from a cassette; what is not there is asked of ``live``, if that is not None, and recorded."""

    def __init__(self, cassette: Cassette, live: Web | None) -> None:
        self._cassette = cassette
        self._live = live

    async def start(self) -> None:
        if self._live is not None:
            await self._live.start()

    async def stop(self) -> None:
        if self._live is not None:
            await self._live.stop()
        self._cassette.close()

    async def search(self, query: str) -> str:
        return await self._answer("search", "search", query)

    async def browse(self, url: str) -> str:
        try:
            return await self._answer("browse", "page", str(checked_url(url)))
        except ToolFailed as error:
            return f"{ERROR}{error.message}"

    async def _answer(self, tool: Literal["search", "browse"], what: str, argument: str) -> str:
        if (recorded := self._cassette.get(tool, argument)) is not None:
            return recorded
        if self._live is None:
            return f"{ERROR}this {what} was not recorded"
        answer: str = await getattr(self._live, tool)(argument)
        if not answer.startswith(ERROR):
            self._cassette.put(tool, argument, answer)
        return answer
