"""`Session`: a namespace that lasts, in a child process of its own: the sides of supervisor and child.

The two exchange files and single bytes, so the supervisor parses nothing that the child wrote. Between calls
the child is stopped, so threads that the code left behind take no time. In the child, `Interpreter` executes
the code as at an interactive prompt.
"""

from __future__ import annotations

import ast
import gc
import json
import linecache
import os
import select
import signal
import socket
import sys
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from .confinement import confine, reserve
from .output import (
    MAX_ERROR,
    MAX_TRACEBACK,
    Output,
    cut,
    describe,
    nameless_file,
    replace,
    start_of,
    text_of,
    traceback_of,
)
from .watch import REASONS, Watch

INTERRUPT = signal.SIGXCPU
"""The signal that interrupts code; one that programs have no handler of their own for."""

_AGAIN_SECONDS = 0.2


class _TimeUp(BaseException):
    """Raised in code that ran too long; ``except Exception`` does not catch it."""


class Executed(NamedTuple):
    """The outcome of code, without its output."""

    result: str | None  # ``str`` of the last expression, if it is not None
    error: str | None  # the exception that ended it, or None
    trace: str  # its traceback


class Interpreter:
    """Executes code in one namespace, the module ``__main__``."""

    def __init__(self, namespace: dict[str, Any], output: Output) -> None:
        module = types.ModuleType("__main__")
        module.__dict__.update(namespace, __name__="__main__")
        sys.modules["__main__"] = module
        self._names = module.__dict__
        self._output = output
        self._cells = 0
        self._running = False

    def execute(self, code: str, timeout: float, output_limit: int) -> Executed:
        """Execute code, until it ends or `INTERRUPT` comes.

        Args:
            timeout: the seconds after which it comes, for the message.
        """
        self._output.capture()
        self._cells += 1
        name = f"<cell {self._cells}>"
        error = result = None
        trace = ""
        try:
            with self._interruptible():
                result = self._execute(name, code)
        except _TimeUp:
            self._running = False
            error = f"TimeoutError: stopped after {timeout:g} s; variables are kept"
        except SystemExit as end:
            error = f"SystemExit: {text_of(end.code)}; the session goes on"
        except BaseException as fault:
            with reserve():
                error = describe(fault)
                trace = traceback_of(fault, name)
        with reserve():
            if error is not None and error.startswith("MemoryError"):
                gc.collect()
            self._output.flush()
        return Executed(result and cut(result, output_limit), error, trace)

    def _execute(self, name: str, code: str) -> str | None:
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        tree = ast.parse(code, name)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            del tree.body[-1]
        exec(compile(tree, name, "exec", dont_inherit=True), self._names)
        if not isinstance(last, ast.Expr):
            return None
        value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), self._names)
        return None if value is None else str(value)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        def time_up(signum: int, frame: object) -> None:
            if self._running:
                raise _TimeUp

        signal.signal(INTERRUPT, time_up)
        self._running = True
        try:
            yield
        finally:
            self._running = False


class Session:
    """Executes code in one namespace."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._ours, self._theirs = socket.socketpair()
        self._request = nameless_file()
        self._result, self._error, self._trace = (nameless_file() for _ in range(3))
        self._output = Output()

    # The child's side

    def prepare(self, config: dict[str, Any]) -> None:
        self._ours.close()
        confine(config)

    def run(self) -> None:
        interpreter = Interpreter(self._namespace, self._output)
        while self._theirs.recv(1):
            request = json.loads(start_of(self._request, os.fstat(self._request.fileno()).st_size))
            done = interpreter.execute(request["code"], request["timeout"], request["output_limit"])
            with reserve():
                replace(self._result, b"" if done.result is None else b"=" + _bytes(done.result))
                replace(self._error, _bytes(done.error or ""))
                replace(self._trace, _bytes(done.trace))
            self._theirs.send(b".")

    # The supervisor's side

    def started(self, child: int, folder: str | None) -> None:
        """It runs in this process, and may make files in this folder."""
        self._child = child
        self._folder = folder
        self._theirs.close()
        self._ours.setblocking(False)

    def execute(self, request: dict[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
        """Have code executed: the texts are ``stdout``, ``stderr``, ``error`` and ``=`` with the result.
        ``ended`` says how the child ended where it did not survive it, and then there is no text."""
        for file in (self._result, self._error, self._trace):
            replace(file, b"")
        replace(self._request, json.dumps(request).encode())
        try:
            self._forget_answers()
            self._ours.send(b".")
        except OSError:  # it closed its end, or never reads: what it was told before is still there
            return self._killed("it does not answer")
        os.kill(self._child, signal.SIGCONT)
        ended = self._wait(request["timeout"], request["grace"])
        if ended is not None:
            return ended
        os.kill(self._child, signal.SIGSTOP)
        limit = request["output_limit"]
        outputs = zip(self._output.start(limit), self._output.sizes(), strict=True)
        texts = [_noted(*text, limit) for text in outputs]
        return {"ended": None, "starved": False}, [
            texts[0],
            texts[1] + start_of(self._trace, 4 * MAX_TRACEBACK),
            start_of(self._error, 4 * MAX_ERROR),
            start_of(self._result, 4 * limit + 100),
        ]

    def _wait(self, timeout: float, grace: float) -> tuple[dict[str, Any], list[bytes]] | None:
        """Wait for the child's answer, interrupt code that takes too long, and kill what takes no notice."""
        watch = Watch(self._child, self._folder)
        interrupted = 0.0
        while True:
            if self._answered(watch.nap):
                return None
            done, status = os.waitpid(self._child, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                return _ended(f"signal {-code}" if code < 0 else f"exit status {code}")
            excess = watch.excess(timeout)
            if excess == "time" and watch.excess(timeout + grace) == "time":
                return self._killed(f"no answer in {timeout + grace:g} s")
            if excess == "time" and watch.elapsed - interrupted > _AGAIN_SECONDS:
                # Again and again: code may hold one exception in an ``except:`` of its own.
                os.kill(self._child, INTERRUPT)
                interrupted = watch.elapsed
            elif excess not in (None, "time"):
                return self._killed(REASONS[excess], starved=excess == "machine")

    def _answered(self, seconds: float) -> bool:
        readable, _, _ = select.select([self._ours], [], [], seconds)
        if not readable:
            return False
        if self._ours.recv(1):
            return True
        time.sleep(seconds)  # it closed its end: there is no answer to wait for, but its end
        return False

    def _forget_answers(self) -> None:
        while True:
            try:
                if not self._ours.recv(4096):
                    raise ConnectionError
            except BlockingIOError:
                return

    def _killed(self, reason: str, *, starved: bool = False) -> tuple[dict[str, Any], list[bytes]]:
        os.kill(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)
        return _ended(reason, starved=starved)


def _ended(reason: str, *, starved: bool = False) -> tuple[dict[str, Any], list[bytes]]:
    return {"ended": reason, "starved": starved}, []


def _noted(text: bytes, size: int, limit: int) -> bytes:
    return text if size <= limit else text + f"\n... ({size - limit} more)".encode()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")
