"""``/rollouts``: runs over HTTP (docs/http.md, Many rollouts in one request).

| request | does |
|---|---|
| ``POST /rollouts`` | begins a run, and streams its lines |
| ``GET /rollouts/{id}?after=17`` | the lines behind a cursor |
| ``POST /rollouts/{id}/rows`` | adds rows to an open run |
| ``POST /rollouts/{id}/cancel`` | cancels rows of an open run |
| ``DELETE /rollouts/{id}`` | drops the run, and cancels what still runs of it |

The gateway at which a run was begun holds it. Its name is a part of the run's id, as with sessions, so a
request that lands on another gateway is passed on to that one (`Peers`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import re
import secrets
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

import msgspec
import orjson
from msgspec import structs
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gym_serve.graph import wire
from gym_serve.graph.peers import Peers
from gym_serve.graph.runs import AddedRow, OpenRun, Runs
from gym_serve.graph.spec import Graph, nearest
from gym_serve.observe.tracing import checked_parent
from gym_serve.rollouts import Expansion, RunnerOptions, expand, jobs_of, raise_problem
from gym_serve.rollouts.rows import LocatedRow, Problems, parsed_row
from gym_serve.rollouts.scheduling import MAX_FAILURES
from gym_serve.servers.context import closing
from gym_serve.servers.sessions import replica_of
from gym_serve.servers.transport import Call, Reply, Transport, encode
from gym_serve.types.errors import BadRequest, GymError, InvalidRequest, NotFound, SessionLost
from gym_serve.types.exact import exact_json
from gym_serve.types.model_endpoint import MODEL_FIELD, ModelEndpoint, endpoint_of
from gym_serve.types.requests import JSON, parse
from gym_serve.types.rows import agent_name, check_row

ROLLOUTS = "rollouts"
"""The route, and the first part of the names of its operations between gateways."""

READ, EXISTS, CANCEL, DROP = (f"{ROLLOUTS}/{op}" for op in ("read", "exists", "cancel", "delete"))
NDJSON = "application/x-ndjson"

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # the latter is nginx's
_KEY = re.compile(r"[\x21-\x7e]{16,200}")
_MOST_ROWS = 100_000
_Count = Annotated[int, Field(ge=1, le=4096)]


_NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # the last one of deep nesting
_FORM = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class RunBody(BaseModel):
    """The body of ``POST /rollouts`` beside its ``rows``."""

    model_config = _FORM

    agent: str | None = None
    """The agent of all rows; else each row's ``agent_ref.name``, else the graph's default agent."""
    repeats: Annotated[int, Field(ge=1, le=1024)] = 1
    """Rollouts per row."""
    seed: int | None = None
    """Sampling seed of a row's first rollout; that of each further one is one more."""
    params: JSON = {}
    """Replace keys of every row's ``responses_create_params``."""
    concurrency: _Count = 128
    """How many rollouts run at the same time at most."""
    attempts: Annotated[int, Field(ge=1, le=100)] = 1
    """How often a rollout is tried if its failure is worth it."""
    timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds for one attempt, beside the agent's own deadlines."""
    max_failures: Annotated[int, Field(ge=1)] = MAX_FAILURES
    """So many rollouts in a row that meet an error which only the operator can mend end the run."""
    endpoint: JSON | None = None
    """Where the policy answers, for rows without a ``_ng_model``."""
    open: bool = False
    """Whether rows are added later; each of them is one attempt."""
    stream: bool = True
    """Whether the answer is the stream of lines; else it is the id of the run alone."""


class RowsBody(BaseModel):
    """The body of ``POST /rollouts/{id}/rows`` beside its ``rows``."""

    model_config = _FORM

    first: Annotated[int, Field(ge=0)]
    """Number of the first row among all of the run, from 0: rows that have come before are left out."""
    agent: str | None = None
    """The agent of these rows; else each row's, else the graph's default agent."""
    traceparents: dict[str, str] = {}
    """By a row's number: the span of the client that it is a part of."""
    open: bool = True
    """Whether further rows will follow."""


class CancelBody(BaseModel):
    """The body of ``POST /rollouts/{id}/cancel``."""

    model_config = _FORM

    rows: list[int]
    """The numbers of the rows whose rollouts are of no use any more."""


