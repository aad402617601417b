"""`Episode`: one rollout in progress. It records what has happened and calls the servers.

Exceeding one of the `Limits` is the policy's own doing and gets a real result: a call that is not run has an
error as its output, an answer that is too long is cut, and the episode is verified as it stands. It is never
a failure, which trainers mask: a policy could learn to turn zeros into failures. The same holds for a history
that no endpoint takes (`gym_serve.servers.history`), and for the time of a tool or a harness
(`PolicyDeadline`). A server that does not answer, a slow model call and waiting are not (`DeadlineExceeded`).
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

from gym_serve.observe.catalogue import TOOL_CALLS
from gym_serve.observe.timeline import QUEUED
from gym_serve.servers.agent_streams import heard
from gym_serve.servers.clients import EnvironmentClient, ModelClient, name_of
from gym_serve.servers.context import current, patience, time_limit, use
from gym_serve.servers.history import CALL_KEYS, History, is_refusal_of_history
from gym_serve.servers.sessions import replica_of
from gym_serve.servers.tools import TASK_STEPS, UNAVAILABLE, UNVERIFIED, WANTS_TOOLS, is_tool_name
from gym_serve.servers.transport import Reply, encode
from gym_serve.servers.usage import USAGE_FIELD, CostLimit, UsageMeter, metering
from gym_serve.types.errors import (
    BadRequest,
    DeadlineExceeded,
    GymError,
    InvalidRequest,
    NotFound,
    OperatorError,
    PolicyDeadline,
    Rejected,
    Retryable,
    SessionNotFound,
    Unavailable,
)
from gym_serve.types.media import shown_parts
from gym_serve.types.protocols import context_overflow_response, tokens_of, usage_sum
from gym_serve.types.protocols.requests import metadata_object
from gym_serve.types.requests import JSON, input_items

_NOT_WRITTEN = frozenset({*CALL_KEYS, "logprobs", "encrypted_content"})
_SHORT = 256  # bytes; a text up to this, such as an id or a type, is never cut
_DEEPEST = 8
_TOO_DEEP = "nested too deeply"
_READABLE_BYTES = 8 * 2**20
_SHOWN = 500  # characters of an endpoint's words
_NOWHERE = ("", "local")  # no replicas
_NO_STEPS = ("model", "harness", "close")  # stages that are no steps of a timeline
_REPORTED = ("tool", "verify")  # stages whose server says by itself why time ran out
_SLOW = 0.1  # share of an episode's or a harness's time from which a single model call was slow

T = TypeVar("T")

_WRONG = InvalidRequest.status  # status under which calls with arguments that cannot be passed on are counted
# Statuses of a tool call for which the server, not the tool, may have failed.
_NOT_THE_TOOL = frozenset({404, 409, OperatorError.status}) | UNAVAILABLE


class EpisodeOver(Exception):
    """The policy has reached a limit that ends the episode, which is verified as it stands."""


class Limits(NamedTuple):
    """The limits of an episode; see the settings of the same names in `AgentServer.Config`."""

    max_tool_calls_per_turn: int = 128
    max_tool_calls: int = 1024
    max_argument_bytes: int = 2**20
    max_answer_bytes: int = 4 * 2**20
    max_episode_bytes: int = 32 * 2**20
    max_episode_tokens: int | None = None
    max_episode_cost: CostLimit | None = None


def written_bytes(value: Any, depth: int = 0) -> int:
    """The approximate size of an item as JSON, in bytes, without its tokens and log-probabilities."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
    if depth < _DEEPEST and isinstance(value, dict):
        return sum(len(k) + written_bytes(v, depth + 1) for k, v in value.items() if k not in _NOT_WRITTEN)
    if depth < _DEEPEST and isinstance(value, list):
        return sum(1 + written_bytes(v, depth + 1) for v in value)
    return 8


