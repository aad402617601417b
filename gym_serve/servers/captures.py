"""Captures: the model calls of external harnesses, recorded by the replica that answers them.

A capture is a session of a model server: every call below ``/{model}/rollouts/{id}/v1`` goes to the replica
that opened it. Only complete answers are recorded; a call that failed, or whose harness hung up, counts as
``unfinished``. If the last call failed, and not because of the request, the capture reports that ``failure``,
so that nobody scores what the harness made of it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from gym_serve.capture import CallTree, trajectories_of, with_bundle, without_tokens
from gym_serve.observe.timeline import MODEL_CALLS, Recorder
from gym_serve.servers.clients import ModelClient
from gym_serve.servers.context import CallContext, closing, current, stream_in, use
from gym_serve.servers.protocols import Model
from gym_serve.servers.sessions import OpenSession, SessionTable
from gym_serve.servers.usage import record_notes
from gym_serve.types.errors import (
    BadRequest,
    GymError,
    OperatorError,
    Overloaded,
    Retryable,
    Unavailable,
    error_from_body,
)
from gym_serve.types.model_endpoint import ModelEndpoint
from gym_serve.types.protocols import (
    FINAL_EVENTS,
    CompletionStream,
    chat_to_params,
    response_to_chat,
    tokens_of,
)
from gym_serve.types.requests import JSON, input_items

_MAX_CALLS = 10_000  # per capture, so that a harness in a loop cannot take all memory

OPEN = "rollouts"
TRAJECTORIES = "rollouts/trajectories"
CLOSE = "rollouts/close"
RECORDED: JSON = {  # JSON schema of a capture's contents
    "type": "object",
    "required": ["id", "calls", "unfinished", "trajectories"],
    "properties": {
        "id": {"type": "string"},
        "calls": {"type": "integer", "minimum": 0},
        "unfinished": {"type": "integer", "minimum": 0},
        "trajectories": {"type": "array", "items": {"type": "object"}},
    },
}


@dataclass
class _Capture:
    affinity: str | None
    endpoint: ModelEndpoint | None
    tree: CallTree = field(default_factory=CallTree)
    recorder: Recorder = field(default_factory=Recorder)
    unfinished: int = 0
    failure: GymError | None = None
    running: list[float] = field(default_factory=list)  # when each call began that has not ended
    ended: list[float] = field(default_factory=list)  # how many seconds each of the others took

    def took(self, begun: float) -> None:
        self.running.remove(begun)
        self.ended.append(time.monotonic() - begun)

    def seconds(self) -> list[float]:
        now = time.monotonic()
        return [*self.ended, *(now - begun for begun in self.running)]


@dataclass
class _Call:
    """A call that is being recorded."""

    params: JSON
    context: CallContext
    record: Callable[[JSON], None]


class Captures:
    """The captures of one model server; ``ttl`` is seconds without a call after which one is dropped."""

    def __init__(self, server: str, replica: str, ttl: float, most: int = 10_000) -> None:
        self._server = server
        self._table: SessionTable[_Capture] = SessionTable(replica, ttl)
        self._most = most

    def __len__(self) -> int:
        self._expire()
        return len(self._table)

    def open(self) -> str:
        """Open a capture and return its id. Its model calls have the affinity key and endpoint of this
        call."""
        self._expire()
        if len(self._table) >= self._most:
            raise Overloaded(f"{self._most} captures are open (`max_captures`); close some, or wait")
        return self._table.open(_Capture(current().affinity, current().endpoint), time.monotonic()).id

    def traceparent(self, session_id: str) -> str | None:
        return self._table.traceparent(session_id)

    async def call(self, params: JSON, ask: Callable[[JSON], Awaitable[JSON]]) -> JSON:
        """Make a model call in the current capture and record it, unless the model fails. Raises `BadRequest`
        if the request relies on state of the server, or the capture is full; else as `check`."""
        with self._recording(params) as call:
            with use(call.context):
                response = await ask(call.params)
            call.record(response)
        return response

    async def stream(
        self, params: JSON, ask: Callable[[JSON], AsyncIterator[JSON]]
    ) -> AsyncGenerator[JSON, None]:
        """The events of a streamed call of the current session, the final one once the call is recorded: a
        harness that has seen the end of an answer, and asks at once what comes next, finds it recorded."""
        final: list[JSON] = []
        with self._recording(params) as call:
            async with closing(stream_in(call.context, ask(call.params))) as events:
                async for event in events:
                    if event.get("type") in FINAL_EVENTS:
                        final.append(event)
                    else:
                        yield event
            if not final:
                raise Unavailable("the stream of the model ended before its answer")
            call.record(final[-1]["response"])
        for event in final:
            yield event

    @contextmanager
    def _recording(self, params: JSON) -> Iterator[_Call]:
        session = self._current()
        capture = session.state
        tree = capture.tree
        if len(tree.nodes) + session.running >= _MAX_CALLS:
            raise BadRequest(f"a capture can hold {_MAX_CALLS} calls")
        if params.get("previous_response_id") is not None:
            raise BadRequest("`previous_response_id` is not supported: send the whole conversation")
        instructions = params.get("instructions")
        head: list[JSON] = [{"role": "system", "content": str(instructions)}] if instructions else []
        items = [*head, *_items(params["input"])]
        parent, begins = tree.parent_of(items)
        session.running += 1
        capture.unfinished += 1
        begun, notes = time.monotonic(), current().notes
        capture.running.append(begun)
        body = {**params, "input": with_bundle(items, parent, begins)[len(head) :]}

        def record(response: JSON) -> None:
            tree.add(items, response, parent, begins)
            tokens = tokens_of(response.get("usage"))
            capture.recorder.add_model_call(
                "model", begun, self._server, response, tokens=tokens, notes=notes
            )
            capture.unfinished -= 1
            capture.failure = None

        try:
            affinity = capture.affinity or session.id
            context = replace(current(), affinity=affinity, session=None, endpoint=capture.endpoint)
            yield _Call(body, context, record)
        except (OperatorError, Retryable) as error:
            capture.failure = error
            raise
        finally:
            session.running -= 1
            session.used = time.monotonic()
            capture.took(begun)

    def trajectories(self, *, take: bool = True) -> JSON:
        """The contents of the current capture; see `trajectories_of`. Notes: the times of its calls."""
        session = self._current()
        nodes, failure = session.state.tree.nodes, session.state.failure
        if take:
            current().notes[MODEL_CALLS] = session.state.recorder.take()
        return {
            "id": session.id,
            "calls": len(nodes),
            "unfinished": session.state.unfinished,
            "seconds": session.state.seconds(),
            "failure": None if failure is None else failure.to_body()["error"],
            "trajectories": trajectories_of(nodes),
        }

    def check(self) -> None:
        """Raise `SessionLost` or `SessionNotFound` if the current capture does not exist."""
        self._current()

    def close(self) -> None:
        self._table.pop(current().session or "")

    def _current(self) -> OpenSession[_Capture]:
        self._expire()
        session_id = current().session
        if session_id is None:
            raise BadRequest("the path names no rollout; POST /{model}/rollouts opens one and returns its id")
        return self._table.get(session_id, time.monotonic())

    def _expire(self) -> None:
        for session_id in self._table.expired(time.monotonic()):
            self._table.pop(session_id)


def _items(input_: str | list[Any]) -> list[JSON]:
    items = input_items(input_)
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise BadRequest(f"`input[{index}]` must be an object, got {type(item).__name__}")
    return list(map(without_tokens, items))


class RecordedModel:
    """A model as a harness sees it. Its answers have no token ids, which are for trainers."""

    def __init__(self, model: Model, captures: Captures) -> None:
        self._model = model
        self._captures = captures

    async def responses(self, body: JSON) -> JSON:
        return _shown(await self._captures.call(body, self._model.responses))

    async def stream_responses(self, body: JSON) -> AsyncGenerator[JSON, None]:
        async with closing(self._captures.stream(body, self._model.stream_responses)) as events:
            async for event in events:
                yield _shown_event(event)

    async def chat_completions(self, body: JSON) -> JSON:
        return response_to_chat(await self.responses(chat_to_params(body)), body)

    async def stream_chat(self, body: JSON) -> AsyncGenerator[JSON, None]:
        stream = CompletionStream(body)
        async with closing(self.stream_responses(chat_to_params(body))) as events:
            async for event in events:
                for chunk in stream.event(event):
                    yield chunk


def _shown(response: JSON) -> JSON:
    return {**response, "output": list(map(without_tokens, response["output"]))}


def _shown_event(event: JSON) -> JSON:
    shown = dict(event)
    if isinstance(item := event.get("item"), dict):
        shown["item"] = without_tokens(item)
    if isinstance(response := event.get("response"), dict) and isinstance(response.get("output"), list):
        shown["response"] = _shown(response)
    return shown


class Recording:
    """A capture at a model server, as the agent sees it that runs the harness."""

    def __init__(self, model: ModelClient, id: str) -> None:
        self.id = id
        # Of the last model call, unless the request was at fault; known after `trajectories` and `look`.
        self.failure: GymError | None = None
        self.seconds: list[float] = []  # how long each model call took, those that have not ended included
        self._model = model

    @classmethod
    async def open(cls, model: ModelClient) -> Recording:
        """Open a capture; its model calls have the affinity key of the current context."""
        reply = await model.call(OPEN, {})
        model.decode(reply)
        if reply.session is None:
            raise Unavailable("the model server opened no capture", server=model.transport.server)
        return cls(model, reply.session)

    @property
    def path(self) -> str:
        """Path of the model for the harness, below the address of the graph; it ends with ``/v1``."""
        return f"/{self._model.transport.server}/rollouts/{self.id}/v1"

    async def trajectories(self) -> list[JSON]:
        """The recorded trajectories; see `trajectories_of`."""
        reply = await self._model.call(TRAJECTORIES, {}, session=self.id)
        answer = self._model.decode(reply)
        if reply.notes is not None and MODEL_CALLS in reply.notes:
            record_notes({MODEL_CALLS: reply.notes[MODEL_CALLS]})
        return self._learn(answer)

    async def look(self) -> list[JSON]:
        """The trajectories so far; at the model server, nothing changes by that."""
        return self._learn(await self._model.fetch(TRAJECTORIES, {"look": True}, session=self.id))

    def _learn(self, answer: JSON) -> list[JSON]:
        if failure := answer.get("failure"):
            self.failure = error_from_body(503, {"error": failure}, server=self._model.transport.server)
            self.failure.stage = "model"
        else:
            self.failure = None
        self.seconds = answer.get("seconds") or []
        return list(answer["trajectories"])

    async def close(self) -> None:
        await self._model.fetch(CLOSE, {}, session=self.id)
