"""From a page to the text that the model reads.

Trafilatura finds the text of an HTML page. It works on what a stranger wrote, so it runs in a process of its
own, which has a limit of memory and is killed when it runs out of time; so does guessing a character set.
Trafilatura gets decoded text: of bytes it would decompress any amount.
"""

from __future__ import annotations

import asyncio
import codecs
import re
import resource

import anyio
import anyio.to_process

from gym_serve.environments.google_search.pages import Page
from gym_serve.servers.deadline import time_limit
from gym_serve.types.errors import ToolFailed

__all__ = ["PageText", "decoded", "shortened"]

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
    """Extracts the text of pages.

    Args:
        max_words: longer texts lose their middle.
        timeout: seconds for one page.
        processes: pages at the same time.
    """

    def __init__(self, max_words: int, timeout: float, processes: int) -> None:
        self._max_words = max_words
        self._timeout = timeout
        self._turns = asyncio.Semaphore(processes)  # waiting for a turn is no time of the page's
        self._limiter = anyio.CapacityLimiter(processes)

    async def of(self, page: Page) -> str | None:
        """The text of a page; None if it has none.

        Raises:
            ToolFailed: no text was found in time.
        """
        text = (await self._in_worker(page)).strip()
        return shortened(text, self._max_words) if text else None

    async def _in_worker(self, page: Page) -> str:
        try:
            async with self._turns:
                with time_limit(self._timeout):
                    return await anyio.to_process.run_sync(
                        _text_of, page, cancellable=True, limiter=self._limiter
                    )
        except (asyncio.TimeoutError, TimeoutError, anyio.BrokenWorkerProcess, MemoryError):
            raise ToolFailed("the page is too complicated to find its text") from None


def decoded(page: Page) -> str:
    """The characters of a page: as it says, else UTF-8, else as they look; wrong bytes become marks.

    A page says so by its header, its first bytes, and its ``meta`` element or XML declaration.
    """
    marked = "utf-16" if page.body[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else None
    written = _CHARSET.search(page.body[:_CHARSET_WITHIN])
    for charset in (page.charset, marked, written and written.group(1).decode("ascii")):
        try:
            text = page.body.decode(codecs.lookup(charset or "").name, "replace")
            break
        except (LookupError, ValueError):  # no such character set, or one that is no text encoding
            continue
    else:
        text = _undeclared(page.body)
    # Some encodings have lone surrogates, which JSON has not.
    return text.replace("\0", "").removeprefix("\ufeff").encode("utf-8", "replace").decode("utf-8")


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
