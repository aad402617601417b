"""`Web`: the two tools as text in, text out, over the network or from a cassette.

Whatever goes wrong on the way is an answer that the model reads (``Error: ...``), and none that is recorded.
"""

from __future__ import annotations

from typing import Protocol

from gym_serve.environments.google_search.cassette import Cassette
from gym_serve.environments.google_search.custom_search import CustomSearch
from gym_serve.environments.google_search.extraction import PageText
from gym_serve.environments.google_search.pages import WebPages, checked_url
from gym_serve.servers.base import missing_package
from gym_serve.types.errors import GraphError, GymError, ToolFailed

__all__ = ["ERROR", "LiveWeb", "RecordedWeb", "Web"]

ERROR = "Error: "
"""How an answer begins that tells of a failure."""


class Web(Protocol):
    """What the environment's tools are made of."""

    async def start(self) -> None:
        """Acquire connections and files."""

    async def stop(self) -> None:
        """Release them."""

    async def search(self, query: str) -> str:
        """Results for a query, as JSON text."""

    async def browse(self, url: str) -> str:
        """Text of a page."""


class LiveWeb:
    """The web itself.

    Args:
        engine: the search engine.
        pages: fetches pages.
        text: finds their text.
    """

    def __init__(self, engine: CustomSearch, pages: WebPages, text: PageText) -> None:
        self._engine = engine
        self._pages = pages
        self._text = text

    async def start(self) -> None:
        """Open the connections.

        Raises:
            GraphError: the library that extracts text is not installed.
        """
        if problems := list(missing_package("trafilatura", "gym-serve[google_search]")):
            raise GraphError(problems)
        await self._engine.start()
        await self._pages.start()

    async def stop(self) -> None:
        """Close the connections."""
        await self._engine.stop()
        await self._pages.stop()

    async def search(self, query: str) -> str:
        """See `CustomSearch.search`."""
        try:
            return await self._engine.search(query)
        except GymError as error:
            return f"{ERROR}{error.message}"

    async def browse(self, url: str) -> str:
        """The text of a page."""
        try:
            page = await self._pages.get(checked_url(url))
            return await self._text.of(page) or "No text found"
        except GymError as error:
            return f"{ERROR}{error.message}"


class RecordedWeb:
    """A web from a cassette.

    Args:
        cassette: the answers.
        live: asked for what is not there, and its answers recorded; None to stay offline.
    """

    def __init__(self, cassette: Cassette, live: Web | None) -> None:
        self._cassette = cassette
        self._live = live

    async def start(self) -> None:
        """Start the live web, if there is one."""
        if self._live is not None:
            await self._live.start()

    async def stop(self) -> None:
        """Stop it, and close the cassette."""
        if self._live is not None:
            await self._live.stop()
        self._cassette.close()

    async def search(self, query: str) -> str:
        """The recorded results, else those of the live web."""
        recorded = self._cassette.get("search", query)
        if recorded is not None:
            return recorded
        if self._live is None:
            return f"{ERROR}this search was not recorded"
        return self._recorded("search", query, await self._live.search(query))

    async def browse(self, url: str) -> str:
        """The recorded page, else that of the live web."""
        try:
            key = str(checked_url(url))
        except ToolFailed as error:
            return f"{ERROR}{error.message}"
        recorded = self._cassette.get("browse", key)
        if recorded is not None:
            return recorded
        if self._live is None:
            return f"{ERROR}this page was not recorded"
        return self._recorded("browse", key, await self._live.browse(key))

    def _recorded(self, tool: str, argument: str, answer: str) -> str:
        if not answer.startswith(ERROR):
            self._cassette.put(tool, argument, answer)
        return answer