def shortened(output: list[JSON], limit: int) -> list[JSON] | None:
    """The items of one model call cut to about ``limit`` bytes, with all of its tokens on the last one; None
    if they are within it."""
    left = limit
    for at, item in enumerate(output):
        size = written_bytes(item)
        if size > left:
            of_the_call = {key: output[-1][key] for key in CALL_KEYS if key in output[-1]}
            return [*output[:at], {**_cut(item, left)[0], **of_the_call}]
        left -= size
    return None


def _cut(value: Any, left: int) -> tuple[Any, int]:
    """``value`` with its long texts cut to ``left`` bytes, and the bytes that are left then."""
    if isinstance(value, str):
        size = written_bytes(value)
        if size > max(left, _SHORT):
            value = value.encode("utf-8", "surrogatepass")[: max(left, 0)].decode("utf-8", "ignore")
        return value, left - size
    if isinstance(value, dict):
        shorter: JSON = {}
        for key, each in value.items():
            if key not in _NOT_WRITTEN:
                shorter[key], left = _cut(each, left - len(key))
        return shorter, left
    if isinstance(value, list):
        entries: list[Any] = []
        for each in value:
            if left <= 0 and entries:
                break
            entry, left = _cut(each, left - 1)
            entries.append(entry)
        return entries, left
    return value, left - 8


def readable(items: Sequence[JSON]) -> list[JSON]:
    """Items without training tokens, and with all of their texts together cut to some megabytes."""
    left, shown = _READABLE_BYTES, list[JSON]()
    for item in items:
        try:
            shorter, left = _cut(item, left)
        except RecursionError:
            shorter = {"type": "message", "role": "assistant", "content": "(nested too deeply to be shown)"}
        shown.append(shorter)
    return shown


