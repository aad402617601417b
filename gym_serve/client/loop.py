"""The event loop on which all transports of this process live, whichever loop or thread calls.

A Serve handle whose router runs on the caller's loop is the cheap kind (see `serve_compat`), but cannot move
to another loop; a trainer calls from its own loop, from none, or from several. Calls between two loops are
queued and handled in batches: a wake-up and a thread-safe future for each cost the driver a fifth more.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import uvloop

T = TypeVar("T")

_GRACE_SECONDS = 10.0  # for which an interrupt waits for what it cancels: an author's code may not let go


class _Queue:
    """Work for one loop, put by any thread."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        self._woken = False

    def put(self, loop: asyncio.AbstractEventLoop, work: Callable[[], object]) -> None:
        self._waiting.append(work)
        if not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # the loop is closed: nothing waits there any more
                loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._woken = False  # first: later work must wake the loop again
        while self._waiting:
            self._waiting.popleft()()


_queues: WeakKeyDictionary[asyncio.AbstractEventLoop, _Queue] = WeakKeyDictionary()
_pumps: set[asyncio.Future[None]] = set()  # event loops keep no strong references to their tasks
_starting = threading.Lock()


def _loop() -> asyncio.AbstractEventLoop:
    with _starting:  # the first calls may come from several threads at once
        return _started()


@lru_cache(maxsize=1)
def _started() -> asyncio.AbstractEventLoop:
    loop = uvloop.new_event_loop()
    threading.Thread(target=loop.run_forever, name="gym_serve", daemon=True).start()
    return loop


async def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on that loop and await it from any other; cancelling the call cancels the coroutine."""
    there, running = _loop(), _Running(work)
    _put(there, running.start)
    try:
        return await running.answer
    except asyncio.CancelledError:
        _put(there, running.cancel)
        raise


def wait(work: Coroutine[Any, Any, T]) -> T:
    """Like `run`, but blocking; an interrupt cancels the coroutine, and waits until it has ended. Raises
    RuntimeError: called on that loop itself, which would deadlock."""
    there, running = _loop(), _Blocking(work)
    if _here() is there:
        work.close()
        raise RuntimeError("a blocking call of Gym was made on its own event loop; await the async form")
    try:
        there.call_soon_threadsafe(running.start)
        return running.answer.result()
    except BaseException:  # an interrupt comes at any point, before the start as well
        there.call_soon_threadsafe(running.cancel)
        concurrent.futures.wait([running.answer], _GRACE_SECONDS)
        raise


def start(work: Coroutine[Any, Any, object]) -> None:
    """Run a coroutine on that loop, from any thread, and wait for nothing."""
    asyncio.run_coroutine_threadsafe(work, _loop())


def _here() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class _Running(Generic[T]):
    """A coroutine on that loop, and its result on the caller's. (Closures would take 1 KB more per call.)"""

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


class _Blocking(Generic[T]):
    """A coroutine on that loop, and its result for a thread."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self.answer: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._work = work
        self._task: asyncio.Task[T] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._work)
        self._task.add_done_callback(self._done)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:
            self._work.close()
            self._give_up()

    def _give_up(self) -> None:
        self.answer.cancel()
        self.answer.set_running_or_notify_cancel()  # wakes those that wait

    def _done(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self._give_up()
        elif (error := task.exception()) is not None:
            self.answer.set_exception(error)
        else:
            self.answer.set_result(task.result())


def _put(loop: asyncio.AbstractEventLoop, work: Callable[[], object]) -> None:
    queue = _queues.get(loop) or _queues.setdefault(loop, _Queue())
    queue.put(loop, work)


def awaitables(items: AsyncIterator[T], count: int) -> Iterator[Awaitable[T]]:
    """Awaitables of the items of a stream, in their order, as `asyncio.as_completed` has them.

    Call it inside a running event loop.

    Args:
        items: the stream; it is read from the first step on, whether its items are awaited or not.
    """
    done: asyncio.Queue[T | Exception] = asyncio.Queue()

    async def pump() -> None:
        try:
            async for item in items:
                done.put_nowait(item)
        except Exception as error:
            for _ in range(count):
                done.put_nowait(error)

    async def take() -> T:
        item = await done.get()
        if isinstance(item, Exception):
            raise item
        return item

    pumping = asyncio.ensure_future(pump())
    _pumps.add(pumping)
    pumping.add_done_callback(_pumps.discard)
    for _ in range(count):
        yield take()
