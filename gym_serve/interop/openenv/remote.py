"""`RemoteInstance`: an environment behind OpenEnv's WebSocket, ``{url}/ws``: one connection for one episode.

Answers come in the order of the messages and bear no number. A call that was given up would leave its answer
to the next one, so such a connection is not used again.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import orjson

from gym_serve.interop.openenv.instance import Outcome, outcome_of
from gym_serve.servers.transport import encode
from gym_serve.types.errors import (
    GymError,
    InvalidRequest,
    Overloaded,
    SessionLost,
    ToolFailed,
    Unavailable,
)
from gym_serve.types.requests import JSON

__all__ = ["RemoteInstance", "action_schema"]

_MAX_MESSAGE = 100 << 20
_ERRORS: dict[str, type[GymError]] = {
    "INVALID_JSON": InvalidRequest,
    "VALIDATION_ERROR": InvalidRequest,
    "EXECUTION_ERROR": ToolFailed,
    "CAPACITY_REACHED": Overloaded,
}
_CLOSED = (
    aiohttp.WSMsgType.CLOSE,
    aiohttp.WSMsgType.CLOSING,
    aiohttp.WSMsgType.CLOSED,
    aiohttp.WSMsgType.ERROR,
)


class RemoteInstance:
    """An environment by its URL; it connects when it is reset.

    Args:
        http: the connections' owner.
        url: address of the environment.
        headers: sent with the connection.
    """

    def __init__(self, http: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> None:
        self._http = http
        self._url = url
        self._headers = headers
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._turn = asyncio.Lock()
        self._lost = False

    async def reset(self, options: JSON) -> Outcome:
        """See `Instance.reset`."""
        if self._socket is None:
            self._socket = await self._connected()
        return outcome_of(await self._ask("reset", options))

    async def step(self, action: JSON) -> Outcome:
        """See `Instance.step`."""
        return outcome_of(await self._ask("step", action))

    async def close(self) -> None:
        """See `Instance.close`; the environment ends with the connection."""
        if self._socket is not None:
            await self._socket.close()

    async def _connected(self) -> aiohttp.ClientWebSocketResponse:
        try:
            return await self._http.ws_connect(
                f"{self._url.rstrip('/')}/ws", headers=self._headers, max_msg_size=_MAX_MESSAGE
            )
        except aiohttp.WSServerHandshakeError as error:
            if error.status == 429:
                raise Overloaded(f"{self._url} takes no further connection") from None
            raise Unavailable(f"{self._url} answered {error.status} to a WebSocket") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"{self._url} cannot be connected to: {error}") from None

    async def _ask(self, kind: str, data: JSON) -> Any:
        async with self._turn:
            socket = self._socket
            if socket is None or socket.closed or self._lost:
                raise SessionLost(f"the connection to {self._url} is gone, and the episode with it")
            try:
                await socket.send_str(encode({"type": kind, "data": data}).decode())
                message = await socket.receive()
            except (aiohttp.ClientError, OSError) as error:
                raise SessionLost(f"the connection to {self._url} was lost: {error}") from None
            except asyncio.CancelledError:
                self._lost = True
                raise
        if message.type in _CLOSED:
            raise SessionLost(f"{self._url} ended the connection, and the episode with it")
        return self._answer(message.data)

    def _answer(self, text: Any) -> Any:
        try:
            answer = orjson.loads(text)
            kind, data = answer["type"], answer.get("data")
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            raise Unavailable(f"{self._url} does not speak OpenEnv's protocol: {str(text)[:200]!r}") from None
        if kind != "error":
            return data
        data = data if isinstance(data, dict) else {}
        error = _ERRORS.get(str(data.get("code")), Unavailable)
        raise error(f"{self._url}: {str(data.get('message'))[:2000]}")


async def action_schema(http: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> JSON:
    """JSON schema of an environment's actions, as its ``/schema`` tells it.

    Raises:
        Unavailable: it does not.
    """
    try:
        async with http.get(f"{url.rstrip('/')}/schema", headers=headers) as response:
            body = orjson.loads(await response.read())
            schema = body.get("action") if response.status == 200 and isinstance(body, dict) else None
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError, orjson.JSONDecodeError) as error:
        raise Unavailable(f"{url} has no schema of its actions: {type(error).__name__}: {error}") from None
    if not isinstance(schema, dict):
        raise Unavailable(f"{url} has no schema of its actions: HTTP {response.status}")
    return schema
