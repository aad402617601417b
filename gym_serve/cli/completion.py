"""What the shell proposes where a graph file, a graph, a server, an agent or a type is to be typed.

Each press of the tab key is a process of its own that has to answer at once. So proposals come from the
graph files at hand (in the current folder and in ``graphs``), from those that come with gym_serve, and from
installed entry points: no Ray is asked, no server is imported. What cannot be read proposes nothing; the
command itself says what is wrong with it. Where there is no proposal, shells propose files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import typer

from gym_serve.graph import shipped
from gym_serve.graph.loading import GraphSource, graph_names, load_graph
from gym_serve.graph.spec import SECTIONS
from gym_serve.types.errors import GraphError

_YAML = (".yaml", ".yml")
_GRAPH = re.compile(rb"gym_serve\.graph:app|^(?:models|resources|agents|extends):", re.MULTILINE)


def graph_files(incomplete: str) -> list[str]:
    """Graph files of the folder that is being typed; before there is one, also those of ``graphs``."""
    folder, slash, _ = incomplete.rpartition("/")
    folders = [folder + slash] if slash else ["", "graphs/"]
    return [
        folder + path.name
        for folder in folders
        for path in sorted(Path(folder).glob("*"))
        if path.suffix in _YAML and _looks_like_a_graph(path)
    ]


def graph(incomplete: str) -> list[str]:
    """`graph_files`, and the names of the graphs that come with gym_serve."""
    return [*graph_files(incomplete), *([] if "/" in incomplete else shipped.names())]


def graph_then_rows(ctx: typer.Context, incomplete: str) -> list[str]:
    """`graph`, as long as neither a graph nor rows are given."""
    given = any(ctx.params.get(name) for name in ("paths", "attach", "url"))
    return [] if given else graph(incomplete)


def applications(ctx: typer.Context) -> list[str]:
    """Names of the graphs in the file of the command."""
    return [source.name for source in _given(ctx)]


def graphs() -> list[str]:
    """Names of the graphs in all files at hand."""
    return sorted({source.name for source in _at_hand()})


def servers() -> list[str]:
    """Names of the servers in all files at hand."""
    return sorted({name for source in _at_hand() for section in SECTIONS for name in _names(source, section)})


def agents(ctx: typer.Context) -> list[str]:
    """Names of the agents in the file of the command, else in all files at hand."""
    return sorted({name for source in _given(ctx) or _at_hand() for name in _names(source, "agents")})


def types() -> list[tuple[str, str]]:
    """Environments, agents and models that are installed, each with its kind."""
    from gym_serve.cli.catalog_entries import NAMES
    from gym_serve.graph.classes import GROUPS

    return [(point.name, NAMES[kind]) for kind in NAMES for point in entry_points(group=GROUPS[kind])]


def types_and_graphs(incomplete: str) -> list[tuple[str, str]]:
    """What `show` shows."""
    known = types()
    named = {name for name, _ in known}
    return [*known, *((name, "graph") for name in graph(incomplete) if name not in named)]


def environments() -> list[str]:
    """Environments that are installed."""
    return [name for name, kind in types() if kind == "environment"]


def formats() -> list[tuple[str, str]]:
    """Formats of `export`, each with what it is for."""
    from gym_serve.interop.export import FORMATS

    return [(exporter.name, exporter.summary) for exporter in FORMATS.values()]


def _looks_like_a_graph(path: Path) -> bool:
    try:
        return path.is_file() and _GRAPH.search(path.read_bytes()) is not None
    except OSError:
        return False


def _given(ctx: typer.Context) -> list[GraphSource]:
    # Arguments before an option without its value, which is what is being typed, are still in ctx.args.
    words = [ctx.params.get("file"), ctx.params.get("graph"), *(ctx.params.get("paths") or ()), *ctx.args]
    files = [Path(word) for word in words if word is not None]
    return next((_sources(file) for file in files if file.suffix in _YAML), [])


def _at_hand() -> Iterator[GraphSource]:
    for file in graph_files(""):
        yield from _sources(Path(file))


def _sources(file: Path) -> list[GraphSource]:
    try:
        return [load_graph(file, application=name) for name in graph_names(file)]
    except GraphError:
        return []


def _names(source: GraphSource, section: str) -> list[str]:
    named = getattr(source.spec, section)
    return [str(name) for name in named] if isinstance(named, dict) else []
