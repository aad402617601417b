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
from typing import Any, Generic, TypeVar
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
    there, running = _loop(), _Running(work)
    _put(there, running.start)
    try:
        return await running.answer
    except asyncio.CancelledError:
        _put(there, running.cancel)
        raise


def wait(work: Coroutine[Any, Any, T]) -> T:
    """The same, blocking; an interrupt cancels the work.

    Raises:
        RuntimeError: called on that loop itself, which would wait for itself.
    """
    there = _loop()
    if _here() is there:
        work.close()
        raise RuntimeError("a blocking call of Gym was made on its own event loop; await the async form")
    running = asyncio.run_coroutine_threadsafe(work, there)
    try:
        return running.result()
    except BaseException:
        running.cancel()
        raise


def _here() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class _Running(Generic[T]):
    """A coroutine that runs there, and its answer here. (In closures the same takes 1 KB more, per call.)"""

    __slots__ = ("_task", "_work", "answer")

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self.answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._work = work

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._work)
        self._task.add_done_callback(self._done)

    def cancel(self) -> None:
        self._task.cancel()

    def _done(self, task: asyncio.Task[T]) -> None:
        _put(self.answer.get_loop(), self._hand_over)

    def _hand_over(self) -> None:
        if self.answer.done():
            return  # cancelled meanwhile
        if self._task.cancelled():
            self.answer.cancel()
        elif (error := self._task.exception()) is not None:
            self.answer.set_exception(error)
        else:
            self.answer.set_result(self._task.result())


def _put(loop: asyncio.AbstractEventLoop, work: Callable[[], object]) -> None:
    queue = _queues.get(loop) or _queues.setdefault(loop, _Queue())
    queue.put(loop, work)
