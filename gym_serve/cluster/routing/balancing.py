"""Which replica takes a call that belongs to no session: `Members` are those that run, `Balancer` chooses.

Both are pure. Two replicas are drawn and the less busy one takes it ("power of two choices", Mitzenmacher
2001): callers with the same outdated loads do not all pick the same replica. The calls of one episode stay on
one replica, which has their prefix cached, as long as it runs.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from functools import cache

_KEPT = 65_536  # episodes whose replica is remembered


class Balancer:
    """Chooses replicas."""

    def __init__(self, load: Callable[[str], int]) -> None:
        self._load = load
        self._kept: OrderedDict[str, str] = OrderedDict()

    def choose(self, replicas: Collection[str], affinity: str | None = None) -> str | None:
        """One of ``replicas``; None if there are none.

        Args:
            affinity: key of the episode; None for a call that may go anywhere.
        """
        if not replicas:
            return None
        if affinity is None:
            return self._less_busy(replicas)
        replica = self._kept.pop(affinity, None)
        if replica is None or replica not in replicas:
            replica = self._less_busy(replicas)
        self._kept[affinity] = replica
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return replica

    def _less_busy(self, replicas: Collection[str]) -> str:
        if len(replicas) == 1:
            return next(iter(replicas))
        return min(random.sample(sorted(replicas), 2), key=self._load)


class Members:
    """The running replicas of one deployment, by their unique ids."""

    def __init__(self) -> None:
        self.running: frozenset[str] = frozenset()

    def update(self, replicas: Iterable[str]) -> None:
        """Serve's news: these are running."""
        self.running = frozenset(replicas)

    def died(self, replica: str) -> None:
        """The process of ``replica`` is gone; Serve's own news of it may take a while."""
        self.running -= {replica}


@cache
def members_of(application: str, deployment: str) -> Members:
    """The members of a deployment."""
    return Members()
