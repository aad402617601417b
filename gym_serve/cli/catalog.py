"""`gym-serve list` and `show`: environments, agents, models and graph files.

The catalog: server types from the entry points of installed packages, and the graph files of a folder.

Inspecting a type imports it. A type that cannot be imported (an extra is not installed) is listed with
the reason.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
import yaml
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from gym_serve.cli.options import JsonOption
from gym_serve.cli.printing import echo, print_json, print_table
from gym_serve.graph.classes import FOLDER, GROUPS, find_class
from gym_serve.graph.loading import graph_names, load_graph
from gym_serve.graph.spec import SECTIONS, nearest
from gym_serve.servers.base import Server, missing_package
from gym_serve.servers.clients import Client, Kind
from gym_serve.servers.resources import ResourcesServer
from gym_serve.types.errors import GraphError, NotFound

NAMES: dict[Kind, str] = {"resources": "environment", "agent": "agent", "model": "model"}
"""What each kind is called here: an environment is what a resources server serves."""


@dataclass(frozen=True)
class Entry:
    """A server type or a graph file.

    Attributes:
        kind: ``environment``, ``agent``, ``model``, ``graph`` or ``benchmark``.
        name: what to write as ``type``; the path or name of a graph.
        package: the distribution that brings it, with its version; the environment of a benchmark.
        import_path: ``package.module:Class`` of a type.
        summary: its first sentence.
        error: why it cannot be looked at.
        missing: what it lacks on this machine, as `gym-serve up` says it.
        server: its class.
    """

    kind: str
    name: str
    package: str = ""
    import_path: str = ""
    summary: str = ""
    error: str | None = None
    missing: str | None = None
    server: type[Server] | None = field(default=None, repr=False)

    def public(self) -> dict[str, Any]:
        """The entry as JSON can hold it."""
        shown = {key: value for key, value in vars(self).items() if key != "server"}
        return {key: value for key, value in shown.items() if value not in ("", None)}


def entries_of(kinds: set[str], folder: Path | None) -> list[Entry]:
    """All entries of some kinds: types by kind and name, then the graphs of a folder.

    Without a folder, these are the graphs that come with gym_serve and those in ``graphs``.
    """
    entries = [
        entry for kind, name in NAMES.items() if not kinds or name in kinds for entry in type_entries(kind)
    ]
    if not kinds or "benchmark" in kinds:
        from gym_serve.evaluation import benchmark_names, find_benchmark

        entries += [
            Entry("benchmark", one.name, one.environment["type"], summary=one.description)
            for one in map(find_benchmark, benchmark_names())
        ]
    if not kinds or "graph" in kinds:
        if folder is None and Path("graphs").resolve() != FOLDER.resolve():
            entries += shipped_entries()
        entries += graph_entries(folder or Path("graphs"))
    return entries


def type_entries(kind: Kind) -> Iterator[Entry]:
    """The server types of a kind, by name."""
    for point in sorted(entry_points(group=GROUPS[kind]), key=lambda point: point.name):
        package = f"{point.dist.name} {point.dist.version}" if point.dist else ""
        entry = Entry(NAMES[kind], point.name, package, point.value)
        try:
            server = find_class(kind, point.name)
        except GraphError as error:
            yield replace(entry, summary=_written_summary(point.value), error="; ".join(error.problems))
        else:
            lacking = [p for needed in server.requires.items() for p in missing_package(*needed)]
            missing = "; ".join(lacking) or None
            yield replace(entry, summary=summary_of(server), missing=missing, server=server)


def shipped_entries() -> Iterator[Entry]:
    """The graphs that come with gym_serve, by name, each with its first comment."""
    for path in sorted(FOLDER.glob("*.yaml")):
        yield Entry("graph", path.stem, f"gym-serve {version('gym-serve')}", summary=_first_comment(path))


def graph_entries(folder: Path) -> Iterator[Entry]:
    """The graph files of a folder, each with its first comment; other YAML files are left out."""
    for path in sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")]):
        try:
            specs = [load_graph(path, application=name).spec for name in graph_names(path)]
        except GraphError:
            continue
        if any(getattr(spec, section) for spec in specs for section in SECTIONS):
            yield Entry("graph", str(path), summary=_first_comment(path))


def summary_of(server: type[Server]) -> str:
    """First paragraph of the docstring of a class, in one line."""
    return _first_paragraph(server.__doc__)


def _written_summary(import_path: str) -> str:
    """That of a class whose module cannot be imported, from its source; empty if that is not found."""
    module, _, name = import_path.partition(":")
    with suppress(Exception):  # importing the packages around it is foreign code
        file = Path(getattr(find_spec(module), "origin", None) or "")
        definitions = (node for node in ast.parse(file.read_bytes()).body if isinstance(node, ast.ClassDef))
        return next(_first_paragraph(ast.get_docstring(node)) for node in definitions if node.name == name)
    return ""


def _first_paragraph(docstring: str | None) -> str:
    text = inspect.cleandoc(docstring or "").partition("\n\n")[0]
    return " ".join(text.split()).replace("``", "`")


def _first_comment(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").lstrip().splitlines()
    return lines[0].lstrip("#").strip() if lines and lines[0].startswith("#") else ""


_LONGEST_DEFAULT = 60
_FILES = {"README.md": "readme", "fixtures.jsonl": "fixtures", "data": "data"}


def find_types(name: str) -> list[Entry]:
    """The types of a name, an entry point's or an import path. Raises NotFound: there is none; names the
    nearest; GraphError: the import path leads to no server class."""
    if ":" in name:
        return [_imported(name)]
    entries = [entry for kind in NAMES for entry in type_entries(kind)]
    matches = [entry for entry in entries if entry.name == name]
    if not matches:
        raise NotFound(f"no environment, agent or model {name!r}{nearest(name, [e.name for e in entries])}")
    return matches


def details(entry: Entry) -> dict[str, Any]:
    """A type as JSON can hold it: ``settings``, for an environment ``tools``, and its ``files``."""
    shown = entry.public()
    if entry.server is not None:
        shown["description"] = inspect.cleandoc(entry.server.__doc__ or "")
        shown["settings"] = list(_settings(entry.server))
        if issubclass(entry.server, ResourcesServer):
            shown["reverify_mode"] = entry.server.reverify_mode
            shown["tools"] = [spec.openai() for spec in entry.server.tools.values()]
        shown["files"] = files_of(entry.server)
    return shown


def files_of(server: type[Server]) -> dict[str, str]:
    """README, fixtures and data in the folder of a class's module, if they exist."""
    folder = Path(inspect.getfile(server)).parent
    return {what: str(folder / name) for name, what in _FILES.items() if (folder / name).exists()}


