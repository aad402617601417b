"""Write what comes from the code: docs/types.md, environments.md, api.md, options.md and graph.svg.

    python docs/generate.py

types.md lists the settings of every built-in server type. Names, types, defaults and meanings come from the
pydantic models and the docstrings below their attributes.

environments.md lists every environment and agent. The description is the first paragraph of the class; tools,
state and kind follow from its methods, and the packages to install from its imports and pyproject.toml.

api.md lists every name of `gym_serve` and `gym_serve.testing` with its signature and docstring.

A test fails if a committed page is out of date.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import runpy
import sys
import textwrap
from collections.abc import Callable, Container, Iterator, Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, packages_distributions
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from typing_extensions import is_typeddict

import gym_serve
import gym_serve.testing
from gym_serve.cli.catalog import field_docs
from gym_serve.client.core import CollectOptions
from gym_serve.client.gym import GraphOptions
from gym_serve.client.policy import AsyncPolicy, Policy
from gym_serve.client.rollout_client import RolloutOptions
from gym_serve.evaluation import benchmark_names, find_benchmark
from gym_serve.graph.spec import AutoscalingOptions, GatewayOptions, ServerOptions
from gym_serve.servers import AgentServer, ModelServer, ResourcesServer
from gym_serve.servers.base import Server
from gym_serve.servers.clients import Client

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
graph_picture = runpy.run_path(str(ROOT / "docs" / "pictures.py"))["graph_picture"]
options_page = runpy.run_path(str(ROOT / "docs" / "command_reference.py"))["options_page"]
SECTIONS: dict[str, tuple[str, type[Server]]] = {
    "models": ("gym_serve.models", ModelServer),
    "resources": ("gym_serve.environments", ResourcesServer),
    "agents": ("gym_serve.agents", AgentServer),
}
LIMITS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "minLength": "length ≥ {}",
}
LONGEST_DEFAULT = 80
HEAD = """\
<!-- Written by docs/generate.py; do not edit. -->
# Built-in types

The settings of every built-in `type`. How they are written, and the keys that every server takes
beside them, is in [the graph file](graph-reference.md). A key whose default is — is required.
"""


ENVIRONMENTS_HEAD = """\
<!-- Written by docs/generate.py; do not edit. -->
# Environments and agents

Every built-in environment and agent; their settings are in [built-in types](types.md), and graphs that
`serve run` starts in `graphs/`.

- **Kind**: *single turn*: the answer is scored. *Tools*: the model calls tools first. *Steps*: the
  environment answers every turn with an observation and a reward (`gymnasium_agent`). *Group*: the rollouts
  of a row are compared with one another. *Judge*: a further model has a say.
- **State**: *session*: an episode has state of its own. *Snapshot*: it goes on elsewhere when its replica
  dies.
