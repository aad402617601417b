"""`best_matches`: the entries that have all words of a query, by where they have them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path

from gym_serve.cli.catalog.details import files_of
from gym_serve.cli.catalog.entries import Entry
from gym_serve.cli.catalog.meanings import meanings
from gym_serve.servers.resources import ResourcesServer

__all__ = ["best_matches"]


def best_matches(entries: Iterable[Entry], words: Iterable[str]) -> list[Entry]:
    """The entries that have every word, in any case; the best match first.

    A word in the name counts most, then one in the summary, then one anywhere else.
    """
    wanted = [word.casefold() for word in words]
    scored = []
    for entry in entries:
        weighted = [(weight, text.casefold()) for weight, text in _texts(entry)]
        ranks = [max((weight for weight, text in weighted if word in text), default=0) for word in wanted]
        if all(ranks):
            scored.append((sum(ranks), entry))
    return [entry for _, entry in sorted(scored, key=lambda pair: -pair[0])]


def _texts(entry: Entry) -> Iterator[tuple[int, str]]:
    yield 8, entry.name
    yield 4, entry.summary
    yield 2, f"{entry.kind} {entry.package} {entry.import_path}"
    if entry.kind == "graph":
        yield 1, Path(entry.name).read_text(encoding="utf-8")
    if (server := entry.server) is None:
        return
    yield 2, inspect.getdoc(server) or ""
    if issubclass(server, ResourcesServer):
        for spec in server.tools.values():
            yield 2, f"tool {spec.name} {spec.description}"
    meaning = meanings(server.Config)
    for name in server.Config.model_fields:
        yield 1, f"{name} {meaning.get(name, '')}"
    if (readme := files_of(server).get("readme")) is not None:
        yield 1, Path(readme).read_text(encoding="utf-8", errors="replace")