class Episode:
    """One episode of a row.

    Args:
        row: the row, never changed.
        model: the policy.
        resources: tools and verifier.
        timeouts: seconds by stage (seed, model, tool, verify, close, and harness where there is one).
        limits: limits of what the policy may do.

    Raises:
        InvalidRequest: the row's ``metadata`` cannot take its ``extra_body`` or ``chat_template_kwargs``.

    Attributes:
        items: every output item so far, in order.
        session: id of the session with the environment, once it is open.
        meter: the usage of the episode's model calls, those of its environment included.
        fields: further fields of the rollout, from the agent; fields of the verdict take precedence.
        running: the stages that run now: name, `time.monotonic` moment of the beginning, details.
        has_steps: whether `next_step` may come to one.
        look: asks for what is not here until the end: the trajectories of an external harness, if any.
        verified: whether a verdict will be asked for.
        deadline: seconds of the whole episode until its verification, and the setting that says so.
    """

    def __init__(
        self,
        row: JSON,
        model: ModelClient,
        resources: EnvironmentClient,
        timeouts: Mapping[str, float],
        limits: Limits = Limits(),  # noqa: B008  # a constant
    ) -> None:
        self.row = row
        self.items: list[JSON] = []
        self.session: str | None = None
        self.meter = UsageMeter()
        self.fields: JSON = {}
        self.running: list[tuple[str, float, tuple[Any, ...]]] = []
        self.look: Callable[[], Awaitable[list[JSON]]] | None = None
        self._model = model
        self._events = heard()
        self._resources = resources
        self._environment = name_of(resources, "resources")
        self._place = self._environment  # and the session's replica
        self._server: int | None = None  # its index in the timeline
        self._timeouts = timeouts
        self._limits = limits
        self.verified = True
        self.deadline = (math.inf, "")
        self._not_its_own = 0.0  # seconds that the policy did not choose: seed, slow model calls, waiting
        self._tool_calls = 0
        self._bytes = 0  # of the items so far
        self._over = False
        self._params: JSON = _with_extras(row)
        self._history = History(input_items(self._params["input"]), limits.max_tool_calls_per_turn)
        self._last: JSON | None = None
        self._response: JSON | None = None  # made when it is first asked for
        self._usages: list[Any] = []
        tools = self._params.get("tools")
        self._declared = None if tools is None else _names(tools)  # None: any tool of the environment
        self._are_its_own = False  # whether the environment declared them, not the row
        self.has_steps = False

    @property
    def response(self) -> JSON | None:
        """The episode as one Response: the last model response, with every item and summed usage."""
        if self._response is None and self._last is not None:
            self._response = {**self._last, "output": self.items, "usage": usage_sum(self._usages)}
        return self._response

    def shown(self) -> JSON | None:
        """`response` for readers; see `readable`."""
        if self._last is None and not self.items:
            return None
        return {**(self._last or {}), "output": readable(self.items), "usage": usage_sum(self._usages)}

    @property
    def used(self) -> JSON:
        """The rollout's field with the usage of its model calls; empty if none is known."""
        return {USAGE_FIELD: self.meter.to_json()} if self.meter else {}

    @property
    def incomplete(self) -> bool:
        """Whether the last model response was cut off (``incomplete_details``)."""
        return bool(self._last and self._last.get("incomplete_details"))

    async def seed(self) -> None:
        """Open the session. A row without tools of its own is offered those that the environment returns."""
        row = self.row if self._declared is not None else {**self.row, WANTS_TOOLS: True}
        if not self.verified:
            row = {**row, UNVERIFIED: True}
        fields = await self.stage("seed", lambda: self._opened(row))
        tools = fields.get("tools")
        if not self._params.get("tools") and isinstance(tools, list) and all(map(_is_function, tools)):
            self._params = {**self._params, "tools": tools}
            self._declared, self._are_its_own = _names(tools), True
        self.has_steps = bool(fields.get(TASK_STEPS))

    async def next_step(self) -> bool:
        """Go on with the next step of a task that has some, when the policy is done with one: its instruction
        is a user's message. False if there is none."""
        if not self.has_steps:
            return False
        ask: Any = self._resources.fetch
        answer = await self.stage("verify", lambda: ask("next_step", {}, session=self.session))
        instruction = answer["instruction"]
        self.has_steps = instruction is not None
        if self.has_steps:
            self.append_items([{"type": "message", "role": "user", "content": instruction}])
        return self.has_steps

    async def _opened(self, row: JSON) -> JSON:
        session, fields = await self._resources.seed_session(row)
        self.enter(session)
        return fields

    async def generate(self) -> list[JSON]:
        """Make a model call with everything so far and return the items of its turn.

        An answer that exceeds the limit is cut (`incomplete`), and is the last one. Raises `EpisodeOver` at a
        limit of the episode; `AgentServer` catches it.
        """
        if self._over or self._bytes >= self._limits.max_episode_bytes:
            self.fields.setdefault("stopped_by", "max_episode_bytes")
            raise EpisodeOver
        if (limit := self._used_up()) is not None:
            self.stop(limit)
            raise EpisodeOver
        body = {**self._params, "input": self._history.items}
        try:
            response = await self.stage("model", lambda: self._answer(body))
        except Rejected as error:
            if not is_refusal_of_history(error, self._history):
                raise
            self.stop("history_refused")
            self.fields["refusal"] = error.message[:_SHOWN]
            raise EpisodeOver from None
        self._history.accept()
        turn: list[JSON] = response["output"]
        if any(not isinstance(item, dict) for item in turn):
            raise Unavailable("the model answered with output items that are not objects", stage="model")
        if (cut := shortened(turn, self._limits.max_answer_bytes)) is not None:
            turn, self._over = cut, True
            details = {"reason": "max_output_tokens"}
            response = {**response, "incomplete_details": details, "status": "incomplete"}
            self.fields["stopped_by"] = "max_answer_bytes"
        self._bytes += written_bytes(turn)
        self._last, self._response = response, None
        self._usages.append(response.get("usage"))
        turn = self._history.identified(turn)
        self.items += turn
        self._history.add_turn(turn, self._declared or ())
        return turn

    def _used_up(self) -> str | None:
        """The limit of tokens or cost that the model calls have reached, if any."""
        tokens, cost = self._limits.max_episode_tokens, self._limits.max_episode_cost
        if tokens is None and cost is None:
            return None
        prompt, cached, output = tokens_of(usage_sum(self._usages)) or (0, 0, 0)
        if tokens is not None and prompt + output >= tokens:
            return "max_episode_tokens"
        counts = {"input_tokens": prompt, "cached_tokens": cached, "output_tokens": output}
        return "max_episode_cost" if cost is not None and cost.cost(counts) >= cost.most else None

    async def _answer(self, body: JSON) -> JSON:
        # An agent behind a URL, in the place of a model, has no stream.
        if self._events is None or not isinstance(self._model, ModelClient):
            return await self._model.responses(body)
        return await self._events.call(self._model, body, self.items)

    def replace_response(self, response: JSON) -> None:
        """Make a Response that was produced elsewhere the response of the whole episode.

        It has every output item, and the usage of all model calls. Raises `Unavailable` if it has no list.
        """
        items = response.get("output")
        if not isinstance(items, list) or any(not isinstance(item, dict) for item in items):
            raise Unavailable("the response has no list of output items", stage="model")
        self._last, self._response = response, None
        self._usages = [response.get("usage")]
        self.items = items

    def stop(self, by: str) -> None:
        """Note which limit has ended the episode; one that never called its model has an empty response."""
        self.fields["stopped_by"] = by
        if self._last is None:
            self._last = {**context_overflow_response(self._params), "output": []}

    def append_prompt(self, items: list[JSON]) -> None:
        """Append items to the prompt only: the model sees them, the response does not contain them."""
        self._history.add(items)

    def append_items(self, items: list[JSON]) -> None:
        """Append items that the model did not produce, such as a user's message, to prompt and response."""
        self.items += items
        self._bytes += written_bytes(items)
        self._history.add(items)

    async def run_tools(self, calls: list[JSON], *, parallel: bool = False) -> list[JSON]:
        """Run function calls and append their outputs, in the order of the calls.

        Calls over a limit do not run, and their output says so. If a tool fails, its error is its output.
        Raises `Retryable` if one could not be reached.
        """
        limits, outputs = self._limits, list[JSON]()
        room = max(0, min(limits.max_tool_calls_per_turn, limits.max_tool_calls - self._tool_calls))
        calls, refused = calls[:room], calls[room:]
        self._tool_calls += len(calls)
        if parallel and self.session is not None:
            outputs = list(await asyncio.gather(*map(self._run_tool, calls)))
        else:
            for call in calls:
                outputs.append(await self._run_tool(call))
        self._shorten(outputs)
        if refused:
            why = _error(
                f"Not run: at most {limits.max_tool_calls_per_turn} tool calls are run of a turn, "
                f"and {limits.max_tool_calls} of an episode."
            )
            outputs += [_output(call, why) for call in refused]
        self.append_items(outputs)
        return outputs

    async def verify(self) -> JSON:
        """The verdict on the episode: ``reward`` and the verifier's own fields."""
        response = self.response
        if response is None:
            raise Unavailable("the agent made no model call, so there is nothing to verify", stage="verify")
        return await self.stage("verify", lambda: self._resources.verify(self.row, response, self.session))

    async def close(self) -> None:
        """Free the session, if there is one."""
        session, self.session = self.session, None
        if session is not None:
            await self.stage("close", lambda: self._resources.close_session(session))

    async def stage(self, name: str, work: Callable[[], Awaitable[T]], details: tuple[Any, ...] = ()) -> T:
        """Run ``work`` as the stage ``name``, within its deadline and the episode's.

        Args:
            name: one of `AgentServer.stages`.
            details: of a tool, for its step in the timeline: its name, and the bytes of its arguments.

        Raises:
            PolicyDeadline: the policy used up the time of the stage, or of the episode.
            DeadlineExceeded: it took too long, and not by what the policy did.
            GymError: it failed; the error's ``stage`` is set.
        """
        begun, status = time.monotonic(), 0
        size: int | None = None
        running = (name, begun, details)
        self.running.append(running)
        outer = current()
        with use(outer.within(self._timeouts[name])) as context, metering(self.meter, name):
            left = context.timeout()
            if left is not None and name in _REPORTED:
                left += 2 * patience(left)
            try:
                with time_limit(left):
                    result = await work()
                status = 200
                if isinstance(result, Reply):
                    status, size = result.status, len(result.body)
            except (asyncio.TimeoutError, TimeoutError):
                status = DeadlineExceeded.status
                raise self._late(name, begun, episode=context is outer) from None
            except GymError as error:
                status = error.status
                # The server has the same deadline, and may report first that it has passed.
                if isinstance(error, DeadlineExceeded | PolicyDeadline) and context.is_over():
                    own = isinstance(error, PolicyDeadline)
                    raise self._late(name, begun, episode=context is outer, own=own) from None
                error.stage = error.stage or name
                raise
            finally:
                self.running.remove(running)
                self._account(name, time.monotonic() - begun)
                recorder = self.meter.recorder
                # Model calls are recorded by their client; one without a status was cancelled.
                if recorder is not None and status and name not in _NO_STEPS:
                    if name == "tool":
                        details = (*(details or (None, None)), size)
                    if self._server is None:
                        self._server = recorder.server(self._place)
                    recorder.add(name, begun, self._server, details, status)
        return result

    def enter(self, session: str | None) -> None:
        """Make a session that of the episode."""
        self.session = session
        replica = replica_of(session) if session else ""
        self._place = self._environment if replica in _NOWHERE else f"{self._environment}/{replica}"
        self._server = None

    def late(self) -> DeadlineExceeded | PolicyDeadline:
        """The failure of an episode whose own time is over, outside of any stage."""
        return self._late("episode", time.monotonic(), episode=True)

    def set_aside(self, seconds: Iterable[float], limit: float) -> float:
        """Take slow model calls out of the policy's time; returns their seconds, of all that each call took
        in something with a ``limit``."""
        slow = sum(each for each in seconds if each > limit * _SLOW)
        self._not_its_own += slow
        return slow

    def _account(self, stage: str, seconds: float) -> None:
        if stage == "seed":
            self._not_its_own += seconds
        elif stage == "model":
            self.set_aside([seconds], self.deadline[0])

    def _late(
        self, stage: str, begun: float, *, episode: bool, own: bool = False
    ) -> DeadlineExceeded | PolicyDeadline:
        """The failure for a limit that has passed: of the episode, or of the stage that ``begun`` then.

        ``own``: the server said that the policy's time was over.
        """
        where, (seconds, setting) = stage, self.deadline
        if not episode:
            seconds, setting = self._timeouts[stage], f"{stage}_timeout"
        elif stage in ("seed", "verify", "close"):
            own = False
        else:
            here = time.monotonic() - begun
            others = self._not_its_own + (here if stage == "model" and here > seconds * _SLOW else 0.0)
            own, where = (own or stage != "tool") and others < seconds / 2, "episode"
        message = f"the {where} ran out of time ({setting}: {round(seconds, 2):g} s)"
        if episode and where != stage:
            message += f", in its {stage} stage"
        return PolicyDeadline(message, stage=where) if own else DeadlineExceeded(message, stage=stage)

    def _shorten(self, outputs: list[JSON]) -> None:
        left = self._limits.max_episode_bytes - self._bytes
        for output in outputs:
            size = written_bytes(output["output"])
            if size > left:
                output["output"] = _error(f"The output is too long: {size} bytes.")
            left -= written_bytes(output)

    async def _run_tool(self, call: JSON) -> JSON:
        return _output(call, await self._tool_output(call.get("name"), call.get("arguments")))

    async def _tool_output(self, name: Any, arguments: Any) -> str | list[JSON]:
        # The model wrote all of this: nothing is trusted.
        is_name = isinstance(name, str) and is_tool_name(name)
        if not is_name or (self._declared is not None and name not in self._declared):
            return self._refused(None, NotFound.status, f"There is no tool named {str(name)[:100]!r}.")
        limit, size, problem = self._limits.max_argument_bytes, written_bytes(arguments), ""
        if arguments is None:
            arguments = ""  # as some write the arguments of a tool that has none
        if not isinstance(arguments, str) or size > limit:
            problem = f"longer than {limit} bytes, or no text"
        else:
            try:
                values = _ARGUMENTS.decode(arguments) if arguments.strip() else {}
                values = {} if values is None else values
                if not isinstance(values, dict):
                    problem = f"expected a JSON object, got {type(values).__name__}"
            except RecursionError:
                problem = _TOO_DEEP
            except ValueError as error:
                problem = repr(error)
        if not problem:
            try:
                call = lambda: self._call_tool(name, values)  # noqa: E731
                reply: Reply = await self.stage("tool", call, (name, size))
                return shown_parts(reply.body) or reply.body.decode("utf-8", "replace")
            except RecursionError:  # JSON that can be decoded may be too deep to be encoded
                problem = _TOO_DEEP
        return self._refused(name, _WRONG, f"Invalid tool call arguments: {problem}")

    def _refused(self, name: str | None, status: int, message: str) -> str:
        """The output of a call that is not passed on. It is counted; names in rows are any number."""
        tool = name if name is not None and self._are_its_own else "unknown"
        TOOL_CALLS.add(self._environment, tool, str(status))
        return _error(message)

    async def _call_tool(self, name: str, values: JSON) -> Reply:
        reply = await self._resources.call_tool(name, values, self.session)
        if reply.notes is not None:
            self._not_its_own += reply.notes.get(QUEUED, 0) / 1e6
        if reply.status in _NOT_THE_TOOL:
            try:
                self._resources.decode(reply)
            except (OperatorError, PolicyDeadline, Retryable, SessionNotFound):
                raise
            except GymError:
                return reply  # the tool's own refusal, which the model is shown
        if reply.session is not None and reply.session != self.session:
            self.enter(reply.session)
        return reply