- **Reverify**: whether `gym-serve reverify` can score stored rollouts again.
- **Install**: the extra of the package that it needs, and programs that pip does not install.
"""
SHOWN_TOOLS = 4


def types_page() -> str:
    """The text of types.md."""
    return "\n".join([HEAD, *_types(), *_options()]).rstrip() + "\n"


def _types() -> Iterator[str]:
    for section, (group, base) in SECTIONS.items():
        yield f"## {section}\n"
        if base.Config.model_fields:
            yield "Every type has these keys, and those of its own below.\n"
            yield _table(base.Config)
        for name, server in _built_in(group):
            yield f"### {name}\n\n{_line(server.__doc__)}\n"
            yield _table(server.Config, without=base.Config.model_fields)


def _built_in(group: str) -> Iterator[tuple[str, type[Server]]]:
    """The types of this package, by name; other packages may register theirs in the same group."""
    # Not of what is installed, which may be older than the code.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name, target in sorted(project["entry-points"][group].items()):
        if target.startswith("gym_serve."):
            yield name, EntryPoint(name, target, group).load()


def _options() -> Iterator[str]:
    yield "## Serve options\n\nEvery server but a remote one takes these. Names and defaults are Ray Serve's,"
    yield "except that `num_cpus` is 0.1 and `max_ongoing_requests` 4096 where they are left out.\n"
    yield _table(ServerOptions)
    yield "### gateway\n\nThe deployment that answers HTTP takes these as well.\n"
    yield _table(GatewayOptions, without=ServerOptions.model_fields)
    yield f"### autoscaling\n\n{_line(AutoscalingOptions.__doc__)}\n"
    yield _table(AutoscalingOptions)


def _table(model: type[BaseModel], without: Container[str] = ()) -> str:
    schema = model.model_json_schema(by_alias=False)
    meaning = field_docs(model)
    rows = [
        f"| `{name}` | {_type(field, schema['properties'][name], schema)} | {_default(field)} "
        f"| {_line(meaning.get(name))} |"
        for name, field in model.model_fields.items()
        if name not in without
    ]
    if not rows:
        return "It has no settings of its own.\n"
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows, ""])


def _type(field: FieldInfo, shape: dict[str, Any], schema: dict[str, Any]) -> str:
    for annotation in (field.annotation, *get_args(field.annotation)):
        if isinstance(annotation, type) and issubclass(annotation, Client):
            return f"name of a {annotation.kind} server"
        if annotation is SecretStr:
            return "secret"
    return _shape(shape, schema.get("$defs", {}))


def _shape(shape: dict[str, Any], defs: dict[str, Any]) -> str:
    if "$ref" in shape:
        return _shape(defs[shape["$ref"].rpartition("/")[2]], defs)
    if "anyOf" in shape:
        return " or ".join(_shape(s, defs) for s in shape["anyOf"] if s.get("type") != "null")
    if "enum" in shape or "const" in shape:
        return ", ".join(f"`{value}`" for value in shape.get("enum", [shape.get("const")]))
    name, items, values = shape.get("type", "any"), shape.get("items"), shape.get("additionalProperties")
    if name == "array":
        name = f"list of {_shape(items, defs)}" if items else "list"
        return f"non-empty {name}" if shape.get("minItems") else name
    if name == "object":
        return f"mapping to {_shape(values, defs)}" if isinstance(values, dict) else "mapping"
    limits = [text.format(shape[key]) for key, text in LIMITS.items() if key in shape]
    return f"{name} {', '.join(limits)}".strip()


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "—"
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is None or isinstance(default, SecretStr):
        return ""
    text = json.dumps(default, default=str, ensure_ascii=False)
    return f"`{_line(text)}`" if len(text) <= LONGEST_DEFAULT else "see the source"


def _line(text: str | None) -> str:
    """The first paragraph, in one line that a cell can hold."""
    return " ".join((text or "").strip().split("\n\n")[0].split()).replace("``", "`").replace("|", "\\|")


def environments_page() -> str:
    """The text of environments.md."""
    lines = [ENVIRONMENTS_HEAD, "## Environments", ""]
    lines += ["| name | what it is, and the reward | kind | tools | state | reverify | install |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for name, server in _built_in("gym_serve.environments"):
        assert issubclass(server, ResourcesServer)
        cells = (_kind(server), _tools(server), _state(server), server.reverify_mode, _install(server))
        lines.append(f"| {_link(name, server)} | {_line(server.__doc__)} | {' | '.join(cells)} |")
    lines += ["", "## Agents", ""]
    lines += ["| name | what it does | refers to |", "|---|---|---|"]
    for name, server in _built_in("gym_serve.agents"):
        references = ", ".join(f"`{field}`" for field in _references(server))
        lines.append(f"| `{name}` | {_line(server.__doc__)} | {references} |")
    return "\n".join(lines) + "\n"


def _link(name: str, server: type[Server]) -> str:
    is_here = (ROOT / "environments" / name / "README.md").exists()
    return f"[`{name}`](../environments/{name}/README.md)" if is_here else f"`{name}`"


def _kind(server: type[ResourcesServer]) -> str:
    kinds = []
    if hasattr(server, "step"):
        kinds.append("steps")
    elif server.compare is not ResourcesServer.compare:
        kinds.append("group")
    else:
        kinds.append("tools" if server.tools or _has_session(server) else "single turn")
    if any(kind == "model" for kind in _references(server).values()):
        kinds.append("judge")
    return ", ".join(kinds)


def _tools(server: type[ResourcesServer]) -> str:
    names = [f"`{name}`" for name in server.tools]
    if len(names) <= SHOWN_TOOLS:
        found_later = _has_session(server) and not hasattr(server, "step")
        return ", ".join(names) or ("those of its server" if found_later else "—")
    return f"{len(names)}: {', '.join(names[: SHOWN_TOOLS - 1])}, ..."


def _state(server: type[ResourcesServer]) -> str:
    if not _has_session(server):
        return "—"
    return "session, snapshot" if server.restorable else "session"


def _has_session(server: type[ResourcesServer]) -> bool:
    return server.Session is not ResourcesServer.Session


def _references(server: type[Server]) -> dict[str, str]:
    """The fields that name another server, with its kind."""
    return {
        name: annotation.kind
        for name, field in server.Config.model_fields.items()
        for annotation in (field.annotation, *get_args(field.annotation))
        if isinstance(annotation, type) and issubclass(annotation, Client)
    }


def _install(server: type[Server]) -> str:
    needed = [f"extra `{extra}`" for extra in _extras(server)]
    sandbox = server.Config.model_fields.get("sandbox")
    if sandbox is not None and sandbox.default == "bubblewrap":
        needed.append("bubblewrap")
    return ", ".join(needed) or "—"


def _extras(server: type[Server]) -> list[str]:
    """The extra that bears its name, else those that bring what its modules import."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {
        extra: {_distribution(requirement) for requirement in requirements}
        for extra, requirements in project["optional-dependencies"].items()
    }
    folder = Path(inspect.getfile(server)).parent
    if folder.name in extras:
        return [folder.name]
    base = {_distribution(name) for name in (project["name"], *project["dependencies"])}
    installed = _installed()
    imported = {
        _distribution(name)
        for module in _imports(inspect.getfile(server)) | set(server.requires)
        for name in installed.get(module, [])
    }
    return sorted(extra for extra, names in extras.items() if names & imported - base and extra != "test")


