"""`NemoGym`: NeMo Gym's resources servers, as they are, as servers of a graph.

    resources:
      counter: {type: nemo_gym, server: resources_servers.example_session_state_mgmt.app}

Its routes become operations, and a session of the graph holds the cookies that the server set in it. A route
with one parameter, such as ``/{tool}``, stands for any number of tools, whose names the rows have. A tool's
answer is for the model, refusals included. If the server refuses seed, reset, step or verify, that is a typed
failure; if it raises an exception there, the failure is retried. Neither is a reward of 0.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple, get_type_hints
from urllib.parse import quote

import httpx
import orjson
from pydantic import BaseModel, Field, SecretStr

from gym_serve.interop.nemo_gym.construction import (
    Answer,
    AsgiApp,
    GraphServers,
    McpTools,
    make_server,
    session_headers,
    with_secrets,
)
from gym_serve.servers import Operation, Reply, ResourcesServer
from gym_serve.servers.clients import ModelClient
from gym_serve.servers.sessions import SessionCall
from gym_serve.servers.tools import UNAVAILABLE, WANTS_TOOLS, UnavailableTools, is_tool_name
from gym_serve.servers.transport import text_as_json
from gym_serve.servers.usage import metering
from gym_serve.types.errors import (
    GraphError,
    GymError,
    InvalidRequest,
    NotFound,
    ToolFailed,
    Unavailable,
    VerifierFailed,
    error_from_body,
)
from gym_serve.types.protocols import responses_usage
from gym_serve.types.requests import JSON, VerifyRequest


class Route(NamedTuple):
    """A route of an application: its path, the first line of its documentation, the schema of its body."""

    path: str
    summary: str
    request: JSON


def posts_of(app: Any) -> dict[str, Route]:
    """The routes for POST with a path of one part, by that part: ``"verify"``, ``"{tool}"``."""
    routes = {}
    for route in app.routes:
        path, methods = getattr(route, "path", ""), getattr(route, "methods", None) or ()
        if "POST" in methods and path.count("/") == 1:
            text = (inspect.getdoc(route.endpoint) or "").partition("\n")[0]
            routes[path.strip("/")] = Route(path, text or f"Route {path}", _body_of(route.endpoint))
    return routes


def tool_path(routes: dict[str, Route], name: str) -> str | None:
    """The path of a tool, escaped; None if no tool has the name, which a model wrote."""
    if not is_tool_name(name):
        return None
    if name in routes:
        return routes[name].path
    return f"/{quote(name, safe='')}" if any(is_any(part) for part in routes) else None


def is_any(part: str) -> bool:
    """Whether a route's path stands for any name."""
    return part.startswith("{") and part.endswith("}")


def _body_of(endpoint: Any) -> JSON:
    """JSON schema of the body that an endpoint takes: that of its parameter that is a pydantic model."""
    try:
        hints = get_type_hints(endpoint)
    except (NameError, TypeError):
        hints = {}  # annotations that only FastAPI could resolve; the schema is for documentation alone
    for name, hint in hints.items():
        if name != "return" and isinstance(hint, type) and issubclass(hint, BaseModel):
            return hint.model_json_schema()
    return {"type": "object"}


_REPEATED = frozenset({"responses_create_params", "response"})  # with every default filled in


