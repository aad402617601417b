"""From the ``type`` of a server to its class.

A type is the short name of an entry point, an import path ``package.module:Class``, or, in graphs
written in Python, the class itself. Importing it runs foreign code: whatever that raises becomes a
problem of the graph that says what to do.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from functools import reduce
from importlib.metadata import Distribution, EntryPoint, entry_points
from typing import Any

from gym_serve.graph.names import nearest
from gym_serve.graph.spec import SECTION_OF
from gym_serve.servers.base import Server
from gym_serve.servers.clients import Kind
from gym_serve.types.errors import GraphError

__all__ = ["GROUPS", "find_class", "type_name"]

GROUPS: dict[Kind, str] = {
    "model": "gym_serve.models",
    "resources": "gym_serve.environments",
    "agent": "gym_serve.agents",
}
"""Entry point group of each kind of server."""

_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def type_name(type_: object) -> str:
    """``type`` as text; ``module:Class`` for a class."""
    return f"{type_.__module__}:{type_.__qualname__}" if isinstance(type_, type) else str(type_)


def find_class(kind: Kind, type_: object) -> type[Server]:
    """The class of a server.

    Args:
        kind: kind of the section that it stands in.
        type_: short name, import path, or class.

    Raises:
        GraphError: there is none, it cannot be imported, or it is of another kind.
    """
    if isinstance(type_, type):
        found: Any = type_
    elif not isinstance(type_, str):
        raise GraphError("a type is a short name or an import path package.module:Class")
    elif ":" in type_:
        if not _IMPORT_PATH.fullmatch(type_):
            raise GraphError(f"{type_!r} is no import path; write package.module:Class")
        found = _imported(type_, lambda: _load(type_))
    else:
        entry = _entry_point(kind, type_)
        found = _imported(entry.value, entry.load, entry)
    actual: Kind | None = getattr(found, "kind", None)
    if not (isinstance(found, type) and issubclass(found, Server)) or actual not in SECTION_OF:
        bases = "ModelServer, ResourcesServer or AgentServer"
        raise GraphError(f"{type_name(type_)!r} is no server class; derive it from {bases}")
    if actual != kind:
        raise GraphError(f"{type_name(type_)!r} belongs under {SECTION_OF[actual]!r}, not here")
    return found


def _entry_point(kind: Kind, name: str) -> EntryPoint:
    for entry in entry_points(group=GROUPS[kind], name=name):
        return entry
    for other, group in GROUPS.items():
        if entry_points(group=group, name=name):
            raise GraphError(f"{name!r} belongs under {SECTION_OF[other]!r}, not here")
    known = [*sorted(entry_points(group=GROUPS[kind]).names), "http"]
    raise GraphError(f"no type {name!r}{nearest(name, known)}; or an import path package.module:Class")


def _load(import_path: str) -> Any:
    module, _, attributes = import_path.partition(":")
    return reduce(getattr, attributes.split("."), importlib.import_module(module))


def _imported(import_path: str, load: Callable[[], Any], entry: EntryPoint | None = None) -> Any:
    try:
        return load()
    except ModuleNotFoundError as error:
        hint = _install(error.name or "", entry.dist if entry else None)
        raise GraphError(f"cannot import {import_path}: {error}; {hint}") from error
    except Exception as error:
        # Foreign code: a broken module is a problem of the graph, beside the other problems.
        raise GraphError(f"cannot import {import_path}: {type(error).__name__}: {error}") from error


def _install(module: str, owner: Distribution | None) -> str:
    """What to install for a missing module: the extra of the type's own package that brings it."""
    package = _normalized(module.partition(".")[0])
    for requirement in (owner.requires if owner else None) or ():
        name = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"""extra == ['"]([\w.-]+)['"]""", requirement)
        if owner and name and extra and package == _normalized(name.group()) != _normalized(owner.name):
            return f"pip install '{owner.name}[{extra.group(1)}]'"
    return "install the package that brings it" if owner else "install it, or correct the import path"


def _normalized(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()
