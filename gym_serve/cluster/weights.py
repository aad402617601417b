"""New weights for every replica of a model, including those that start later.

`update_weights` puts the weights into the graph's `WeightStore`, an actor that outlives the driver, and each
replica fetches them from there: tensors go through Ray's object store. (Nothing that may come over HTTP is
unpickled.) A replica that starts reads the store before it publishes its address and after, or it could miss
an update. If the store's machine is lost, such a replica has the weights of the graph file, and says so.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import ray

from gym_serve.cluster.routing.rpc import (
    Address,
    Channel,
    ConnectError,
    ConnectionLostError,
    ConnectTimeoutError,
    Directory,
    NotDeliveredError,
    QueueFullError,
)
from gym_serve.cluster.serve_compat import is_being_deleted
from gym_serve.servers.model import PAUSE, RESUME, HoldMode, ModelServer, PauseMode
from gym_serve.servers.runner import EACH, ServerRunner
from gym_serve.servers.transport import Call, Reply, encode
from gym_serve.types.errors import BadRequest, GymError, InvalidRequest, Unavailable

__all__ = [
    "CurrentWeights",
    "WeightStore",
    "check_reach",
    "hold",
    "release",
    "replicas",
    "tell_all",
    "update_weights",
]

_ALL = "weights/"  # begins the operations that a call to any replica does on all of them
_UPDATE, _FETCH = f"{_ALL}update", f"{EACH}weights/fetch"

_NAMESPACE = "gym_serve"
_CHECK_SECONDS = 1.0  # between two checks whether the graph still exists
_MISSES = 3  # in a row until the store ends: Serve's controller may be restarting


class _Fetch(msgspec.Struct):
    mode: PauseMode = "keep"


class _Update(msgspec.Struct):
    path: str
    version: str
    mode: PauseMode = "keep"


class CurrentWeights:
    """The weights of a replica of a graph."""

    def __init__(self, application: str, runner: ServerRunner) -> None:
        self._application = application
        self._runner = runner
        self._loaded = 0
        self._loading = asyncio.Lock()

    def takes(self, call: Call) -> bool:
        return call.op.startswith(EACH) or (call.op.startswith(_ALL) and call.op in self._runner.operations)

    async def dispatch(self, call: Call) -> Reply:
        """Answer a call about weights; failures are in the reply. It waits for no other call."""
        name = self._runner.server.name
        try:
            if call.op == _FETCH:
                await self.fetch(msgspec.json.decode(call.body, type=_Fetch).mode)
                return Reply.of({})
            if call.op.startswith(EACH):
                is_operation = call.op in self._runner.operations
                op = call.op if is_operation else call.op.removeprefix(EACH)
                return await self._runner.dispatch(call._replace(op=op))
            if call.op == _UPDATE:
                new = msgspec.json.decode(call.body, type=_Update)
                await update_weights(self._application, name, new.version, path=new.path, mode=new.mode)
                return Reply.of({"weight_version": new.version})
            replies = await tell_all(self._application, name, call._replace(op=f"{EACH}{call.op}"))
            return max(replies, key=lambda reply: reply.status)
        except msgspec.DecodeError as error:
            return Reply.failed(InvalidRequest(str(error), server=name))
        except GymError as error:
            error.server = error.server or name
            return Reply.failed(error)

    async def fetch(self, mode: PauseMode = "keep") -> None:
        """Load the graph's current weights, unless the server has them.

        Raises `BadRequest` if the server does not take these, `Unavailable` if they are lost.
        """
        server = self._runner.server
        if not isinstance(server, ModelServer):
            raise BadRequest(f"{server.name} is not a model")
        async with self._loading:
            while (current := await self._current(server.name)) is not None:
                weights = await asyncio.to_thread(_fetched, current)
                await server.update_weights(weights, current.version, mode)
                self._loaded = current.serial

    async def hold(self) -> None:
        """Hold the calls of a server that started while its model is held."""
        server = self._runner.server
        held = WeightStore(self._application).held
        if isinstance(server, ModelServer) and await asyncio.to_thread(held, server.name):
            await server.hold("keep")

    async def _current(self, model: str) -> StoredWeights | None:
        current = await asyncio.to_thread(WeightStore(self._application).current, model)
        return None if current is None or current.serial == self._loaded else current


def _fetched(current: StoredWeights) -> Path | bytes | None:
    if current.path is not None:
        return Path(current.path)
    if not current.tensors:
        return None
    try:
        blob: bytes = ray.get(current.tensors[0])
    except ray.exceptions.RayError as error:
        raise Unavailable(f"the weights {current.version!r} are not in the object store: {error}") from None
    return blob


def check_reach(public: Mapping[str, Any], server: str) -> None:
    """Raise `BadRequest` if changes cannot reach all replicas of a server of a graph (as ``/graph`` shows
    it): it runs elsewhere, or also inside another server's replicas."""
    kinds = ("models", "resources", "agents")
    nodes = {name: node for kind in kinds for name, node in (public.get(kind) or {}).items()}
    if (nodes.get(server) or {}).get("type") == "http":
        raise BadRequest(f"{server} runs elsewhere (`type: http`): change or pause it there")
    for name, node in nodes.items():
        if server in (node.get("inline") or ()):
            place = f"{server} also runs inside {name}, where no change and no pause reaches it"
            raise BadRequest(f"{place}: take it out of `inline` of {name}")


