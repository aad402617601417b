"""The other servers of a graph, as a server sees them: `ModelClient`, `EnvironmentClient` and `AgentClient`.

A setting that is annotated with one of these types is a *reference*. In a graph file its value is the name of
a server of that kind, and the server is constructed with a client of it. In a unit test the value may be any
object with the same methods.

What the spans of calls say: names and attributes after OpenTelemetry's conventions for generative AI.

These conventions (https://github.com/open-telemetry/semantic-conventions-genai) are still in development; all
of their names that gym_serve uses are in this file, except that of an episode (`AgentServer.run`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, ClassVar, Literal

import orjson
from msgspec.structs import replace
from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema
from typing_extensions import Self

from gym_serve.observe.tracing import Span, span
from gym_serve.servers.context import closing, current, use
from gym_serve.servers.transport import CALLER_LEFT, Call, Reply, Transport, encode
from gym_serve.servers.usage import USAGE_FIELD, merge_usage, record_answer, record_failure, record_notes
from gym_serve.types.errors import DeadlineExceeded, EndpointMisconfigured, GymError, NotFound, Unavailable
from gym_serve.types.model_endpoint import ModelEndpoint
from gym_serve.types.protocols import FINAL_EVENTS, check_completion, check_response, read_events

PROVIDER = "gym_serve"  # what a caller knows about a model server of its graph: behind it may be any

_CHATS = frozenset({"v1/responses", "v1/chat/completions"})
_REQUEST = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "max_output_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "max_tokens": "gen_ai.request.max_tokens",
}


def describe_call(call_span: Span, server: str, op: str, body: Any, reply: Reply) -> None:
    """Describe a call, seen by its caller."""
    if op in _CHATS:
        _describe_chat(call_span, server, body if isinstance(body, dict) else {}, reply)
    elif op.startswith("tools/"):
        tool = op.removeprefix("tools/")
        call_span.name(f"execute_tool {tool}")
        operation = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.type": "function"}
        call_span.set({**operation, "gen_ai.tool.name": tool})
    describe_reply(call_span, server, reply)


def describe_reply(call_span: Span, server: str, reply: Reply) -> None:
    """Say which server a call went to, and how it ended."""
    call_span.set(
        {"gym_serve.server": server, "gym_serve.status": reply.status, "gym_serve.session": reply.session}
    )
    if reply.status >= 400:
        try:
            reply.json()
        except GymError as error:
            call_span.fail(error.code, error.message)


def _describe_chat(call_span: Span, server: str, body: Mapping[str, Any], reply: Reply) -> None:
    model = str(body.get("model") or server)
    call_span.name(f"chat {model}")
    call_span.set(
        {"gen_ai.operation.name": "chat", "gen_ai.provider.name": PROVIDER, "gen_ai.request.model": model}
    )
    call_span.set({name: _number(body.get(key)) for key, name in _REQUEST.items() if key in body})
    try:
        answer = orjson.loads(reply.body) if reply.status < 400 else None
    except orjson.JSONDecodeError:
        return
    if not isinstance(answer, dict):
        return
    usage = answer.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("input_tokens_details") or usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    call_span.set(
        {
            "gen_ai.response.id": _text(answer.get("id")),
            "gen_ai.response.model": _text(answer.get("model")),
            "gen_ai.response.finish_reasons": _finish_reasons(answer),
            "gen_ai.usage.input_tokens": _number(usage.get("input_tokens", usage.get("prompt_tokens"))),
            "gen_ai.usage.output_tokens": _number(usage.get("output_tokens", usage.get("completion_tokens"))),
            "gen_ai.usage.cache_read.input_tokens": _number(cached),
        }
    )


def _finish_reasons(answer: Mapping[str, Any]) -> list[str]:
    if isinstance(choices := answer.get("choices"), list):
        return [str(choice.get("finish_reason")) for choice in choices if isinstance(choice, dict)]
    if isinstance(cut := answer.get("incomplete_details"), dict):
        reason = str(cut.get("reason"))
        return ["length" if reason == "max_output_tokens" else reason]
    items = output if isinstance(output := answer.get("output"), list) else []
    calls = any(isinstance(item, dict) and item.get("type") == "function_call" for item in items)
    return ["tool_calls" if calls else "stop"]


def _number(value: Any) -> int | float | None:
    return value if isinstance(value, int | float) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


Kind = Literal["model", "resources", "agent"]

_LATE_SECONDS = 60.0
_closing: set[asyncio.Task[None]] = set()  # the loop itself holds no reference
_METERED = frozenset({"v1/responses", "v1/chat/completions", "v1/messages", "pooling", "classify"})


class Client:
    """A reference to a server, and the calls that it answers."""

    kind: ClassVar[Kind]

    def __init__(self, transport: Transport, endpoint: ModelEndpoint | None = None) -> None:
        self.transport = transport
        self._endpoint = endpoint

    def at(self, endpoint: ModelEndpoint) -> Self:
        """A client of the same server, whose calls are answered by ``endpoint``."""
        return type(self)(self.transport, endpoint)

    async def call(self, op: str, body: Any = None, *, session: str | None = None) -> Reply:
        """Call an operation in the current context, within its deadline. A failure of the server is in the
        reply; raises a `GymError` if the call could not be delivered."""
        context = current()
        with span(op, context.traceparent, "internal" if op.startswith("tools/") else "client") as call_span:
            reply = await self.transport.call(self._call(op, body, session, call_span.traceparent))
            if call_span.recording:
                describe_call(call_span, self.transport.server, op, body, reply)
        if reply.notes is not None:
            self._noted(reply.notes)
        return reply

    def _call(self, op: str, body: Any, session: str | None, traceparent: str | None) -> Call:
        context = current()
        return Call(
            op,
            b"" if body is None else encode(body),
            session,
            context.request_id,
            context.affinity,
            context.timeout(),
            self._endpoint,
            traceparent,
        )

    async def fetch(self, op: str, body: Any = None, *, session: str | None = None) -> Any:
        """`call`, with the reply decoded. Raises a `GymError` that names the server if either failed."""
        begun, notes = time.monotonic(), None
        try:
            reply = await self.call(op, body, session=session)
            notes = reply.notes
            answer = self.decode(reply)
        except GymError as error:
            self._failed(op, body, error.status, notes, begun)
            raise
        except asyncio.CancelledError:
            status = DeadlineExceeded.status if current().is_over() else CALLER_LEFT
            self._failed(op, body, status, notes, begun)
            raise
        self._answered(op, body, answer, notes, begun)
        return answer

    def decode(self, reply: Reply) -> Any:
        """The JSON body of ``reply``; raises the `GymError` that it carries, with the name of this server."""
        try:
            return reply.json()
        except GymError as error:
            error.server = error.server or self.transport.server
            raise

    def _noted(self, notes: dict[str, Any]) -> None:
        """Hook that sees the notes of each reply."""

    def _answered(self, op: str, body: Any, answer: Any, notes: dict[str, Any] | None, begun: float) -> None:
        """Hook that sees each decoded answer, and when it was asked for."""

    def _failed(self, op: str, body: Any, status: int, notes: dict[str, Any] | None, begun: float) -> None:
        """Hook that sees each failure, also that the caller stopped waiting."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        name = core_schema.str_schema(min_length=1)
        client = core_schema.no_info_plain_validator_function(cls._check)
        return core_schema.union_schema(
            [name, client],
            mode="left_to_right",
            custom_error_type="reference",
            custom_error_message=f"must be the name of a {cls.kind} server, or an object like {cls.__name__}",
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"type": "string", "description": f"name of a {cls.kind} server of the graph"}

    @classmethod
    def _check(cls, value: Any) -> Any:
        # Any object with the client's methods will do: fakes of unit tests are not subclasses.
        methods = [m for m in vars(cls) if not m.startswith("_") and callable(getattr(cls, m))]
        if not all(callable(getattr(value, method, None)) for method in methods):
            raise ValueError("it lacks methods of the client")
        return value


