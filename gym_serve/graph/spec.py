"""The graph: `GraphSpec` as it is written, `Graph` and its `Node`\\ s as they are resolved.

`GraphSpec` accepts anything, so that reading a file never fails half way: `resolve` makes all checks and
reports all problems at once. A `Graph` is valid: its names, types, references and settings are checked, and
its secrets are ``SecretStr``. A `Node` is the only form of a server between the file and its replicas.
"""

from __future__ import annotations

import builtins
import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, SecretStr, SkipValidation, model_validator
from pydantic_core import to_jsonable_python
from typing_extensions import Self

from gym_serve.observe.logs import Format, Level
from gym_serve.servers.base import Server
from gym_serve.servers.clients import Kind
from gym_serve.servers.tools import UnavailableTools

SECTIONS: dict[str, Kind] = {"models": "model", "resources": "resources", "agents": "agent"}
"""The sections of a graph, and the kind of server that each holds."""

SECTION_OF: dict[Kind, str] = {kind: section for section, kind in SECTIONS.items()}
"""The section of each kind."""

HTTP = "http"
"""The ``type`` of a server that runs elsewhere and is reached by its URL."""

_CREDENTIALS = re.compile(r"://[^/?#@\s]+@")

MASK = "**********"
"""What stands where a secret was; the same as pydantic's."""

_Count = Annotated[int, Field(ge=0)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_FORM = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

_SESSIONS = 64.0  # Serve's own default, 2 requests, suits a GPU model


class AutoscalingOptions(BaseModel):
    """Number of replicas by load. Delays are in seconds."""

    model_config = _FORM

    max_replicas: Annotated[int, Field(ge=1)]
    """Maximum number of replicas."""
    min_replicas: _Count | None = None
    """Minimum number of replicas; 0 scales to zero when idle. Serve's default is 1."""
    initial_replicas: _Count | None = None
    """Number of replicas at the start."""
    target_sessions: _Positive | None = None
    """Target number of live sessions per replica; for agents and models, of calls. 64 if neither this nor
    ``target_ongoing_requests`` is given."""
    target_ongoing_requests: _Positive | None = None
    """Instead, the target number of calls per replica, waiting ones included."""
    upscale_delay_s: _Amount | None = None
    """Time for which the load must be high before replicas are added."""
    downscale_delay_s: _Amount | None = None
    """Time for which the load must be low before replicas are removed."""
    downscale_to_zero_delay_s: _Amount | None = None
    """The same for the last replica."""
    upscaling_factor: _Positive | None = None
    """Factor of each step up."""
    downscaling_factor: _Positive | None = None
    """Factor of each step down."""
    look_back_period_s: _Positive | None = None
    """Window over which the load is measured."""
    aggregation_function: Literal["mean", "max", "min"] | None = None
    """How the loads within the window become one number."""

    @property
    def fewest(self) -> int:
        """``min_replicas``, or its default."""
        return 1 if self.min_replicas is None else self.min_replicas

    @property
    def sessions(self) -> float | None:
        """``target_sessions``, or its default; None if ``target_ongoing_requests`` is given instead."""
        if self.target_ongoing_requests is not None:
            return None
        return _SESSIONS if self.target_sessions is None else self.target_sessions

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        low = self.fewest
        if low > self.max_replicas:
            raise ValueError(f"min_replicas must be at most max_replicas ({self.max_replicas}), got {low}")
        if self.initial_replicas is not None and not low <= self.initial_replicas <= self.max_replicas:
            raise ValueError(
                f"initial_replicas must be between min_replicas ({low}) and max_replicas "
                f"({self.max_replicas}), got {self.initial_replicas}"
            )
        if self.target_sessions is not None and self.target_ongoing_requests is not None:
            raise ValueError("target_sessions and target_ongoing_requests exclude each other; remove one")
        return self


class ServerOptions(BaseModel):
    """Serve options of one server, each with Serve's name and meaning."""

    model_config = _FORM

    num_replicas: Annotated[int, Field(ge=1)] | None = None
    """Fixed number of replicas."""
    autoscaling: AutoscalingOptions | None = None
    """Instead, the number of replicas by load."""
    max_ongoing_requests: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of calls that a replica runs at once (4,096)."""
    max_queued_requests: Annotated[int, Field(ge=-1)] | None = None
    """Maximum number of calls that wait at a replica (16,384). Further ones are refused, to be retried
    later (`Overloaded`). -1 is no limit."""
    num_cpus: _Amount | None = None
    """CPU cores per replica."""
    num_gpus: _Amount | None = None
    """GPUs per replica; a fraction shares one."""
    memory: _Amount | None = None
    """Memory per replica, in bytes."""
    resources: dict[str, _Amount] | None = Field(
        default=None, validation_alias=AliasChoices("resources", "ray_resources")
    )
    """Ray's custom resources per replica. Write ``ray_resources`` for a server with a setting
    ``resources``, such as an agent."""
    accelerator_type: str | None = None
    """Kind of GPU, e.g. ``H100``."""
    runtime_env: dict[str, Any] | None = Field(default=None, repr=False)
    """Ray's runtime environment of the replicas."""
    placement_group_bundles: Annotated[list[dict[str, _Amount]], Field(min_length=1)] | None = None
    """Resources that each replica reserves; the replica runs in the first bundle."""
    placement_group_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] | None = None
    """How the bundles are placed on nodes."""
    max_replicas_per_node: Annotated[int, Field(ge=1, le=100)] | None = None
    """Maximum number of replicas on one node."""
    health_check_period_s: _Positive | None = None
    """Seconds between health checks."""
    health_check_timeout_s: _Positive | None = None
    """Seconds after which a health check has failed."""
    graceful_shutdown_timeout_s: _Amount | None = None
    """Seconds that a replica gets to finish its requests before it is killed."""
    graceful_shutdown_wait_loop_s: _Amount | None = None
    """Seconds between checks whether it has finished."""

    @model_validator(mode="after")
    def _compatible(self) -> Self:
        pairs = [("num_replicas", "autoscaling"), ("placement_group_bundles", "max_replicas_per_node")]
        for one, other in pairs:
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise ValueError(f"{one} and {other} exclude each other; remove one")
        if self.placement_group_strategy is not None and self.placement_group_bundles is None:
            raise ValueError("placement_group_strategy needs placement_group_bundles")
        return self

    def public(self) -> dict[str, Any]:
        """The options that are given, as JSON, with environment variables masked."""
        options: dict[str, Any] = to_jsonable_python(self, exclude_none=True, fallback=str)
        variables = options.get("runtime_env", {}).get("env_vars")
        if isinstance(variables, dict):
            options["runtime_env"]["env_vars"] = dict.fromkeys(variables, MASK)
        return options


