"""Reads a graph from a file, a mapping or a `GraphSpec`, with the file that it extends and overrides.

A file is a Serve config (``applications:``) or the ``args:`` of one. `load_graph`
only puts the parts together; `resolve` checks the result.

YAML is read strictly: no key is repeated, and nothing contains itself. Messages give the place in the
file and never quote it, as the line may hold a secret.

Variables in graph files: ``${NAME}``, ``${NAME:-default}``, and ``$${`` for a literal ``${``.

As in a shell, ``:-`` gives the default of a variable that is unset or empty. ``${NAME}`` alone refuses both,
so that an empty variable never turns a setting off unnoticed. If a value with variables becomes empty, its
key is left out and the setting's default applies. Variables inside the values of variables are not replaced.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from dotenv import dotenv_values

from gym_serve.graph.classes import FOLDER, graph_file
from gym_serve.graph.spec import SECTIONS, GraphSpec, nearest, word_for
from gym_serve.types.errors import GraphError

_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?", re.DOTALL)
_MALFORMED = "invalid variable; write ${NAME} or ${NAME:-default}, and $${ for a literal ${"
_ABSENT = object()


class _Variable(NamedTuple):
    name: str
    default: str | None


def environment(base_dir: Path) -> dict[str, str]:
    """Variables of this process, over those of ``.env`` in ``base_dir``, over ``.env`` here. Raises
    GraphError: a ``.env`` file that cannot be read."""
    variables: dict[str, str] = {}
    for file in dict.fromkeys((Path.cwd() / ".env", base_dir / ".env")):
        if not file.is_file():
            continue
        try:
            values = dotenv_values(file)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it must be a text in UTF-8"
            raise GraphError(f"{file}: cannot be read: {reason}") from None
        variables |= {name: value for name, value in values.items() if value is not None}
    return variables | dict(os.environ)


class Variables:
    """Replaces variables by their values, and keeps the problems of those that have none."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self.problems: list[tuple[str, str]] = []
        """Path and message of every problem so far."""

    def fill(self, value: Any, path: str) -> Any:
        """``value`` with its variables replaced, at any depth; unchanged where that failed.

        None for a text that becomes empty.
        """
        filled = self._fill(value, path)
        return None if filled is _ABSENT else filled

    def _fill(self, value: Any, path: str) -> Any:
        if isinstance(value, str):
            return self._text(value, path) if "${" in value else value
        if isinstance(value, Mapping):
            pairs = ((k, self._fill(v, f"{path}.{k}" if path else str(k))) for k, v in value.items())
            return {key: filled for key, filled in pairs if filled is not _ABSENT}
        if isinstance(value, list | tuple):
            items = (self._fill(item, f"{path}[{i}]") for i, item in enumerate(value))
            return [filled for filled in items if filled is not _ABSENT]
        return value

    def _text(self, text: str, path: str) -> Any:
        problems = len(self.problems)
        filled = "".join(self._part(part, path) for part in _parts(text))
        if len(self.problems) > problems:
            return text
        return filled or _ABSENT

    def _part(self, part: str | _Variable | None, path: str) -> str:
        if isinstance(part, str):
            return part
        if part is None:
            self.problems.append((path, _MALFORMED))
            return ""
        if value := self._env.get(part.name):
            return value
        if part.default is not None:
            filled = self._fill(part.default, path)
            return "" if filled is _ABSENT else str(filled)
        state = "is empty" if part.name in self._env else "is not set"
        hint = f"export it, put it into .env, or write ${{{part.name}:-default}}"
        self.problems.append((path, f"environment variable {part.name} {state}; {hint}"))
        return ""


def variables_of(value: Any) -> dict[str, bool]:
    """The variables in a graph as it is written, and of each whether the graph needs a value for it.

    It does not need those that have a default wherever they stand, or that stand in a branch of an ``if``,
    which may not be taken.
    """
    variables: dict[str, bool] = {}

    def visit(value: Any, needed: bool) -> None:
        if isinstance(value, Mapping):
            for key, below in value.items():
                visit(below, needed and key not in ("then", "else"))
        elif isinstance(value, list | tuple):
            for below in value:
                visit(below, needed)
        elif isinstance(value, str):
            for part in _parts(value):
                if isinstance(part, _Variable):
                    variables[part.name] = variables.get(part.name, False) or (
                        needed and part.default is None
                    )
                    visit(part.default, needed)

    visit(value, True)
    return variables


