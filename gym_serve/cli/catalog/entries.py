"""What there is: server types from the entry points of installed packages, and graph files of a folder.

Looking at a type imports it. One that cannot be imported (an extra that is not installed) is listed with
the reason: the others are still worth a list.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from gym_serve.graph.classes import GROUPS, find_class
from gym_serve.graph.loading import graph_names, load_graph
from gym_serve.graph.spec import SECTIONS
from gym_serve.servers.base import Server
from gym_serve.servers.clients import Kind
from gym_serve.types.errors import GraphError

__all__ = [
    "NAMES",
    "Entry",
    "entries_of",
    "graph_entries",
    "graph_entry",
    "summary_of",
    "type_entries",
]

NAMES: dict[Kind, str] = {"resources": "environment", "agent": "agent", "model": "model"}
"""What each kind is called here: an environment is what a resources server serves."""


@dataclass(frozen=True)
class Entry:
    """A server type or a graph file.

    Attributes:
        kind: ``environment``, ``agent``, ``model`` or ``graph``.
        name: what to write as ``type``; the path of a graph.
        package: the distribution that brings it, with its version.
        import_path: ``package.module:Class`` of a type.
        summary: its first sentence.
        error: why it cannot be looked at.
        server: its class.
    """

    kind: str
    name: str
    package: str = ""
    import_path: str = ""
    summary: str = ""
    error: str | None = None
    server: type[Server] | None = field(default=None, repr=False)

    def public(self) -> dict[str, Any]:
        """The entry as JSON can hold it."""
        shown = {key: value for key, value in vars(self).items() if key != "server"}
        return {key: value for key, value in shown.items() if value not in ("", None)}


def entries_of(kinds: set[str], folder: Path) -> list[Entry]:
    """All entries of some kinds: types by kind and name, then the graphs of a folder."""
    found = [
        entry for kind, name in NAMES.items() if not kinds or name in kinds for entry in type_entries(kind)
    ]
    if not kinds or "graph" in kinds:
        found += graph_entries(folder)
    return found


def type_entries(kind: Kind) -> Iterator[Entry]:
    """The server types of a kind, by name."""
    for point in sorted(entry_points(group=GROUPS[kind]), key=lambda point: point.name):
        yield _type_entry(kind, point)


def graph_entries(folder: Path) -> Iterator[Entry]:
    """The graph files of a folder; other YAML files are left out."""
    for path in sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")]):
        entry = graph_entry(path)
        if entry.error is None:
            yield entry


def graph_entry(path: Path) -> Entry:
    """The entry of a graph file; its summary is the comment that it begins with."""
    try:
        specs = [load_graph(path, application=name).spec for name in graph_names(path)]
    except GraphError as error:
        return Entry("graph", str(path), error="; ".join(error.problems))
    if not any(getattr(spec, section) for spec in specs for section in SECTIONS):
        return Entry("graph", str(path), error="no graph: it has neither models, resources nor agents")
    return Entry("graph", str(path), summary=_first_comment(path))


def _type_entry(kind: Kind, point: EntryPoint) -> Entry:
    package = f"{point.dist.name} {point.dist.version}" if point.dist else ""
    try:
        server = find_class(kind, point.name)
    except GraphError as error:
        return Entry(NAMES[kind], point.name, package, point.value, error="; ".join(error.problems))
    return Entry(NAMES[kind], point.name, package, point.value, summary_of(server), server=server)


def summary_of(server: type[Server]) -> str:
    """First paragraph of the docstring of a class, in one line."""
    text = inspect.cleandoc(server.__doc__ or "").partition("\n\n")[0]
    return " ".join(text.split()).replace("``", "`")


def _first_comment(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").lstrip().splitlines()
    return lines[0].lstrip("#").strip() if lines and lines[0].startswith("#") else ""
