"""The replica transport: reaches a deployment of the same application on replicas of its own.

The Serve handle reports which replicas run, and wakes a deployment that was scaled to zero. The calls go to
the replicas directly, those of a session only to the replica that its id names. Undelivered calls, calls
refused by a full queue, and model calls whose replica died are retried on another replica, streams only
before their first event. If all queues are full, the call is `Overloaded`. Any other call whose replica died
is `Unavailable`, or `SessionLost` if that replica held its session.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from gym_serve.cluster.routing.balancing import Balancer, members_of
from gym_serve.cluster.routing.rpc import (
    Channel,
    ConnectError,
    ConnectionLostError,
    ConnectTimeoutError,
    Directory,
    NotDeliveredError,
    QueueFullError,
)
from gym_serve.cluster.serve_compat import local_handle, this_process
from gym_serve.servers.context import closing, patience, time_limit
from gym_serve.servers.sessions import RESTORE, replica_of
from gym_serve.servers.transport import Call, Reply
from gym_serve.types.errors import DeadlineExceeded, GymError, Overloaded, SessionLost, Unavailable

T = TypeVar("T")
_Parts = AsyncGenerator[bytes, None]

_AVOIDED_SECONDS = 1.0  # for which a replica that cannot be reached is skipped
_TRIES = 3  # to reach the replica of a session: a busy machine may not accept in time
_PATIENCE_SECONDS = 30.0  # how long a call waits for a replica that can be reached
_PAUSE_SECONDS = 0.05
_RERUNS = 1  # of a call whose replica died: it may be the call that kills it
_RETRY_SECONDS = 1.0  # the hint of a full queue
_REPEATABLE = ("v1/", "seed_session", RESTORE)  # operations whose effect is gone with their replica


class ReplicaTransport:
    """Reaches the replicas of a deployment."""

    def __init__(self, server: str, handle: DeploymentHandle[Any]) -> None:
        self.server = server
        self.handle = handle
        id = handle.deployment_id
        self._members = members_of(id.app_name, id.name)
        self._directory = Directory(id.app_name, id.name)
        self._balancer = Balancer(self._load)
        self._channels: dict[str, Channel] = {}
        self._opening: dict[str, asyncio.Task[Channel]] = {}
        self._avoided: dict[str, float] = {}
        self._ping: DeploymentHandle[Any] | None = None
        self._waking: asyncio.Task[None] | None = None

    async def call(self, call: Call) -> Reply:
        return await self._send(call, Channel.call)

    async def stream(self, call: Call) -> _Parts:
        deadline = None if call.timeout is None else time.monotonic() + call.timeout
        first, parts = await self._send(call, _begin_stream)
        async with closing(parts):
            while first is not None:
                yield first
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                first = await self._within(left, call, _next_part(parts))

    async def _send(self, call: Call, send: Callable[[Channel, Call], Awaitable[T]]) -> T:
        """What ``send`` returns for the replica that takes the call, within its deadline."""
        if self._ping is None:
            self._ping = local_handle(self.handle, "ping")  # from now on Serve reports which replicas run
        owner = replica_of(call.session) if call.session else ""
        if owner:
            return await self._within(call.timeout, call, self._send_to_owner(call, owner, send))
        return await self._within(call.timeout, call, self._send_to_any(call, send))

    async def _within(self, timeout: float | None, call: Call, answer: Awaitable[T]) -> T:
        try:
            with time_limit(None if timeout is None else timeout + patience(timeout)):
                return await answer
        except (asyncio.TimeoutError, TimeoutError):
            raise DeadlineExceeded(
                f"{self.server} did not answer {call.op} within {call.timeout:.6g} s", server=self.server
            ) from None
        except (ConnectionLostError, NotDeliveredError):
            raise Unavailable(
                f"a replica of {self.server} died during {call.op}", server=self.server
            ) from None
        except GymError as error:
            error.server = error.server or self.server
            raise

    async def close(self) -> None:
        """Close the connections, in the event loop that made the calls."""
        for task in [*self._opening.values(), *filter(None, [self._waking])]:
            task.cancel()
        channels, self._channels = self._channels, {}
        await asyncio.gather(*(channel.close() for channel in channels.values()))
        if self._ping is not None:
            await self._ping.shutdown_async()  # type: ignore[no-untyped-call]
            self._ping = None

    async def _send_to_owner(
        self, call: Call, owner: str, send: Callable[[Channel, Call], Awaitable[T]]
    ) -> T:
        try:
            return await send(await self._owner(owner), call)
        except QueueFullError as busy:
            raise Overloaded(
                f"the queue of {self.server} is full: {busy}", retry_after=_RETRY_SECONDS
            ) from None
        except (ConnectError, NotDeliveredError):
            pass
        except ConnectionLostError:
            try:
                await self._owner(owner)
            except ConnectError:
                pass
            else:
                raise Unavailable(f"the connection to {self.server} broke during {call.op}") from None
        raise SessionLost(f"replica {owner[:64]} of {self.server}, which held the session, died")

    async def _send_to_any(self, call: Call, send: Callable[[Channel, Call], Awaitable[T]]) -> T:
        give_up = time.monotonic() + _PATIENCE_SECONDS
        full: set[str] = set()
        broken = 0
        while True:
            replica = self._balancer.choose(self._reachable() - full, call.affinity)
            if replica is None:
                if full:
                    raise Overloaded(f"the queues of {self.server} are full", retry_after=_RETRY_SECONDS)
                if self._members.running:
                    await asyncio.sleep(_PAUSE_SECONDS)
                else:
                    asleep = time.monotonic()
                    await self._wake()  # a large model takes minutes to start
                    give_up += time.monotonic() - asleep
            else:
                try:
                    return await send(await self._channel(replica), call)
                except ConnectError:
                    self._avoided[replica] = time.monotonic() + _AVOIDED_SECONDS
                except NotDeliveredError:
                    pass
                except QueueFullError:
                    full.add(replica)
                except ConnectionLostError:
                    broken += 1
                    if broken > _RERUNS or not call.op.startswith(_REPEATABLE):
                        raise Unavailable(f"a replica of {self.server} died during {call.op}") from None
            if time.monotonic() > give_up:
                raise Unavailable(f"no replica of {self.server} could be reached for {call.op}")

    def _reachable(self) -> frozenset[str]:
        now = time.monotonic()
        self._avoided = {replica: until for replica, until in self._avoided.items() if until > now}
        return self._members.running.difference(self._avoided)

    def _load(self, replica: str) -> int:
        channel = self._channels.get(replica)
        return 0 if channel is None else channel.load

    async def _owner(self, replica: str) -> Channel:
        """The connection to the replica that holds a session, which takes several tries."""
        for _ in range(_TRIES - 1):
            with suppress(ConnectTimeoutError):
                return await self._channel(replica)
        return await self._channel(replica)

    async def _channel(self, replica: str) -> Channel:
        channel = self._channels.get(replica)
        if channel is not None and channel.is_open:
            return channel
        if (opening := self._opening.get(replica)) is None:
            opening = self._opening[replica] = asyncio.create_task(self._open(replica))
            opening.add_done_callback(lambda _: self._opening.pop(replica, None))
        return await asyncio.shield(opening)

    async def _open(self, replica: str) -> Channel:
        self._channels = {name: channel for name, channel in self._channels.items() if channel.is_open}
        address = await self._directory.get(replica)
        if address is None:
            self._members.died(replica)  # e.g. of an earlier application of the same name
            raise ConnectError(f"There is no replica {replica[:64]!r}.")
        try:
            channel = await Channel.open(address, this_process())
        except ConnectTimeoutError:
            raise
        except ConnectError:
            self._members.died(replica)
            await self._directory.remove(replica)
            raise
        self._channels[replica] = channel
        return channel

    async def _wake(self) -> None:
        """Wait until Serve has started a replica: one request for all calls that wait."""
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._woken())
        await asyncio.shield(self._waking)

    async def _woken(self) -> None:
        assert self._ping is not None
        try:
            await self._ping.remote()
        except BackPressureError:
            raise Overloaded(f"the queue of {self.server} is full", retry_after=_RETRY_SECONDS) from None
        except DeploymentUnavailableError:
            raise Unavailable(f"{self.server} failed to deploy. See its logs (gym-serve logs).") from None
        except Exception as error:
            raise Unavailable(
                f"{self.server} could not be reached: {type(error).__name__}: {error}"
            ) from error


async def _begin_stream(channel: Channel, call: Call) -> tuple[bytes | None, _Parts]:
    """The first part of an answer, and the further ones. Until the first one, the call can be retried."""
    parts = channel.stream(call)
    return await _next_part(parts), parts


async def _next_part(parts: _Parts) -> bytes | None:
    return await anext(parts, None)
