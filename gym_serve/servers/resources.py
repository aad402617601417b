"""`ResourcesServer`: the tools, the verifier and the per-episode state of an environment.

An author writes tools, `verify`, and where needed `seed`, `close` and `aggregate`; routes,
sessions, validation and schemas are done here. A call without a session id gets a fresh session:
a tool call's stays open if the call succeeds (its id is in the reply), a verify call's lives for that
call only. Methods may be plain functions: those run in a thread, one at a time per session.

Where sessions are `ResourcesServer.restorable`, the calls of one session run one after the other, and every
reply that a caller may have to build on, a failed tool's included, carries the state it left behind.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Literal

import orjson
from pydantic import BaseModel, TypeAdapter

from gym_serve.servers.base import Operation, Server
from gym_serve.servers.context import current
from gym_serve.servers.edge import Reply, encode
from gym_serve.servers.live_sessions import LiveSessions, SessionCall
from gym_serve.servers.metrics import STATISTICS_ONLY, MetricSpec, aggregate_metrics
from gym_serve.servers.snapshots import RESTORE, seal, state_of, unseal
from gym_serve.servers.tools import RESERVED, Extra, ToolSpec, hints_of, tools_of
from gym_serve.servers.usage import USAGE_FIELD, Meter, metering
from gym_serve.types.errors import GymError, InvalidRequest, ToolFailed, VerifierFailed
from gym_serve.types.requests import JSON, CompareRequest, Comparison, Verdict, VerifyRequest, parse

__all__ = ["ResourcesServer"]

_COMPARE_REQUEST: TypeAdapter[CompareRequest] = TypeAdapter(CompareRequest)


class ResourcesServer(Server):
    """Base class of environments."""

    kind = "resources"

    reverify_mode: ClassVar[Literal["stateless", "unsupported", "unknown"]] = "unknown"
    """Whether a stored response can be scored again: ``stateless`` if `verify` reads no session."""

    restorable: ClassVar[bool] = False
    """Whether a session goes on in another replica, from its last acknowledged state, when its own dies.

    Set it where `Session` is a pydantic model whose fields are all of the state. A class with `snapshot`
    and `restore` of its own has it set."""

    metrics: ClassVar[MetricSpec] = STATISTICS_ONLY
    """What ``/aggregate_metrics`` computes: scores, the extracted answer, breakdowns."""

    extra_arguments: ClassVar[Extra] = "ignore"
    """What becomes of an argument that a tool does not have: it is left out, as in NeMo Gym's servers, or
    with ``forbid`` the call is refused, and the model is told. Schemas forbid it either way."""

    tools: ClassVar[dict[str, ToolSpec]] = {}
    """The tools by name, collected from the methods marked with `tool`."""

    class Config(Server.Config):
        """Settings of every resources server."""

        session_ttl: float = 3600.0
        """Seconds without a call after which a session is closed."""

    config: Config

    class Session(BaseModel):
        """State of one episode; subclasses override it with their own class (any class will do)."""

    _verify_request: ClassVar[TypeAdapter[Any]]
    _verify_takes_session: ClassVar[bool]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.restorable = _is_restorable(cls)
        cls.tools = tools_of(cls, cls.extra_arguments)
        if clash := RESERVED & cls.tools.keys():
            raise TypeError(f"{cls.__name__}: no tool may be named {', '.join(sorted(clash))}")
        parameters = list(inspect.signature(cls.verify).parameters)
        request: Any = hints_of(cls, cls.verify).get(parameters[1])
        known = isinstance(request, type) and issubclass(request, VerifyRequest)
        cls._verify_request = TypeAdapter(request if known else VerifyRequest)
        cls._verify_takes_session = "session" in parameters

    def __init__(self, *, name: str | None = None, replica: str = "local", **settings: Any) -> None:
        super().__init__(name=name, **settings)
        hook = None if type(self).close is ResourcesServer.close else self.close
        self.takes_snapshots = self.restorable
        """Off where the server runs inside its caller's process, which its sessions cannot outlive."""
        self.sessions: LiveSessions[Any] = LiveSessions(
            replica, self.config.session_ttl, hook, exclusive=self.restorable
        )

    # What an author writes

    async def seed(self, row: JSON, session: Any) -> JSON | None:
        """Prepare the state of an episode from its row.

        Returns:
            fields for the answer of ``/seed_session``, or None.
        """
        return None

    def verify(self, *args: Any, **kwargs: Any) -> Any:
        """Score a response: ``verify(self, request: VerifyRequest, session: Session) -> Verdict``.

        ``async`` or not; ``session`` may be left out. The annotation of ``request`` may be a
        subclass of `VerifyRequest` that types the row's own keys.

        Raises:
            Rejected: the row lacks what the verifier needs.
            Retryable: no reward could be found now; never answer 0 instead.
        """
        raise NotImplementedError(f"{type(self).__name__} has no verify")

    async def compare(self, request: CompareRequest) -> Comparison:
        """Score the rollouts of a group against one another (optional).

        The collector calls it once per group, when all rollouts of it are in or its deadline has
        passed; there is no session.

        Raises:
            Retryable: no rewards could be found now.
        """
        raise NotImplementedError

    async def close(self, session: Any) -> None:
        """Release what a session holds; called exactly once per session, after its last call."""

    async def snapshot(self, session: Any) -> Any:
        """The state of a session, for `restore` in another replica (optional; see `restorable`).

        Called after every call that may have changed the state; no other call of the session runs meanwhile.

        Returns:
            bytes, or anything that JSON can hold.
        """
        return json.dumps(session.model_dump(mode="json", by_alias=True, round_trip=True)).encode()

    async def restore(self, state: Any) -> Any:
        """A session from what `snapshot` gave: bytes, or decoded JSON.

        The replica that took the snapshot has died, or it was stopped and has called `close`: acquire
        again what the session needs.

        Raises:
            Exception: the session cannot go on; the episode fails with `SessionLost`.
        """
        session = type(self).Session
        assert issubclass(session, BaseModel)  # checked with the class
        return session.model_validate_json(state)

    async def aggregate(self, rollouts: list[JSON]) -> JSON | None:
        """Metrics of the environment's own over many rollouts; None for those of `metrics`."""
        return None

    # Operations

    def operations(self) -> dict[str, Operation]:
        row = {"type": "object", "description": "the row", "additionalProperties": True}
        operations = {
            "seed_session": Operation(self._op_seed, "Open a session for a row", row, {"type": "object"}),
            "verify": Operation(
                self._op_verify,
                "Score a response",
                self._verify_request.json_schema(),
                Verdict.model_json_schema(),
            ),
            "close_session": Operation(self._op_close, "Close a session", None, {"type": "object"}),
            "aggregate_metrics": Operation(
                self._op_aggregate,
                "Metrics over many verified rollouts",
                {"type": "object", "properties": {"verify_responses": {"type": "array"}}},
                {"type": "object"},
            ),
            "reverify_mode": Operation(
                self._op_reverify_mode,
                "Whether responses can be scored again",
                None,
                {"type": "string"},
                "GET",
            ),
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
            operations[f"tools/{name}"] = Operation(
                self._tool_handler(name, spec),
                spec.description or f"Tool {name}",
                spec.parameters,
                spec.returns.json_schema(mode="serialization"),
            )
        return operations

    @property
    def live_sessions(self) -> int:
        return len(self.sessions)

    async def start(self) -> None:
        self.sessions.start()

    async def stop(self) -> None:
        await self.sessions.stop()

    async def _op_seed(self, body: Any) -> Reply:
        if not isinstance(body, dict):
            raise InvalidRequest("the body of /seed_session is the row, a JSON object")

        async def seed(call: SessionCall[Any]) -> Reply:
            return Reply.of(await call.run(self.seed, body, call.session.state) or {})

        return await self._open_and_call(type(self).Session(), seed)

    async def _op_restore(self, body: Any) -> Reply:
        version, snapshot = unseal(state_of(body))
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
        return Reply.of({}, self.sessions.open(state, version).id)

    async def _op_verify(self, body: Any) -> Reply:
        request = parse(self._verify_request, body, "request")

        async def verify(call: SessionCall[Any]) -> Reply:
            arguments = (call.session.state,) if self._verify_takes_session else ()
            meter = call.session.meter
            try:
                with metering(meter, "verify"):
                    verdict = await call.run(self.verify, request, *arguments)
                fields = Verdict.model_validate(verdict).model_dump(mode="json")
                return Reply.of({**fields, USAGE_FIELD: meter.take()} if meter else fields)
            except GymError:
                raise
            except Exception as error:
                raise VerifierFailed(f"the verifier failed: {type(error).__name__}: {error}") from error

        session_id = current().session
        if session_id is not None:
            return await self.in_session(session_id, verify, touches=self._verify_takes_session)
        session = self.sessions.open(type(self).Session())
        try:
            async with SessionCall(self.sessions, session) as call:
                return await verify(call)
        finally:
            await self.sessions.close(session.id)

    async def _op_compare(self, body: Any) -> Reply:
        request: CompareRequest = parse(_COMPARE_REQUEST, body, "request")
        meter = Meter()
        try:
            with metering(meter, "compare"):
                comparison = await self._rewards_of(request)
            reply = Reply.of(comparison.model_dump(mode="json"))
        except GymError as error:
            error.server = error.server or self.name
            reply = Reply.failed(error)
        # What models used is told in any case: there is no session to keep the counts of a failure.
        if not meter:
            return reply
        return reply._replace(body=encode({**orjson.loads(reply.body), USAGE_FIELD: meter.to_json()}))

    async def _rewards_of(self, request: CompareRequest) -> Comparison:
        try:
            comparison = Comparison.model_validate(await self.compare(request))
        except GymError:
            raise
        except Exception as error:
            raise VerifierFailed(f"compare failed: {type(error).__name__}: {error}") from error
        given, wanted = len(comparison.rewards), len(request.response_objs)
        if given != wanted:
            raise VerifierFailed(f"compare gave {given} rewards for {wanted} rollouts")
        return comparison

    async def _op_close(self, body: Any) -> JSON:
        session_id = current().session
        session = None if session_id is None else await self.sessions.close(session_id)
        # What no verdict has told: of a verifier that failed, or of tools without a verdict after them.
        return {USAGE_FIELD: session.meter.take()} if session is not None and session.meter else {}

    async def _op_aggregate(self, body: Any) -> JSON:
        rollouts = body.get("verify_responses") if isinstance(body, dict) else None
        if not isinstance(rollouts, list):
            raise InvalidRequest("verify_responses: a list of verified rollouts is missing")
        own = await self.aggregate(rollouts)
        if own is not None:
            return own
        return await asyncio.to_thread(aggregate_metrics, rollouts, self.metrics)

    async def _op_reverify_mode(self, body: Any) -> str:
        return self.reverify_mode

    def _tool_handler(self, name: str, spec: ToolSpec) -> Callable[[Any], Any]:
        method = getattr(self, name)

        async def handler(body: Any) -> Reply:
            arguments = parse(spec.arguments, body, "arguments")
            values = {field: getattr(arguments, field) for field in type(arguments).model_fields}

            async def use(call: SessionCall[Any]) -> Reply:
                session = {"session": call.session.state} if spec.takes_session else {}
                try:
                    with metering(call.session.meter, "tool"):
                        result = await call.run(method, **values, **session)
                    return Reply(200, spec.returns.dump_json(result))
                except GymError:
                    raise
                except Exception as error:
                    raise ToolFailed(f"tool {name} failed: {type(error).__name__}: {error}") from error

            session_id = current().session
            if session_id is None:
                return await self._open_and_call(type(self).Session(), use)
            return await self.in_session(session_id, use, touches=spec.takes_session)

        return handler

    # Sessions

    async def in_session(
        self, session_id: str, work: Callable[[SessionCall[Any]], Awaitable[Reply]], *, touches: bool = True
    ) -> Reply:
        """Run a call of an open session: what operations of a subclass's own do as well.

        Args:
            session_id: the session.
            work: the call; runs the author's methods by `SessionCall.run`.
            touches: whether it gets hold of the state.

        Raises:
            SessionLost, SessionNotFound: see `LiveSessions.get`. A failure of ``work`` is in the reply.
        """
        async with SessionCall(self.sessions, self.sessions.get(session_id)) as call:
            try:
                reply = await work(call)
            except GymError as error:
                error.server = error.server or self.name
                reply = Reply.failed(error)
            return await self._acknowledged(call, reply, touches)

    async def _open_and_call(self, state: Any, work: Callable[[SessionCall[Any]], Awaitable[Reply]]) -> Reply:
        """Run the first call in a new session, which is closed again if the call fails."""
        session = self.sessions.open(state)
        try:
            async with SessionCall(self.sessions, session) as call:
                return await self._acknowledged(call, await work(call))
        except BaseException:
            await self.sessions.close(session.id)
            raise

    async def _acknowledged(self, call: SessionCall[Any], reply: Reply, touched: bool = True) -> Reply:
        """The reply with its session, and the state that its caller can go on from elsewhere."""
        session, state = call.session, None
        if touched and self.takes_snapshots:
            snapshot = await call.run(self.snapshot, session.state)
            session.version += 1
            state = seal(session.version, snapshot)
        return reply._replace(session=session.id, state=state)


def _is_restorable(cls: type[ResourcesServer]) -> bool:
    """Whether sessions of a class have snapshots.

    Raises:
        TypeError: the class says so, and they could not be complete.
    """
    own = [getattr(cls, n) is not getattr(ResourcesServer, n) for n in ("snapshot", "restore")]
    if any(own):
        if not all(own):
            raise TypeError(f"{cls.__name__}: snapshot and restore belong together")
        return True
    if not cls.restorable:
        return False
    why = "write snapshot and restore"
    if not issubclass(cls.Session, BaseModel):
        raise TypeError(f"{cls.__name__}.restorable: Session is no pydantic model; {why}")
    hidden = [*cls.Session.__private_attributes__]
    hidden += [name for name, field in cls.Session.model_fields.items() if field.exclude]
    if hidden:
        raise TypeError(f"{cls.__name__}.restorable: no snapshot would hold {', '.join(hidden)}; {why}")
    return True
