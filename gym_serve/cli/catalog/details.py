"""What `show` tells of one type: its settings and tools, and the files that its package brings."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from gym_serve.cli.catalog.entries import NAMES, Entry, summary_of, type_entries
from gym_serve.cli.catalog.meanings import meanings
from gym_serve.graph.classes import find_class
from gym_serve.graph.names import nearest
from gym_serve.servers.base import Server
from gym_serve.servers.clients import Client
from gym_serve.servers.resources import ResourcesServer
from gym_serve.types.errors import GraphError, NotFound

__all__ = ["details", "files_of", "find_types"]

_LONGEST_DEFAULT = 60
_FILES = {"README.md": "readme", "fixtures.jsonl": "fixtures", "data": "data"}


def find_types(name: str) -> list[Entry]:
    """The types of a name, an entry point's or an import path.

    Raises:
        NotFound: there is none; names the nearest.
        GraphError: the import path leads to no server class.
    """
    if ":" in name:
        return [_imported(name)]
    known = [entry for kind in NAMES for entry in type_entries(kind)]
    found = [entry for entry in known if entry.name == name]
    if not found:
        raise NotFound(f"no environment, agent or model {name!r}{nearest(name, [e.name for e in known])}")
    return found


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
    """README, fixtures and data beside the module of a class, as far as they are there."""
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
    # Each kind was tried; what is wrong apart from the kind is said by all of them alike.
    raise GraphError(next((p for p in problems if "belongs under" not in p), problems[0]))


def _settings(server: type[Server]) -> Iterator[dict[str, str]]:
    schema = server.Config.model_json_schema(by_alias=False)
    meaning = meanings(server.Config)
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
