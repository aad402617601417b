"""The class of a server, by its ``type``, and its settings, checked against the class's ``Config``.

A type is the short name of an entry point, an import path ``package.module:Class``, or, in graphs
written in Python, the class itself. Importing it runs foreign code: any exception becomes a problem
of the graph that says what to do.

References to servers and secrets are found by their annotations, so also if other settings are wrong.
No message shows a secret.

The graphs that come with gym_serve, by name: what a first run needs without the repository.

A graph's name is that of its file (``weather``). The name of an environment (``simple_weather``) leads to the
graph of its own name, else to the smallest one whose only environment it is. A file at hand goes first.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from importlib.metadata import Distribution, EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, Secret, SecretBytes, SecretStr, ValidationError

import gym_serve
from gym_serve.graph.spec import MASK, SECTION_OF, SECTIONS, nearest, word_for
from gym_serve.servers.base import Server
from gym_serve.servers.clients import Client, Kind
from gym_serve.types.errors import GraphError
from gym_serve.types.requests import in_our_words

Problem = tuple[str, str]
"""Path in the file, and message."""

_SECRETS = (SecretStr, SecretBytes, Secret)

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
    """The class of a server in a section: ``type_`` is a short name, an import path, or the class. Raises
    GraphError: there is none, it cannot be imported, or it is of another kind."""
    if isinstance(type_, type):
        target: Any = type_
    elif not isinstance(type_, str):
        raise GraphError(
            f"must be a short name or an import path package.module:Class, got {word_for(type_)}"
        )
    elif ":" in type_:
        if not _IMPORT_PATH.fullmatch(type_):
            raise GraphError(f"{type_!r} is not an import path; write package.module:Class")
        target = _imported(type_, lambda: pkgutil.resolve_name(type_))
    else:
        entry = _entry_point(kind, type_)
        target = _imported(entry.value, entry.load, entry)
    actual: Kind | None = getattr(target, "kind", None)
    if not (isinstance(target, type) and issubclass(target, Server)) or actual not in SECTION_OF:
        bases = "ModelServer, ResourcesServer or AgentServer"
        raise GraphError(f"{type_name(type_)!r} is not a server class; derive it from {bases}")
    if actual != kind:
        raise GraphError(f"{type_name(type_)!r} belongs under {SECTION_OF[actual]!r}, not here")
    return target


def _entry_point(kind: Kind, name: str) -> EntryPoint:
    registered = {other: _registered(group, _packages()) for other, group in GROUPS.items()}
    for entry in registered[kind].select(name=name):
        return entry
    for other, entries in registered.items():
        if name in entries.names:
            raise GraphError(f"{name!r} belongs under {SECTION_OF[other]!r}, not here")
    names = [*sorted(registered[kind].names), "http"]
    raise GraphError(f"unknown type {name!r}{nearest(name, names)}; or write package.module:Class")


def _packages() -> tuple[tuple[str, int], ...]:
    """The folders of packages, with the time at which one was last installed or removed."""
    return tuple((folder, Path(folder).stat().st_mtime_ns) for folder in sys.path if os.path.exists(folder))


@lru_cache(maxsize=8)
def _registered(group: str, packages: tuple[tuple[str, int], ...]) -> EntryPoints:
    """The entry points of a group. Finding them reads the metadata of every installed package."""
    return entry_points(group=group)


def _imported(import_path: str, load: Callable[[], Any], entry: EntryPoint | None = None) -> Any:
    try:
        return load()
    except ModuleNotFoundError as error:
        hint = _install(error.name or "", entry.dist if entry else None)
        raise GraphError(f"cannot import {import_path}: {error}{line_of(error)}; {hint}") from error
    except (Exception, SystemExit) as error:
        # Foreign code: a broken module is a problem of the graph, beside the other problems.
        raise GraphError(
            f"cannot import {import_path}: {type(error).__name__}: {error}{line_of(error)}"
        ) from error


def line_of(error: BaseException) -> str:
    """The line of the author's module that raised, unless the message names one."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    if (
        len(frames) < 2
        or ".py" in str(error)
        or frames[-1].filename in (__file__, importlib.__file__, pkgutil.__file__)
    ):
        return ""
    return f" ({os.path.relpath(frames[-1].filename)}:{frames[-1].lineno})"


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