@lru_cache
def _installed() -> Mapping[str, list[str]]:
    """The distributions of each installed module; reading them takes seconds."""
    return packages_distributions()


def _imports(file: str) -> set[str]:
    """Top-level modules that a server's file imports, and the others of its folder if it is a package."""
    path = Path(file)
    names: set[str] = set()
    for module in path.parent.glob("*.py") if path.name == "__init__.py" else [path]:
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module)
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
    return {name.partition(".")[0] for name in names}


def _distribution(requirement: str) -> str:
    """The name that a requirement begins with, as package indexes spell it."""
    name = re.match(r"[\w.-]+", requirement)
    return re.sub(r"[-_.]+", "-", name[0]).lower() if name else ""


API_HEAD = """\
<!-- Written by docs/generate.py; do not edit. -->
# Python API

Every public name with its signature and docstring. `gym_serve` exports all of them except those of the
last section. The guides show how to use them: [trainers](trainers.md), [writing an
environment](writing-an-environment.md), [writing an agent](writing-an-agent.md), [writing a
model](writing-a-model.md).
"""
API_SECTIONS = {
    "Rollouts": (
        "Gym",
        "GraphOptions",
        "RolloutOptions",
        "CollectOptions",
        "Policy",
        "AsyncGym",
        "AsyncPolicy",
        "Budget",
        "Row",
        "Rollout",
        "Failure",
        "Group",
        "Progress",
        "PromptTemplate",
        "Report",
        "merge",
    ),
    "Servers": ("ResourcesServer", "tool", "AgentServer", "Episode", "ModelServer", "ServerRunner"),
    "Requests and results": ("Response", "VerifyRequest", "Verdict", "CompareRequest", "Comparison"),
    "Clients": ("ModelClient", "EnvironmentClient", "AgentClient"),
    "Graphs": ("Graph", "GraphSpec", "load_graph", "resolve"),
}
"""The names of `gym_serve` in order; errors and names that are missing here follow."""