class GatewayOptions(ServerOptions):
    """Serve options of the deployment that answers HTTP, and its own."""

    max_request_bytes: Annotated[int, Field(ge=1)] = 64 * 2**20
    """Maximum size of a request's body, in bytes; a larger one is refused with 413."""


class LogOptions(BaseModel):
    """The log of the servers."""

    model_config = _FORM

    format: Format = "text"
    """A record as a line of text, or as a JSON object."""
    level: Level = "info"
    """The least level of gym_serve's records. Other loggers keep their own levels."""
    access: bool = False
    """Whether every call is logged, with its status and duration."""


class GraphSpec(BaseModel):
    """The ``args:`` of an application: a graph, not checked yet.

    A server is a mapping: its ``type``, the settings of that type, and any `ServerOptions`;
    ``inline: [names]`` runs servers that it references inside its own replicas. With ``if``, it
    takes the settings under ``then`` if the value of ``if`` is not empty (nor ``false``), else those
    under ``else``; the keys beside them apply in both cases. See `gym_serve.graph.resolving`.
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
    """Whether a graph without a token may be reached from other machines, or run on a Ray without one."""
    tracing: Annotated[Any, SkipValidation] = None
    """Share of the rollouts whose traces are recorded, from 0 to 1. OpenTelemetry's environment variables set
    where they are sent. Without it, nothing is recorded."""
    logs: Annotated[Any, SkipValidation] = None
    """`LogOptions` of all servers."""
    gateway: Annotated[Any, SkipValidation] = None
    """`GatewayOptions` of the deployment that answers HTTP: its replicas, their CPUs, ..."""

    def raw(self) -> dict[str, Any]:
        """The given keys and values, unchanged, including unknown keys."""
        return {key: value for key, value in self if key in self.model_fields_set}

    def policies(self) -> list[str]:
        """The models of the graph that its agents name, those included that they name only ``if`` something
        is set."""
        agents: Any = self.agents
        named: dict[str, None] = {}
        for agent in agents.values() if isinstance(agents, Mapping) else ():
            for part in (agent, agent.get("then"), agent.get("else")) if isinstance(agent, Mapping) else ():
                name = part.get("model") if isinstance(part, Mapping) else None
                if isinstance(name, str) and name in self.models:
                    named[name] = None
        return list(named)

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        # Settings may hold secrets until they are resolved, so only names are shown.
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
        unavailable_tools: what happens if its tools are unavailable.
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
        """`settings`, with each name of a referenced server replaced by a client."""
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

    def sent_headers(self) -> dict[str, str]:
        """`headers`, with their secrets."""
        return {name: value.get_secret_value() for name, value in self.headers.items()}

    def outline(self) -> Node:
        """The node as its callers see it: without class, settings and options."""
        return replace(self, cls=None, settings={}, inline=(), options=ServerOptions())

    def public(self) -> dict[str, Any]:
        """The server as in the file, as JSON, with defaults filled in and secrets masked."""
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
        insecure: whether a graph without tokens may be reached from other machines, and may run on a Ray
            without a token.
        default_agent: agent of the rows that name none.
        gateway: options of the deployment that answers HTTP.
        tracing: share of the rollouts that are traced; None for no tracing at all.
        logs: the log of the servers.
    """

    nodes: dict[str, Node]
    auth_tokens: tuple[SecretStr, ...] = ()
    insecure: bool = False
    default_agent: str | None = None
    gateway: GatewayOptions = field(default_factory=GatewayOptions)
    tracing: float | None = None
    logs: LogOptions = field(default_factory=LogOptions)

    def outline(self) -> Graph:
        """The graph as the gateway sees it: its servers' outlines, and no Serve options."""
        own = self.gateway.model_dump(include=GatewayOptions.model_fields.keys() - ServerOptions.model_fields)
        gateway = GatewayOptions(**own)
        nodes = {name: node.outline() for name, node in self.nodes.items()}
        return replace(self, nodes=nodes, gateway=gateway)

    def public(self) -> dict[str, Any]:
        """The servers by section and name, as JSON, without secrets; the answer of ``/graph``.

        It also has the share of rollouts to trace, for clients that make rollouts.
        """
        shown: dict[str, Any] = {
            section: {name: node.public() for name, node in self.nodes.items() if node.kind == kind}
            for section, kind in SECTIONS.items()
        }
        return shown if self.tracing is None else {**shown, "tracing": self.tracing}

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
    """``value`` with user and password masked in URLs, which settings keep as plain strings."""
    if isinstance(value, str):
        return _CREDENTIALS.sub(f"://{MASK}@", value)
    if isinstance(value, dict):
        return {key: _without_passwords(item) for key, item in value.items()}
    return [_without_passwords(item) for item in value] if isinstance(value, list) else value