def _is_function(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") == "function" and isinstance(tool.get("name"), str)


def _names(tools: list[JSON]) -> set[str]:
    functions = (tool for tool in tools if tool.get("type", "function") == "function")
    return {name for tool in functions if isinstance(name := tool.get("name"), str)}


def _output(call: JSON, output: str | list[JSON]) -> JSON:
    return {"type": "function_call_output", "call_id": call.get("call_id"), "output": output}


def _error(message: str) -> str:
    return json.dumps({"error": message})


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text)


# Not orjson: models know what this module says about a wrong text, and how NeMo Gym words it.
_ARGUMENTS = json.JSONDecoder(parse_float=_finite, parse_constant=_no_number)


def _with_extras(row: JSON) -> JSON:
    """The row's Responses body; ``extra_body`` and ``chat_template_kwargs`` join its metadata."""
    params: JSON = dict(row["responses_create_params"])
    for key in ("extra_body", "chat_template_kwargs"):
        if isinstance(extra := row.get(key), dict):
            metadata = params.get("metadata") or {}
            if not isinstance(metadata, dict):
                raise InvalidRequest("responses_create_params.metadata must be an object")
            try:
                stored = metadata_object(metadata, key)
            except BadRequest as error:
                raise InvalidRequest(f"responses_create_params.{error.message}") from None
            params["metadata"] = {**metadata, key: encode({**stored, **extra}).decode()}
    return params