def has_literal(text: str) -> bool:
    """Whether a secret has no variable at all, or one whose default is written out. ``EMPTY`` is the word for
    no key, and no secret."""
    variables = [part for part in _parts(text) if isinstance(part, _Variable)]
    if not variables:
        return text != "EMPTY"
    return any(v.default and has_literal(v.default) for v in variables)


def _parts(text: str) -> Iterator[str | _Variable | None]:
    """The literals and variables of ``text``; None for a malformed rest."""
    at = 0
    while (start := text.find("${", at)) >= 0:
        if text[at:start].endswith("$"):
            yield text[at : start - 1] + "${"
            at = start + 2
            continue
        yield text[at:start]
        end = closing_brace(text, start + 2)
        variable = None if end is None else _VARIABLE.fullmatch(text, start + 2, end)
        if end is None or variable is None:
            yield None
            return
        yield _Variable(*variable.groups())
        at = end + 1
    yield text[at:]


def closing_brace(text: str, at: int) -> int | None:
    """Index of the brace that closes the one before ``at``; braces in between stand in pairs."""
    depth = 1
    for index in range(at, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return None


IMPORT_PATH = "gym_serve.graph:app"
"""``import_path`` of the applications that are graphs."""

_QUOTED = re.compile(r"""(['"])(?!<).{2,}\1""")
"""Words of the file in PyYAML's messages; its own names of tokens stand in ``<>``."""
_DEFAULT = "default"  # Serve's own name for an application without one


@dataclass(frozen=True)
class GraphSource:
    """A graph as it was read. ``name``: name of its application; ``route_prefix``: HTTP path of the
    application, ``/`` by default; ``spec``: the graph, with what it extends and all overrides in place;
    ``path``: the file, if it came from one."""

    name: str
    route_prefix: str
    spec: GraphSpec
    path: str | None

    @property
    def base_dir(self) -> Path:
        """Directory that relative paths and ``.env`` are looked for in: that of the file, and the current one
        for a graph that comes with gym_serve."""
        folder = Path(self.path).parent if self.path else Path.cwd()
        return Path.cwd() if folder == FOLDER else folder


def load_graph(
    source: str | Path | Mapping[str, Any] | GraphSpec,
    *,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    application: str | None = None,
) -> GraphSource:
    """Read a graph.

    Args:
        source: path of a file, name of a graph that comes with gym_serve, or the contents of a file.
        overrides: values by path, ``{"agents.math_agent.max_steps": 3}``, or
            ``["agents.math_agent.max_steps=3"]`` with values in YAML. A value replaces what
            stands there; null deletes it. A secret is passed as ``SecretStr``.
        application: which application of a Serve config; needed where it has several graphs.

    Raises:
        GraphError: the file cannot be read, has no such application or several of which none is
            chosen, or an override names a server that the graph does not have.
    """
    path = graph_file(source) if isinstance(source, str | Path) else None
    where = str(path) if path else None
    try:
        if isinstance(source, GraphSpec):
            content: Any = source.raw()
        else:
            content = source if path is None else read_yaml(path)
        name, route_prefix, args = _application(content, application)
        args = extended(args, path.parent if path else Path.cwd(), [path.resolve()] if path else [])
        _override(args, _pairs(overrides))
    except GraphError as error:
        raise GraphError(error.problems, source=error.source or where) from None
    return GraphSource(name, route_prefix, GraphSpec.model_validate(args), where)


def graph_names(path: Path) -> list[str]:
    """Names of the graphs in a file, in its order: what `load_graph` takes as ``application``. Raises
    GraphError: the file cannot be read, or holds no graph."""
    path = graph_file(path)
    try:
        return list(_graphs(read_yaml(path)))
    except GraphError as error:
        raise GraphError(error.problems, source=error.source or str(path)) from None


def extended(args: Mapping[str, Any], base_dir: Path, above: Sequence[Path] = ()) -> dict[str, Any]:
    """A graph merged over the file that it ``extends``, relative to ``base_dir``, and that one's own. Raises
    GraphError: a file cannot be read, holds no graph, or extends itself."""
    own = dict(args)
    extends = own.pop("extends", None)
    if extends is None:
        return own
    if not isinstance(extends, str):
        raise GraphError(f"`extends` must be the path of a graph file, got {word_for(extends)}")
    path = (base_dir / extends).resolve()
    if path in above:
        raise GraphError(f"extends: the files form a cycle: {' -> '.join(p.name for p in [*above, path])}")
    try:
        content = read_yaml(path)
        if len(names := list(_graphs(content))) > 1:
            raise GraphError(f"{path.name} holds several graphs ({', '.join(names)}); it must hold one")
        _, _, base = _application(content, None)
    except GraphError as error:
        raise GraphError([f"extends: {p}" for p in error.problems], source=error.source) from None
    result: dict[str, Any] = merged(extended(base, path.parent, [*above, path]), own)
    return result


def _graphs(content: Any) -> dict[str, Mapping[str, Any]]:
    """The applications of a file that are graphs, by name; the args of one alone are named ``default``."""
    if not isinstance(content, Mapping):
        raise GraphError(
            f"a graph file must be a mapping with `applications` (a Serve config) or `models`, `resources` "
            f"and `agents`, got {word_for(content)}"
        )
    if "applications" not in content:
        return {_DEFAULT: {"args": content}}
    applications = content["applications"]
    if not isinstance(applications, list) or not all(isinstance(a, Mapping) for a in applications):
        raise GraphError(f"`applications` must be a list of mappings, got {word_for(applications)}")
    graphs: dict[str, Mapping[str, Any]] = {}
    for application in applications:
        if application.get("import_path") == IMPORT_PATH:
            name = application.get("name", _DEFAULT)
            if not isinstance(name, str) or not name:
                raise GraphError(f"applications: `name` must be a text, got {word_for(name)}; quote it")
            if name in graphs:
                raise GraphError(f"applications: two graphs have the name {name!r}; rename one")
            graphs[name] = application
    if not graphs:
        raise GraphError(f"applications: none is a graph; a graph has import_path: {IMPORT_PATH}")
    return graphs


def _application(content: Any, wanted: str | None) -> tuple[str, str, dict[str, Any]]:
    """Name, route prefix and args of the graph in the contents of a file."""
    graphs = _graphs(content)
    if wanted is None and len(graphs) > 1:
        raise GraphError(
            f"applications: several graphs ({', '.join(graphs)}); choose one with "
            "application=NAME (--application NAME)"
        )
    name = next(iter(graphs)) if wanted is None else wanted
    if name not in graphs:
        raise GraphError(f"applications: unknown graph {name!r}{nearest(name, graphs)}")
    route_prefix = graphs[name].get("route_prefix", "/")
    if not isinstance(route_prefix, str) or not route_prefix.startswith("/"):
        raise GraphError(
            f"applications.{name}.route_prefix: must be a path that starts with /, got {route_prefix!r}"
        )
    args = graphs[name].get("args")
    if not isinstance(args, Mapping):
        raise GraphError(
            f"applications.{name}.args: must be a mapping that holds the graph, got {word_for(args)}"
        )
    return name, route_prefix, {str(key): value for key, value in args.items()}


def _pairs(overrides: Mapping[str, Any] | Sequence[str]) -> Iterable[tuple[str, Any]]:
    if isinstance(overrides, Mapping):
        yield from overrides.items()
        return
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals:
            raise GraphError(f"{path}: an override must be path=value, e.g. agents.math_agent.max_steps=3")
        try:
            yield path.strip(), parse_yaml(text)
        except GraphError:
            raise GraphError(f"{path}: the value is not valid YAML; quote it") from None


def _override(args: dict[str, Any], pairs: Iterable[tuple[str, Any]]) -> None:
    """Set the values in place; mappings on the way are copied first, as callers may own them."""
    problems = []
    for path, value in pairs:
        first, *rest = path.split(".")
        present = args.get(first)
        if first not in GraphSpec.model_fields:
            problems.append(f"{path}: unknown key {first!r}{nearest(first, GraphSpec.model_fields)}")
        elif first in SECTIONS and rest and (not isinstance(present, Mapping) or rest[0] not in present):
            names = present if isinstance(present, Mapping) else ()
            problems.append(f"{path}: unknown server {rest[0]!r}{nearest(rest[0], names)}")
        elif (problem := _set(args, [first, *rest], value)) is not None:
            problems.append(f"{path}: {problem}")
    if problems:
        raise GraphError(problems)


def _set(args: dict[str, Any], keys: list[str], value: Any) -> str | None:
    *parents, last = keys
    here = args
    for key in parents:
        child = here.get(key)
        if child is not None and not isinstance(child, Mapping):
            return f"{key!r} must be a mapping, got {word_for(child)}"
        child = dict(child or {})
        here[key] = child
        here = child
    if value is None and last in here:
        del here[last]
    else:
        here[last] = value
    return None


def read_yaml(path: Path) -> Any:
    """The value of a YAML file. Raises GraphError: the file cannot be read, or is not strict YAML."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise GraphError(f"no such file: {path}") from None
    except OSError as error:
        raise GraphError(f"cannot be read: {error.strerror or error}", source=str(path)) from None
    except UnicodeDecodeError:
        raise GraphError("must be a text in UTF-8; save it as one", source=str(path)) from None
    try:
        return parse_yaml(text)
    except GraphError as error:
        raise GraphError(error.problems, source=str(path)) from None


def parse_yaml(text: str) -> Any:
    """The value of YAML text. Raises GraphError: it is not YAML, a key is repeated, or a node contains
    itself."""
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if problems := _problems(node):
            raise GraphError(problems)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise GraphError(f"{where}invalid YAML: {_QUOTED.sub('...', error.problem or '')}") from None
    except RecursionError:
        raise GraphError("invalid YAML: it is nested too deeply") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise GraphError(f"line {line}: invalid YAML: it has a character that YAML forbids") from None
    except (yaml.YAMLError, ValueError) as error:  # a date that does not exist, say
        raise GraphError(f"invalid YAML: {type(error).__name__}") from None


class TextDumper(yaml.SafeDumper):
    """Writes texts of several lines, such as prompts, as they are read best, and no aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


TextDumper.add_representer(str, TextDumper.text)


def merged(base: Any, changes: Any) -> Any:
    """``base`` changed by ``changes``: mappings key by key, anything else is replaced.

    A null deletes the key from ``base``; where ``base`` has no such key, it is a value.
    """
    if not isinstance(base, Mapping) or not isinstance(changes, Mapping):
        return changes
    result = dict(base)
    for key, value in changes.items():
        if key not in result:
            result[key] = value
        elif value is None:
            del result[key]
        else:
            result[key] = merged(result[key], value)
    return result


def _problems(root: yaml.Node) -> list[str]:
    problems: list[str] = []
    visited: set[int] = set()

    def visit(node: yaml.Node, path: str, above: frozenset[int]) -> None:
        if id(node) in above:
            problems.append(
                f"{path}: line {node.start_mark.line + 1}: the alias refers to a node that contains it"
            )
        if id(node) in visited:
            return
        visited.add(id(node))
        above |= {id(node)}
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                visit(item, f"{path}[{index}]", above)
        elif isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                name = str(key.value) if isinstance(key, yaml.ScalarNode) else "?"
                here, line = f"{path}.{name}".lstrip("."), key.start_mark.line + 1
                if isinstance(key, yaml.ScalarNode) and name in lines:
                    problems.append(f"{here}: the key is repeated, in line {lines[name]} and line {line}")
                lines[name] = line
                visit(value, here, above)

    visit(root, "", frozenset())
    return problems
