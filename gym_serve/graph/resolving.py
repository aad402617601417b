"""`resolve`: from a graph as it is written to a checked `Graph`, or all that is wrong with it at once.

Server by server: the choice of ``if``, variables, type, settings and options; then what the
servers are to one another. What cannot be known because of one problem adds no others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import SecretStr, TypeAdapter, ValidationError

from gym_serve.graph.drafts import LITERAL_SECRET, Draft, make_draft
from gym_serve.graph.entries import read_entry
from gym_serve.graph.interpolation import Variables, environment, has_literal
from gym_serve.graph.loading import extended
from gym_serve.graph.names import name_problem, nearest
from gym_serve.graph.options import GatewayOptions
from gym_serve.graph.references import reference_problems
from gym_serve.graph.settings import Problem, check
from gym_serve.graph.spec import SECTIONS, Graph, GraphSpec
from gym_serve.servers.clients import Kind
from gym_serve.types.errors import GraphError

__all__ = ["resolve"]

_BOOLEAN = TypeAdapter(bool)


def resolve(
    spec: GraphSpec,
    *,
    source: str | None = None,
    base_dir: Path | None = None,
    env: Mapping[str, str] | None = None,
    literal_secrets: bool = True,
) -> Graph:
    """Check a graph and fill in everything that it leaves open.

    Args:
        spec: the graph as it is written.
        source: name of its file, for the error.
        base_dir: directory of ``extends`` and ``.env``; the current one by default.
        env: variables; by default those of the process, over those of ``.env`` files.
        literal_secrets: whether secrets may be written out in it; not in files, as Serve shows them.

    Raises:
        GraphError: every problem of the graph, each with its path.
    """
    base_dir = base_dir or Path.cwd()
    try:
        content = extended(spec.raw(), base_dir)
        variables = Variables(environment(base_dir) if env is None else env)
    except GraphError as error:
        raise GraphError(error.problems, source=error.source or source) from None
    names = list(GraphSpec.model_fields)
    problems = [(key, f"unknown key{nearest(key, names)}") for key in content if key not in names]
    drafts, kinds = _drafts(content, variables, problems, literal_secrets=literal_secrets)
    problems += reference_problems(drafts, kinds)
    default_agent = _default_agent(content, variables, problems, kinds)
    auth_tokens = _auth_tokens(content, variables, problems, literal_secrets=literal_secrets)
    insecure = _insecure(content, variables, problems)
    gateway = _gateway(content, variables, problems)
    if problems:
        lines = dict.fromkeys(f"{path}: {message}" for path, message in problems)
        raise GraphError(list(lines), source=source)
    nodes = {name: draft.node for name, draft in drafts.items()}
    return Graph(nodes, auth_tokens, insecure, default_agent, gateway)


def _drafts(
    content: Mapping[str, Any], variables: Variables, problems: list[Problem], *, literal_secrets: bool
) -> tuple[dict[str, Draft], dict[str, Kind]]:
    """The servers, and the kind of every name, broken servers included."""
    drafts: dict[str, Draft] = {}
    sections: dict[str, str] = {}
    for section, key, value in _servers(content, problems):
        path = f"{section}.{key}"
        if problem := name_problem(key):
            problems.append((path, problem))
        name = str(key)
        if name in sections:
            problems.append((path, f"the name is taken by {sections[name]}.{name}"))
            continue
        entry, found = read_entry(value, path, variables)
        problems += found
        if entry is not None or found:
            sections[name] = section
        if entry is not None:
            draft, found = make_draft(entry, name, SECTIONS[section], literal_secrets=literal_secrets)
            problems += found
            if draft is not None:
                drafts[name] = draft
    return drafts, {name: SECTIONS[section] for name, section in sections.items()}


def _servers(content: Mapping[str, Any], problems: list[Problem]) -> Iterator[tuple[str, Any, Any]]:
    """Section, name and value of every server; sections that are no mappings become problems."""
    for section in SECTIONS:
        servers = content.get(section) or {}
        if isinstance(servers, Mapping):
            yield from ((section, name, value) for name, value in servers.items())
        else:
            problems.append((section, "must be a mapping of servers by name"))


def _filled(content: Mapping[str, Any], key: str, variables: Variables, problems: list[Problem]) -> Any:
    known = len(variables.problems)
    value = variables.fill(content.get(key), key)
    found = variables.problems[known:]
    problems += found
    return None if found else value


def _default_agent(
    content: Mapping[str, Any], variables: Variables, problems: list[Problem], kinds: Mapping[str, Kind]
) -> str | None:
    agents = [name for name, kind in kinds.items() if kind == "agent"]
    name = _filled(content, "default_agent", variables, problems)
    if name is None:
        return agents[0] if len(agents) == 1 else None
    if name not in agents:
        problems.append(("default_agent", f"{name!r} is no agent{nearest(name, agents)}"))
    return str(name)


def _gateway(content: Mapping[str, Any], variables: Variables, problems: list[Problem]) -> GatewayOptions:
    options = _filled(content, "gateway", variables, problems) or {}
    if not isinstance(options, Mapping):
        problems.append(("gateway", "must be a mapping of Serve options"))
        return GatewayOptions()
    checked, found = check(GatewayOptions, options, "gateway")
    problems += found
    return checked if isinstance(checked, GatewayOptions) else GatewayOptions()


def _insecure(content: Mapping[str, Any], variables: Variables, problems: list[Problem]) -> bool:
    given = _filled(content, "insecure", variables, problems)
    try:
        return given is not None and _BOOLEAN.validate_python(given)
    except ValidationError:
        problems.append(("insecure", f"expected true or false, got {given!r}"))
        return False


def _auth_tokens(
    content: Mapping[str, Any], variables: Variables, problems: list[Problem], *, literal_secrets: bool
) -> tuple[SecretStr, ...]:
    """The tokens: one, or a list of them, of which those that come out empty are left out."""
    written: Any = content.get("auth_token")
    several = isinstance(written, list)
    given: list[Any] = written if several else [written]
    tokens = []
    for at, each in enumerate(given):
        path = f"auth_token[{at}]" if several else "auth_token"
        token = _filled({path: each}, path, variables, problems)
        if isinstance(token, SecretStr):
            tokens.append(token)
        elif isinstance(token, str) and token:
            tokens.append(SecretStr(token))
            if not literal_secrets and has_literal(each):
                problems.append((path, LITERAL_SECRET))
        elif token is not None or (several and each is None):
            problems.append((path, "expected a string, and not an empty one; an open graph has no such key"))
    return tuple(tokens)
