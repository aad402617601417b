"""`gym-serve list` and `show`: environments, agents, models and graph files."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from gym_serve.cli.options import JsonOption
from gym_serve.cli.printing import echo, print_json, print_table


class _Kind(str, Enum):
    environment = "environment"
    agent = "agent"
    model = "model"
    graph = "graph"
    benchmark = "benchmark"


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
        list[_Kind] | None,
        typer.Argument(metavar="[KIND]...", help="environment, agent, model, graph or benchmark."),
    ] = None,
    *,
    graphs: FolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """List environments, agents, models, benchmarks and graphs of installed packages, and graph files.

    A type that cannot be imported, or lacks a package, is listed with what to install.

    Exit status: 0.

    Example: gym-serve list environment graph --graphs graphs
    """
    from gym_serve.cli.catalog_entries import entries_of

    entries = entries_of({chosen.value for chosen in kind or ()}, graphs)
    if as_json:
        print_json([entry.public() for entry in entries])
        return
    rows = [
        (e.kind, e.name, e.package, "\n".join(filter(None, (e.summary, e.error or e.missing))))
        for e in entries
    ]
    print_table(("kind", "name", "package", ""), rows)


def show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A type or benchmark of gym-serve list, or an import path package.module:Class.",
        ),
    ],
    *,
    as_json: JsonOption = False,
) -> None:
    """Show a type with its settings, tools and files, or a benchmark; gym-serve resolve shows a graph.

    Exit status: 0, or 1 if there is no such type, or it cannot be imported.

    Example: gym-serve show simple_weather
    """
    from gym_serve.cli.catalog_entries import details, find_types
    from gym_serve.evaluation import benchmark_names, find_benchmark

    if name in benchmark_names():
        benchmark = find_benchmark(name).model_dump(mode="json", by_alias=True, exclude_defaults=True)
        print_json(benchmark) if as_json else echo(
            yaml.safe_dump(benchmark, sort_keys=False, allow_unicode=True)
        )
        return
    types = [details(entry) for entry in find_types(name)]
    if as_json:
        print_json(types[0] if len(types) == 1 else types)
    else:
        for shown in types:
            _show_type(shown)
    if any("error" in shown for shown in types):
        raise typer.Exit(1)


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
