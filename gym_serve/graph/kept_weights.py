"""The weights that the models of a running graph have now, kept for replicas that start later.

An actor keeps them, as they have to outlive the driver that brought them: what lies in Ray's object store
goes with the process that put it there. There is one for a graph, made with its first update; it ends when
Serve has deleted the graph. With its machine the weights are lost, and a replica that starts then has those
of the graph file, and says so by its version.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from typing import Any, NamedTuple

import ray

from gym_serve.routing.serve_compat import is_being_deleted

__all__ = ["Kept", "forget", "keep", "kept", "settle"]

_NAMESPACE = "gym_serve"
_WATCH_SECONDS = 1.0  # between two looks whether the graph is there
_LOOKS = 3  # in a row that do not find it: Serve's controller may be restarting


class Kept(NamedTuple):
    """Weights of one model.

    Attributes:
        serial: counts the updates of all models of the graph, from 1; a version's name may come again.
        version: their name.
        path: where they lie; None for tensors.
        tensors: the reference to their bytes in the object store, inside a list, as Ray would fetch it
            otherwise; empty where they lie at a path.
    """

    serial: int
    version: str
    path: str | None
    tensors: list[Any]


class _Keeper:
    """The actor.

    Args:
        application: the graph that it ends with.
    """

    def __init__(self, application: str) -> None:
        self._now: dict[str, Kept] = {}
        self._before: dict[str, Kept | None] = {}
        self._serials = itertools.count(1)
        threading.Thread(target=self._end_with, args=(application,), daemon=True).start()

    def keep(self, model: str, version: str, path: str | None, tensors: bytes | None) -> int:
        references = [] if tensors is None else [ray.put(tensors)]
        self._before[model] = self._now.get(model)
        self._now[model] = Kept(next(self._serials), version, path, references)
        return self._now[model].serial

    def settle(self, model: str, serial: int, accepted: bool) -> None:
        if self._now[model].serial != serial:
            return  # another driver has brought others
        before = self._before.pop(model)
        if not accepted:
            del self._now[model]
            if before is not None:
                self._now[model] = before

    def kept(self, model: str) -> Kept | None:
        return self._now.get(model)

    def _end_with(self, application: str) -> None:
        missed = 0
        while missed < _LOOKS:
            time.sleep(_WATCH_SECONDS)
            missed = missed + 1 if asyncio.run(is_being_deleted(application)) else 0
        forget(application)


def keep(application: str, model: str, version: str, path: str | None, tensors: bytes | None) -> int:
    """Let replicas that start from now on begin with these weights; their serial number.

    Args:
        application, model: the graph, and the model in it.
        version: name of the weights.
        path: where they lie.
        tensors: or their bytes.
    """
    keeper: Any = ray.remote(num_cpus=0)(_Keeper)
    keeper = keeper.options(
        name=_name(application), namespace=_NAMESPACE, lifetime="detached", get_if_exists=True
    ).remote(application)
    serial: int = ray.get(keeper.keep.remote(model, version, path, tensors))
    return serial


def settle(application: str, model: str, serial: int, *, accepted: bool) -> None:
    """End an update: the weights before it are dropped, or, where it failed, are the current ones again."""
    if (keeper := _found(application)) is not None:
        ray.get(keeper.settle.remote(model, serial, accepted))


def kept(application: str, model: str) -> Kept | None:
    """The current weights of a model; None where it has those of the graph file."""
    if (keeper := _found(application)) is None:
        return None
    found: Kept | None = ray.get(keeper.kept.remote(model))
    return found


def forget(application: str) -> None:
    """Drop the weights of all models of a graph."""
    if (keeper := _found(application)) is not None:
        ray.kill(keeper)


def _name(application: str) -> str:
    return f"weights of {application}"


def _found(application: str) -> Any:
    try:
        return ray.get_actor(_name(application), namespace=_NAMESPACE)
    except ValueError:  # there is none: nothing was updated
        return None