class NemoGym(ResourcesServer):
    """A NeMo Gym resources server, with its tools, its verifier and its sessions."""

    requires: ClassVar[Mapping[str, str]] = {"nemo_gym": "nemo-gym==0.4.0"}

    class Config(ResourcesServer.Config):
        """Settings of the host; all are read at the start only."""

        server: str = Field(pattern=r"^[A-Za-z_][\w.]*(:[A-Za-z_]\w*)?$")
        """Import path of the server's class, ``package.module:Class``; the class may be left out where the
        module has only one server, as in ``resources_servers.mcqa.app``."""
        config: dict[str, Any] = Field(default_factory=dict)
        """The server's settings, as in NeMo Gym's config; its network settings are not needed. Paths are
        relative to the server's folder."""
        secrets: dict[str, SecretStr] = Field(default_factory=dict)
        """Secret settings, by their paths in ``config``: ``tavily_api_key``,
        ``search.api_key``."""
        unavailable_tools: UnavailableTools = "show"
        """What a tool's answer of 429, 502, 503 or 504 does: ``show`` gives it to the model, as NeMo Gym
        does; ``fail`` ends the attempt, which is tried again."""
        servers: dict[str, ModelClient] = Field(default_factory=dict)
        """The models that it calls: NeMo Gym's name of each, and the graph's."""

    config: Config

    class Session:
        """The cookies of a session, and the headers that name it over MCP."""

        def __init__(self) -> None:
            self.cookies = httpx.Cookies()
            self.mcp_headers: dict[str, str] = {}

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._app: AsgiApp | None = None
        self._routes: dict[str, Route] = {}
        self._mcp: McpTools | None = None
        self._mcp_tools: list[JSON] = []

    def make_app(self) -> tuple[Any, str | None]:
        """The server's web application, and the path of its tools over MCP if it has some."""
        config = self.config
        servers = GraphServers(config.servers, f"servers of {self.name}")
        settings = with_secrets(config.config, config.secrets)
        server = make_server(config.server, settings, self.name, servers)
        return server.setup_webserver(), getattr(server, "mcp_url_path", None)

    async def start(self) -> None:
        web_app, mcp_path = await asyncio.to_thread(self.make_app)
        app = AsgiApp(web_app)
        await app.start()
        self._app, self._routes = app, posts_of(app.app)
        if "step" in self._routes and "reset" not in self._routes:
            await app.stop()
            self._app = None
            raise GraphError(
                f"server: {self.config.server} has a tool named step, which is a route here: no model could "
                "call it; an environment of OpenEnv can be hosted with type: openenv"
            )
        if mcp_path is not None:
            self._mcp = McpTools(app, mcp_path)
            self._mcp_tools = await self._mcp.tools()
        await super().start()

    async def stop(self) -> None:
        await super().stop()
        if self._app is not None:
            await self._app.stop()

    async def close(self, session: Session) -> None:
        if "close" in self._routes:
            answer = await self._post("close", {}, session)
            if answer.status >= 400:
                raise self._failure(answer)

    async def aggregate(self, rollouts: list[JSON]) -> JSON | None:
        if "aggregate_metrics" not in self._routes:
            return None
        body = {"verify_responses": rollouts}
        metrics = self._json(await self._post("aggregate_metrics", body, self.Session()))
        return metrics if isinstance(metrics, dict) else None

    def operations(self) -> dict[str, Operation]:
        operations = super().operations()
        row, verify = operations["seed_session"].request, operations["verify"].request
        if "reset" in self._routes:
            answer = {"type": "object", "properties": {"observation": {}, "info": {"type": "object"}}}
            begin = partial(self._begin, "reset")
            operations["reset"] = Operation(begin, "Begin an episode", row, answer)
            operations["close"] = Operation(operations["close_session"].handler, "End an episode")
        if "step" in self._routes:
            operations["step"] = Operation(self._op_step, "Take a step", verify, {"type": "object"})
        for tool in self._mcp_tools:
            name = tool["name"]
            summary = tool["description"].partition("\n")[0] or f"Tool {name}"
            use = partial(self._use_mcp, name)
            operations[f"tools/{name}"] = Operation(use, summary, tool["parameters"])
        for name, route in self._routes.items():
            if not is_any(name) and tool_path(self._routes, name):
                use = partial(self._use, name)
                operations[f"tools/{name}"] = Operation(use, route.summary, route.request)
        return operations

    def operation(self, op: str) -> Operation | None:
        """A tool whose name is in no list, because a route of the server takes any name."""
        kind, _, name = op.partition("/")
        if kind != "tools" or tool_path(self._routes, name) is None:
            return None
        return Operation(partial(self._use, name), f"Tool {name}", {"type": "object"})

    async def _op_seed(self, body: Any) -> Reply:
        return await self._begin("seed_session" if "seed_session" in self._routes else "reset", body)

    async def _begin(self, route: str, row: Any) -> Reply:
        if not isinstance(row, dict):
            raise InvalidRequest(f"the body of /{route} must be the row, a JSON object")
        row = {key: value for key, value in row.items() if key != WANTS_TOOLS}

        async def begin(call: SessionCall[Any]) -> Reply:
            if route not in self._routes:
                return Reply.of({})
            answer = self._json(await self._post(route, row, call.session.state))
            if self._mcp is None or not isinstance(answer, dict):
                return Reply.of(answer)
            call.session.state.mcp_headers = session_headers(answer)
            return Reply.of({**answer, "tools": self._mcp_tools})

        return await self.in_open_session(begin)

    async def _op_step(self, body: Any) -> Reply:
        async def step(call: SessionCall[Any]) -> Reply:
            with metering(call.session.meter, "tool"):
                return Reply.of(self._json(await self._post("step", _complete(body), call.session.state)))

        return await self.in_any_session(step)

    async def verify(self, request: VerifyRequest, session: Session) -> JSON:
        """Ask the server's verifier; always returns the reward, and else what is not of the request. Raises
        VerifierFailed: it raised, or answered no verdict.
        """
        if "verify" not in self._routes:
            raise NotFound(f"{self.config.server} has no verifier: it is stepped, by a gymnasium_agent")
        body = request.model_dump(mode="json", exclude_unset=True)
        try:
            answer = await self._post("verify", _complete(body), session)
        except (GymError, asyncio.TimeoutError):
            raise
        except Exception as error:  # of its own code, or of a service that it asks: NeMo Gym tries again, too
            raise VerifierFailed(f"{self.config.server} failed: {type(error).__name__}: {error}") from error
        verdict = self._json(answer)
        if not isinstance(verdict, dict):
            raise VerifierFailed(f"{self.config.server} returned no verdict: {str(verdict)[:200]}")
        return {
            key: value
            for key, value in verdict.items()
            if key == "reward" or (key not in _REPEATED and (key not in body or value != body[key]))
        }

    async def _use(self, name: str, body: Any) -> Reply:
        async def use(call: SessionCall[Any]) -> Reply:
            try:
                with metering(call.session.meter, "tool"):
                    answer = await self._post(name, body, call.session.state)
            except (GymError, asyncio.TimeoutError):
                raise
            except Exception as error:
                raise ToolFailed(f"tool {name} failed: {type(error).__name__}: {error}") from error
            shown = answer.status in UNAVAILABLE and self.config.unavailable_tools == "show"
            return Reply(ToolFailed.status if shown else answer.status, text_as_json(answer.body))

        return await self.in_any_session(use)

    async def _use_mcp(self, name: str, body: Any) -> Reply:
        async def use(call: SessionCall[Any]) -> Reply:
            assert self._mcp is not None  # started
            with metering(call.session.meter, "tool"):
                text = await self._mcp.call(name, body, call.session.state.mcp_headers)
            return Reply(200, text_as_json(text.encode("utf-8", "replace")))

        return await self.in_any_session(use)

    async def _post(self, name: str, body: Any, session: Session) -> Answer:
        assert self._app is not None  # started
        path = tool_path(self._routes, name) or f"/{name}"
        return await self._app.post(path, body, session.cookies)

    def _json(self, answer: Answer) -> Any:
        if answer.status >= 400:
            raise self._failure(answer)
        try:
            return orjson.loads(answer.body)
        except orjson.JSONDecodeError:
            raise Unavailable(f"the answer is not JSON: {answer.body[:200]!r}", server=self.name) from None

    def _failure(self, answer: Answer) -> GymError:
        try:
            body = orjson.loads(answer.body)
        except orjson.JSONDecodeError:
            body = answer.body.decode("utf-8", "replace")
        return error_from_body(answer.status, body, server=self.name)


def _complete(body: Any) -> Any:
    """A row and a response, whose usage has every count that NeMo Gym's types of it require."""
    response = body.get("response") if isinstance(body, dict) else None
    if not isinstance(response, dict) or (usage := responses_usage(response.get("usage"))) is None:
        return body
    return {**body, "response": {**response, "usage": usage}}
