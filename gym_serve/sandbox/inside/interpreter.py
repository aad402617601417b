"""`Interpreter`: a namespace that lasts, and code executed in it, as at an interactive prompt."""

from __future__ import annotations

import ast
import gc
import linecache
import signal
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from .confinement import reserve
from .files import Output
from .report import cut, describe, text_of, traceback_of

__all__ = ["INTERRUPT", "Executed", "Interpreter"]

INTERRUPT = signal.SIGXCPU
"""The signal that interrupts code; one that programs have no handler of their own for."""


class _TimeUp(BaseException):
    """Raised in code that ran too long; no ``except Exception`` holds it."""


class Executed(NamedTuple):
    """What came of code, beside its output."""

    result: str | None
    """``str`` of the last expression, if it is not None."""
    error: str | None
    """The exception that ended it, or None."""
    trace: str
    """Its traceback."""


class Interpreter:
    """Executes code in one namespace, the module ``__main__``.

    Args:
        namespace: names that are there from the start.
        output: takes what the code writes.
    """

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
            code: Python statements.
            timeout: the seconds after which it comes, for the message.
            output_limit: characters of the result.
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