def api_page() -> str:
    """The text of api.md."""
    public = {name: getattr(gym_serve, name) for name in gym_serve.__all__}
    for named in (GraphOptions, RolloutOptions, CollectOptions, Policy, AsyncPolicy):  # what signatures name
        public[named.__name__] = named
    errors = {name: value for name, value in public.items() if _is_error(value)}
    placed = {name for names in API_SECTIONS.values() for name in names}
    rest = [name for name in public if name not in {*placed, *errors, "__version__"}]
    lines = [API_HEAD]
    for title, names in {**API_SECTIONS, "Other names": rest}.items():
        entries = [line for name in names if name in public for line in _entry(name, public[name])]
        lines += [f"## {title}\n", *entries] if entries else []
    lines += ["## Errors\n", "[Errors](errors.md) lists causes and remedies. Indentation shows subclasses.\n"]
    lines += [*_error_tree(errors, gym_serve.GymError), ""]
    lines += ["## gym_serve.testing\n"]
    for name in gym_serve.testing.__all__:
        lines += _entry(name, getattr(gym_serve.testing, name))
    return "\n".join(lines).rstrip() + "\n"


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


def _error_tree(errors: Mapping[str, type], root: type, depth: int = 0) -> Iterator[str]:
    yield f"{'  ' * depth}- `{root.__name__}` (`{root.code}`): {_line(root.__doc__)}"  # type: ignore[attr-defined]
    for error in errors.values():
        if root in error.__bases__:
            yield from _error_tree(errors, error, depth + 1)


def _entry(name: str, value: Any) -> Iterator[str]:
    """The lines of a class, function or constant."""
    yield f"### {name}\n"
    if not callable(value):
        yield f"`{value!r}`\n"
        return
    yield from _documented(value)
    if not isinstance(value, type):
        return
    if fields := _fields(value):
        yield "\n".join(["| field | type | meaning |", "|---|---|---|", *fields, ""])
    for cls in [value, *[base for base in value.__mro__[1:] if not _is_listed(base)]]:
        for member, given in vars(cls).items():
            method = given.__func__ if isinstance(given, (classmethod, staticmethod)) else given
            if not member.startswith("_") and inspect.getdoc(method):
                if isinstance(method, property):
                    yield f"#### {name}.{member}\n\n{_text(method)}\n"
                elif inspect.isfunction(method):
                    yield f"#### {name}.{member}\n"
                    yield from _documented(method)


def _is_listed(cls: type) -> bool:
    """Whether its members stand elsewhere: under its own name, or in another package's documentation."""
    return cls.__name__ in gym_serve.__all__ or not cls.__module__.startswith("gym_serve")


def _documented(value: Any) -> Iterator[str]:
    """The signature, where it says more than the fields do, and the docstring."""
    if inspect.isfunction(value):
        prefix = "async " if inspect.iscoroutinefunction(value) or inspect.isasyncgenfunction(value) else ""
        yield f"`{prefix}{value.__name__}{_signature(value)}`\n"
    elif issubclass(value, dict):
        yield f"`class {value.__name__}({'TypedDict' if is_typeddict(value) else 'dict[str, Any]'})`\n"
    elif not issubclass(value, BaseModel) and not hasattr(value, "__dataclass_fields__"):
        yield f"`class {value.__name__}{_signature(value.__init__)}`\n"
    yield f"{_text(value)}\n"


