"""`ModelServer`: anything that answers OpenAI's Responses and Chat Completions, and Anthropic's Messages.

A subclass writes `responses` or `chat_completions`; the other protocols are converted. Streams are made from
finished answers unless it also writes `stream_responses` and `stream_chat`. Below ``rollouts`` the same calls
are recorded for an external harness (`gym_serve.servers.captures`).

`Gate`: the calls of a model wait while its policy changes, and none fails for that.

A closed gate holds new calls. What becomes of running ones is the caller's choice (`Policy.pause`): they go
on, they are waited for, or they are interrupted and made again once the gate opens, which is safe because a
model call has no effect but its answer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pydantic import Field

from gym_serve.observe.catalogue import POLICY_VERSION
from gym_serve.servers.base import Operation, Server, author_error, place_of_class
from gym_serve.servers.captures import CLOSE, OPEN, RECORDED, TRAJECTORIES, Captures, RecordedModel
from gym_serve.servers.context import closing, interruptible
from gym_serve.servers.protocols import PROTOCOLS, Model, models_list
from gym_serve.servers.transport import Reply
from gym_serve.servers.usage import Prices
from gym_serve.types.errors import BadRequest, GymError, InvalidRequest, ModelFailed, NotFound, Unavailable
from gym_serve.types.protocols import (
    chat_chunks,
    chat_to_params,
    chat_to_response,
    message_to_params,
    response_events,
    response_to_chat,
    responses_to_chat,
    schemas,
)
from gym_serve.types.requests import JSON

T = TypeVar("T")


class Gate:
    """The gate before the calls of one model. Use it in one event loop."""

    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self._opened.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._calls = 0
        self._blocks: set[interruptible] = set()
        self._interrupts = 0

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def close(self) -> None:
        self._opened.clear()

    def open(self) -> None:
        self._opened.set()

    async def idle(self) -> None:
        await self._idle.wait()

    def interrupt(self) -> None:
        self._interrupts += 1
        for block in list(self._blocks):
            block.interrupt()

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Make a call once the gate is open. One that is interrupted is made again."""
        while True:
            await self._until_open()
            with interruptible() as block, self._counted(block):
                return await work()

    async def stream(self, begin: Callable[[], AsyncIterator[T]]) -> AsyncGenerator[T, None]:
        """The items of a call that begins once the gate is open. One that is interrupted before its first
        item is made again, and later raises `Unavailable`: its reader has a part of the answer already."""
        while True:
            await self._until_open()
            interrupts, begun = self._interrupts, False
            with self._counted(None):
                async with closing(begin()) as items:
                    while self._interrupts == interrupts:
                        with interruptible() as block:
                            self._blocks.add(block)
                            try:
                                item = await anext(items)
                            except StopAsyncIteration:
                                return
                            finally:
                                self._blocks.discard(block)
                        if self._interrupts == interrupts:
                            begun = True
                            yield item
            if begun:
                raise Unavailable("the policy was paused in the middle of this answer")

    async def _until_open(self) -> None:
        while not self._opened.is_set():  # it may be closed again before all that waited have gone on
            await self._opened.wait()

    @contextmanager
    def _counted(self, block: interruptible | None) -> Iterator[None]:
        self._calls += 1
        self._idle.clear()
        if block is not None:
            self._blocks.add(block)
        try:
            yield
        finally:
            if block is not None:
                self._blocks.discard(block)
            self._calls -= 1
            if not self._calls:
                self._idle.set()


PauseMode = Literal["keep", "abort"]
"""What happens to running generations: they continue with the new weights, or fail (retryable)."""

HoldMode = Literal["keep", "wait", "abort"]
"""What `Policy.pause` does with running model calls: an engine of the graph freezes them, and elsewhere they
end (``keep``); they are waited for (``wait``); they are ended, and made again afterwards (``abort``)."""

# Operations of one replica of a model, for the process that trains it.
PAUSE, RESUME, VERSION = "each/policy/pause", "each/policy/resume", "each/policy/version"
TAKE, ANSWER = "each/policy/take", "each/policy/answer"

COUNT_TOKENS = "v1/messages/count_tokens"  # the operation that counts the tokens of a prompt