class Leaf(NamedTuple):
    """A value with the class that it is annotated with."""

    path: str
    annotation: type
    value: Any


def check(
    model: type[BaseModel], values: Mapping[str, Any], path: str, *, known: Iterable[str] = ()
) -> tuple[BaseModel | None, list[Problem]]:
    """The settings of the server at a path as ``model``, or None and every problem of them.

    An unknown setting is compared with the names of ``model`` and those in ``known``.
    """
    try:
        return model.model_validate(dict(values)), []
    except ValidationError as error:
        secrets = [leaf.value for leaf in secrets_of(model, values)]
        texts = [secret for secret in secrets if isinstance(secret, str) and secret]
        problems = []
        for detail in error.errors(include_url=False, include_context=False):
            message = _message(model, detail["type"], detail["loc"], detail["msg"], known)
            if detail["msg"].startswith("Input should be") and detail["input"] not in secrets:
                message += _got(detail["type"], detail["input"])
            for secret in texts:
                message = message.replace(secret, MASK)
            problems.append((join(path, *detail["loc"]), message))
        return None, problems
    except Exception as error:
        # A validator of the class broke. Its message may quote any setting, so it is not shown.
        return None, [(path, f"a validator of {model.__qualname__} failed with {type(error).__name__}")]


def given(config: BaseModel, values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings among ``values``, by the names used there, as ``config`` made them."""
    names = {key: name for name, keys in _keys(type(config)).items() for key in keys}
    extra = config.model_extra or {}
    return {
        key: getattr(config, names[key]) if key in names else extra.get(key, value)
        for key, value in values.items()
    }


def field_names(model: type[BaseModel]) -> list[str]:
    """The names that settings of ``model`` may be given by, aliases included."""
    return [key for keys in _keys(model).values() for key in keys]


def join(path: str, *parts: str | int) -> str:
    """A path of settings: ``join("a.b", "c", 0)`` is ``a.b.c[0]``."""
    for part in parts:
        path = f"{path}[{part}]" if isinstance(part, int) else f"{path}.{part}" if path else part
    return path


def is_within(path: str, above: str) -> bool:
    """Whether ``path`` is ``above``, or something inside of it."""
    return path == above or (path.startswith(above) and path[len(above)] in ".[")


def secrets_of(model: type[BaseModel], values: Mapping[str, Any], path: str = "") -> Iterator[Leaf]:
    """Every value that is annotated as a secret, at any depth."""
    for key, annotation in _annotations(model, values):
        for leaf in _leaves(annotation, values[key], join(path, key), into_models=True):
            if issubclass(leaf.annotation, _SECRETS):
                yield leaf


def references_of(model: type[BaseModel], values: Mapping[str, Any]) -> dict[str, list[Leaf]]:
    """Every value that is annotated as a reference, by path; several leaves where several kinds fit.

    Looked for in fields, and in lists and mappings of references.
    """
    leaves: dict[str, list[Leaf]] = {}
    for key, annotation in _annotations(model, values):
        for leaf in _leaves(annotation, values[key], key, into_models=False):
            if issubclass(leaf.annotation, Client) and leaf.value is not None:
                leaves.setdefault(leaf.path, []).append(leaf)
    return leaves


def _keys(model: type[BaseModel]) -> dict[str, list[str]]:
    keys = {}
    for name, info in model.model_fields.items():
        choices = getattr(info.validation_alias, "choices", [info.validation_alias])
        aliases = [alias for alias in choices if isinstance(alias, str)]
        keys[name] = list(dict.fromkeys(aliases or [name]))
    return keys


def _annotations(model: type[BaseModel], values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, keys in _keys(model).items():
        for key in {*keys, name} & values.keys():
            yield key, model.model_fields[name].annotation


def _leaves(annotation: Any, value: Any, path: str, *, into_models: bool) -> Iterator[Leaf]:
    """The values in ``value`` whose annotation is a class, found along the annotation."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _leaves(args[0], value, path, into_models=into_models)
    elif origin in (Union, types.UnionType):
        for arg in args:
            yield from _leaves(arg, value, path, into_models=into_models)
    elif isinstance(value, Mapping) and isinstance(origin, type) and issubclass(origin, Mapping):
        for key, item in value.items():
            yield from _leaves(args[1], item, join(path, str(key)), into_models=into_models)
    elif isinstance(value, list | tuple) and isinstance(origin, type) and issubclass(origin, Iterable):
        for index, item in enumerate(value):
            arg = args[min(index, len(args) - 1)]
            arg = args[0] if arg is Ellipsis else arg
            yield from _leaves(arg, item, join(path, index), into_models=into_models)
    elif _is_model(annotation) and isinstance(value, Mapping):
        if into_models:
            for key, inner in _annotations(annotation, value):
                yield from _leaves(inner, value[key], join(path, key), into_models=True)
    elif isinstance(origin or annotation, type):
        yield Leaf(path, origin or annotation, value)


def _is_model(annotation: Any) -> bool:
    # On Python 3.10 `dict[str, int]` is an instance of `type` as well.
    return (
        get_origin(annotation) is None and isinstance(annotation, type) and issubclass(annotation, BaseModel)
    )


def _message(
    model: type[BaseModel], kind: str, loc: tuple[str | int, ...], message: str, known: Iterable[str]
) -> str:
    if kind == "missing":
        return "a required setting is missing"
    if kind == "extra_forbidden":
        inner = _model_at(model, loc[:-1])
        names = [*field_names(inner), *(known if inner is model else ())] if inner else []
        return f"unknown setting{nearest(loc[-1], names)}"
    return in_our_words(message)


def _got(kind: str, value: Any) -> str:
    """What a message says of the value that was given: of a text nothing but its type."""
    if kind.endswith(("_parsing", "literal_error", "enum", "from_float")):
        return ""  # says it already, or would say "got a string" of a string
    return f", got {value if type(value) in (int, float) else word_for(value)}"


def _model_at(model: type[BaseModel], loc: tuple[str | int, ...]) -> type[BaseModel] | None:
    """The class of settings at a place inside ``model``, where it is a field of a field."""
    for part in loc:
        annotations = [annotation for _, annotation in _annotations(model, {str(part): None})]
        options = [option for annotation in annotations for option in (annotation, *get_args(annotation))]
        models = [option for option in options if _is_model(option)]
        if not models:
            return None
        model = models[0]
    return model


FOLDER = Path(gym_serve.__file__).parent / "graphs"
"""Where the files are."""

_SUFFIXES = (".yaml", ".yml")


def graph_file(name: str | Path) -> Path:
    """The file of a graph that comes with gym_serve, by its name; ``name`` as a path if there is none."""
    path = Path(name)
    if path.suffix in _SUFFIXES or len(path.parts) != 1 or path.exists():
        return path
    return _by_name().get(str(name), path)


def names() -> list[str]:
    """The names of the files."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def is_graph(path: Path) -> bool:
    """Whether a path that a command was given is a graph, by its suffix or as a name."""
    return path.suffix in _SUFFIXES or graph_file(path) != path


@lru_cache
def _by_name() -> dict[str, Path]:
    files = sorted(FOLDER.glob("*.yaml"), key=lambda file: file.stem)
    named: dict[str, tuple[int, Path]] = {}
    for file in files:
        args = yaml.safe_load(file.read_text(encoding="utf-8"))["applications"][0]["args"]
        servers = sum(len(args.get(section) or ()) for section in SECTIONS)
        types = {server.get("type") for server in (args.get("resources") or {}).values()}
        if len(types) == 1 and servers < named.get(type_ := str(types.pop()), (servers + 1, file))[0]:
            named[type_] = servers, file
    return {**{type_: file for type_, (_, file) in named.items()}, **{file.stem: file for file in files}}
