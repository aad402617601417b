"""`Gateway`: answers HTTP for a graph.

It knows the names of servers and the transports to them, but none of their classes, so it runs where their
packages are not installed. It passes calls on as bytes, and their replies back
(`gym_serve.gateway.wire`). What it adds is HTTP: routes, bearer tokens, request ids, deadlines,
sessions, streams, the API documentation, and further pages (`Page`, `Site`) of installed packages.

Every failure is a JSON body with an ``error.code``; no request makes the gateway raise. It keeps no state:
any gateway of a graph answers any request.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gym_serve.gateway import api_docs, pages, wire
from gym_serve.gateway.access import Access
from gym_serve.gateway.batch import ROLLOUTS, Batches
from gym_serve.gateway.host import EPISODES, PRESSURE, STATS, Host, LiveEpisodesOfGraph, pressure, stats
from gym_serve.gateway.pages import Page, Site, added_pages
from gym_serve.gateway.policy_routes import POLICY, steer
from gym_serve.graph.spec import Graph
from gym_serve.observe.logs import fault
from gym_serve.servers.runner import DESCRIBE
from gym_serve.servers.transport import Call, Reply, Transport
from gym_serve.types.errors import (
    BadRequest,
    Forbidden,
    GymError,
    InvalidRequest,
    NotFound,
    SessionLost,
    Unauthorized,
    Unavailable,
    error_from_body,
)
from gym_serve.types.exact import exact_json

_DESCRIBE_SECONDS = 5.0
_PROBE_SECONDS = 1.0  # for which the state of the servers is remembered
_SEED = "seed_session"

logger = logging.getLogger("gym_serve")


class Gateway:
    """Answers HTTP for a graph."""

    def __init__(self, graph: Graph, transports: Mapping[str, Transport], host: Host) -> None:
        self._graph = graph
        self._access = Access(graph.auth_tokens, insecure=graph.insecure)
        self._transports = transports
        self._host = host
        self._probing: asyncio.Task[dict[str, dict[str, Any]]] | None = None
        self._probed = 0.0
        self._agents = [name for name, node in graph.nodes.items() if node.kind == "agent"]
        self._batches = Batches(graph, transports, host.leaving)
        self._live = LiveEpisodesOfGraph(host)
        self.public: Mapping[str, Any] = {}
        """The graph without secrets, as ``/graph`` shows it."""

    async def answer(self, request: Request) -> Response:
        request_id = wire.request_id_of(request)
        try:
            self._access.check_origin(request)
            response = await self._route(request, request_id)
        except (Forbidden, Unauthorized) as error:
            client = request.client.host if request.client else "a client"
            fault(None, error.code, f"a request from {client} was refused: {error.code}: {error.message}")
            asks = isinstance(error, Unauthorized) and pages.wants_form(request)
            response = pages.sign_in_form(_root(request), _path(request)) if asks else wire.failed(error)
        except GymError as error:
            response = wire.failed(error)
        except ClientDisconnect:
            response = Response(status_code=499)  # nobody reads it; Serve's own code for this
        except Exception as error:
            logger.exception("%s %s failed [%s]", request.method, request.scope["path"], request_id)
            response = wire.failed(GymError(f"the gateway failed: {type(error).__name__} [{request_id}]"))
        response = wire.in_form_of(request.scope["path"], response)
        response.headers["x-content-type-options"] = "nosniff"
        if request_id != request.headers.get("x-request-id"):
            response.headers["x-request-id"] = request_id  # else the proxy answers with the client's
        return response

    async def stats(self) -> dict[str, Any]:
        return stats(await self._host.reports(STATS), self._agents)

    async def _route(self, request: Request, request_id: str) -> Response:
        path = _path(request)
        if path == pages.SIGN_IN:
            return await pages.answer_sign_in(request, _root(request), self._access)
        if path == "health" and self._access.is_anonymous(request):
            return wire.wrong_method(request, "GET") or await self._probe(request)
        self._access.check_token(request)
        if page := _PAGES.get(path):
            return wire.wrong_method(request, "GET") or await page(self, request)
        if path == "run":
            if wrong := wire.wrong_method(request, "POST"):
                return wrong
            body = await wire.body_of(request, self._graph.gateway.max_request_bytes)
            return await self._call(request, request_id, wire.Route(self._agent_of(body), "run"), body)
        server, _, op = path.partition("/")
        if path == ROLLOUTS:
            return wire.wrong_method(request, "POST") or await self._batches.answer(request)
        if server == EPISODES:
            return await self._live.answer(request, path)
        if server not in self._graph.nodes and (added := (await added_pages()).get(server)):
            if isinstance(added, Site):
                return wire.wrong_method(request, "GET") or await added.answer(request, op, self._live)
            if not op:
                wrong = wire.wrong_method(request, "GET")
                return wrong or wire.answer(Reply.of(added.answer(request, self._graph.nodes)))
        if op == "mcp" and server in self._graph.nodes and self._graph.nodes[server].kind == "resources":
            return await self._mcp(request, request_id, server)
        if op.startswith(POLICY) and server in self._graph.nodes and self._is_own_model(server):
            return await steer(
                request,
                server,
                op,
                transport=self._transports[server],
                host=self._host,
                settings=self.public["models"][server],
                secured=self._access.secured,
                limit=self._graph.gateway.max_request_bytes,
            )
        route = wire.find_route(request.method, path, self._graph.nodes)
        if wrong := wire.wrong_method(request, *filter(None, (route.method, route.beside))):
            return wrong
        body = await wire.body_of(request, self._graph.gateway.max_request_bytes)
        return await self._call(request, request_id, route, body)

    async def _call(self, request: Request, request_id: str, route: wire.Route, body: bytes) -> Response:
        server, op = route.server, route.op
        timeout = wire.timeout_of(request)
        session = wire.session_of(request) if route.in_session or op == _SEED else route.session
        affinity = request.headers.get("x-session-affinity")
        if op in _OPENS or (route.in_session and session is None):
            affinity = None  # only episodes of this graph open sessions with such a key
        body, streams = wire.stream_of(op, body)
        traceparent = wire.traceparent_of(request)
        call = Call(op, body, session, request_id, affinity, timeout, traceparent=traceparent)
        transport, remote = self._transports[server], self._graph.nodes[server].url is not None
        if streams:
            return await wire.open_stream(transport, call)
        reply = await _reply_of(transport, call)
        path = f"{_root(request)}/{server}"
        if reply.status >= 400:
            response = wire.answer(_typed(server, op, reply) if remote else reply, request)
            if route.in_session and reply.session and reply.session != session:  # it moved to another replica
                wire.keep_session(response, reply.session, path)
            return response
        if op == "verify" and not remote:  # a remote server has merged them itself
            reply = wire.merged(body, reply)
        response = wire.answer(reply, request)
        if op in ("close_session", "close"):
            wire.drop_session(response, path)
        elif reply.session and (route.in_session or op in _OPENS):
            wire.keep_session(response, reply.session, path)
        return response

    async def _mcp(self, request: Request, request_id: str, server: str) -> Response:
        """The tools of an environment, for a client of the Model Context Protocol."""
        if wrong := wire.wrong_method(request, "POST", "DELETE"):
            return wrong
        named = request.headers.get("mcp-session-id")
        if request.method == "DELETE":
            if not named:
                raise BadRequest("`mcp-session-id` is missing; send the session to close")
            return await self._call(
                request, request_id, wire.Route(server, "close_session", session=named), b""
            )
        try:
            # At its first use, as the library is optional; in a thread, as importing it takes a second.
            endpoint = await asyncio.to_thread(importlib.import_module, "gym_serve.gateway.mcp_endpoint")
        except ModuleNotFoundError as error:
            raise NotFound(f"{error}: MCP needs pip install 'gym-serve[mcp]' on the cluster") from error
        session = wire.session_of(request, named)
        timeout = wire.timeout_of(request)
        traceparent = wire.traceparent_of(request)
        exchange = endpoint.McpExchange(
            server, self._transports[server], session, request_id, timeout, traceparent=traceparent
        )
        body = await wire.body_of(request, self._graph.gateway.max_request_bytes)
        response: Response = await exchange.answer(request, body)
        if exchange.session is not None and exchange.session != session:
            wire.keep_session(response, exchange.session, f"{_root(request)}/{server}")
        return response

    def _is_own_model(self, server: str) -> bool:
        node = self._graph.nodes[server]
        return node.kind == "model" and node.url is None

    def _agent_of(self, body: bytes) -> str:
        """The agent that the row of ``/run`` names, else the default agent."""
        name = self._graph.default_agent
        if b'"agent_ref"' in body:
            try:
                row = exact_json(body)
            except ValueError as error:
                raise BadRequest(f"the body of /run must be JSON: {error}") from None
            ref = row.get("agent_ref") if isinstance(row, dict) else None
            if not isinstance(ref, dict | None):
                raise InvalidRequest(f'`agent_ref` must be an object {{"name": ...}}, got {str(ref)[:40]!r}')
            name = (ref or {}).get("name") or name
        return wire.known_agent(name, self._agents)

    async def _health(self, request: Request) -> Response:
        states = await self._host.states()
        waiting = [name for name, state in states.items() if state["state"] != "ready"]
        if not waiting:
            return wire.answer(Reply.of({"status": "ok", "servers": states}))
        error = Unavailable(f"not ready: {', '.join(waiting)}")
        body = {**error.to_body(), "status": "unavailable", "not_ready": waiting, "servers": states}
        return wire.answer(Reply.of(body)._replace(status=error.status))

    async def _probe(self, request: Request) -> Response:
        """``/health`` for a probe without the token: only whether all servers are ready.

        Anybody may ask, so Serve is asked once a second at most.
        """
        old = time.monotonic() > self._probed + _PROBE_SECONDS
        if self._probing is None or (self._probing.done() and old):
            self._probing, self._probed = asyncio.create_task(self._host.states()), time.monotonic()
        states = (await asyncio.shield(self._probing)).values()
        if all(state["state"] == "ready" for state in states):
            return wire.answer(Reply.of({"status": "ok"}))
        error = Unavailable("not ready")
        return wire.answer(
            Reply.of({**error.to_body(), "status": "unavailable"})._replace(status=error.status)
        )

    async def _json(self, request: Request) -> Response:
        match _path(request):
            case "pressure":
                page = pressure(await self._host.reports(PRESSURE), self._agents)
            case "stats":
                page = await self.stats()
            case "openapi.json":
                page = await self._describe(request)
            case _:
                page = dict(self.public)
        return wire.answer(Reply.of(page))

    async def _docs(self, request: Request) -> Response:
        return pages.response(pages.reference(await self._describe(request)), script=True)

    async def _docs_script(self, request: Request) -> Response:
        headers = {"cache-control": "no-cache", "x-content-type-options": "nosniff"}
        return Response(pages.script(), media_type="text/javascript", headers=headers)

    async def _home(self, request: Request) -> Response:
        sites = [name for name, page in (await added_pages()).items() if isinstance(page, Site)]
        root, nodes = _root(request), self._graph.nodes
        return pages.response(pages.home(root, nodes, self._graph.default_agent, sites))

    async def _describe(self, request: Request) -> dict[str, Any]:
        described = await asyncio.gather(*map(self._operations, self._transports))
        return api_docs.openapi(
            _root(request),
            self._graph.nodes,
            dict(zip(self._transports, described, strict=True)),
            pages={name: page for name, page in (await added_pages()).items() if isinstance(page, Page)},
            default_agent=self._graph.default_agent,
            secured=self._access.secured,
        )

    async def _operations(self, server: str) -> dict[str, Any] | None:
        """The operations of a server; None if it does not describe them: it is down, or a foreign one."""
        try:
            reply = await self._transports[server].call(Call(DESCRIBE, timeout=_DESCRIBE_SECONDS))
            operations = reply.json()
        except GymError:
            return None
        described = isinstance(operations, dict) and all(isinstance(o, dict) for o in operations.values())
        return operations if described else None


_OPENS = (_SEED, "reset")
_PAGES = {
    **dict.fromkeys(("graph", "pressure", "stats", "openapi.json"), Gateway._json),
    "": Gateway._home,
    "health": Gateway._health,
    "docs": Gateway._docs,
    "docs.js": Gateway._docs_script,
}


async def _reply_of(transport: Transport, call: Call) -> Reply:
    """The reply to a call; seeding a lost session opens another one."""
    try:
        return await transport.call(call)
    except SessionLost:
        if call.op != _SEED:
            raise
        return await transport.call(call._replace(session=None))


def _root(request: Request) -> str:
    root: str = request.scope.get("root_path", "")
    return root.rstrip("/")


def _path(request: Request) -> str:
    """Path below the application's, without a slash at either end."""
    path: str = request.scope["path"].removeprefix(_root(request)).strip("/")
    return path


def _typed(server: str, op: str, reply: Reply) -> Reply:
    """A failure of a remote server as one of the error tree; a tool's own error is left unchanged."""
    if op.startswith("tools/"):
        return reply
    try:
        body = orjson.loads(reply.body)
    except orjson.JSONDecodeError:
        body = reply.body[:2000].decode("utf-8", "replace")
    return Reply.failed(error_from_body(reply.status, body, server=server))._replace(notes=reply.notes)
