"""`gym-serve list`, `show` and `search`: environments, agents, models and graph files."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_serve.cli.options import JsonOption
from gym_serve.cli.printing import echo, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gym_serve.cli.catalog_entries import Entry
    from gym_serve.graph.loading import GraphSource


class _Kind(str, Enum):
    environment = "environment"
    agent = "agent"
    model = "model"
    graph = "graph"


FolderOption = Annotated[
    Path | None,
    typer.Option(
        "--graphs",
        metavar="FOLDER",
        help="Folder of the graph files. [default: those that come with gym_serve, and those of ./graphs]",
    ),
]


def list_entries(
    kind: Annotated[
        list[_Kind] | None, typer.Argument(metavar="[KIND]...", help="environment, agent, model or graph.")
    ] = None,
    *,
    graphs: FolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """List environments, agents and models of installed packages, graphs by name, and graph files.

    A type that cannot be imported, or lacks a package, is listed with what to install.

    Exit status: 0.

    Example: gym-serve list environment graph --graphs graphs
    """
    from gym_serve.cli.catalog_entries import entries_of

    entries = entries_of({chosen.value for chosen in kind or ()}, graphs)
    _print(entries, as_json=as_json)


def search(
    words: Annotated[list[str], typer.Argument(metavar="WORDS...", help="Words that must all occur.")],
    *,
    graphs: FolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Search names, descriptions, tools, settings and READMEs; the best match first.

    Exit status: 0, or 1 if nothing was found.

    Example: gym-serve search weather tool
    """
    from gym_serve.cli.catalog_entries import best_matches, entries_of

    found = best_matches(entries_of(set(), graphs), words)
    _print(found, as_json=as_json)
    if not found:
        if not as_json:
            echo(f"Nothing found for {' '.join(words)}. gym-serve list shows everything.", err=True)
        raise typer.Exit(1)


def show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A type, an import path package.module:Class, a graph file or its name.",
        ),
    ],
    *,
    as_json: JsonOption = False,
) -> None:
    """Show a type with its settings, tools and files, or the servers that a graph file names.

    A name that both a type and a graph have is the type's.

    Exit status: 0, or 1 if there is no such type or file, or it cannot be imported.

    Example: gym-serve show simple_weather
    """
    from gym_serve.cli.catalog_entries import details, find_types, has_type
    from gym_serve.graph import shipped

    if name.endswith((".yaml", ".yml")) or (name in shipped.names() and not has_type(name)):
        _show_graphs(shipped.graph_file(name), as_json=as_json)
        return
    found = [details(entry) for entry in find_types(name)]
    if as_json:
        print_json(found[0] if len(found) == 1 else found)
    else:
        for shown in found:
            _show_type(shown)
    if any("error" in shown for shown in found):
        raise typer.Exit(1)


def _print(entries: Iterable[Entry], *, as_json: bool) -> None:
    if as_json:
        print_json([entry.public() for entry in entries])
    else:
        print_table(
            ("kind", "name", "package", ""),
            (
                (entry.kind, entry.name, entry.package, "\n".join(filter(None, _about(entry))))
                for entry in entries
            ),
        )


def _about(entry: Entry) -> tuple[str | None, ...]:
    """What an entry is, and below it what is missing."""
    return entry.summary, entry.error or entry.missing


def _show_type(shown: dict[str, Any]) -> None:
    echo(f"{shown['name']}: {shown['kind']}, {shown['import_path']} {shown.get('package', '')}".rstrip())
    if "error" in shown:
        echo(shown["error"], err=True)
        return
    echo(f"\n{shown['description']}\n")
    print_table(
        ("setting", "type", "default", ""),
        (tuple(setting.values()) for setting in shown["settings"]),
    )
    for tool in shown.get("tools", ()):
        arguments = ", ".join(tool["parameters"].get("properties", {}))
        echo(f"\ntool {tool['name']}({arguments}): {tool['description']}")
    if "reverify_mode" in shown:
        echo(f"\nreverify: {shown['reverify_mode']}")
    for what, path in shown["files"].items():
        echo(f"{what}: {path}")


def _show_graphs(path: Path, *, as_json: bool) -> None:
    from gym_serve.graph.loading import graph_names, load_graph

    sources = [load_graph(path, application=name) for name in graph_names(path)]
    if as_json:
        shown = [
            {
                "kind": "graph",
                "name": source.name,
                "route_prefix": source.route_prefix,
                "servers": _servers(source),
            }
            for source in sources
        ]
        print_json(shown[0] if len(shown) == 1 else shown)
        return
    for source in sources:
        echo(f"{source.name}: graph at {source.route_prefix}, {path}\n")
        print_table(("section", "server", "type"), ([*server.values()] for server in _servers(source)))
        echo()
    echo(f"Check it with gym-serve validate {path}; print all settings with gym-serve resolve {path}")


def _servers(source: GraphSource) -> list[dict[str, str]]:
    from gym_serve.graph.spec import SECTIONS

    return [
        {"section": section, "name": name, "type": _type_of(server)}
        for section in SECTIONS
        for name, server in (getattr(source.spec, section) or {}).items()
    ]


def _type_of(server: Any) -> str:
    """The type of a server as written; the types of both branches of an ``if``."""
    if not isinstance(server, dict):
        return "-"
    branches = (server, server.get("then"), server.get("else"))
    types = [str(b["type"]) for b in branches if isinstance(b, dict) and b.get("type")]
    return " or ".join(dict.fromkeys(types)) or "-"
