"""The event loop on which all handles of this process live, whoever calls.

A Serve handle whose router runs on the caller's loop is the cheap kind (see `serve_compat`), but
it belongs to that loop; a trainer calls from its own loop, from none, or from several. The loop
runs in a daemon thread for the rest of the process, as Serve's own: handles cannot move.

What one loop has for another waits in a queue, and is done in one go when that loop looks: a wake-up from
another thread and a thread-safe future for every call cost the driver a fifth more CPU and memory.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

__all__ = ["run", "wait"]

T = TypeVar("T")


class _Queue:
    """What is to be done in one loop, put from any thread."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        self._woken = False

    def put(self, loop: asyncio.AbstractEventLoop, work: Callable[[], object]) -> None:
        self._waiting.append(work)
        if not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
                loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._woken = False  # first: what is put from now on wakes the loop again
        while self._waiting:
            self._waiting.popleft()()


_queues: WeakKeyDictionary[asyncio.AbstractEventLoop, _Queue] = WeakKeyDictionary()


_starting = threading.Lock()


def _loop() -> asyncio.AbstractEventLoop:
    with _starting:  # the first calls may come from several threads at once
        return _started()


@lru_cache(maxsize=1)
def _started() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="gym_serve", daemon=True).start()
    return loop


async def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine there and await it from any other loop; cancelling cancels it."""
    here, there = asyncio.get_running_loop(), _loop()
    answer: asyncio.Future[T] = here.create_future()
    tasks: list[asyncio.Task[T]] = []

    def start() -> None:
        tasks.append(asyncio.ensure_future(work))
        tasks[0].add_done_callback(lambda task: _put(here, lambda: _hand_over(task, answer)))

    def cancel() -> None:
        tasks[0].cancel()

    _put(there, start)
    try:
        return await answer
    except asyncio.CancelledError:
        _put(there, cancel)
        raise


def wait(work: Coroutine[Any, Any, T]) -> T:
    """The same, blocking."""
    return asyncio.run_coroutine_threadsafe(work, _loop()).result()


def _put(loop: asyncio.AbstractEventLoop, work: Callable[[], object]) -> None:
    queue = _queues.get(loop) or _queues.setdefault(loop, _Queue())
    queue.put(loop, work)


def _hand_over(task: asyncio.Task[T], answer: asyncio.Future[T]) -> None:
    if answer.done():
        return  # cancelled meanwhile
    if task.cancelled():
        answer.cancel()
    elif (error := task.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(task.result())
