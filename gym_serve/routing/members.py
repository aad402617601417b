"""`Members`: the replicas of a deployment that take new work, as Serve tells this process.

One per deployment and process: `MemberRouter` writes it and the replica transports read it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

__all__ = ["Members", "members_of"]


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