def _imported(import_path: str) -> Entry:
    problems: list[str] = []
    for kind, name in NAMES.items():
        try:
            server = find_class(kind, import_path)
        except GraphError as error:
            problems += error.problems
        else:
            return Entry(name, import_path, "", import_path, summary_of(server), server=server)
    # Each kind was tried: problems other than the kind are the same for all.
    raise GraphError(next((p for p in problems if "belongs under" not in p), problems[0]))


def _settings(server: type[Server]) -> Iterator[dict[str, str]]:
    schema = server.Config.model_json_schema(by_alias=False)
    meaning = field_docs(server.Config)
    for name, info in server.Config.model_fields.items():
        yield {
            "name": name,
            "type": _type(info, schema["properties"][name], schema.get("$defs", {})),
            "default": _default(info),
            "description": " ".join(meaning.get(name, "").split()).replace("``", "`"),
        }


def _type(info: FieldInfo, shape: dict[str, Any], definitions: dict[str, Any]) -> str:
    for annotation in (info.annotation, *get_args(info.annotation)):
        if isinstance(annotation, type) and issubclass(annotation, Client):
            return f"name of {'an' if annotation.kind == 'agent' else 'a'} {annotation.kind} server"
        if annotation is SecretStr:
            return "secret"
    return _shape(shape, definitions)


def _shape(shape: dict[str, Any], definitions: dict[str, Any]) -> str:
    if "$ref" in shape:
        return _shape(definitions[shape["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in shape:
        options = (_shape(option, definitions) for option in shape["anyOf"])
        return " or ".join(option for option in options if option != "null")
    if "enum" in shape or "const" in shape:
        return ", ".join(str(value) for value in shape.get("enum", [shape.get("const")]))
    if shape.get("type") == "array":
        items = shape.get("items")
        return f"list of {_shape(items, definitions)}" if items else "list"
    return {"object": "mapping"}.get(shape.get("type", ""), str(shape.get("type", "any")))


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "(required)"
    default = info.get_default(call_default_factory=True, validated_data={})
    if default is None or isinstance(default, SecretStr):
        return ""
    text = json.dumps(default, default=str, ensure_ascii=False)
    return text if len(text) <= _LONGEST_DEFAULT else "(long)"


def field_docs(model: type[BaseModel]) -> dict[str, str]:
    """The meaning of every field that has one: its ``description``, else the docstring below it."""
    written: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if issubclass(cls, BaseModel) and cls is not BaseModel:
            written |= _docstrings(cls)
    described = {name: info.description for name, info in model.model_fields.items() if info.description}
    return {name: meaning for name, meaning in {**written, **described}.items() if name in model.model_fields}


def _docstrings(cls: type) -> dict[str, str]:
    """Those in the body of a class; none if there is no source, as for a class made by a function."""
    docs: dict[str, str] = {}
    with suppress(OSError, TypeError):
        definition = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        for field, below in pairwise(definition.body if isinstance(definition, ast.ClassDef) else ()):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(docstring))),
                ):
                    docs[name] = inspect.cleandoc(docstring)
    return docs


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
    from gym_serve.evaluation import benchmark_names, find_benchmark

    if name in benchmark_names():
        benchmark = find_benchmark(name).model_dump(mode="json", by_alias=True, exclude_defaults=True)
        if as_json:
            print_json(benchmark)
        else:
            echo(yaml.safe_dump(benchmark, sort_keys=False, allow_unicode=True))
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