def name_of(client: Any, otherwise: str) -> str:
    """Name of the server behind a client; ``otherwise`` for a fake of a unit test, which has none."""
    return str(getattr(getattr(client, "transport", None), "server", otherwise))


class ModelClient(Client):
    """A model server."""

    kind = "model"

    async def responses(
        self, params: dict[str, Any], hear: Callable[[dict[str, Any]], None] | None = None
    ) -> dict[str, Any]:
        """``POST /v1/responses``: OpenAI's Response object for a Responses body.

        Args:
            hear: called with each event of OpenAI's stream while the model answers; None asks for no stream.

        Raises:
            Rejected: the model refused the request.
            Retryable: it is overloaded, unavailable or too slow, or its answer is malformed.
            OperatorError: a setting is wrong, such as the key or the address of an endpoint.
        """
        return await self._checked("v1/responses", params, check_response, hear)

    async def chat_completions(self, body: dict[str, Any]) -> dict[str, Any]:
        """``POST /v1/chat/completions``: OpenAI's ChatCompletion for a Chat body. Raises as `responses`."""
        return await self._checked("v1/chat/completions", body, check_completion)

    def _answered(self, op: str, body: Any, answer: Any, notes: dict[str, Any] | None, begun: float) -> None:
        if op in _METERED:
            record_answer(self.transport.server, body, answer, begun, notes)

    def _failed(self, op: str, body: Any, status: int, notes: dict[str, Any] | None, begun: float) -> None:
        if op in _METERED:
            record_failure(self.transport.server, body, status, begun, notes)

    async def _checked(
        self,
        op: str,
        body: Any,
        check: Callable[[Any], Any],
        hear: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = await (self._heard(op, body, hear) if hear else self.fetch(op, body))
            check(answer)
        except NotFound as error:  # the graph, or a URL in it, names a server of another kind
            raise EndpointMisconfigured(error.message, server=error.server) from None
        except Unavailable as error:
            error.server = error.server or self.transport.server
            raise
        return answer

    async def _heard(self, op: str, body: Any, hear: Callable[[dict[str, Any]], None]) -> Any:
        """`fetch` by a Responses stream: the response that its last event has."""
        begun, answer = time.monotonic(), None
        try:
            with span(op, current().traceparent, "client") as call_span:
                call = self._call(op, body, None, call_span.traceparent)
                async with closing(self.transport.stream(call)) as chunks:
                    async for event in read_events(chunks):
                        hear(event)
                        if event.get("type") in FINAL_EVENTS:
                            answer = event.get("response")
                if call_span.recording:
                    describe_call(call_span, self.transport.server, op, body, Reply.of(answer))
            if answer is None:
                raise Unavailable("the model's stream ended before its answer was complete")
        except GymError as error:
            error.server = error.server or self.transport.server
            self._failed(op, body, error.status, None, begun)
            raise
        except asyncio.CancelledError:
            status = DeadlineExceeded.status if current().is_over() else CALLER_LEFT
            self._failed(op, body, status, None, begun)
            raise
        self._answered(op, body, answer, None, begun)
        return answer


class EnvironmentClient(Client):
    """An environment: its tools, its verifier and its sessions."""

    kind = "resources"

    async def seed_session(self, row: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
        """Open a session for a row; returns its id, and the fields of the environment's answer.

        A caller who stops waiting leaves no session open: the reply may be under way already, and a server of
        another framework does not notice that its caller has left.
        """
        seeding = asyncio.ensure_future(self.call("seed_session", row))
        try:
            reply = await asyncio.shield(seeding)
        except asyncio.CancelledError:
            closing = asyncio.ensure_future(self._close_late(seeding))
            _closing.add(closing)
            closing.add_done_callback(_closing.discard)
            raise
        fields = self.decode(reply)
        return reply.session, fields if isinstance(fields, dict) else {}

    async def call_tool(self, name: str, arguments: Any, session: str | None) -> Reply:
        """Run a tool. The reply's body is the output that the model sees, also if the tool failed."""
        return await self.call(f"tools/{name}", arguments, session=session)

    async def verify(
        self, row: dict[str, Any], response: dict[str, Any], session: str | None
    ) -> dict[str, Any]:
        """Score a response: ``reward`` and the verifier's own fields.

        The usage of the verifier's model calls is recorded as if they had been made here.
        """
        verdict = await self.fetch("verify", {**row, "response": response}, session=session)
        if not isinstance(verdict, dict) or not isinstance(verdict.get("reward"), int | float):
            problem = f"the verifier's answer has no reward: {str(verdict)[:200]}"
            raise Unavailable(problem, server=self.transport.server)
        merge_usage(verdict.pop(USAGE_FIELD, None))
        return verdict

    async def close_session(self, session: str) -> None:
        """Free a session and record the usage of its model calls that no verdict reported; safe to call
        twice."""
        answer = await self.fetch("close_session", {}, session=session)
        merge_usage(answer.get(USAGE_FIELD) if isinstance(answer, dict) else None)

    async def _close_late(self, seeding: asyncio.Future[Reply]) -> None:
        """Close the session of a reply that nobody waits for, if it comes soon; else take the call back."""
        with suppress(GymError, asyncio.TimeoutError), use(replace(current(), deadline=None)):
            reply = await asyncio.wait_for(seeding, _LATE_SECONDS)
            if reply.session is not None:
                await self.close_session(reply.session)

    def _noted(self, notes: dict[str, Any]) -> None:
        record_notes(notes)


class AgentClient(Client):
    """An agent server."""

    kind = "agent"

    async def run(self, row: dict[str, Any]) -> dict[str, Any]:
        """``POST /run``: one episode of a row, as a rollout, also if it failed."""
        rollout: dict[str, Any] = await self.fetch("run", row)
        return rollout

    async def responses(self, params: dict[str, Any]) -> dict[str, Any]:
        """``POST /v1/responses``: a whole episode as one Response."""
        response: dict[str, Any] = await self.fetch("v1/responses", params)
        return response


CLIENTS: dict[Kind, type[Client]] = {cls.kind: cls for cls in (ModelClient, EnvironmentClient, AgentClient)}
