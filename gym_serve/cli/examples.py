"""Rows for a try: one that is given, or the examples beside the class of an agent's environment."""

from __future__ import annotations

import inspect
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from itertools import islice
from pathlib import Path
from typing import Protocol

import orjson

from gym_serve.graph.spec import Graph
from gym_serve.rollouts.rows import read_rows
from gym_serve.types.errors import InvalidRequest, NotFound
from gym_serve.types.exact import exact_bytes, exact_json
from gym_serve.types.requests import JSON

SOURCES = "gym_serve.rows"
"""The entry points of `RowSource`."""


def default_agent(graph: Graph) -> str:
    """The agent of rows that name none. Raises NotFound: the graph has several agents."""
    if graph.default_agent is None:
        agents = [name for name, node in graph.nodes.items() if node.kind == "agent"]
        raise NotFound(f"the graph has several agents ({', '.join(agents)}): name one in the row's agent_ref")
    return graph.default_agent


def example_rows(graph: Graph, agent: str, missing: str) -> Path:
    """The file of example rows of an agent's environment. Raises InvalidRequest: it has none, or is not of
    this machine."""
    target = graph.nodes[agent].references.get("resources")
    cls = graph.nodes[target].cls if target is not None else None
    if cls is None:
        raise InvalidRequest(f"{missing} is missing: the environment is remote, so its examples are not here")
    path = Path(inspect.getfile(cls)).parent / "data" / "example.jsonl"
    if not path.is_file():
        raise InvalidRequest(f"{missing} is missing: {cls.__name__} has no examples at {path}")
    return path


class RowSource(Protocol):
    """What ``NAME:FOLDER`` stands for in the place of a file of rows: an entry point of `SOURCES`. ``graph``:
    a graph that comes with gym_serve, for a command without one."""

    graph: str

    def rows(self, folder: Path) -> Iterator[JSON]:
        """The rows of a folder. Raises InvalidRequest: there is none."""
        ...


def row_source(path: Path) -> tuple[RowSource, Path] | None:
    """The source and the folder of ``NAME:FOLDER``; None if a path is no such thing."""
    name, colon, folder = str(path).partition(":")
    if not colon or path.exists():
        return None
    for entry in entry_points(group=SOURCES, name=name):
        return entry.load()(), Path(folder)
    return None


@contextmanager
def file_of_rows(source: RowSource, folder: Path) -> Iterator[Path]:
    """A file with the rows of a source, which is removed at the end. Raises InvalidRequest: there is no
    row."""
    rows = list(source.rows(folder))
    with tempfile.TemporaryDirectory(prefix="gym-serve-rows-") as place:
        path = Path(place, "rows.jsonl")
        path.write_bytes(b"".join(exact_bytes(row, orjson.OPT_APPEND_NEWLINE) for row in rows))
        yield path


def row_of(text: str) -> JSON:
    """The row that a user gives: a JSON object, or ``FILE.jsonl[:LINE]`` for the first line or another one.
    Raises InvalidRequest: it is none."""

    if text.lstrip().startswith("{"):
        try:
            return dict(exact_json(text))
        except ValueError as error:
            raise InvalidRequest(f"ROW is invalid JSON: {error}") from None
    path, _, line = text.rpartition(":") if re.search(r":\d+$", text) else (text, "", "1")
    row = next(islice(read_rows(Path(path)), int(line) - 1, None), None)
    if row is None:
        raise InvalidRequest(f"{path} has no row {line}")
    if row.row is None:
        raise InvalidRequest(f"{row.where}: {row.problem}")
    return row.row
