"""``POST /rollouts``: the rollouts of many rows in one request (docs/http.md, Many rollouts in one request).

The answer is a line of JSON for each rollout, as it ends. Each row is one attempt, and its line has what
``POST /run`` would have answered: the rollout, or the error and its status. Whoever sends rows decides what
is tried again (`gym_serve.client.remote_agent` leaves that to the scheduler of its process).

Nothing outlives the request: a client that closes it cancels what still runs, and a response that ends
without its last line was cut off.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import structs
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from starlette.requests import Request
from starlette.responses import StreamingResponse

from gym_serve.gateway import wire
from gym_serve.graph.spec import Graph
from gym_serve.observe.tracing import checked_parent
from gym_serve.rollouts import Expansion, expand
from gym_serve.rollouts.rows import LocatedRow, Problems, parsed_row, raise_problem
from gym_serve.rollouts.runner import TaskPool
from gym_serve.servers.transport import Call, Reply, Transport, encode
from gym_serve.types.errors import BadRequest, GymError, InvalidRequest
from gym_serve.types.exact import exact_json
from gym_serve.types.model_endpoint import MODEL_FIELD, ModelEndpoint, endpoint_of
from gym_serve.types.requests import JSON, parse
from gym_serve.types.rows import agent_name, check_row

ROLLOUTS = "rollouts"
"""The route."""
NDJSON = "application/x-ndjson"

_MOST_ROWS = 100_000
_BEAT_SECONDS = 5.0  # between two signs of life: a client knows a dead connection by their absence
_LINGER_SECONDS = 0.01  # for which lines are gathered: each chunk costs Serve's proxy a millisecond
_FEW_BYTES = 1 << 16
_NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # the last one of deep nesting

logger = logging.getLogger("gym_serve")


class BatchBody(BaseModel):
    """The body of ``POST /rollouts`` beside its ``rows``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    # No docstrings: pydantic takes long to find them, and this is imported wherever a graph is.
    agent: str | None = Field(
        None,
        description="Agent of all rows; else each row's `agent_ref.name`, else the graph's default agent.",
    )
    repeats: int = Field(1, ge=1, le=1024, description="Rollouts per row.")
    seed: int | None = Field(
        None, description="Sampling seed of a row's first rollout; that of each further one is one more."
    )
    params: JSON = Field({}, description="Replace keys of every row's `responses_create_params`.")
    concurrency: int = Field(
        128, ge=1, le=4096, description="How many rollouts run at the same time at most."
    )
    timeout: float | None = Field(
        None, gt=0, description="Seconds for one rollout, beside the agent's own deadlines."
    )
    endpoint: JSON | None = Field(
        None, description="Where the policy answers, for rows without a `_ng_model`."
    )
    traceparents: dict[str, str] = Field(
        {}, description="By a row's number: the span of the client that it is a part of."
    )


_BODY: TypeAdapter[Any] = TypeAdapter(BatchBody)


