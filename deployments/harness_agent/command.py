"""A harness that is a program: it finds the model in its environment variables, and the row on its input.

It runs with the rights of this process, in an empty folder that goes when it ends, with no environment
variable of this process but ``PATH``. Its whole process group ends with it. The program is the graph
author's; what a model makes it do is its own affair: run a harness that executes code in a container.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress

from pydantic import SecretStr

from gym_serve.deployments.harness_agent.task import Task, masked
from gym_serve.servers.transport import encode
from gym_serve.types.errors import Unavailable
from gym_serve.types.requests import JSON

__all__ = ["CommandHarness"]

_KEPT = 1 << 16  # bytes of the output, at its end


class CommandHarness:
    """Runs a program for every rollout.

    Args:
        command: program and arguments; no shell sees them.
        env: further environment variables.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, SecretStr]) -> None:
        self._command = command
        self._env = env

    async def start(self) -> None:
        """Nothing is needed."""

    async def stop(self) -> None:
        """Nothing is held."""

    async def run(self, task: Task) -> JSON:
        """See `Harness.run`.

        Returns:
            ``{"exit_status": 0, "output": str}``, the end of what it wrote.

        Raises:
            Unavailable: it cannot be started, or its exit status is not 0.
        """
        with tempfile.TemporaryDirectory(prefix="harness-", ignore_cleanup_errors=True) as folder:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    cwd=folder,
                    env=self._variables(task, folder),
                    start_new_session=True,
                )
            except OSError as error:
                raise Unavailable(f"the harness {self._command[0]} cannot be started: {error}") from None
            try:
                _, output = await asyncio.gather(_feed(process, encode(task.row)), _tail(process))
                status = await process.wait()
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        text = output.decode("utf-8", "replace")
        for secret in (task.api_key, *self._env.values()):  # should it print them: rollouts are kept
            text = masked(text, secret)
        if status:
            raise Unavailable(f"the harness ended with exit status {status}: {text[-2000:]}")
        return {"exit_status": status, "output": text}

    def _variables(self, task: Task, folder: str) -> dict[str, str]:
        key = task.api_key.get_secret_value()
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": folder,
            "TMPDIR": folder,
            "LANG": "C.UTF-8",
            "OPENAI_BASE_URL": task.base_url,
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": task.base_url.removesuffix("/v1"),  # its client adds the version
            "ANTHROPIC_AUTH_TOKEN": key,
            "GYM_SERVE_RESOURCES_URL": task.resources_url,
            **({"GYM_SERVE_SESSION_ID": task.session} if task.session else {}),
            **{name: value.get_secret_value() for name, value in self._env.items()},
        }


async def _feed(process: asyncio.subprocess.Process, row: bytes) -> None:
    assert process.stdin is not None
    with suppress(ConnectionError):  # it need not read it
        process.stdin.write(row)
        await process.stdin.drain()
        process.stdin.close()


async def _tail(process: asyncio.subprocess.Process) -> bytes:
    """The end of the output; all of it is read, so that the program never waits to write."""
    assert process.stdout is not None
    kept = b""
    while chunk := await process.stdout.read(_KEPT):
        kept = (kept + chunk)[-_KEPT:]
    return kept
