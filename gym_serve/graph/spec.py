"""The graph: `GraphSpec` as it is written, `Graph` and its `Node`\\ s as they are resolved.

`GraphSpec` takes anything, so that reading it never fails half way: every check is made by
`resolve`, which reports all problems at once. A `Graph` holds no problem: its names, types,
references and settings are checked, and its secrets are ``SecretStr``.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, SecretStr, SkipValidation
from pydantic_core import to_jsonable_python

from gym_serve.graph.options import MASK, GatewayOptions, ServerOptions
from gym_serve.servers.base import Server
from gym_serve.servers.clients import Kind
from gym_serve.servers.tools import UnavailableTools

__all__ = ["HTTP", "MASK", "SECTIONS", "SECTION_OF", "Graph", "GraphSpec", "Node", "ServerOptions"]

SECTIONS: dict[str, Kind] = {"models": "model", "resources": "resources", "agents": "agent"}
"""The sections of a graph, and the kind of server that each holds."""

SECTION_OF: dict[Kind, str] = {kind: section for section, kind in SECTIONS.items()}
"""The section of each kind."""

HTTP = "http"
"""The ``type`` of a server that runs elsewhere and is reached by its URL."""

_CREDENTIALS = re.compile(r"://[^/?#@\s]+@")


class GraphSpec(BaseModel):
    """What stands under ``args:`` of an application: a graph, not checked yet.

    A server is a mapping: its ``type``, the settings of that type, and any `ServerOptions`;
    ``inline: [names]`` runs servers that it references inside its own replicas. With ``if``, it
    takes the settings under ``then`` where the value of ``if`` is not empty (nor ``false``), else
    those under ``else``; the keys beside them hold in both cases. See `graph.entries`.
    """

    model_config = ConfigDict(extra="allow", hide_input_in_errors=True)

    extends: Annotated[str | None, SkipValidation] = None
    """Path of a graph file that this one changes, relative to this one; null deletes a key of it."""
    models: Annotated[dict[str, Any], SkipValidation] = {}
    """Model servers by name."""
    resources: Annotated[dict[str, Any], SkipValidation] = {}
    """Resources servers (environments) by name."""
    agents: Annotated[dict[str, Any], SkipValidation] = {}
    """Agent servers by name."""
    default_agent: Annotated[str | None, SkipValidation] = None
    """Agent of the rows that name none; by default the only agent, if there is one only."""
    auth_token: Annotated[Any, SkipValidation] = None
    """Bearer token that every HTTP request must carry, written as ``${NAME}``; of a list, any will do."""
    insecure: Annotated[Any, SkipValidation] = None
    """Whether a graph without a token may be reached from other machines."""
    gateway: Annotated[Any, SkipValidation] = None
    """`GatewayOptions` of the deployment that answers HTTP: its replicas, their CPUs, ..."""

    def raw(self) -> dict[str, Any]:
        """What was given, unchanged, unknown keys included."""
        return {key: value for key, value in self if key in self.model_fields_set}

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        # Settings may hold secrets until they are resolved: only names are shown.
        for section in SECTIONS:
            servers = getattr(self, section)
            yield section, list(servers) if isinstance(servers, dict) else type(servers).__name__


@dataclass(frozen=True)
class Node:
    """One server of a graph.

    Attributes:
        name: its name, unique in the graph.
        kind: what it is.
        type: as in the file; ``module:Class`` where a class was given.
        cls: its class; None for a remote server.
        settings: keyword arguments for ``cls``, as Python values; references hold names.
        references: name of the referenced server by setting: ``judge``, ``judges[0]`` in a list,
            ``judges.strict`` in a mapping.
        inline: referenced servers that run inside this one's replicas.
        options: Serve options; empty for a remote server.
        url: base URL of a remote server, without a slash at the end.
        headers: headers for every request to it.
        unavailable_tools: what becomes of its tools that are unavailable.
    """

    name: str
    kind: Kind
    type: str
    cls: builtins.type[Server] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    references: dict[str, str] = field(default_factory=dict)
    inline: tuple[str, ...] = ()
    options: ServerOptions = field(default_factory=ServerOptions)
    url: str | None = None
    headers: dict[str, SecretStr] = field(default_factory=dict)
    unavailable_tools: UnavailableTools = "fail"

    def connected(self, client: Callable[[str], Any]) -> dict[str, Any]:
        """`settings` with a client in the place of every name of a referenced server.

        Args:
            client: makes the client of a server, by its name; called once per reference.
        """
        settings = dict(self.settings)
        for setting in dict.fromkeys(path.partition(".")[0].partition("[")[0] for path in self.references):
            value = settings[setting]
            if isinstance(value, dict):
                settings[setting] = {key: client(name) for key, name in value.items()}
            elif isinstance(value, str):
                settings[setting] = client(value)
            else:
                settings[setting] = type(value)(client(name) for name in value)
        return settings

    def outline(self) -> Node:
        """The node as those see it who call the server: without its class, settings and options."""
        return replace(self, cls=None, settings={}, inline=(), options=ServerOptions())

    def public(self) -> dict[str, Any]:
        """The server as in the file, defaults filled in and secrets masked; JSON can hold it."""
        if self.cls is None:
            masked = {"headers": dict.fromkeys(self.headers, MASK)} if self.headers else {}
            return {"type": self.type, "url": self.url, **masked}
        config = _without_passwords(to_jsonable_python(self.cls.Config(**self.settings), fallback=_type_name))
        options = self.options.public()
        if "resources" in options and "resources" in config:
            options["ray_resources"] = options.pop("resources")
        inline = {"inline": list(self.inline)} if self.inline else {}
        return {"type": self.type, **config, **options, **inline}


@dataclass(frozen=True)
class Graph:
    """A resolved graph.

    Attributes:
        nodes: the servers by name, in the order of the file.
        auth_tokens: bearer tokens of HTTP requests, of which any will do; none for an open graph.
        insecure: whether a graph without tokens may be reached from other machines.
        default_agent: agent of the rows that name none.
        gateway: options of the deployment that answers HTTP.
    """

    nodes: dict[str, Node]
    auth_tokens: tuple[SecretStr, ...] = ()
    insecure: bool = False
    default_agent: str | None = None
    gateway: GatewayOptions = field(default_factory=GatewayOptions)

    def public(self) -> dict[str, dict[str, Any]]:
        """The servers by section and name, for ``/graph``: JSON can hold it, no secrets."""
        return {
            section: {name: node.public() for name, node in self.nodes.items() if node.kind == kind}
            for section, kind in SECTIONS.items()
        }

    def order(self) -> list[str]:
        """Names of the servers, each after those that it references."""
        ordered: dict[str, None] = {}

        def visit(name: str) -> None:
            for target in self.nodes[name].references.values():
                if target not in ordered:
                    visit(target)
            ordered[name] = None

        for name in self.nodes:
            if name not in ordered:
                visit(name)
        return list(ordered)


def _without_passwords(value: Any) -> Any:
    """``value`` with user and password masked in URLs; settings keep URLs as plain strings."""
    if isinstance(value, str):
        return _CREDENTIALS.sub(f"://{MASK}@", value)
    if isinstance(value, dict):
        return {key: _without_passwords(item) for key, item in value.items()}
    return [_without_passwords(item) for item in value] if isinstance(value, list) else value


def _type_name(value: Any) -> str:
    return type(value).__name__
