"""Write the pages that come from the code: docs/types.md and docs/environments.md.

    python docs/generate.py

types.md: the settings of every built-in server type. Names, types, defaults and field_docs are those of the
pydantic models; the docstrings below their attributes are the field_docs.

environments.md: every environment and agent, one line each. What it is for and how it is rewarded is the
first sentence of its class; tools, state and the kind follow from its methods; what to install, from what
its modules import and the extras of pyproject.toml.

A test fails when a committed page is out of date.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Callable, Container, Iterator
from importlib.metadata import entry_points, packages_distributions
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from gym_serve.cli.catalog_entries import field_docs
from gym_serve.graph.options import AutoscalingOptions, GatewayOptions, ServerOptions
from gym_serve.servers import AgentServer, ModelServer, ResourcesServer
from gym_serve.servers.base import Server
from gym_serve.servers.clients import Client

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
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
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        if entry.dist is not None and entry.dist.name == "gym-serve":
            yield entry.name, entry.load()


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
    readme = Path(inspect.getfile(server)).with_name("README.md")
    return f"[`{name}`](../environments/{readme.parent.name}/README.md)" if readme.exists() else f"`{name}`"


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
    installed = packages_distributions()
    imported = {
        _distribution(name) for module in _imports(folder, set()) for name in installed.get(module, [])
    }
    return sorted(extra for extra, names in extras.items() if names & imported - base and extra != "test")


def _imports(folder: Path, seen: set[Path]) -> set[str]:
    """Top-level modules that the modules of a folder import, those of other environments included."""
    seen.add(folder)
    names: set[str] = set()
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module)
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
    for name in [name for name in names if name.startswith("gym_serve.environments.")]:
        other = folder.parent / name.split(".")[2]
        if other.is_dir() and other not in seen:
            names |= _imports(other, seen)
    return {name.partition(".")[0] for name in names}


def _distribution(requirement: str) -> str:
    """The name that a requirement begins with, as package indexes spell it."""
    name = re.match(r"[\w.-]+", requirement)
    return re.sub(r"[-_.]+", "-", name[0]).lower() if name else ""


PAGES: dict[Path, Callable[[], str]] = {
    ROOT / "docs" / "types.md": types_page,
    ROOT / "docs" / "environments.md": environments_page,
}


if __name__ == "__main__":
    for path, text in PAGES.items():
        path.write_text(text(), encoding="utf-8")
