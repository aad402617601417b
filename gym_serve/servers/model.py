"""`ModelServer`: anything that answers OpenAI's Responses and Chat Completions, and Anthropic's Messages.

A subclass writes `responses` or `chat_completions`; the other protocols are converted. Streams are made from
finished answers unless it also writes `stream_responses` and `stream_chat`. Below ``rollouts`` the same calls
are recorded for an external harness (`gym_serve.servers.captures`).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from gym_serve.servers.base import Operation, Server, place_of_class
from gym_serve.servers.captures import CLOSE, OPEN, RECORDED, TRAJECTORIES, Captures, RecordedModel
from gym_serve.servers.protocols import PROTOCOLS, Model
from gym_serve.servers.transport import Reply
from gym_serve.servers.usage import Prices
from gym_serve.types.errors import BadRequest, InvalidRequest, NotFound
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

__all__ = ["COUNT_TOKENS", "ModelServer", "PauseMode"]

PauseMode = Literal["keep", "abort"]
"""What happens to running generations: they continue with the new weights, or fail (retryable)."""

COUNT_TOKENS = "v1/messages/count_tokens"
"""The operation that counts the tokens of a prompt."""


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
        self.captures = Captures(replica, self.config.capture_ttl, self.config.max_captures)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.responses is ModelServer.responses and cls.chat_completions is ModelServer.chat_completions:
            raise TypeError(
                f"{place_of_class(cls)}: {cls.__name__} must define `responses` or `chat_completions`"
            )

    async def responses(self, body: JSON) -> JSON:
        """OpenAI's Response for a body of ``POST /v1/responses`` (without ``stream``).

        Raises:
            Rejected: the model refuses the request, with the reason.
            Retryable: it is overloaded, unavailable or too slow.
        """
        completion = await self.chat_completions(responses_to_chat(body))
        return chat_to_response(completion, body, parse_think=True)

    async def chat_completions(self, body: JSON) -> JSON:
        """OpenAI's ChatCompletion for a body of ``POST /v1/chat/completions`` (without ``stream``).

        Raises: as `responses`.
        """
        return response_to_chat(await self.responses(chat_to_params(body)), body)

    async def update_weights(self, weights: Path | bytes, version: str, mode: PauseMode = "keep") -> None:
        """Replace the model's weights while it runs.

        Args:
            weights: a folder or file of safetensors, or the bytes of such a file.
            version: name of the version; calls report the version with which they began.
            mode: what happens to running generations.

        Raises:
            BadRequest: this server takes no weights, or these are wrong.
        """
        raise BadRequest(f"{self.name} takes no weights: its engine runs elsewhere, or updates are off")

    async def stream_responses(self, body: JSON) -> AsyncIterator[JSON]:
        """`responses` as a stream: an async generator of OpenAI's events for the body of `responses`.

        The last event has the finished Response, the same as `responses` returns. The generator is closed
        when the client goes away.

        Raises: as `responses`, also after the first event.
        """
        for event in response_events(await self.responses(body)):
            yield event

    async def stream_chat(self, body: JSON) -> AsyncIterator[JSON]:
        """`chat_completions` as a stream: an async generator of OpenAI's chunks.

        The chunks add up to what `chat_completions` returns; one of them has the ``usage``.

        Raises: as `chat_completions`, also after the first chunk.
        """
        for chunk in chat_chunks(await self.chat_completions(body), include_usage=True):
            yield chunk

    async def count_tokens(self, body: JSON) -> int:
        """Number of tokens in the prompt of a body of ``POST /v1/responses``.

        Raises:
            NotFound: this server cannot count them.
            Rejected, Retryable: as `responses`.
        """
        raise NotFound(f"{self.name} cannot count tokens: only models with an engine in the graph can")

    def model_names(self) -> list[str]:
        """Names for ``GET /v1/models``; the server's own name by default."""
        return [self.name]

    def operations(self) -> dict[str, Operation]:
        done = {"type": "object", "maxProperties": 0}
        id_ = {"type": "object", "required": ["id"], "properties": {"id": {"type": "string"}}}
        recorded = RecordedModel(self, self.captures)
        return {
            **{op: _protocol(op, self) for op in PROTOCOLS},
            **{op: self._counting() for op in (COUNT_TOKENS, f"{OPEN}/{COUNT_TOKENS}")},
            **{
                op: Operation(answer, "The models of this server", None, schemas.MODELS, "GET")
                for op, answer in (
                    ("v1/models", self._op_models),
                    (f"{OPEN}/v1/models", self._op_models_of_a_recording),
                )
            },
            OPEN: Operation(self._op_open, "Record the calls of an external harness", None, id_),
            TRAJECTORIES: Operation(self._op_trajectories, "What was recorded", None, RECORDED, "GET"),
            CLOSE: Operation(self._op_close, "Drop what was recorded", None, done, "DELETE"),
            **{f"{OPEN}/{op}": _protocol(op, recorded, ", recorded") for op in PROTOCOLS},
        }

    @property
    def live_sessions(self) -> int:
        return len(self.captures)

    def _counting(self) -> Operation:
        protocol = PROTOCOLS["v1/messages"]
        return Operation(
            self._op_count_tokens,
            f"Tokens of an {protocol.summary} request",
            protocol.request,
            schemas.TOKEN_COUNT,
        )

    async def _op_count_tokens(self, body: Any) -> JSON:
        if not isinstance(body, dict):
            raise InvalidRequest(f"the body must be an object with `messages`, got {type(body).__name__}")
        return {"input_tokens": await self.count_tokens(message_to_params(body))}

    async def _op_models(self, body: Any) -> JSON:
        now = int(time.time())
        names = self.model_names()
        models = [{"id": name, "object": "model", "created": now, "owned_by": "gym_serve"} for name in names]
        return {"object": "list", "data": models}

    async def _op_models_of_a_recording(self, body: Any) -> JSON:
        self.captures.check()
        return await self._op_models(body)

    async def _op_open(self, body: Any) -> Reply:
        id_ = self.captures.open()
        return Reply.of({"id": id_}, id_)

    async def _op_trajectories(self, body: Any) -> JSON:
        return self.captures.trajectories()

    async def _op_close(self, body: Any) -> JSON:
        self.captures.close()
        return {}


def _protocol(op: str, model: Model, note: str = "") -> Operation:
    protocol = PROTOCOLS[op]
    return Operation(
        partial(protocol.answer, model),
        f"{protocol.summary}{note}",
        protocol.request,
        protocol.response,
        stream=partial(protocol.stream, model),
    )