def _signature(function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    given = [
        parameter.replace(
            annotation=_Source(parameter.annotation), default=_default_source(parameter.default)
        )
        for name, parameter in signature.parameters.items()
        if name not in ("self", "cls")
    ]
    returned = signature.return_annotation
    plain = signature.replace(parameters=given, return_annotation=signature.empty)
    return f"{plain} -> {returned}" if isinstance(returned, str) and returned != "None" else str(plain)


def _default_source(default: Any) -> Any:
    return _Source("...") if callable(default) and default is not inspect.Parameter.empty else default


class _Source:
    """An annotation that is shown as it is written."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _attributes(value: Any) -> dict[str, str]:
    """The meanings in a section ``Attributes`` of a docstring."""
    _, _, section = (inspect.getdoc(value) or "").partition("\nAttributes:\n")
    section = section.split("\n\n")[0]
    return {
        found[1]: found[2] for found in re.finditer(r"^    (\w+):((?:.|\n {5,})*)", section, re.MULTILINE)
    }


def _text(value: Any) -> str:
    """A docstring as Markdown: sections such as ``Args`` are lists; a table shows ``Attributes``."""
    docstring = re.sub(r"Attributes:\n(    .*\n?)+", "", inspect.getdoc(value) or "")
    lines = docstring.replace("``", "`").splitlines()
    text, section = [], ""
    for line in lines:
        if heading := re.fullmatch(r"(Args|Raises|Returns|Yields):", line):
            section = heading[1]
            text += [f"**{section}**", ""]
        elif section in ("Args", "Raises") and re.match(r"    \S", line):
            name, colon, meaning = line.strip().partition(":")
            text.append(f"- `{name.strip('`')}`{colon}{meaning}")
        elif section and line.startswith("    "):
            text.append("  " * (section in ("Args", "Raises")) + line.strip())
        else:
            section = section if not line else ""
            text.append(line)
    return "\n".join(text).strip()


def _fields(cls: type) -> list[str]:
    """Rows of a table: the fields of a class, with the docstrings below or the comments beside them."""
    if is_typeddict(cls):
        named = cls.__annotations__
    else:
        named = cls.model_fields if issubclass(cls, BaseModel) else getattr(cls, "__dataclass_fields__", {})
    rows, meanings_above = [], _attributes(cls)
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith("gym_serve"):
            continue
        source = textwrap.dedent(inspect.getsource(base))
        lines, definition = source.splitlines(), ast.parse(source).body[0]
        assert isinstance(definition, ast.ClassDef)
        for node, below in pairwise([*definition.body, ast.Pass()]):
            match node, below:
                case ast.AnnAssign(target=ast.Name(id=name)), _ if name in named and name[0] != "_":
                    doc = below.value if isinstance(below, ast.Expr) else None
                    beside = lines[node.end_lineno - 1][node.end_col_offset :].partition("# ")[2]
                    above = meanings_above.get(name) or beside
                    meaning = doc.value if isinstance(doc, ast.Constant) else above
                    annotated = re.sub(r"^Annotated\[(.*), \w+\]$", r"\1", ast.unparse(node.annotation))
                    annotation = annotated.replace("|", "\\|")
                    rows.append(f"| `{name}` | `{annotation}` | {_line(meaning)} |")
    return rows


def benchmarks_page() -> str:
    """docs/benchmarks.md, with the table of all names between its marks."""
    text = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    rows = ["| name | environment | |", "|---|---|---|"]
    for benchmark in map(find_benchmark, benchmark_names()):
        rows.append(f"| `{benchmark.name}` | `{benchmark.environment['type']}` | {benchmark.description} |")
    before, after = text.split("<!-- benchmarks -->")[0], text.split("<!-- end -->")[1]
    table = "\n".join(rows)
    return f"{before}<!-- benchmarks -->\n\n{table}\n\n<!-- end -->{after}"


PAGES: dict[Path, Callable[[], str]] = {
    ROOT / "docs" / "types.md": types_page,
    ROOT / "docs" / "environments.md": environments_page,
    ROOT / "docs" / "api.md": api_page,
    ROOT / "docs" / "options.md": options_page,
    ROOT / "docs" / "benchmarks.md": benchmarks_page,
    ROOT / "docs" / "graph.svg": graph_picture,
}


if __name__ == "__main__":
    for path, text in PAGES.items():
        path.write_text(text(), encoding="utf-8")