class ModelServer(Server):
    """Base class of models."""

    kind = "model"

    class Config(Server.Config):
        """Settings of every model."""

        prices: Prices | None = None
        """Price of a million of its tokens: ``{input, output, cached_input?}``. Runs then report their cost,
        and can be limited (``gym-serve collect --max-cost``)."""
        capture_ttl: float = Field(3600.0, gt=0)
        """Seconds without a call after which the capture of an external harness is dropped."""
        max_captures: int = Field(10_000, ge=0)
        """Maximum number of open captures per replica; a further one is refused (429)."""

    def __init__(self, *, name: str | None = None, replica: str = "local", **settings: Any) -> None:
        super().__init__(name=name, **settings)
        self.captures = Captures(self.name, replica, self.config.capture_ttl, self.config.max_captures)
        self.gate = Gate()  # holds the calls while the policy changes
        self.weight_version: str | None = None  # version of the weights that answer; None if nobody said one
        # How often its weights were replaced; on a cluster, its graph counts (`gym_serve.cluster.weights`).
        self.updates = 0

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.responses is ModelServer.responses and cls.chat_completions is ModelServer.chat_completions:
            where = place_of_class(cls)
            raise TypeError(f"{where}: {cls.__name__} must define `responses` or `chat_completions`")

    async def responses(self, body: JSON) -> JSON:
        """OpenAI's Response for a body of ``POST /v1/responses`` (without ``stream``). Raises `Rejected`
        with the reason, or `Retryable`."""
        completion = await self.chat_completions(responses_to_chat(body))
        return chat_to_response(completion, body, parse_think=True)

    async def chat_completions(self, body: JSON) -> JSON:
        """OpenAI's ChatCompletion for a body of ``POST /v1/chat/completions``. Raises as `responses`."""
        metadata = self.metadata()
        return {**response_to_chat(await self.responses(chat_to_params(body)), body), **metadata}

    def metadata(self) -> JSON:
        """Fields that a call adds to its last output item, completion and chunks: the version of the
        weights."""
        return {} if self.weight_version is None else {"weight_version": self.weight_version}

    async def hold(self, mode: HoldMode) -> None:
        """Let no model call begin until `release`; see `HoldMode`. Calls wait, and none fails."""
        self.gate.close()
        if mode == "abort":
            self.gate.interrupt()
        if mode != "keep":
            await self.gate.idle()

    async def release(self) -> None:
        """Release the model calls that were held."""
        self.gate.open()

    async def update_weights(
        self, weights: Path | bytes | None, version: str, mode: PauseMode = "keep"
    ) -> None:
        """Replace the model's weights while it runs.

        Args:
            weights: a folder or file of safetensors, or the bytes of such a file; None where the trainer has
                replaced them itself, at an endpoint or in its own process, and says their version.
            version: name of the version; calls report the version with which they began.

        Raises:
            BadRequest: this server takes no weights, or these are wrong.
        """
        if weights is not None:
            raise BadRequest(f"{self.name} takes no weights: its engine runs elsewhere, or updates are off")
        self.weight_version = version

    async def stream_responses(self, body: JSON) -> AsyncIterator[JSON]:
        """`responses` as a stream: an async generator of OpenAI's events for the body of `responses`.

        The last event has the finished Response, the same as `responses` returns. The generator is closed
        when the client goes away. Raises as `responses`, also after the first event.
        """
        for event in response_events(await self.responses(body)):
            yield event

    async def stream_chat(self, body: JSON) -> AsyncIterator[JSON]:
        """`chat_completions` as a stream of OpenAI's chunks, which add up to it; one of them has the
        ``usage``."""
        metadata = self.metadata()
        for chunk in chat_chunks(await self.chat_completions(body), include_usage=True):
            yield {**chunk, **metadata}

    async def count_tokens(self, body: JSON) -> int:
        """Number of tokens in the prompt of a body of ``POST /v1/responses``; `NotFound` where it cannot."""
        raise NotFound(f"{self.name} cannot count tokens: only models with an engine in the graph can")

    def model_names(self) -> list[str]:
        """Names for ``GET /v1/models``; the server's own name by default."""
        return [self.name]

    def operations(self) -> dict[str, Operation]:
        any_, done = {"type": "object"}, {"type": "object", "maxProperties": 0}
        id_ = {"type": "object", "required": ["id"], "properties": {"id": {"type": "string"}}}
        recorded = RecordedModel(self, self.captures)
        models = {"v1/models": self._op_models, f"{OPEN}/v1/models": self._op_models_of_a_recording}
        about = "The models of this server"
        return {
            **{op: self._protocol(op, self) for op in PROTOCOLS},
            **{op: self._counting() for op in (COUNT_TOKENS, f"{OPEN}/{COUNT_TOKENS}")},
            **{op: Operation(answer, about, None, schemas.MODELS, "GET") for op, answer in models.items()},
            OPEN: Operation(self._op_open, "Record the calls of an external harness", None, id_),
            TRAJECTORIES: Operation(self._op_trajectories, "What was recorded", None, RECORDED, "GET"),
            CLOSE: Operation(self._op_close, "Drop what was recorded", None, done, "DELETE"),
            **{f"{OPEN}/{op}": self._protocol(op, recorded, ", recorded") for op in PROTOCOLS},
            PAUSE: Operation(self._op_pause_calls, "Hold model calls", any_, done),
            RESUME: Operation(self._op_resume_calls, "Let model calls begin", None, done),
            VERSION: Operation(self._op_version, "Version of the weights", None, any_),
        }

    def observe(self) -> None:
        """See `Server.observe`."""
        digits = re.search(r"(\d{1,15})\D*$", self.weight_version or "")
        if digits is None:
            POLICY_VERSION.remove(self.name)
        else:
            POLICY_VERSION.set(self.name, value=int(digits[1]))

    def failure(self, op: str, error: Exception) -> GymError | None:
        """See `Server.failure`: the author's mistake, where it was a call of the model."""
        if not op.endswith(tuple(PROTOCOLS)):
            return None
        is_own = type(self).responses is not ModelServer.responses
        return author_error(
            ModelFailed, self.name, self.responses if is_own else self.chat_completions, error
        )

    @property
    def live_sessions(self) -> int:
        return len(self.captures)

    def traceparent(self, session: str) -> str | None:
        return self.captures.traceparent(session)

    def _counting(self) -> Operation:
        protocol = PROTOCOLS["v1/messages"]
        about = f"Tokens of an {protocol.summary} request"
        return Operation(self._op_count_tokens, about, protocol.request, schemas.TOKEN_COUNT)

    async def _op_count_tokens(self, body: Any) -> JSON:
        if not isinstance(body, dict):
            raise BadRequest(f"the body must be an object with `messages`, got {type(body).__name__}")
        return {"input_tokens": await self.count_tokens(message_to_params(body))}

    async def _op_models(self, body: Any) -> JSON:
        return models_list(self.model_names())

    async def _op_models_of_a_recording(self, body: Any) -> JSON:
        self.captures.check()
        return await self._op_models(body)

    def _protocol(self, op: str, model: Model, note: str = "") -> Operation:
        protocol, gate = PROTOCOLS[op], self.gate

        async def answer(body: Any) -> Any:
            return await gate.run(lambda: protocol.answer(model, body))

        return Operation(
            answer,
            f"{protocol.summary}{note}",
            protocol.request,
            protocol.response,
            stream=lambda body: gate.stream(lambda: protocol.stream(model, body)),
        )

    async def _op_pause_calls(self, body: Any) -> JSON:
        mode: Any = body.get("mode", "keep") if isinstance(body, dict) else None
        if mode not in get_args(HoldMode):
            raise InvalidRequest(f"`mode` must be keep, wait or abort, got {str(mode)[:40]!r}")
        await self.hold(mode)
        return {}

    async def _op_resume_calls(self, body: Any) -> JSON:
        await self.release()
        return {}

    async def _op_version(self, body: Any) -> JSON:
        version, paused = self.weight_version, not self.gate.is_open
        return {"weight_version": version, "paused": paused, "updates": self.updates}

    async def _op_open(self, body: Any) -> Reply:
        id_ = self.captures.open()
        return Reply.of({"id": id_}, id_)

    async def _op_trajectories(self, body: Any) -> JSON:
        return self.captures.trajectories(take=not (isinstance(body, dict) and body.get("look")))

    async def _op_close(self, body: Any) -> JSON:
        self.captures.close()
        return {}