_RUN: TypeAdapter[Any] = TypeAdapter(RunBody)
_ROWS: TypeAdapter[Any] = TypeAdapter(RowsBody)
_CANCEL: TypeAdapter[Any] = TypeAdapter(CancelBody)


class _Agent(msgspec.Struct):
    name: str | None = None


class _Head(msgspec.Struct):
    agent_ref: _Agent | None = None


class RunRoutes:
    """Answers the requests below ``/rollouts``, and those that other gateways pass on.

    Args:
        graph: the outline of the graph.
        transports: reach its servers, by name.
        peers: the other gateways.
    """

    server = "gateway"

    def __init__(self, graph: Graph, transports: Mapping[str, Transport], peers: Peers) -> None:
        self._graph = graph
        self._transports = transports
        self._peers = peers
        self._agents = [name for name, node in graph.nodes.items() if node.kind == "agent"]
        self._keys: dict[str, str] = {}  # idempotency keys of runs
        self._releasing: set[asyncio.Task[None]] = set()
        options = graph.gateway
        self._runs = Runs(
            peers.replica,
            self._episode,
            ttl=options.run_ttl,
            most=options.max_runs,
            most_bytes=options.max_request_bytes,
            on_drop=self._on_drop,
        )

    async def answer(self, request: Request, path: str) -> Response:
        """Answer a request.

        Args:
            request: the request.
            path: its path below the graph's, which begins with ``rollouts``.

        Raises:
            GymError: it is refused.
        """
        _, id, op = (*path.split("/", 2), "", "")[:3]
        if not id:
            return wire.wrong_method(request, "POST") or await self._begin(request)
        if not op and request.method == "DELETE":
            return wire.answer(await self._call(Call(DROP, session=id)))
        if not op and request.method == "HEAD":
            reply = await self._call(Call(EXISTS, session=id))
            return Response(media_type=NDJSON) if reply.status == 200 else wire.answer(reply)
        if not op:
            wrong = wire.wrong_method(request, "GET", "DELETE")
            return wrong or await self._lines(request, id, _after(request))
        if op not in ("rows", "cancel"):
            raise NotFound(f"a run has no route /{op[:100]}; it has /rows and /cancel")
        if wrong := wire.wrong_method(request, "POST"):
            return wrong
        body = await wire.body_of(request, self._graph.gateway.max_request_bytes)
        return wire.answer(await self._call(Call(f"{ROLLOUTS}/{op}", body, id)))

    async def call(self, call: Call) -> Reply:
        """Answer a request for a run of this gateway. Failures are in the reply."""
        try:
            if call.op == DROP:
                await self._runs.delete(call.session or "")
                return Reply.of({})
            run = self._runs.get(call.session or "")
            if call.op == EXISTS:
                return Reply.of({})
            if not isinstance(run, OpenRun):
                raise BadRequest(
                    "the run has all of its rows; only one that was begun with `open` takes more"
                )
            if call.op == CANCEL:
                run.cancel(parse(_CANCEL, _json(call.body), "body").rows)
            else:
                rows, options = await asyncio.to_thread(_read, call.body, _ROWS)
                if options.first + len(rows) > run.rows:
                    self._runs.reserve(len(call.body))
                run.add(options.first, self._added(rows, options), more=options.open)
            return Reply.of({"rows": run.rows})
        except GymError as error:
            return Reply.failed(error)

    async def stream(self, call: Call) -> AsyncGenerator[bytes, None]:
        """The lines of a run of this gateway; the operation is `READ`.

        Raises:
            SessionNotFound: there is no such run.
            InvalidRequest, Conflict: see `RunLog.acknowledge`.
        """
        body = orjson.loads(call.body)
        run = self._runs.get(call.session or "")
        async with closing(run.read(body["after"], body["seconds"], self._peers.leaving)) as lines:
            async for chunk in lines:
                yield chunk

    async def close(self) -> None:
        """Drop the runs: until this gateway is gone, Serve starts none in its place, so nothing may wait."""
        await self._runs.close()
        await asyncio.gather(*self._releasing)
        await self._peers.stop()

    async def _begin(self, request: Request) -> Response:
        key = _key_of(request)
        body = await wire.body_of(request, self._graph.gateway.max_request_bytes)
        rows, options = await asyncio.to_thread(_read, body, _RUN)
        if not options.open:
            await asyncio.to_thread(self._check, rows, options)
        await self._peers.start(self)
        id = self._runs.new_id()
        holder = id if key is None else await self._claimed(key, id, body)
        if holder == id:
            self._open(id, rows, options, len(body), wire.traceparent_of(request))
        root = request.scope.get("root_path", "").rstrip("/")
        if options.stream and not options.open:
            response = await self._lines(request, holder, None)
        else:
            response = wire.answer(Reply.of({"run": holder}))
        response.headers["location"] = f"{root}/{ROLLOUTS}/{holder}"
        return response

    def _open(self, id: str, rows: list[bytes], options: RunBody, size: int, trace: str | None) -> None:
        try:
            if options.open:
                run = self._runs.open(id, options.concurrency)
                run.add(0, self._added(rows, RowsBody(first=0, agent=options.agent)))
            else:
                jobs = jobs_of(expand(_located(rows), self._expansion(options), problem=raise_problem))
                settings = RunnerOptions(
                    options.concurrency,
                    options.attempts,
                    options.timeout,
                    max_failures=options.max_failures,
                )
                endpoint = None if options.endpoint is None else ModelEndpoint.read(options.endpoint)
                self._runs.schedule(id, jobs, partial(self._rollout, endpoint, trace), settings, size)
        except GymError:
            self._on_drop(id)
            raise

    async def _lines(self, request: Request, id: str, after: int | None) -> Response:
        body = encode({"after": after, "seconds": wire.timeout_of(request)})
        lines = self._via(id).stream(Call(READ, body, id))
        try:
            first = await anext(lines, b"")
        except SessionLost:
            raise self._lost(id) from None
        except BaseException:
            await lines.aclose()
            raise
        return _Lines(first, lines)

    async def _call(self, call: Call) -> Reply:
        try:
            return await self._via(call.session or "").call(call)
        except SessionLost:
            raise self._lost(call.session or "") from None

    def _via(self, id: str) -> Transport:
        """The gateway that holds a run."""
        return self if replica_of(id) in ("", self._peers.replica) else self._peers.transport

    def _lost(self, id: str) -> SessionLost:
        return SessionLost(
            f"the gateway that held the run {id[:100]} is gone; post the rows again whose rollouts you lack"
        )

    async def _claimed(self, key: str, id: str, body: bytes) -> str:
        """The id of the run that a key belongs to: the new one's, or that of an earlier request.

        Raises:
            InvalidRequest: the earlier request had another body.
        """
        entry = hashlib.sha256(key.encode()).hexdigest()
        value = f"{id} {hashlib.sha256(body).hexdigest()}"
        while (found := await self._peers.claim(entry, value)) != value:
            holder, _, digest = found.partition(" ")
            if digest != value.partition(" ")[2]:
                raise InvalidRequest(
                    "`idempotency-key` must be new for every request; an earlier one had another body"
                )
            with suppress(SessionLost):
                if (await self._via(holder).call(Call(EXISTS, session=holder))).status == 200:
                    return holder
            # Its gateway is gone. All who find that look at the next entry, where one of them is the first.
            entry = hashlib.sha256(f"{entry} {holder}".encode()).hexdigest()
        self._keys[id] = entry
        return id

    def _on_drop(self, id: str) -> None:
        if (entry := self._keys.pop(id, None)) is not None:
            releasing = asyncio.ensure_future(self._peers.release(entry))
            self._releasing.add(releasing)
            releasing.add_done_callback(self._releasing.discard)

    def _expansion(self, options: RunBody) -> Expansion:
        return Expansion(
            agent=options.agent,
            default_agent=self._graph.default_agent,
            repeats=options.repeats,
            seed=options.seed,
            params=options.params,
        )

    def _check(self, rows: list[bytes], options: RunBody) -> None:
        """Check the rows of a run before it begins.

        Raises:
            InvalidRequest: some cannot be used; names all of them.
        """
        problems = Problems()
        expansion = dataclasses.replace(self._expansion(options), repeats=1)
        for _ in expand(_located(rows), expansion, problem=problems.add, check=self._check_row):
            pass
        problems.raise_if_any(f"{problems.count} rows cannot be used, so nothing was started")
        if not rows:
            raise InvalidRequest("`rows` must have at least one row, unless `open` is true")
        if options.endpoint is not None:
            ModelEndpoint.read(options.endpoint)

    def _check_row(self, row: JSON) -> None:
        check_row(row)
        self._known(agent_name(row))

    def _known(self, agent: str | None) -> str:
        if agent is None:
            raise InvalidRequest(
                f"`agent_ref` is missing, and there is no default agent; agents: {', '.join(self._agents)}"
            )
        if agent not in self._agents:
            raise NotFound(f"unknown agent {agent[:100]!r}{nearest(agent[:100], self._agents)}")
        return agent

    def _added(self, rows: list[bytes], options: RowsBody) -> list[AddedRow]:
        default = options.agent or self._graph.default_agent
        spans = {number: checked_parent(span) for number, span in options.traceparents.items()}
        return [
            AddedRow((None if options.agent else _agent_of(row)) or default, row, spans.get(str(number)))
            for number, row in enumerate(rows, options.first)
        ]

    async def _episode(self, agent: str | None, call: Call) -> bytes:
        name = self._known(agent)
        reply = await self._transports[name].call(call)
        # A server elsewhere may answer anything; what ours answer is one line.
        if reply.status >= 400 or self._graph.nodes[name].url is not None or b"\n" in reply.body:
            return encode(reply.json())
        return reply.content

    async def _rollout(self, default: ModelEndpoint | None, trace: str | None, row: JSON) -> JSON:
        """One episode of a materialized row; see `gym_serve.rollouts.Run`."""
        endpoint = endpoint_of(row) or default
        if endpoint is not None:
            row, endpoint = {**row, MODEL_FIELD: endpoint.public}, structs.replace(endpoint, over_http=True)
        id, key = secrets.token_hex(16), str(row["_ng_rollout_id"])
        call = Call("run", encode(row), None, id, key, None, endpoint, trace)
        rollout: JSON = (await self._transports[str(agent_name(row))].call(call)).json()
        return rollout