async def update_weights(
    application: str,
    model: str,
    version: str,
    *,
    path: str | None = None,
    tensors: bytes | None = None,
    mode: PauseMode = "keep",
) -> None:
    """Give every replica of a model new weights, and store them for those that start later.

    There is neither ``path`` nor ``tensors`` where the trainer has replaced them itself. Raises the
    `GymError` of a replica; others may have the new weights, and those that start later have the old ones.
    """
    store = WeightStore(application)
    serial = await asyncio.to_thread(store.put, model, version, path, tensors)
    try:
        for reply in await tell_all(application, model, Call(_FETCH, encode({"mode": mode}))):
            reply.json()
    except BaseException:
        await asyncio.to_thread(store.rollback, model, serial)
        raise
    await asyncio.to_thread(store.commit, model, serial)


async def replicas(application: str, server: str) -> Mapping[str, Callable[[Call], Awaitable[Reply]]]:
    """How to call each replica of a server that runs now, by its name."""
    directory = Directory(application, server)

    def calling(replica: str, address: Address) -> Callable[[Call], Awaitable[Reply]]:
        async def call(call: Call) -> Reply:
            reply = await _tell(directory, replica, address, call)
            return reply or Reply.failed(Unavailable(f"replica {replica} of {server} is gone"))

        return call

    return {name: calling(name, address) for name, address in (await directory.all()).items()}


async def hold(application: str, model: str, mode: HoldMode) -> None:
    """Hold the calls of a model, also at replicas that start later; see `ModelServer.hold`. Raises the
    `GymError` of a replica; the others hold their calls."""
    await asyncio.to_thread(WeightStore(application).hold, model, True)
    for reply in await tell_all(application, model, Call(PAUSE, encode({"mode": mode}))):
        reply.json()


async def release(application: str, model: str) -> None:
    """Let the calls of a model begin again. Raises the `GymError` of a replica; the others answer calls."""
    await asyncio.to_thread(WeightStore(application).hold, model, False)
    for reply in await tell_all(application, model, Call(RESUME)):
        reply.json()


async def tell_all(application: str, server: str, call: Call) -> list[Reply]:
    """The replies of all replicas; those that died, and have not been replaced yet, give none."""
    directory = Directory(application, server)
    addresses = await directory.all()
    answers = (_tell(directory, replica, address, call) for replica, address in addresses.items())
    return [reply for reply in await asyncio.gather(*answers) if reply is not None]


async def _tell(directory: Directory, replica: str, address: Address, call: Call) -> Reply | None:
    """The reply of one replica, its failures included: the others must not be left half way."""
    try:
        async with Channel.opened(address) as channel:
            return await channel.call(call)
    except ConnectTimeoutError as error:
        return Reply.failed(Unavailable(f"replica {replica} does not answer: {error}"))
    except ConnectError:
        await directory.remove(replica)
        return None
    except (NotDeliveredError, QueueFullError, ConnectionLostError) as error:
        return Reply.failed(Unavailable(f"replica {replica} did not take {call.op}: {error}"))


