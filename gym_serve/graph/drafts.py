"""A server of the graph before its references are known to lead anywhere: its `Draft`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, SecretStr

from gym_serve.graph.classes import find_class, type_name
from gym_serve.graph.entries import Entry
from gym_serve.graph.interpolation import has_literal
from gym_serve.graph.options import ServerOptions
from gym_serve.graph.settings import Problem, check, field_names, given, is_within, references_of, secrets_of
from gym_serve.graph.spec import HTTP, Node
from gym_serve.servers.base import Server
from gym_serve.servers.clients import Kind
from gym_serve.servers.tools import UnavailableTools
from gym_serve.types.errors import GraphError

__all__ = ["LITERAL_SECRET", "Draft", "make_draft"]

_OWN_KEYS = ("type", "inline", "if")
LITERAL_SECRET = "write a secret as ${NAME}: written out it would show in `serve config` and in the dashboard"


@dataclass(frozen=True)
class Draft:
    """A server whose references are still to be checked.

    Attributes:
        entry: where it is written.
        node: the server; its settings are empty if they are wrong.
        kinds: the kinds that each of its references may be of.
        is_open: whether it has references that are not known for want of a variable.
    """

    entry: Entry
    node: Node
    kinds: dict[str, set[Kind]]
    is_open: bool


def make_draft(
    entry: Entry, name: str, kind: Kind, *, literal_secrets: bool
) -> tuple[Draft | None, list[Problem]]:
    """The server of an entry; None if its class is not known. Paths of problems are absolute."""
    if entry.is_open("type"):
        return None, []
    if "type" not in entry.filled:
        return None, [(entry.path, "a type is missing: a short name, package.module:Class, or http")]
    type_ = entry.filled["type"]
    if type_ == HTTP:
        found, problems = _remote(entry, name, kind)
        model: type[BaseModel] = _Remote
    else:
        try:
            cls = find_class(kind, type_)
        except GraphError as error:
            return None, [(entry.at("type"), problem) for problem in error.problems]
        found, problems = _local(entry, name, kind, cls)
        model = cls.Config
    if not literal_secrets:
        written = secrets_of(model, entry.written)
        literal = (leaf for leaf in written if isinstance(leaf.value, str) and has_literal(leaf.value))
        problems += [(leaf.path, LITERAL_SECRET) for leaf in literal]
    return found, [(entry.at(path), message) for path, message in problems if not entry.is_open(path)]


def _base_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be a URL, e.g. http://host:8000/math/policy")
    if parts.username is not None:
        raise ValueError("a URL is shown to everyone: pass the password as api_key or in headers")
    if parts.query or parts.fragment:
        raise ValueError("must be a base URL, without ? and #")
    return url.rstrip("/")


class _Remote(BaseModel):
    """Settings of a server of type ``http``."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    url: Annotated[str, AfterValidator(_base_url)]
    headers: dict[str, SecretStr] = {}
    api_key: SecretStr | None = None


class _RemoteResources(_Remote):
    """The same for an environment."""

    unavailable_tools: UnavailableTools = "fail"


def _remote(entry: Entry, name: str, kind: Kind) -> tuple[Draft, list[Problem]]:
    settings = {key: value for key, value in entry.filled.items() if key != "type"}
    remote, problems = check(_RemoteResources if kind == "resources" else _Remote, settings, "")
    node = Node(name, kind, HTTP)
    if isinstance(remote, _Remote):
        headers = dict(remote.headers)
        if remote.api_key is not None:
            headers["Authorization"] = SecretStr(f"Bearer {remote.api_key.get_secret_value()}")
        node = replace(node, url=remote.url, headers=headers)
    if isinstance(remote, _RemoteResources):
        node = replace(node, unavailable_tools=remote.unavailable_tools)
    return Draft(entry, node, {}, is_open=False), problems


def _local(entry: Entry, name: str, kind: Kind, cls: type[Server]) -> tuple[Draft, list[Problem]]:
    # A setting goes before an option of the same name: an agent's `resources` is its environment.
    option_names = [key for key in field_names(ServerOptions) if key not in field_names(cls.Config)]
    options = {key: value for key, value in entry.filled.items() if key in option_names}
    settings = {key: value for key, value in entry.filled.items() if key not in {*_OWN_KEYS, *option_names}}
    config, problems = check(cls.Config, settings, "", known=[*option_names, *_OWN_KEYS])
    deployed, option_problems = check(ServerOptions, options, "")

    kinds, references = {}, {}
    found = references_of(cls.Config, settings)
    # Why a value is no reference is said once, and better than by the alternatives of its schema.
    problems = [(path, message) for path, message in problems if not any(is_within(path, r) for r in found)]
    for path, leaves in found.items():
        kinds[path] = {getattr(leaf.annotation, "kind", kind) for leaf in leaves}
        if isinstance(leaves[0].value, str):
            references[path] = leaves[0].value
        else:
            problems.append((path, f"must be the name of a {' or '.join(sorted(kinds[path]))} server"))
    is_open = any(entry.is_open(path) for path in found)

    inline = entry.filled.get("inline") or []
    if not isinstance(inline, list) or not all(isinstance(target, str) for target in inline):
        problems.append(("inline", "must be a list of names of servers"))
        inline = []
    node = Node(
        name,
        kind,
        type_name(entry.filled["type"]),
        cls,
        given(config, settings) if config else {},
        {path: target for path, target in references.items() if not entry.is_open(path)},
        tuple(inline),
        deployed if isinstance(deployed, ServerOptions) else ServerOptions(),
    )
    return Draft(entry, node, kinds, is_open), problems + option_problems
