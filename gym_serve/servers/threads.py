"""`Threads`: where plain functions of authors run, beside the event loop.

asyncio's own executor has few threads. A function that never returns keeps one from all others, and keeps the
process from ending. It also wakes the loop for every result; here, results that are ready share a waking.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any

from gym_serve.servers.containment import as_exception

_MOST = min(32, (os.cpu_count() or 1) + 4)  # as asyncio has; more would keep the event loop from its turn
_STALL_SECONDS = 0.005  # without a call's begin while others wait, until there is one thread more
_IDLE_SECONDS = 10.0  # without a call, until a thread ends


class ThreadCall:
    """A function that waits for a thread or runs in one; await its ``result``."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.context, self.function = contextvars.copy_context(), function
        self.is_running = self.is_abandoned = False

    def settle(self, value: Any, error: BaseException | None) -> None:
        if self.result.done():
            return
        if error is None:
            self.result.set_result(value)
        else:
            self.result.set_exception(error)


class Threads:
    """The threads of one event loop: as many as asyncio has, and those whose calls were abandoned."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[ThreadCall] = SimpleQueue()
        self._settled: deque[Callable[[], None]] = deque()
        self._lock = Lock()  # of what follows
        self._threads = 0
        self._begun = 0  # number of calls
        self._wakes = False  # whether the loop will settle calls
        self._timer: asyncio.TimerHandle | None = None  # of the loop alone

    def call(self, function: Callable[[], Any]) -> ThreadCall:
        """Run a function in a thread, as soon as one is free."""
        call = ThreadCall(function)
        self._waiting.put(call)
        with self._lock:
            if not self._threads:
                self._add()
        if self._timer is None:
            self._watch()
        return call

    async def run(self, function: Callable[[], Any]) -> Any:
        """Await a function that runs in a thread. What it raises is raised here."""
        return await self.wait(self.call(function))

    async def wait(self, call: ThreadCall) -> Any:
        """Await a call's result; it is abandoned if that is cancelled."""
        try:
            return await asyncio.shield(call.result)
        except asyncio.CancelledError:
            self.abandon(call)
            raise

    def abandon(self, call: ThreadCall) -> None:
        """Nobody waits for a call any more: it does not begin, or leaves its thread to itself."""
        with self._lock:
            call.is_abandoned = True
            self._threads -= call.is_running
        if not call.is_running:
            call.result.cancel()

    def _watch(self, begun: int = -1) -> None:
        """Add a thread if calls wait and none has begun for a while."""
        self._timer = None
        if self._waiting.empty():
            return
        with self._lock:
            if begun == self._begun and self._threads < _MOST:
                self._add()
            begun = self._begun
        self._timer = asyncio.get_running_loop().call_later(_STALL_SECONDS, self._watch, begun)

    def _add(self) -> None:
        self._threads += 1
        loop = asyncio.get_running_loop()
        Thread(target=self._work, args=(loop,), name="gym_serve-call", daemon=True).start()

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        while (call := self._next()) is not None:
            value: Any = None
            failure: BaseException | None = None
            try:
                value = call.context.run(call.function)
            except BaseException as error:
                is_passed_on = isinstance(error, Exception) and not isinstance(error, StopIteration)
                failure = error if is_passed_on else as_exception(error)
            with self._lock:
                call.is_running, is_replaced = False, call.is_abandoned
                self._settled.append(partial(call.settle, value, failure))
                wakes, self._wakes = self._wakes, True
            if not wakes:
                with suppress(RuntimeError):  # the loop is closed: nobody waits
                    loop.call_soon_threadsafe(self._settle)
            if is_replaced:
                return
            del call, value, failure  # before the next one comes

    def _next(self) -> ThreadCall | None:
        """The next call, or None if the thread has waited long enough."""
        while True:
            with suppress(Empty):
                call = self._waiting.get(timeout=_IDLE_SECONDS)
                with self._lock:
                    if not call.is_abandoned:
                        call.is_running = True
                        self._begun += 1
                        return call
                continue
            with self._lock:
                if self._waiting.empty():
                    self._threads -= 1
                    return None

    def _settle(self) -> None:
        self._wakes = False
        while self._settled:
            self._settled.popleft()()
