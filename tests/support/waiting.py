"""Waiting for what another thread, another process or the other side of a connection does.

It sets no event here, so its state is looked at again and again. A test's own time limit ends a wait in vain.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

__all__ = ["until", "wait_until"]


async def until(condition: Callable[[], object]) -> float:
    """Wait until a condition holds; the seconds that it took."""
    started = time.perf_counter()
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return time.perf_counter() - started


def wait_until(condition: Callable[[], object]) -> None:
    """The same, blocking, for conditions that cost more: what Ray says, which processes there are."""
    while not condition():
        time.sleep(0.05)