class _Lines(StreamingResponse):
    """The lines of a run. A response that breaks off is no failure: the client asks for the rest."""

    def __init__(self, first: bytes, lines: AsyncGenerator[bytes, None]) -> None:
        super().__init__(self._chunks(first, lines), media_type=NDJSON, headers=_HEADERS)
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._lines.aclose()

    async def _chunks(self, first: bytes, lines: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        yield first
        with suppress(GymError):
            async for chunk in lines:
                yield chunk


def _read(body: bytes, schema: TypeAdapter[Any]) -> tuple[list[bytes], Any]:
    """The rows of a body as they came, and the rest of it.

    Raises:
        BadRequest: it is no JSON.
        InvalidRequest: it does not fit; names all problems.
    """
    try:
        members = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        rows = msgspec.json.decode(members.pop("rows", b"[]"), type=list[msgspec.Raw])
    except _NO_JSON as error:
        raise BadRequest(f"the body must be a JSON object with a list of `rows`: {error}") from None
    if len(rows) > _MOST_ROWS:
        raise InvalidRequest(f"`rows` must have at most {_MOST_ROWS} rows, got {len(rows)}")
    options = {name: _json(bytes(value)) for name, value in members.items()}
    return [bytes(row) for row in rows], parse(schema, options, "body")


def _json(data: bytes) -> Any:
    try:
        return exact_json(data)
    except ValueError as error:
        raise BadRequest(f"the body must be JSON: {error}") from None


def _located(rows: list[bytes]) -> Iterator[LocatedRow]:
    for number, row in enumerate(rows):
        yield parsed_row(f"rows[{number}]", row)


def _agent_of(row: bytes) -> str | None:
    try:
        head = msgspec.json.decode(row, type=_Head)
    except _NO_JSON:  # the agent says what is wrong with the row
        return None
    return None if head.agent_ref is None else head.agent_ref.name


def _after(request: Request) -> int:
    given = request.query_params.get("after", "0")
    if not (given.isascii() and given.isdecimal() and len(given) <= 15):
        raise InvalidRequest(f"`after` must be a cursor, a whole number, got {given[:40]!r}")
    return int(given)


def _key_of(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and not _KEY.fullmatch(key):
        raise BadRequest("`idempotency-key` must have 16 to 200 printable ASCII characters, e.g. a UUID")
    return key
