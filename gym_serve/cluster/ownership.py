"""Who owns a graph, and when it ends without its owner.

A graph that `Gym.from_graph` deploys on a cluster belongs to a run. One process at a time *holds* it, e.g. a
trainer's actor that Ray has restarted. Once the holder has been gone for the lease, the graph is taken down
by its own gateway (`watch`). The `Claim` lies in Ray's key-value store. Ray says whether the holder lives
(`worker_is_alive`), who has nothing to renew: a trainer may hold Python's lock for minutes.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time

import msgspec
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from gym_serve.cluster.serve_compat import kv_delete, kv_get, kv_put, worker_is_alive

logger = logging.getLogger("gym_serve")

_MOST_SECONDS = 5.0  # between two looks at the holder
_LOOKS = 4  # within a lease


class Terms(msgspec.Struct, frozen=True):
    """What a run asks for."""

    owner: str | None = None  # name of the run; None for one that only this process is part of
    lease_s: float = 300.0  # seconds for which the graph waits for another process of the run
    detached: bool = False


class Claim(msgspec.Struct, frozen=True):
    """A process that holds a graph; ``worker`` and ``node`` are the process and its machine, as Ray names
    them."""

    id: str
    terms: Terms
    worker: str
    node: str
    process: str

    def is_alive(self) -> bool:
        return worker_is_alive(self.worker, self.node)

    def holder(self) -> str:
        run = "" if self.terms.owner is None else f"the run {self.terms.owner!r}, "
        return f"{run}{self.process}{'' if self.is_alive() else ', which is gone'}"


class Ownership:
    """The claim to one graph."""

    def __init__(self, application: str) -> None:
        self._key = f"owner of {application}".encode()

    def claim(self) -> Claim | None:
        value = kv_get(self._key)
        return None if value is None else msgspec.json.decode(value, type=Claim)

    def take(self, terms: Terms) -> Claim:
        """Let this process hold the graph, whoever held it before."""
        context = ray.get_runtime_context()
        process = f"process {os.getpid()} on {socket.gethostname()}"
        worker, node = context.get_worker_id(), context.get_node_id()
        claim = Claim(secrets.token_hex(8), terms, worker, node, process)
        kv_put(self._key, msgspec.json.encode(claim))
        return claim

    def forget(self) -> None:
        """Drop the claim: the graph is gone, or belongs to nobody."""
        kv_delete(self._key)


class Lease:
    """For how long the holder of a claim has been gone. (It reads no clock.)"""

    def __init__(self) -> None:
        self._gone: tuple[str, float] | None = None

    def is_over(self, claim: Claim | None, alive: bool, now: float) -> bool:
        """Whether to take the graph down."""
        if claim is None or alive or claim.terms.detached:
            self._gone = None
            return False
        if self._gone is None or self._gone[0] != claim.id:
            self._gone = (claim.id, now)
        return now - self._gone[1] >= claim.terms.lease_s


def watch(application: str, ended: threading.Event) -> None:
    """Take an application down once its lease is over; block until then, or until it has ``ended``."""
    ownership, lease, pause = Ownership(application), Lease(), 0.0
    while not ended.wait(pause):
        pause = _MOST_SECONDS
        try:
            if (claim := ownership.claim()) is None:
                continue
            pause = min(pause, claim.terms.lease_s / _LOOKS)
            if not lease.is_over(claim, claim.is_alive(), time.monotonic()):
                continue
            if ownership.claim() == claim:  # nobody has taken it over meanwhile
                lease_s, holder = claim.terms.lease_s, claim.holder()
                logger.warning("%s ends, %g s after its owner did: %s", application, lease_s, holder)
                serve.delete(application, _blocking=False)
                ownership.forget()
        except (RayError, RayServeException, RuntimeError) as error:
            # The cluster's control plane, or Serve's, is starting again. The holder is not known to be gone.
            logger.warning("%s: its owner cannot be looked up: %s", application, error)