class Batches:
    """Answers ``POST /rollouts``. ``leaving``: whether this gateway is being stopped, which would wait for
    open responses."""

    def __init__(
        self, graph: Graph, transports: Mapping[str, Transport], leaving: Callable[[], bool]
    ) -> None:
        self._graph = graph
        self._transports = transports
        self._leaving = leaving
        self._agents = [name for name, node in graph.nodes.items() if node.kind == "agent"]

    async def answer(self, request: Request) -> StreamingResponse:
        """Answer a request. Raises BadRequest: its body is no JSON; InvalidRequest: the body does not fit,
        or rows cannot be used; names all problems; TooLarge: the body is."""
        body = await wire.body_of(request, self._graph.gateway.max_request_bytes)
        # Another thread costs more than to read a few rows.
        read = self._read(body) if len(body) < _FEW_BYTES else await asyncio.to_thread(self._read, body)
        rows, batch, endpoint = read
        lines = self._stream(rows, batch, endpoint, wire.traceparent_of(request))
        return wire.ClosingStream(lines, lines, NDJSON)

    def _read(self, body: bytes) -> tuple[Iterable[list[JSON]], BatchBody, ModelEndpoint | None]:
        """The materialized rows of a body (repeats are made in their turn), its rest, and its endpoint."""
        rows, batch = _parsed(body)
        if not rows:
            raise InvalidRequest("`rows` must have at least one row")
        endpoint = None if batch.endpoint is None else ModelEndpoint.read(batch.endpoint)
        expansion = Expansion(
            agent=batch.agent,
            default_agent=self._graph.default_agent,
            repeats=batch.repeats,
            seed=batch.seed,
            params=batch.params,
        )
        problems = Problems()
        once = dataclasses.replace(expansion, repeats=1)
        groups = list(expand(_located(rows), once, problem=problems.add, check=self._check_row))
        problems.raise_if_any(f"{problems.count} rows cannot be used, so nothing was started")
        if batch.repeats == 1:
            return groups, batch, endpoint
        return expand(_located(rows), expansion, problem=raise_problem), batch, endpoint

    def _check_row(self, row: JSON) -> None:
        check_row(row)
        wire.known_agent(agent_name(row), self._agents)

    async def _stream(
        self,
        groups: Iterable[list[JSON]],
        batch: BatchBody,
        endpoint: ModelEndpoint | None,
        trace: str | None,
    ) -> AsyncGenerator[bytes, None]:
        spans = {int(n): checked_parent(span) for n, span in batch.traceparents.items() if n.isdecimal()}
        waiting = enumerate((number, row) for number, group in enumerate(groups) for row in group)
        following = next(waiting, None)
        pool: TaskPool[int, bytes] = TaskPool()
        counts: Counter[str] = Counter(rollouts=0, errors=0)
        running = 0
        try:
            while running or following is not None:
                while following is not None and running < batch.concurrency:
                    key, (number, row) = following
                    call = _call(row, endpoint, batch.timeout, spans.get(number, trace))
                    pool.spawn(key, self._line(number, row, call, counts))
                    running, following = running + 1, next(waiting, None)
                done = await pool.wait(_BEAT_SECONDS)
                if self._leaving():
                    return
                if running > len(done) > 0:
                    await asyncio.sleep(_LINGER_SECONDS)
                    done += await pool.wait(0)
                running -= len(done)
                lines = b"".join(task.result() for _, task in done) or b'{"running":%d}\n' % running
                ends = not running and following is None
                yield lines + encode({"end": counts}) + b"\n" if ends else lines
        finally:
            await pool.close()

    async def _line(self, number: int, row: JSON, call: Call, counts: Counter[str]) -> bytes:
        agent = str(agent_name(row))
        try:
            reply = await self._transports[agent].call(call)
            # A server elsewhere may answer anything; what ours answer is one line.
            if reply.status >= 400 or self._graph.nodes[agent].url is not None or b"\n" in reply.body:
                reply = Reply.of(reply.json())
        except Exception as error:
            if not isinstance(error, GymError):
                logger.exception("a rollout of row %d failed", number)
                error = GymError(f"the gateway failed: {type(error).__name__}: {error}")
            counts["errors"] += 1
            return encode({"row": number, "status": error.status, **error.to_body()}) + b"\n"
        counts["rollouts"] += 1
        return b'{"row":%d,"rollout":%s}\n' % (number, reply.content)


def _parsed(body: bytes) -> tuple[list[bytes], BatchBody]:
    """The rows of a body as they came, and the rest of it."""
    try:
        members = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        rows = msgspec.json.decode(members.pop("rows", b"[]"), type=list[msgspec.Raw])
    except _NO_JSON as error:
        raise BadRequest(f"the body must be a JSON object with a list of `rows`: {error}") from None
    if len(rows) > _MOST_ROWS:
        raise InvalidRequest(f"`rows` must have at most {_MOST_ROWS} rows, got {len(rows)}")
    try:
        options = {name: exact_json(bytes(value)) for name, value in members.items()}
    except ValueError as error:
        raise BadRequest(f"the body must be JSON: {error}") from None
    return [bytes(row) for row in rows], parse(_BODY, options, "body")


def _located(rows: list[bytes]) -> Iterator[LocatedRow]:
    for number, row in enumerate(rows):
        yield parsed_row(f"rows[{number}]", row)


def _call(row: JSON, default: ModelEndpoint | None, timeout: float | None, trace: str | None) -> Call:
    endpoint = endpoint_of(row) or default
    if endpoint is not None:
        row, endpoint = {**row, MODEL_FIELD: endpoint.public}, structs.replace(endpoint, over_http=True)
    id, key = secrets.token_hex(16), str(row["_ng_rollout_id"])
    return Call("run", encode(row), None, id, key, timeout, endpoint, trace)
