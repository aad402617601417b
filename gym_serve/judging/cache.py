"""`VerdictCache`: replies of judges on disk, so that the same question is asked once.

Opt-in, as a cached sample is not a fresh one. A key is made of the judge, the whole request (prompt and
sampling) and the number of the vote; only replies that gave a verdict are kept. SQLite, so that the replicas
on a machine share a file. A cache that fails is logged and does without: it costs a call, never a verdict.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import sqlite3
import threading
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field

from gym_serve.types.errors import BadRequest
from gym_serve.types.requests import JSON

__all__ = ["CacheSettings", "VerdictCache"]

_BUSY_SECONDS = 5.0

logger = logging.getLogger(__name__)


class CacheSettings(BaseModel):
    """Where replies are kept."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path
    """The SQLite file, on a local disk; created with its folder if there is none. It is never shortened."""
    model: str = Field(min_length=1)
    """Name and version of the judge's model: the file outlives the graph, and so the names of its servers."""


class VerdictCache:
    """Replies by request.

    Args:
        settings: where they are kept.

    Raises:
        BadRequest: the file cannot be opened.
    """

    def __init__(self, settings: CacheSettings) -> None:
        self._model = settings.model
        self._lock = threading.Lock()
        try:
            settings.path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(
                settings.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.execute("CREATE TABLE IF NOT EXISTS replies (key BLOB PRIMARY KEY, reply BLOB)")
        except (OSError, sqlite3.Error) as error:
            raise BadRequest(f"the verdict cache {settings.path} cannot be opened: {error}") from None

    def key(self, judge: int, protocol: str, request: JSON, vote: int) -> bytes:
        """The key of a call.

        Args:
            judge: number of the judge among several.
            protocol: what the request is.
            request: its body.
            vote: number of the question among equal ones.
        """
        parts = [self._model, judge, protocol, request, vote]
        try:
            written = orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)
        except TypeError:  # a lone surrogate, which models can produce, or an integer over 64 bits
            written = json.dumps(parts, sort_keys=True).encode()
        return hashlib.sha256(written).digest()

    async def get(self, key: bytes) -> JSON | None:
        """The reply that is kept under a key."""
        rows = await asyncio.to_thread(self._execute, "SELECT reply FROM replies WHERE key = ?", key)
        try:
            return orjson.loads(rows[0][0]) if rows else None
        except orjson.JSONDecodeError as error:
            logger.warning("the verdict cache holds what is no reply: %s", error)
            return None

    async def put(self, key: bytes, reply: JSON) -> None:
        """Keep a reply."""
        insert = "INSERT OR REPLACE INTO replies VALUES (?, ?)"
        await asyncio.to_thread(self._execute, insert, key, orjson.dumps(reply))

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._database.close()

    def _execute(self, statement: str, *values: bytes) -> list[Any]:
        try:
            with self._lock:
                return self._database.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            logger.warning("the verdict cache failed: %s", error)
            return []
