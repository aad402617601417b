"""`ResourcesServer`: the tools, the verifier and the per-episode state of an environment.

A call without a session id gets a new session: that of a tool call stays open if the call succeeds, that of a
verify call lives for the call only. Methods may be plain functions, which run in a thread, one at a time per
session.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from numbers import Real
from typing import Any, ClassVar, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from gym_serve.metrics import STATISTICS_ONLY, MetricSpec, aggregate_metrics, scored_rollouts
from gym_serve.observe.logs import admits
from gym_serve.observe.timeline import MODEL_CALLS
from gym_serve.servers.base import Operation, Server, author_error, place_of, place_of_class
from gym_serve.servers.context import current
from gym_serve.servers.sessions import RESTORE, LiveSessions, OpenSession, SessionCall, seal, state_of, unseal
from gym_serve.servers.tools import (
    RESERVED,
    UNAVAILABLE,
    UNVERIFIED,
    WANTS_TOOLS,
    Extra,
    ToolDescription,
    ToolSpec,
    UnavailableTools,
    hints_of,
    tools_of,
)
from gym_serve.servers.transport import Reply, encode
from gym_serve.servers.usage import USAGE_FIELD, UsageMeter, metering
from gym_serve.types.errors import (
    CompareFailed,
    GymError,
    InvalidRequest,
    SeedFailed,
    SessionLost,
    SessionNotFound,
    ToolFailed,
    VerifyFailed,
)
from gym_serve.types.requests import JSON, CompareRequest, Comparison, Verdict, VerifyRequest, json_of, parse
from gym_serve.types.rows import VERIFIED

logger = logging.getLogger("gym_serve")

_COMPARE_REQUEST: TypeAdapter[CompareRequest] = TypeAdapter(CompareRequest)


class _NoState(BaseModel):
    """The session of an environment without state."""


class _AnyRow(BaseModel):
    """The row of an environment that does not type its keys: every key is an attribute."""

    model_config = ConfigDict(extra="allow")


class ResourcesServer(Server):
    """Base class of environments."""

    kind = "resources"

    reverify_mode: ClassVar[Literal["stateless", "unsupported", "unknown"]] = "unknown"
    """Whether a stored response can be scored again: ``stateless`` if `verify` reads no session."""

    restorable: ClassVar[bool] = False
    """Whether a session continues on another replica, from its last acknowledged state, if its replica dies.

    Set it if `Session` is a pydantic model whose fields are the whole state; `snapshot` and `restore` set
    it."""

    metrics: ClassVar[MetricSpec] = STATISTICS_ONLY
    """The metrics of ``/aggregate_metrics``: scores, the extracted answer, breakdowns."""

    extra_arguments: ClassVar[Extra] = "ignore"
    """What happens to an argument that a tool does not have: ``ignore`` drops it, as NeMo Gym's servers do;
    ``forbid`` refuses the call, and the model reads why. Schemas forbid it either way."""

    tools: ClassVar[dict[str, ToolSpec]] = {}
    """The tools by name, collected from the methods marked with `tool`."""

    class Config(Server.Config):
        """Settings of every environment."""

        session_ttl: float = 3600.0
        """Seconds without a call after which a session is closed."""
        unavailable_tools: UnavailableTools = "fail"
        """Behaviour if a tool is unavailable (429, 502, 503 or 504): ``fail`` ends the attempt, which is
        masked and retried; ``show`` gives the model the tool's error, as NeMo Gym does."""
        max_client_sessions: int = Field(10_000, ge=0)
        """Maximum number of open sessions per replica that clients opened over HTTP and may never close. A
        further one is refused (429) until one is closed or has expired."""

    Session: ClassVar[type[Any]] = _NoState
    """State of one episode. A subclass defines a class of this name, which is constructed without
    arguments."""

    Row: ClassVar[type[BaseModel]] = _AnyRow
    """The row's own keys. A subclass defines a pydantic model of this name; a parameter ``row: Row`` of
    `seed`, `verify` or a tool receives them."""

    _row: ClassVar[TypeAdapter[Any]]
    _seed_takes_row: ClassVar[bool]
    _tools_take_row: ClassVar[bool]
    _verify_request: ClassVar[TypeAdapter[Any]]
    _verify_parameters: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.restorable = _is_restorable(cls)
        cls.tools = tools_of(cls, cls.extra_arguments)
        if clash := RESERVED & cls.tools.keys():
            where = place_of(getattr(cls, name := min(clash)))
            raise TypeError(f"{where}: tool {cls.__name__}.{name}: the name of a route; rename it")
        fields = cls.Session.model_fields if issubclass(cls.Session, BaseModel) else {}
        if needed := [name for name, field in fields.items() if field.is_required()]:
            where = f"{place_of_class(cls)}: {cls.__name__}.Session"
            raise TypeError(
                f"{where}: {', '.join(needed)} must have defaults, as each episode begins with them"
            )
        if cls.verify is ResourcesServer.verify:
            where = place_of_class(cls)
            raise TypeError(f"{where}: {cls.__name__} must define `verify`, which returns the reward")
        cls._row = TypeAdapter(cls.Row)
        cls._seed_takes_row = cls.Row in hints_of(cls, cls.seed).values()
        cls._tools_take_row = any(spec.row is not None for spec in cls.tools.values())
        cls._verify_parameters, request = _verify_parameters(cls)
        cls._verify_request = TypeAdapter(request)

    def __init__(self, *, name: str | None = None, replica: str = "local", **settings: Any) -> None:
        super().__init__(name=name, **settings)
        hook = None if type(self).close is ResourcesServer.close else self.close
        self._offered: list[JSON] = [spec.openai() for spec in self.tools.values()]
        self.takes_snapshots = self.restorable
        """Off if the server runs inside its caller's process, which its sessions cannot outlive."""
        self.sessions: LiveSessions[Any] = LiveSessions(
            replica,
            self.config.session_ttl,
            hook,
            exclusive=self.restorable,
            max_of_clients=self.config.max_client_sessions,
        )

    @classmethod
    def check_row(cls, row: JSON, *, verified: bool = True) -> None:
        """Check that a row has what `seed`, the tools and, if it will be ``verified``, `verify` read.

        Raises:
            InvalidRequest: keys are missing or have a wrong type; names all of them.
        """
        verify = cls._verify_parameters if verified else ()
        if cls._seed_takes_row or cls._tools_take_row or "row" in verify:
            parse(cls._row, row, "row")
        if "request" in verify:
            parse(cls._verify_request, {**row, "response": {"output": []}}, "row")

    # What an author writes

    async def seed(self, row: Any, session: Any) -> JSON | None:
        """Prepare the state of an episode from its row (optional); called once per session.

        Returns fields for the answer of ``/seed_session``, or None. The field ``tools`` has the tools that
        the model is offered if the row's list of tools is missing or empty, instead of those of the class.
        """
        return None

    def verify(self, *args: Any, **kwargs: Any) -> Any:
        """Score a response: ``verify(self, row: Row, response: Response, session: Session) -> float``.

        ``async`` or not. Parameters are passed by name, and each may be left out; ``request``, a
        `VerifyRequest`, is row and response in one.

        Returns:
            the reward as a number, or a `Verdict` with further fields.

        Raises:
            Rejected: the row lacks a value that the verifier needs.
            Retryable: no reward can be computed now; never return 0 instead.
        """
        raise NotImplementedError(f"{type(self).__name__} has no verify")

    async def compare(self, request: CompareRequest) -> Comparison:
        """Score the rollouts of a group against one another (optional), without a session.

        Called once per group, after all of its rollouts have ended or its deadline has passed. Raises
        `Retryable` if no rewards can be computed now.
        """
        raise NotImplementedError

    async def close(self, session: Any) -> None:
        """Release what a session holds (optional); called exactly once per session, after its last call."""

    async def snapshot(self, session: Any) -> Any:
        """The state of a session, for `restore` in another replica: bytes, or anything that JSON can hold.

        Called after every call that may have changed the state. No other call of the session runs meanwhile.
        """
        return json.dumps(session.model_dump(mode="json", by_alias=True, round_trip=True)).encode()

    async def restore(self, state: Any) -> Any:
        """A session from the state that `snapshot` returned: bytes, or decoded JSON.

        The replica that took the snapshot has died, or was stopped and has called `close`, so acquire again
        what the session needs. If it raises, the episode fails with `SessionLost`.
        """
        session = type(self).Session
        assert issubclass(session, BaseModel)  # checked with the class
        return session.model_validate_json(state)

    async def aggregate(self, rollouts: list[JSON]) -> JSON | None:
        """Metrics of the environment's own over scored rollouts, at least one (optional); None for
        `metrics`."""
        return None

    # Operations

    def operations(self) -> dict[str, Operation]:
        row = {"type": "object", "description": "the row", "additionalProperties": True}
        object_ = {"type": "object"}
        request, verdict = self._verify_request.json_schema(), Verdict.model_json_schema()
        again = "Whether responses can be scored again"
        operations = {
            "seed_session": Operation(self._op_seed, "Open a session for a row", row, object_),
            "verify": Operation(self._op_verify, "Score a response", request, verdict),
            "close_session": Operation(self._op_close, "Close a session", None, object_),
            "aggregate_metrics": Operation(
                self._op_aggregate, "Metrics over many verified rollouts", VERIFIED, object_
            ),
            "reverify_mode": Operation(self._op_reverify_mode, again, None, {"type": "string"}, "GET"),
        }
        if type(self).compare is not ResourcesServer.compare:
            operations["compare"] = Operation(
                self._op_compare,
                "Score the rollouts of a group against one another",
                CompareRequest.model_json_schema(),
                Comparison.model_json_schema(),
            )
        if self.restorable:
            operations[RESTORE] = Operation(self._op_restore, "Open a session from a state")
        for name, spec in self.tools.items():
            schema = spec.returns.json_schema(mode="serialization")
            about = spec.description or f"Tool {name}"
            handler = self._tool_handler(name, spec)
            operations[f"tools/{name}"] = Operation(handler, about, spec.parameters, schema)
        return operations

    @property
    def live_sessions(self) -> int:
        return self.sessions.wanted

    def traceparent(self, session: str) -> str | None:
        return self.sessions.traceparent(session)

    async def start(self) -> None:
        await super().start()
        self.sessions.start()

    async def stop(self) -> None:
        await self.sessions.stop()
        await super().stop()

    async def _op_seed(self, body: Any) -> Reply:
        if not isinstance(body, dict):
            kind = type(body).__name__
            raise InvalidRequest(f"the body of /seed_session must be the row, an object, got {kind}")
        offered = {"tools": self._offered} if body.pop(WANTS_TOOLS, False) and self._offered else {}
        verified = not body.pop(UNVERIFIED, False)
        if not _is_of_client():  # which may send the rest when it verifies; an episode costs model calls
            self.check_row(body, verified=verified)
        row = parse(self._row, body, "row") if self._seed_takes_row or self._tools_take_row else None

        async def seed(call: SessionCall[Any]) -> Reply:
            session = call.session
            if session.seeded is None:
                if self._tools_take_row:
                    session.row = row
                try:
                    row_or_body = row if self._seed_takes_row else body
                    seeded = await call.run(self.seed, row_or_body, session.state) or {}
                    if not isinstance(seeded, Mapping):
                        raise TypeError(f"it must return a mapping or None, got {type(seeded).__name__}")
                    session.seeded = dict(seeded)
                except GymError:
                    raise
                except Exception as error:
                    raise author_error(SeedFailed, self.name, self.seed, error) from error
            return Reply.of({**offered, **session.seeded})

        return await self.in_open_session(seed)

    async def _op_restore(self, body: Any) -> Reply:
        version, snapshot, row = unseal(state_of(body))
        try:
            restore = self.restore
            if inspect.iscoroutinefunction(restore):
                state = await restore(snapshot)
            else:
                state = await asyncio.to_thread(restore, snapshot)
        except GymError:
            raise
        except Exception as error:
            raise InvalidRequest(f"restore failed: {type(error).__name__}: {error}") from error
        session = self.sessions.open(state, version, of_client=_is_of_client())
        session.row = None if row is None else parse(self._row, row, "row")
        session.seeded = {}
        return Reply.of({}, session.id)

    async def _op_verify(self, body: Any) -> Reply:
        request = parse(self._verify_request, body, "request")
        takes_session = "session" in self._verify_parameters
        row = None
        if "row" in self._verify_parameters:
            row = parse(self._row, {key: body[key] for key in body if key != "response"}, "row")

        async def verify(call: SessionCall[Any]) -> Reply:
            values = {"request": request, "row": row, "response": request.response}
            values["session"] = call.session.state
            arguments = [values[name] for name in self._verify_parameters]
            meter = call.session.meter
            try:
                with metering(meter, "verify"):
                    verdict = await call.run(self.verify, *arguments)
                fields = json_of(_verdict(verdict))
                return Reply.of({**fields, USAGE_FIELD: meter.take()} if meter else fields)
            except GymError:
                raise
            except Exception as error:
                raise author_error(VerifyFailed, self.name, self.verify, error) from error

        session_id = current().session
        if session_id is not None:
            return await self.in_session(session_id, verify, touches=takes_session)
        session = self.sessions.open(type(self).Session())
        try:
            async with SessionCall(self.sessions, session) as call:
                return await verify(call)
        finally:
            _note_calls(session)
            await self.sessions.close(session.id)

    async def _op_compare(self, body: Any) -> Reply:
        request: CompareRequest = parse(_COMPARE_REQUEST, body, "request")
        meter = UsageMeter()
        try:
            with metering(meter, "compare"):
                comparison = await self._rewards_of(request)
            reply = Reply.of(json_of(comparison))
        except GymError as error:
            error.server = error.server or self.name
            reply = Reply.failed(error)
        # Usage is reported in any case: there is no session that could keep the counts of a failure.
        if not meter:
            return reply
        return reply._replace(body=encode({**orjson.loads(reply.body), USAGE_FIELD: meter.to_json()}))

    async def _rewards_of(self, request: CompareRequest) -> Comparison:
        try:
            comparison = Comparison.model_validate(await self.compare(request))
        except GymError:
            raise
        except Exception as error:
            raise author_error(CompareFailed, self.name, self.compare, error) from error
        got, wanted = len(comparison.rewards), len(request.response_objs)
        if got != wanted:
            problem = ValueError(f"it must return {wanted} rewards, one per rollout, got {got}")
            raise author_error(CompareFailed, self.name, self.compare, problem)
        return comparison

    async def _op_close(self, body: Any) -> JSON:
        session_id = current().session
        session = None if session_id is None else await self.sessions.close(session_id)
        # Usage that no verdict reported: of a verifier that failed, or of tools with no verdict after them.
        return {USAGE_FIELD: session.meter.take()} if session is not None and session.meter else {}

    async def _op_aggregate(self, body: Any) -> JSON:
        scored = scored_rollouts(body)
        own = await self.aggregate(scored) if scored else None
        if own is not None:
            return own
        return await asyncio.to_thread(aggregate_metrics, body["verify_responses"], self.metrics)

    async def _op_reverify_mode(self, body: Any) -> str:
        return self.reverify_mode

    def _tool_handler(self, name: str, spec: ToolSpec) -> Callable[[Any], Any]:
        method = getattr(self, name)

        async def handler(body: Any) -> Reply:
            arguments = parse(spec.arguments, body, "arguments")
            values = {field: getattr(arguments, field) for field in type(arguments).model_fields}

            async def use(call: SessionCall[Any]) -> Reply:
                injected = {"session": call.session.state} if spec.takes_session else {}
                if spec.row is not None:
                    injected[spec.row] = self._row_of(name, call.session)
                try:
                    with metering(call.session.meter, "tool"):
                        result = await call.run(method, **values, **injected)
                    return Reply(200, spec.returns.dump_json(result))
                except GymError as error:
                    if error.status in UNAVAILABLE and self.config.unavailable_tools == "show":
                        raise ToolFailed(error.message, server=error.server) from error
                    raise
                except Exception as error:
                    if (more := admits(self.name, name, type(error).__name__)) is not None:
                        of = {"server": self.name}
                        logger.info("tool %s of %s failed%s", name, self.name, more, exc_info=error, extra=of)
                    raise ToolFailed(f"tool {name} failed: {type(error).__name__}: {error}") from error

            return await self.in_any_session(use, touches=spec.takes_session)

        return handler

    def described_tool(
        self, tool: ToolDescription, call: Callable[[Any, JSON], Awaitable[Reply]], *, opens: bool = True
    ) -> Operation:
        """The operation of a tool that is not a method of this class, e.g. one of a foreign server.

        ``call`` gets the state of the session and the arguments; ``opens``: see `in_any_session`.
        """

        async def handler(body: Any) -> Reply:
            if not isinstance(body, dict):
                raise InvalidRequest("the arguments must be a JSON object")

            async def use(session_call: SessionCall[Any]) -> Reply:
                return await call(session_call.session.state, body)

            return await self.in_any_session(use, opens=opens)

        return Operation(handler, tool.description or f"Tool {tool.name}", tool.parameters)

    def _row_of(self, tool: str, session: OpenSession[Any]) -> Any:
        if session.row is None:
            raise InvalidRequest(f"tool {tool} reads the row; open the session with /seed_session first")
        return session.row

    # Sessions

    async def in_session(
        self, session_id: str, work: Callable[[SessionCall[Any]], Awaitable[Reply]], *, touches: bool = True
    ) -> Reply:
        """Run a call of an open session, also for a subclass's own operations; a failure is in the reply.

        ``work`` runs the author's methods by `SessionCall.run`; ``touches``: it can change the state. Raises
        `SessionLost` or `SessionNotFound`.
        """
        async with SessionCall(self.sessions, self.sessions.get(session_id)) as call:
            try:
                reply = await work(call)
            except GymError as error:
                error.server = error.server or self.name
                reply = Reply.failed(error)
            return await self._acknowledged(call, reply, touches)

    async def in_any_session(
        self,
        work: Callable[[SessionCall[Any]], Awaitable[Reply]],
        *,
        touches: bool = True,
        opens: bool = True,
    ) -> Reply:
        """Run a call in the session that it names; without one, in a new session, which stays open if the
        call succeeds. Where the call may not open one (``opens``), raises `SessionNotFound`."""
        session_id = current().session
        if session_id is not None:
            return await self.in_session(session_id, work, touches=touches)
        if not opens:
            raise SessionNotFound("no session: call /seed_session first, and send its session id")
        return await self._open_and_call(type(self).Session(), work)

    async def in_open_session(self, work: Callable[[SessionCall[Any]], Awaitable[Reply]]) -> Reply:
        """Run a call in the caller's session if that is open, else in a new one: a client that seeds twice
        keeps its state."""
        session_id = current().session
        try:
            if session_id is not None:
                self.sessions.get(session_id)
                return await self.in_session(session_id, work)
        except (SessionLost, SessionNotFound):
            pass
        return await self._open_and_call(type(self).Session(), work)

    async def _open_and_call(self, state: Any, work: Callable[[SessionCall[Any]], Awaitable[Reply]]) -> Reply:
        """Run the first call of a new session; the session is closed again if the call fails."""
        session = self.sessions.open(state, of_client=_is_of_client())
        try:
            async with SessionCall(self.sessions, session) as call:
                return await self._acknowledged(call, await work(call))
        except BaseException:
            await self.sessions.close(session.id)
            raise

    async def _acknowledged(self, call: SessionCall[Any], reply: Reply, touched: bool = True) -> Reply:
        """The reply with its session, and with the state that its caller can restore on another replica."""
        session, state = call.session, None
        _note_calls(session)
        if touched and self.takes_snapshots:
            snapshot = await call.run(self.snapshot, session.state)
            session.version += 1
            row = None if session.row is None else session.row.model_dump(mode="json", by_alias=True)
            state = seal(session.version, snapshot, row)
        return reply._replace(session=session.id, state=state)


