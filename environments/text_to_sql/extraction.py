"""The query in a model's text."""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["extract_sql"]

_FENCE = "```"
_SQL_FENCE = re.compile(r"```(?:sqlite3?|mysql|postgresql|postgres|pgsql|psql|sql)", re.IGNORECASE)
_STATEMENT = re.compile(r"(?:SELECT|INSERT|UPDATE|DELETE|WITH|CREATE|ALTER|DROP)\s", re.IGNORECASE)
_QUERY = re.compile(r"(?:SELECT|INSERT|UPDATE|DELETE|WITH)\s", re.IGNORECASE)


def extract_sql(text: str) -> str | None:
    """The query in ``text``; None if there is none.

    It is the last block that is marked as SQL; else the last block that begins like SQL; else what goes from
    the first word of SQL to the last semicolon, or to the end.
    """
    marked = list(_blocks(text, _SQL_FENCE))
    if marked:
        return marked[-1] or None
    blocks = [block for block in _blocks(text, re.compile(_FENCE)) if _STATEMENT.match(block)]
    if blocks:
        return blocks[-1]
    start = _QUERY.search(text)
    if start is None:
        return None
    end = text.rfind(";")
    query = text[start.start() : end + 1] if end >= start.start() else text[start.start() :]
    return query.strip().rstrip(";") + ";"


def _blocks(text: str, opening: re.Pattern[str]) -> Iterator[str]:
    """What stands between an opening and the next fence, again and again."""
    place = 0
    while (opened := opening.search(text, place)) is not None:
        closed = text.find(_FENCE, opened.end())
        if closed < 0:
            return
        yield text[opened.end() : closed].strip()
        place = closed + len(_FENCE)