class StoredWeights(NamedTuple):
    """Weights of one model.

    Attributes:
        tensors: the reference to their bytes in the object store, inside a list, as Ray would fetch it
            otherwise; empty if they have a path, or are elsewhere.
    """

    serial: int  # counts the updates of all models of the graph, from 1; the name of a version may come again
    version: str
    path: str | None  # their directory; None for tensors
    tensors: list[Any]


class WeightStore:
    """The current weights of the models of a graph."""

    def __init__(self, application: str) -> None:
        self._application = application
        self._name = f"weights of {application}"

    def put(self, model: str, version: str, path: str | None, tensors: bytes | None) -> int:
        """Make weights the current ones, until `rollback`; returns a serial number for it and `commit`."""
        return int(ray.get(self._made().put.remote(model, version, path, tensors)))

    def hold(self, model: str, held: bool) -> None:
        ray.get(self._made().hold.remote(model, held))

    def held(self, model: str) -> bool:
        return bool(self._ask("held", model))

    def commit(self, model: str, serial: int) -> None:
        """End an update that succeeded: drop the weights before it."""
        self._ask("commit", model, serial)

    def rollback(self, model: str, serial: int) -> None:
        """End an update that failed: the weights before it are the current ones again."""
        self._ask("rollback", model, serial)

    def current(self, model: str) -> StoredWeights | None:
        """The current weights of a model; None if it has those of the graph file."""
        return cast("StoredWeights | None", self._ask("current", model))

    def updates(self, model: str) -> int:
        """How often all replicas of a model got new weights."""
        return int(self._ask("updates", model) or 0)

    def delete(self) -> None:
        if (store := self._actor()) is not None:
            ray.kill(store)

    def _ask(self, method: str, *arguments: Any) -> Any:
        store = self._actor()
        return None if store is None else ray.get(getattr(store, method).remote(*arguments))

    def _made(self) -> Any:
        store: Any = ray.remote(num_cpus=0)(_StoreActor)
        return store.options(
            name=self._name, namespace=_NAMESPACE, lifetime="detached", get_if_exists=True
        ).remote(self._application)

    def _actor(self) -> Any:
        try:
            return ray.get_actor(self._name, namespace=_NAMESPACE)
        except ValueError:  # there is none: nothing was updated
            return None


class _StoreActor:
    """The actor behind a `WeightStore`; it ends with the graph."""

    def __init__(self, application: str) -> None:
        self._current: dict[str, StoredWeights] = {}
        self._previous: dict[str, StoredWeights | None] = {}
        self._serials = itertools.count(1)
        self._updates: Counter[str] = Counter()
        self._held: set[str] = set()
        threading.Thread(target=self._end_with, args=(application,), daemon=True).start()

    def put(self, model: str, version: str, path: str | None, tensors: bytes | None) -> int:
        references = [] if tensors is None else [ray.put(tensors)]
        self._previous[model] = self._current.get(model)
        self._current[model] = StoredWeights(next(self._serials), version, path, references)
        return self._current[model].serial

    def commit(self, model: str, serial: int) -> None:
        self._updates[model] += 1
        if self._current[model].serial == serial:  # else another driver has brought others
            del self._previous[model]

    def rollback(self, model: str, serial: int) -> None:
        if self._current[model].serial != serial:
            return
        previous = self._previous.pop(model)
        if previous is None:
            del self._current[model]
        else:
            self._current[model] = previous

    def current(self, model: str) -> StoredWeights | None:
        return self._current.get(model)

    def updates(self, model: str) -> int:
        return self._updates[model]

    def hold(self, model: str, held: bool) -> None:
        if held:
            self._held.add(model)
        else:
            self._held.discard(model)

    def held(self, model: str) -> bool:
        return model in self._held

    def _end_with(self, application: str) -> None:
        misses = 0
        while misses < _MISSES:
            time.sleep(_CHECK_SECONDS)
            misses = misses + 1 if asyncio.run(is_being_deleted(application)) else 0
        WeightStore(application).delete()
