"""New weights for every replica of a model, those that start later included.

Who brings weights hands them to the keeper of the graph (`gym_serve.graph.kept_weights`) and tells each
replica, which fetches them there: tensors go through Ray's object store, one copy on each machine. (A
reference inside a message would have to be pickled, and nothing that may come over HTTP is unpickled.)

A replica that starts asks the keeper twice, before it says where it listens and after: an update that it
is not told of, as it listened too late, is one that it finds.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import ray

from gym_serve.graph.kept_weights import Kept, keep, kept, settle
from gym_serve.routing.rpc import Address, Broken, Busy, Channel, Directory, Silent, Undelivered, Unreachable
from gym_serve.servers.model import ModelServer, PauseMode
from gym_serve.servers.runner import ServerRunner
from gym_serve.servers.transport import Call, Reply, encode
from gym_serve.types.errors import BadRequest, GymError, InvalidRequest, Unavailable

__all__ = ["CurrentWeights", "update_weights"]

_ALL = "weights/"
"""Begins the operations that a call to any replica does on all of them."""
_EACH = "each/weights/"
"""Begins the same ones, for the replica alone that is called."""
_UPDATE, _FETCH = f"{_ALL}update", f"{_EACH}fetch"


class _Fetch(msgspec.Struct):
    mode: PauseMode = "keep"


class _Update(msgspec.Struct):
    path: str
    version: str
    mode: PauseMode = "keep"


class CurrentWeights:
    """The weights of a replica.

    Args:
        application: the graph.
        host: runs the replica's server.
    """

    def __init__(self, application: str, host: ServerRunner) -> None:
        self._application = application
        self._host = host
        self._loaded = 0
        self._loading = asyncio.Lock()

    def takes(self, call: Call) -> bool:
        """Whether a call is for `dispatch`."""
        return call.op.startswith(_EACH) or (call.op.startswith(_ALL) and call.op in self._host.operations)

    async def dispatch(self, call: Call) -> Reply:
        """Answer a call about weights; failures are in the reply. It waits for no other call."""
        name = self._host.server.name
        try:
            if call.op == _FETCH:
                await self.fetch(msgspec.json.decode(call.body, type=_Fetch).mode)
                return Reply.of({})
            if call.op.startswith(_EACH):
                return await self._host.dispatch(call._replace(op=call.op.removeprefix("each/")))
            if call.op == _UPDATE:
                new = msgspec.json.decode(call.body, type=_Update)
                await update_weights(self._application, name, new.version, path=new.path, mode=new.mode)
                return Reply.of({"weight_version": new.version})
            replies = await _tell_all(self._application, name, call._replace(op=f"each/{call.op}"))
            return max(replies, key=lambda reply: reply.status)
        except msgspec.DecodeError as error:
            return Reply.failed(InvalidRequest(str(error), server=name))
        except GymError as error:
            error.server = error.server or name
            return Reply.failed(error)

    async def fetch(self, mode: PauseMode = "keep") -> None:
        """Load the graph's current weights, unless the server has them.

        Raises:
            BadRequest: the server takes no weights, or not these.
            Unavailable: they are lost, or the engine broke while loading them.
        """
        server = self._host.server
        if not isinstance(server, ModelServer):
            raise BadRequest(f"{server.name} is no model")
        async with self._loading:
            while (current := await self._current(server.name)) is not None:
                weights = await asyncio.to_thread(_fetched, current)
                await server.update_weights(weights, current.version, mode)
                self._loaded = current.serial

    async def _current(self, model: str) -> Kept | None:
        current = await asyncio.to_thread(kept, self._application, model)
        return None if current is None or current.serial == self._loaded else current


def _fetched(current: Kept) -> Path | bytes:
    if current.path is not None:
        return Path(current.path)
    try:
        blob: bytes = ray.get(current.tensors[0])
    except ray.exceptions.RayError as error:
        raise Unavailable(f"the weights {current.version!r} are not in the object store: {error}") from None
    return blob


async def update_weights(
    application: str,
    model: str,
    version: str,
    *,
    path: str | None = None,
    tensors: bytes | None = None,
    mode: PauseMode = "keep",
) -> None:
    """Give every replica of a model new weights, and keep them for those that start later.

    Args:
        application, model: the graph, and the model in it.
        version: name of the weights.
        path: where they lie.
        tensors: or their bytes.
        mode: what becomes of the generations that run.

    Raises:
        GymError: the failure of a replica; others may have the new weights, and those that start later
            have the ones before.
    """
    serial = await asyncio.to_thread(keep, application, model, version, path, tensors)
    accepted = False
    try:
        for reply in await _tell_all(application, model, Call(_FETCH, encode({"mode": mode}))):
            reply.json()
        accepted = True
    finally:
        await asyncio.to_thread(settle, application, model, serial, accepted=accepted)


async def _tell_all(application: str, server: str, call: Call) -> list[Reply]:
    """The replies of all replicas; those that died, and have not been replaced yet, give none."""
    directory = Directory(application, server)
    addresses = await directory.all()
    told = (_tell(directory, replica, address, call) for replica, address in addresses.items())
    return [reply for reply in await asyncio.gather(*told) if reply is not None]


async def _tell(directory: Directory, replica: str, address: Address, call: Call) -> Reply | None:
    """The reply of one replica, its failures included: the others are not to be left half way."""
    try:
        channel = await Channel.open(address)
    except Silent as error:
        return Reply.failed(Unavailable(f"replica {replica} does not answer: {error}"))
    except Unreachable:
        await directory.remove(replica)
        return None
    try:
        return await channel.call(call)
    except (Undelivered, Busy, Broken) as error:
        return Reply.failed(Unavailable(f"replica {replica} did not take {call.op}: {error}"))
    finally:
        await channel.close()
