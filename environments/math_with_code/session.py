"""`PythonSession`: the interpreter of one episode.

It is started with the first code and lives until the session is closed. One that dies of the code it
was given is replaced with the next call, and the model is told so: a session is never stuck, and never
silently without its variables. Calls made at the same time run one after the other.
"""

from __future__ import annotations

import asyncio

from pydantic import BaseModel

from gym_serve.sandbox import SandboxDied, SandboxedPython, SandboxPool

__all__ = ["ExecutionResult", "PythonSession"]

_LOST = "variables, functions and imports are lost"


class ExecutionResult(BaseModel):
    """What the tool answers."""

    success: bool
    """Whether the code ran to its end."""
    stdout: str = ""
    """What it printed."""
    stderr: str = ""
    """Warnings, and the traceback of an exception."""
    error_message: str | None = None
    """The exception in one line, or what became of the interpreter."""
    result: str | None = None
    """Value of the last expression, unless it is None."""


class PythonSession:
    """An interpreter that is started when needed."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._python: SandboxedPython | None = None

    async def execute(
        self, code: str, pool: SandboxPool, turns: asyncio.Semaphore, *, timeout: float, output_limit: int
    ) -> ExecutionResult:
        """Execute code in the episode's namespace.

        Args:
            pool: where a new interpreter is taken from.
            turns: held while the code runs; waiting for it does not count as the code's time.
            timeout: seconds that the code may run or sleep.
            output_limit: characters of each text that are returned.

        Raises:
            Unavailable: an interpreter does not start, or the machine is too busy for it.
        """
        async with self._lock:
            python, notice = self._python, ""
            if python is not None and not python.running:  # its last call was cancelled
                python, notice = None, f"(the interpreter was started anew: {_LOST})\n"
            async with turns:
                self._python = python = python or await pool.take()
                try:
                    done = await python.execute(code, timeout=timeout, output_limit=output_limit)
                except SandboxDied as error:
                    self._python = None
                    message = f"the interpreter ended ({error}); the next call starts a new one: {_LOST}"
                    return ExecutionResult(success=False, error_message=message)
        return ExecutionResult(
            success=done.error is None,
            stdout=done.stdout,
            stderr=notice + done.stderr,
            error_message=done.error,
            result=done.result,
        )

    async def close(self) -> None:
        """End the interpreter, if there is one; later code starts a new one in an empty namespace."""
        async with self._lock:
            python, self._python = self._python, None
            if python is not None:
                await python.stop()
