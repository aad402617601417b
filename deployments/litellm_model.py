"""`litellm_model`: a model by LiteLLM's name, of any provider that it knows; it reads the provider's key.

A model with an OpenAI-compatible endpoint is reached more cheaply by `chat_model`.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import orjson
from pydantic import Field

from gym_serve.deployments.chat_model import ChatModel
from gym_serve.deployments.connections import Connections, NoConnection, Request, Response
from gym_serve.deployments.endpoints import Endpoint, Urls
from gym_serve.servers.context import closing
from gym_serve.types.errors import GraphError
from gym_serve.types.requests import JSON

_NO_KEY = "EMPTY"
_ADDRESS = "http://litellm"  # of no machine: it stands in messages


class LiteLLMConnections(Connections):
    """Calls by LiteLLM's SDK; what a provider says is read as that of any other endpoint."""

    def configure(self, config: Any) -> None:
        super().configure(config)
        key = config.api_key.get_secret_value()
        self._options: JSON = {**config.options, **({} if key == _NO_KEY else {"api_key": key})}

    @asynccontextmanager
    async def _post(self, endpoint: Endpoint, request: Request) -> AsyncGenerator[Response, None]:
        import litellm

        body = {**orjson.loads(request.data), **self._options, "num_retries": 0, "max_retries": 0}
        try:
            answer: Any = await litellm.acompletion(**body)
        except litellm.exceptions.APIConnectionError as error:
            raise NoConnection(f"no connection by LiteLLM: {error}") from None
        except Exception as error:  # one class for each provider's refusals, with nothing else in common
            status = getattr(error, "status_code", None)
            if not isinstance(status, int):
                raise
            headers = getattr(getattr(error, "response", None), "headers", None) or {}
            refused = {"error": {"message": str(error), "code": getattr(error, "code", None)}}
            yield Response(status, headers, _once(orjson.dumps(refused)))
            return
        if not body.get("stream"):
            yield Response(200, {}, _once(_encoded(answer)))
            return
        async with closing(answer):
            yield Response(200, {"Content-Type": "text/event-stream"}, _events(answer))


class LiteLLMModel(ChatModel):
    """A model by LiteLLM's name."""

    requires: ClassVar[Mapping[str, str]] = {"litellm": "gym-serve[litellm]"}

    class Config(ChatModel.Config):
        base_url: Urls = Field(default_factory=lambda: [_ADDRESS])
        """LiteLLM knows the address; for one of your own see ``options``."""
        options: dict[str, Any] = Field(default_factory=dict)
        """Further arguments of ``litellm.acompletion``: ``api_base``, ``api_version``, ... They are shown: a
        key has its place in ``api_key``, or in the variable that LiteLLM reads."""

    config: Config

    @classmethod
    def preflight(cls, config: Config) -> Iterable[str]:
        yield from super().preflight(config)
        if config.health_interval is not None or config.row_endpoints:
            yield "health_interval, row_endpoints: LiteLLM has no endpoint to look at; leave them out"

    def connections(self) -> Connections:
        return LiteLLMConnections(self.config)

    async def start(self) -> None:
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import fetches prices
        try:
            import litellm
        except ImportError as error:
            raise GraphError(f"litellm_model needs {error.name}: pip install 'gym-serve[litellm]'") from None
        litellm.suppress_debug_info = True  # it would print advice about each refusal
        await super().start()


def _encoded(answer: Any) -> bytes:
    encoded: bytes = orjson.dumps(answer.model_dump(exclude_none=True))
    return encoded


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body


async def _events(chunks: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        yield b"data: " + _encoded(chunk) + b"\n\n"
    yield b"data: [DONE]\n\n"
