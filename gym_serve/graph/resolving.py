"""`resolve`: from a graph as it is written to a checked `Graph`, or all its problems at once.

Each server is read once, into its `Node`: the choice of ``if``, variables, type, settings and options.
Then the references between servers are checked. A value that one problem hides causes no other problem.

A reader of the file must see what happens if a variable is missing, e.g.::

    policy:
      if: "${POLICY_BASE_URL:-}"
      then: {type: chat_model, base_url: "${POLICY_BASE_URL}", model: "${POLICY_MODEL}"}
      else: {type: scripted_model}

Only the branch that is taken is read, so its variables are needed only if it is used. A server whose
branch is missing, and its ``type`` with it, is not in the graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    TypeAdapter,
    ValidationError,
)

from gym_serve.graph.classes import (
    Problem,
    check,
    field_names,
    find_class,
    given,
    is_within,
    join,
    references_of,
    secrets_of,
    type_name,
)
from gym_serve.graph.loading import Variables, environment, extended, has_literal, merged
from gym_serve.graph.spec import (
    HTTP,
    SECTIONS,
    GatewayOptions,
    Graph,
    GraphSpec,
    LogOptions,
    Node,
    ServerOptions,
    name_problem,
    nearest,
    word_for,
)
from gym_serve.servers.base import Server
from gym_serve.servers.clients import Kind
from gym_serve.servers.tools import UnavailableTools
from gym_serve.types.errors import GraphError

_LITERAL_SECRET = (
    "write a secret as ${NAME}: written out, it would show in `serve config` and in the dashboard"
)
_CHOICE = ("if", "then", "else")
_OWN_KEYS = ("type", "inline", "if")
_NO = ("", "false", "no", "off", "0")
_A: dict[Kind, str] = {"model": "a model", "resources": "an environment", "agent": "an agent"}
_BOOLEAN = TypeAdapter(bool)
_O = TypeVar("_O", bound=BaseModel)
_T = TypeVar("_T")


def _no_boolean(value: Any) -> Any:
    return "a boolean" if isinstance(value, bool) else value


_SHARE: TypeAdapter[float] = TypeAdapter(Annotated[float, BeforeValidator(_no_boolean), Field(ge=0, le=1)])


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
    reader = _GraphReader(content, variables, literal_secrets=literal_secrets)
    graph = reader.read()
    if reader.problems:
        lines = dict.fromkeys(f"{path}: {message}" for path, message in reader.problems)
        raise GraphError(list(lines), source=source)
    return graph


class _GraphReader:
    """Reads a graph as it is written, and keeps the problems that it finds."""

    def __init__(self, content: Mapping[str, Any], variables: Variables, *, literal_secrets: bool) -> None:
        self.problems: list[Problem] = []
        self._content = content
        self._variables = variables
        self._literal_secrets = literal_secrets
        self._servers: dict[str, _ServerReader] = {}
        self._kinds: dict[str, Kind] = {}  # of every name, also of servers that are too broken to be read

    def read(self) -> Graph:
        names = list(GraphSpec.model_fields)
        self.problems += [
            (key, f"unknown key{nearest(key, names)}") for key in self._content if key not in names
        ]
        for section in SECTIONS:
            self._read_section(section)
        for server in self._servers.values():
            self.problems += self._problems_of_references(server)
        self.problems += self._cycles()
        return Graph(
            {name: server.node for name, server in self._servers.items()},
            default_agent=self._default_agent(),
            auth_tokens=self._auth_tokens(),
            insecure=self._valid("insecure", _BOOLEAN, "true or false") or False,
            gateway=self._options("gateway", GatewayOptions, "Serve options"),
            tracing=self._valid("tracing", _SHARE, "a share of the rollouts from 0 to 1"),
            logs=self._options("logs", LogOptions, "options of the log"),
        )

    def _read_section(self, section: str) -> None:
        servers = self._content.get(section) or {}
        if not isinstance(servers, Mapping):
            self.problems.append((section, f"must be a mapping of servers by name, got {word_for(servers)}"))
            return
        for key, value in servers.items():
            name, path = str(key), f"{section}.{key}"
            if problem := name_problem(key):
                self.problems.append((path, problem))
            if other := self._kinds.get(name):
                taken = next(s for s, kind in SECTIONS.items() if kind == other)
                self.problems.append((path, f"the name is taken by {taken}.{name}"))
                continue
            server = _ServerReader(path, name, SECTIONS[section])
            is_there = server.read(value, self._variables, literal_secrets=self._literal_secrets)
            self.problems += server.problems
            if is_there:
                self._kinds[name] = SECTIONS[section]
            if server.has_node:
                self._servers[name] = server

    def _problems_of_references(self, server: _ServerReader) -> Iterator[Problem]:
        node, kinds = server.node, self._kinds
        for setting, target in node.references.items():
            accepted = server.accepted[setting]
            if target not in kinds:
                fitting = [name for name, kind in kinds.items() if kind in accepted]
                yield server.at(setting), f"unknown server {target!r}{nearest(target, fitting)}"
            elif kinds[target] not in accepted:
                expected = " or ".join(_A[kind] for kind in sorted(accepted))
                yield server.at(setting), f"must be {expected}, got {target!r}, which is {_A[kinds[target]]}"
        referenced = set(node.references.values())
        for index, target in enumerate(node.inline):
            path = server.at(f"inline[{index}]")
            if target not in kinds:
                yield path, f"unknown server {target!r}{nearest(target, referenced)}"
            elif target not in referenced and not server.hides_references:
                yield path, f"{target!r} cannot run inside {node.name!r}, which has no reference to it"
            elif target in self._servers and self._servers[target].node.cls is None:
                yield path, f"{target!r} cannot run inside {node.name!r}: it is remote (type: http)"

    def _cycles(self) -> Iterator[Problem]:
        done: set[str] = set()

        def visit(name: str, way: tuple[str, ...]) -> Iterator[Problem]:
            if name in way:
                cycle = [*way[way.index(name) :], name]
                yield self._servers[name].path, f"its references form a cycle: {' -> '.join(cycle)}"
            elif name not in done:
                for target in dict.fromkeys(self._servers[name].node.references.values()):
                    if target in self._servers:
                        yield from visit(target, (*way, name))
                done.add(name)

        for name in self._servers:
            yield from visit(name, ())

    def _filled(self, value: Any, path: str) -> Any:
        """A value with variables filled in; None, and a problem, if one is missing."""
        before = len(self._variables.problems)
        filled = self._variables.fill(value, path)
        added = self._variables.problems[before:]
        self.problems += added
        return None if added else filled

    def _default_agent(self) -> str | None:
        agents = [name for name, kind in self._kinds.items() if kind == "agent"]
        name = self._filled(self._content.get("default_agent"), "default_agent")
        if name is None:
            return agents[0] if len(agents) == 1 else None
        if name not in agents:
            self.problems.append(("default_agent", f"unknown agent {name!r}{nearest(name, agents)}"))
        return str(name)

    def _auth_tokens(self) -> tuple[SecretStr, ...]:
        """The tokens: one, or a list of them, of which those that come out empty are left out."""
        written: Any = self._content.get("auth_token")
        several = isinstance(written, list)
        tokens = []
        for index, each in enumerate(written if several else [written]):
            path = f"auth_token[{index}]" if several else "auth_token"
            token = self._filled(each, path)
            if isinstance(token, SecretStr):
                tokens.append(token)
            elif isinstance(token, str) and token:
                tokens.append(SecretStr(token))
                if not self._literal_secrets and has_literal(each):
                    self.problems.append((path, _LITERAL_SECRET))
            elif token is not None or (several and each is None):
                got = "an empty one" if token == "" else word_for(token)
                message = f"must be a non-empty string, got {got}; leave the key out for an open graph"
                self.problems.append((path, message))
        return tuple(tokens)

    def _valid(self, key: str, kind: TypeAdapter[_T], wanted: str) -> _T | None:
        value = self._filled(self._content.get(key), key)
        try:
            return None if value is None else kind.validate_python(value)
        except ValidationError:
            self.problems.append((key, f"must be {wanted}, got {value!r}"))
            return None

    def _options(self, key: str, cls: type[_O], what: str) -> _O:
        content = self._filled(self._content.get(key), key) or {}
        if not isinstance(content, Mapping):
            self.problems.append((key, f"must be a mapping of {what}, got {word_for(content)}"))
            return cls()
        checked, problems = check(cls, content, key)
        self.problems += problems
        return checked if isinstance(checked, cls) else cls()


class _ServerReader:
    """Reads the server at a path of the file into its `Node`, and knows where its values are written.

    Attributes:
        node: the server; its settings are empty if they are wrong.
        has_node: whether its class is known.
        accepted: kinds of server that each of its references may lead to.
        hides_references: whether it has references that are unknown, as a variable is missing.
        problems: paths and messages.
    """

    def __init__(self, path: str, name: str, kind: Kind) -> None:
        self.path = path
        self.node = Node(name, kind, "")
        self.has_node = False
        self.accepted: dict[str, set[Kind]] = {}
        self.hides_references = False
        self.problems: list[Problem] = []
        self._branch = ""  # `then` or `else`
        self._of_branch: frozenset[str] = frozenset()  # keys that stand there
        self._unfilled: list[str] = []  # paths of values with a missing variable

    def at(self, setting: str) -> str:
        """The path in the file of a setting, or of something inside it."""
        if not setting:
            return self.path
        is_of_branch = re.split(r"[.\[]", setting, maxsplit=1)[0] in self._of_branch
        return join(self.path, self._branch, setting) if is_of_branch else join(self.path, setting)

    def read(self, value: Any, variables: Variables, *, literal_secrets: bool) -> bool:
        if not isinstance(value, Mapping):
            self.problems.append((self.path, f"must be a mapping with a `type`, got {word_for(value)}"))
            return True
        before = len(variables.problems)
        keys = self._choose(value, variables)
        if keys is None:
            self.problems += variables.problems[before:]
            return bool(self.problems)
        written, filled = keys
        self._unfilled = [path for path, _ in variables.problems[before:]]
        self.problems += variables.problems[before:]
        self._read_type(written, filled, literal_secrets=literal_secrets)
        return True

    def _choose(
        self, value: Mapping[Any, Any], variables: Variables
    ) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The keys of the server, as they are written and filled in; None if they are unknown."""
        strange = [key for key in value if not isinstance(key, str)]
        self.problems += [(join(self.path, str(key)), "a key must be a string; quote it") for key in strange]
        own = {key: item for key, item in value.items() if isinstance(key, str) and key not in _CHOICE}
        chosen: dict[str, Any] = {}
        if "if" in value:
            before = len(variables.problems)
            self._branch = "else" if _is_no(variables.fill(value["if"], join(self.path, "if"))) else "then"
            branch = value.get(self._branch) or {}
            if len(variables.problems) > before or (self._branch not in value and "type" not in own):
                return None
            if not isinstance(branch, Mapping):
                path = join(self.path, self._branch)
                self.problems.append((path, f"must be a mapping, got {word_for(branch)}"))
                return None
            chosen = {str(key): item for key, item in branch.items()}
        elif stray := [key for key in _CHOICE if key in value]:
            self.problems.append((join(self.path, stray[0]), "needs an 'if' beside it"))
        self._of_branch = frozenset(chosen.keys() - own.keys())
        filled_branch = variables.fill(chosen, join(self.path, self._branch))
        return merged(chosen, own), merged(filled_branch, variables.fill(own, self.path))

    def _read_type(
        self, written: Mapping[str, Any], filled: Mapping[str, Any], *, literal_secrets: bool
    ) -> None:
        if self._is_hidden("type"):
            return
        if "type" not in filled:
            hint = "write a short name, package.module:Class, or http"
            self.problems.append((self.path, f"`type` is missing; {hint}"))
            return
        if filled["type"] == HTTP:
            node = self._read_remote(filled)
            model: type[BaseModel] = _Remote
        else:
            try:
                cls = find_class(self.node.kind, filled["type"])
            except GraphError as error:
                self.problems += [(self.at("type"), problem) for problem in error.problems]
                return
            node = self._read_local(cls, filled)
            model = cls.Config
        self.has_node = True
        if not literal_secrets:
            secrets = (leaf for leaf in secrets_of(model, written) if isinstance(leaf.value, str))
            node += [(leaf.path, _LITERAL_SECRET) for leaf in secrets if has_literal(leaf.value)]
        self.problems += [(self.at(path), message) for path, message in node if not self._is_hidden(path)]

    def _read_remote(self, filled: Mapping[str, Any]) -> list[Problem]:
        self.node = replace(self.node, type=HTTP)
        settings = {key: value for key, value in filled.items() if key != "type"}
        is_environment = self.node.kind == "resources"
        remote, problems = check(_RemoteEnvironment if is_environment else _Remote, settings, "")
        if isinstance(remote, _Remote):
            headers = dict(remote.headers)
            if remote.api_key is not None:
                headers["Authorization"] = SecretStr(f"Bearer {remote.api_key.get_secret_value()}")
            self.node = replace(self.node, url=remote.url, headers=headers)
        if isinstance(remote, _RemoteEnvironment):
            self.node = replace(self.node, unavailable_tools=remote.unavailable_tools)
        return problems

    def _read_local(self, cls: type[Server], filled: Mapping[str, Any]) -> list[Problem]:
        # A setting goes before an option of the same name: an agent's `resources` is its environment.
        option_names = [key for key in field_names(ServerOptions) if key not in field_names(cls.Config)]
        options = {key: value for key, value in filled.items() if key in option_names}
        settings = {key: value for key, value in filled.items() if key not in {*_OWN_KEYS, *option_names}}
        config, problems = check(cls.Config, settings, "", known=[*option_names, *_OWN_KEYS])
        deployed, option_problems = check(ServerOptions, options, "")

        found = references_of(cls.Config, settings)
        # A reference that is wrong gets one message below, which is better than those of its schema.
        problems = [
            (path, message) for path, message in problems if not any(is_within(path, r) for r in found)
        ]
        references = {}
        for path, leaves in found.items():
            accepted = {getattr(leaf.annotation, "kind", self.node.kind) for leaf in leaves}
            self.accepted[path], target = accepted, leaves[0].value
            if not isinstance(target, str):
                expected = " or ".join(_A[kind] for kind in sorted(accepted))
                problems.append((path, f"must be the name of {expected}, got {word_for(target)}"))
            elif not self._is_hidden(path):
                references[path] = target
        self.hides_references = any(self._is_hidden(path) for path in found)

        inline = filled.get("inline") or []
        if not isinstance(inline, list) or not all(isinstance(target, str) for target in inline):
            problems.append(("inline", f"must be a list of server names, got {word_for(inline)}"))
            inline = []
        self.node = replace(
            self.node,
            type=type_name(filled["type"]),
            cls=cls,
            settings=given(config, settings) if config else {},
            references=references,
            inline=tuple(inline),
            options=deployed if isinstance(deployed, ServerOptions) else ServerOptions(),
        )
        return problems + option_problems

    def _is_hidden(self, setting: str) -> bool:
        """Whether a setting, or a part of it, is unknown, as a variable is missing."""
        path = self.at(setting)
        return any(is_within(path, unfilled) or is_within(unfilled, path) for unfilled in self._unfilled)


def _is_no(value: Any) -> bool:
    return not value or (isinstance(value, str) and value.strip().lower() in _NO)


def _base_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be a URL, e.g. http://host:8000/math/policy")
    if parts.username is not None:
        raise ValueError(
            "must have no password, as it is shown to everyone; pass it as api_key or in headers"
        )
    if parts.query or parts.fragment:
        raise ValueError("must be a base URL, without ? and #")
    return url.rstrip("/")


class _Remote(BaseModel):
    """Settings of a server of type ``http``."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    url: Annotated[str, AfterValidator(_base_url)]
    headers: dict[str, SecretStr] = {}
    api_key: SecretStr | None = None


class _RemoteEnvironment(_Remote):
    """The same for an environment."""

    unavailable_tools: UnavailableTools = "fail"
