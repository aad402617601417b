"""`Program`: a whole program, or a function of one, in a child process that is forked for it.

Being forked, it starts in a millisecond and sees nothing of earlier ones. It ends as any Python
program does: its threads are joined, its ``atexit`` functions called, its output flushed.
"""

from __future__ import annotations

import builtins
import json
import math
import os
import signal
import sys
import time
import types
from contextlib import suppress
from typing import Any

from .confinement import confine, reserve
from .output import MAX_ERROR, Output, describe, nameless_file, replace, start_of
from .watch import REASONS, Watch


class Program:
    """One run of a program, which finds the names of ``namespace`` without importing them. They are not its
    own: where a function is asked for, it has to be the program's."""

    def __init__(self, request: dict[str, Any], stdin: bytes, namespace: dict[str, Any]) -> None:
        self._request = request
        self._namespace = namespace
        self._output = Output()
        self._result = nameless_file()
        self._stdin = nameless_file()
        replace(self._stdin, stdin)

    def prepare(self, config: dict[str, Any]) -> None:
        os.dup2(self._stdin.fileno(), 0)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - it stays open to the end
        self._output.capture()
        confine(config, math.ceil(self._request["timeout"]) + 1)

    def run(self) -> None:
        name = "__main__" if self._request["function"] is None else "solution"
        module = types.ModuleType(name)
        sys.modules[name] = module
        for key, value in self._namespace.items():
            if not key.startswith("__"):
                setattr(builtins, key, value)
        try:
            self._run(module)
        except SystemExit:
            return  # its status is of no interest: a program that has answered may end as it likes
        except BaseException as error:
            with reserve(), suppress(OSError):  # it may be full
                os.write(2, describe(error).encode("utf-8", "replace"))
            sys.stderr = None  # it is written already
            raise

    def _run(self, module: types.ModuleType) -> None:
        code, function = self._request["code"], self._request["function"]
        names = module.__dict__
        exec(compile(code, "<program>", "exec", dont_inherit=True), names)
        if function is None:
            return
        solution: Any = names.get("Solution")
        is_method = hasattr(solution, function) or (solution is not None and function not in names)
        value = getattr(solution() if is_method else module, function)(*self._request["arguments"])
        try:
            data = json.dumps(value, default=_plain).encode()
        except (TypeError, ValueError):
            return  # nothing in JSON is equal to it
        replace(self._result, data)

    def started(self, child: int, folder: str | None) -> None:
        """In the parent: the program runs in process ``child`` and may make files in ``folder``."""
        self._child = child
        self._watch = Watch(child, folder)

    def outcome(self) -> tuple[dict[str, Any], list[bytes]]:
        """In the parent: wait for the program to end, and return its outcome."""
        limit = self._request["output_limit"]
        ending, reason = self._wait()
        size = os.fstat(self._result.fileno()).st_size
        cut = max(size, *self._output.sizes()) > limit
        texts = [
            self._output.start(limit)[0],
            self._output.end_of_errors(MAX_ERROR) + reason,
            start_of(self._result, limit) if size <= limit else b"",
        ]
        self._output.close()
        self._result.close()
        self._stdin.close()
        return {**ending, "cut": cut, "seconds": self._watch.used}, texts

    def _wait(self) -> tuple[dict[str, Any], bytes]:
        """Wait for the process, and kill it if it takes too much; also the reason in that case."""
        while True:
            done, status = os.waitpid(self._child, os.WNOHANG)
            if done:
                ending = {"status": os.waitstatus_to_exitcode(status), "timed_out": False, "starved": False}
                return ending, b""
            if excess := self._watch.excess(self._request["timeout"]):
                os.kill(self._child, signal.SIGKILL)
                os.waitpid(self._child, 0)
                reason = "" if excess == "time" else f"\nkilled: {REASONS[excess]}"
                ending = {"timed_out": excess == "time", "starved": excess == "machine"}
                return {"status": -signal.SIGKILL, **ending}, reason.encode()
            time.sleep(self._watch.nap)


def _plain(value: Any) -> Any:
    """JSON for what is equal to a value of JSON: numbers and arrays of NumPy, and exact numbers."""
    if callable(plain := getattr(value, "tolist", None)):
        return plain()
    if type(value).__name__ in ("Decimal", "Fraction"):
        return float(value)
    raise TypeError(f"a {type(value).__name__} is not JSON")