def _type_name(value: Any) -> str:
    return type(value).__name__


RESERVED_NAMES = frozenset(
    {
        "docs",
        "episodes",
        "gateway",
        "global_config_dict_yaml",
        "graph",
        "health",
        "openapi.json",
        "pressure",
        "redoc",
        "rollouts",
        "run",
        "server_instances",
        "sign-in",
        "stats",
        "ui",
        "v1",
    }
)
"""Routes of the gateway, and its own name."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,62}")
_MANY = 12
_WORDS = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "a mapping",
}


def name_problem(name: object) -> str | None:
    """Why ``name`` cannot be the name of a server, or None if it can.

    A name stands in URLs (``/math_agent/run``) and in Serve's deployment names.
    """
    if not isinstance(name, str):
        return "a name must be a string; quote it"
    if not _NAME.fullmatch(name):
        return "a name must start with a letter and have only letters, digits, _ and -, at most 63"
    if name in RESERVED_NAMES:
        return "the name is reserved for a route of the graph; choose another"
    return None


def nearest(name: object, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"``, or the known names where none is near; empty if there are none."""
    names = list(dict.fromkeys(known))
    if close := difflib.get_close_matches(str(name), names, n=1):
        return f"; did you mean {close[0]!r}?"
    if not names:
        return ""
    return f"; known: {', '.join(names[:_MANY])}{', ...' * (len(names) > _MANY)}"


def word_for(value: object) -> str:
    """What a value is, as a message names it without showing it: ``a string``, ``a list``."""
    return _WORDS.get(type(value)) or type(value).__qualname__
