"""What a hosted server calls other servers with, in place of NeMo Gym's HTTP client: the graph's transports.

NeMo Gym's servers call models by name and path, and read aiohttp's response. Here a call goes over the
transport to the server of the graph that the name stands for, within the deadline of the call that it is made
for, and what the model used is counted there. Where the server is overloaded or cannot be had, that failure
is raised instead of answered: most of NeMo Gym's verifiers do not look at the status, and would give a reward
for an answer that there was not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson
from pydantic import BaseModel
from yarl import URL

from gym_serve.servers.clients import Client
from gym_serve.servers.transport import encode
from gym_serve.types.errors import NotFound, Rejected

__all__ = ["GraphServers", "ServerAnswer"]


class ServerAnswer:
    """An answer, with those members of `aiohttp.ClientResponse` that NeMo Gym's servers read.

    Args:
        status: HTTP status.
        body: JSON.
    """

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.cookies: dict[str, str] = {}
        self.content = self
        self._body = body

    @property
    def ok(self) -> bool:
        """Whether the status is below 400."""
        return self.status < 400

    async def read(self) -> bytes:
        """The body."""
        return self._body

    async def text(self) -> str:
        """The body as text."""
        return self._body.decode()

    async def json(self, **_: Any) -> Any:
        """The body, decoded."""
        return orjson.loads(self._body)

    def raise_for_status(self) -> None:
        """Raise for a status of 400 or more.

        Raises:
            aiohttp.ClientResponseError: as aiohttp's own response does.
        """
        if not self.ok:
            url = URL("http://in-process")
            info = aiohttp.RequestInfo(url, "POST", None, url)  # type: ignore[arg-type]
            raise aiohttp.ClientResponseError(
                info, (), status=self.status, message=self._body[:1000].decode("utf-8", "replace")
            )


class GraphServers:
    """The servers of the graph, under the names that a hosted server knows them by.

    Args:
        servers: clients by NeMo Gym's name of the server.
        setting: name of the setting that lists them, for messages.
    """

    def __init__(self, servers: Mapping[str, Client], setting: str) -> None:
        self._servers = servers
        self._setting = setting

    async def request(self, server_name: str, url_path: str, json: Any = None) -> ServerAnswer:
        """Call a server.

        Args:
            server_name: NeMo Gym's name of it.
            url_path: route of the server, such as ``/v1/responses``.
            json: the body: a pydantic model, whose set fields are sent, or JSON.

        Raises:
            NotFound: no server of the graph stands for that name.
            Retryable: the server is overloaded, or cannot be had.
        """
        client = self._servers.get(server_name)
        if client is None:
            known = ", ".join(sorted(self._servers)) or "none"
            raise NotFound(f"no server stands for {server_name!r} in {self._setting}; there is {known}")
        body = json.model_dump(mode="json", exclude_unset=True) if isinstance(json, BaseModel) else json
        try:
            return ServerAnswer(200, encode(await client.fetch(url_path.lstrip("/"), body)))
        except Rejected as error:
            return ServerAnswer(error.status, encode(error.to_body()))