def _note_calls(session: OpenSession[Any]) -> None:
    """Tell the caller when which models were called for a session, since the last time."""
    recorder = session.meter.recorder
    if recorder is not None and recorder.steps:
        current().notes[MODEL_CALLS] = recorder.take()


def _verify_parameters(cls: type[ResourcesServer]) -> tuple[tuple[str, ...], type[VerifyRequest]]:
    """What each parameter of `verify` receives, and the type of the request."""
    hints, gets, request = hints_of(cls, cls.verify), [], VerifyRequest
    for position, name in enumerate(list(inspect.signature(cls.verify).parameters)[1:]):
        hint = hints.get(name)
        if isinstance(hint, type) and issubclass(hint, VerifyRequest):
            gets.append("request")
            request = hint
        elif name in ("row", "response", "session"):
            gets.append(name)
        elif position == 0:
            gets.append("request")
        else:
            raise TypeError(
                f"{place_of(cls.verify)}: {cls.__name__}.verify: unknown parameter `{name}`; "
                "it can take `request`, `row`, `response` and `session`"
            )
    return tuple(gets), request


def _verdict(value: Any) -> Verdict:
    if isinstance(value, Real):  # numpy's numbers as well
        return Verdict(reward=float(value))
    if not isinstance(value, Verdict | Mapping):
        raise ValueError(f"it must return a number or a Verdict, got {type(value).__name__}")
    return Verdict.model_validate(value)


def _is_of_client() -> bool:
    """Whether a client makes the current call. An episode's has an affinity key, which no client can send."""
    return current().affinity is None


def _is_restorable(cls: type[ResourcesServer]) -> bool:
    own = [getattr(cls, n) is not getattr(ResourcesServer, n) for n in ("snapshot", "restore")]
    if not any(own) and not cls.restorable:
        return False
    where, step = f"{place_of_class(cls)}: {cls.__name__}", "define `snapshot` and `restore`"
    if any(own):
        if not all(own):
            raise TypeError(f"{where} must define both `snapshot` and `restore`")
        return True
    if not issubclass(cls.Session, BaseModel):
        raise TypeError(f"{where}.restorable: `Session` must be a pydantic model; else {step}")
    hidden = [*cls.Session.__private_attributes__]
    hidden += [name for name, field in cls.Session.model_fields.items() if field.exclude]
    if hidden:
        raise TypeError(f"{where}.restorable: a snapshot would lack {', '.join(hidden)}; {step}")
    return True
