"""`Peers`: the gateways of one graph, as one of them sees the others.

Each gateway that holds runs listens for the others as replicas of servers do (`gym_serve.routing.rpc`). The
idempotency keys of its runs are in Ray's key-value store, where all of them look. Outside of a cluster a
gateway is `Alone`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Protocol

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from gym_serve.routing.replica import ReplicaTransport
from gym_serve.routing.rpc import Directory, Listener
from gym_serve.routing.serve_compat import is_leaving, kv_delete, kv_put_new, node_address
from gym_serve.servers.transport import Call, Reply, Transport
from gym_serve.types.errors import SessionLost

_LOOK_SECONDS = 3.0  # between two looks whether this gateway leaves

__all__ = ["Alone", "Peers", "PeersOfCluster", "peers_here"]


class Peers(Protocol):
    """See the module; `start` before anything else."""

    replica: str
    """Name of this gateway, without a dot."""

    async def start(self, own: Transport) -> None:
        """Let the others reach this gateway; ``own`` answers them. Safe to call again."""
        ...

    async def stop(self) -> None:
        """End that."""
        ...

    @property
    def transport(self) -> Transport:
        """Reaches the gateway that the session of a call names."""
        ...

    async def claim(self, key: str, value: str) -> str:
        """The value of a key, which is this one if it had none."""
        ...

    async def release(self, key: str) -> None:
        """Forget a key."""
        ...

    def leaving(self) -> bool:
        """Whether Serve stops this gateway. It waits for open responses, so they must end."""
        ...


def peers_here() -> Peers:
    """Those of the gateway that this process is."""
    try:
        context = serve.get_replica_context()
    except RayServeException:
        return Alone()
    return PeersOfCluster(context.app_name, context.deployment, context.replica_id.unique_id)


class Alone:
    """No other gateway."""

    replica = "local"
    server = "gateway"

    def __init__(self) -> None:
        self._keys: dict[str, str] = {}

    async def start(self, own: Transport) -> None:
        """See `Peers`."""

    async def stop(self) -> None:
        """See `Peers`."""

    @property
    def transport(self) -> Transport:
        """Reaches nobody."""
        return self

    async def call(self, call: Call) -> Reply:
        """See `Transport.call`."""
        raise SessionLost("there is no other gateway")

    async def stream(self, call: Call) -> AsyncGenerator[bytes, None]:
        """See `Transport.stream`."""
        raise SessionLost("there is no other gateway")
        yield b""

    async def close(self) -> None:
        """See `Transport.close`."""

    async def claim(self, key: str, value: str) -> str:
        """See `Peers`."""
        return self._keys.setdefault(key, value)

    async def release(self, key: str) -> None:
        """See `Peers`."""
        self._keys.pop(key, None)

    def leaving(self) -> bool:
        """See `Peers`."""
        return False


class PeersOfCluster:
    """The gateways of an application of Serve.

    Args:
        application, deployment, replica: names of this one.
    """

    def __init__(self, application: str, deployment: str, replica: str) -> None:
        self.replica = replica
        self._application = application
        self._directory = Directory(application, deployment)
        self._handle: DeploymentHandle[None] = DeploymentHandle(deployment, application)
        self._transport = ReplicaTransport(deployment, self._handle)
        self._listener: Listener | None = None
        self._starting = asyncio.Lock()
        self._deployment = deployment
        self._leaving = False
        self._looked = time.monotonic()

    async def start(self, own: Transport) -> None:
        """See `Peers`."""
        async with self._starting:
            if self._listener is None:
                listener = Listener(own.call, own.stream, lambda: 0)
                await self._directory.put(self.replica, await listener.start(node_address()))
                self._listener = listener

    async def stop(self) -> None:
        """See `Peers`."""
        if self._listener is not None:
            await self._listener.stop()
            await self._directory.remove(self.replica)
        await self._transport.close()

    @property
    def transport(self) -> Transport:
        """See `Peers`."""
        return self._transport

    async def claim(self, key: str, value: str) -> str:
        """See `Peers`."""
        found = await asyncio.to_thread(kv_put_new, self._entry(key), value.encode())
        return found.decode()

    async def release(self, key: str) -> None:
        """See `Peers`."""
        await asyncio.to_thread(kv_delete, self._entry(key))

    def leaving(self) -> bool:
        """See `Peers`; as of the last look, which is a few seconds old."""
        now = time.monotonic()
        if now > self._looked + _LOOK_SECONDS:
            self._looked = now
            self._look = asyncio.ensure_future(self._look_up())
        return self._leaving

    async def _look_up(self) -> None:
        with suppress(RayError, RayServeException, RuntimeError):  # the control plane may be starting again
            names = (self._application, self._deployment, self.replica)
            self._leaving = await asyncio.to_thread(is_leaving, *names)

    def _entry(self, key: str) -> bytes:
        return f"{self._application}/run keys/{key}".encode()
