"""`ConfinedProcess`: a process in a sandbox, with what is its own beside it: a folder, a control group."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
from pathlib import Path

from gym_serve.observe.catalogue import SANDBOX_RUNNING
from gym_serve.sandbox.orphans import OwnFolder
from gym_serve.sandbox.providers import VARIABLES, Confinement
from gym_serve.workers.pool import ChildProcess


class ConfinedProcess:
    """A process that `start` has started, until `stop`."""

    def __init__(
        self, confinement: Confinement, process: ChildProcess, folder: OwnFolder | None, group: Path | None
    ) -> None:
        self.reader = process.reader
        self.writer = process.writer
        self._confinement = confinement
        self._process = process
        self._folder = folder
        self._group = group
        self._counted = True
        SANDBOX_RUNNING.add(value=1)

    @classmethod
    async def start(
        cls,
        confinement: Confinement,
        command: list[str],
        *,
        max_line: int,
        cpus: float = 1.0,
        stdout: int = subprocess.DEVNULL,
    ) -> ConfinedProcess:
        """Start a command of the confinement; ``max_line`` is in bytes, for `reader`. Raises `OSError`."""
        groups = confinement.groups
        group = None if groups is None else groups.create(cpus)
        folder = None if confinement.confines else OwnFolder()
        home = "/" if folder is None else folder.path
        try:
            process = await ChildProcess.start(
                prepared(command, group),
                {**VARIABLES, "HOME": home},
                max_line=max_line,
                folder=home,
                stdout=stdout,
            )
        except BaseException:
            _remove(confinement, folder, group)
            raise
        return cls(confinement, process, folder, group)

    async def stop(self, grace: float = 0.0) -> str:
        """Kill it after ``grace`` seconds, collect it and remove what was its own. Safe to call again, also
        after a cancellation. Returns how it ended, for messages: ``"signal 11"``, ``"exit status 1"``."""
        end = await self._process.end(grace)
        if self._folder is not None or self._group is not None:
            await asyncio.to_thread(_remove, self._confinement, self._folder, self._group)
        if self._counted:
            self._counted = False
            SANDBOX_RUNNING.add(value=-1)
        # bwrap ends with 128 + n when the process in it was ended by signal n.
        return f"signal {end.status - 128}" if self._confinement.confines and end.status > 128 else str(end)


def _remove(confinement: Confinement, folder: OwnFolder | None, group: Path | None) -> None:
    if folder is not None:
        folder.remove()
    if group is not None and confinement.groups is not None:
        confinement.groups.remove(group)


def prepared(command: list[str], group: Path | None) -> list[str]:
    """A command that joins a control group, and that the system kills first if memory is short."""
    os.stat(command[0])  # else the exit status of the shell would look like the program's
    if sys.platform != "linux":
        return command
    steps = ["echo 1000 > /proc/self/oom_score_adj", 'exec "$@"']
    if group is not None:
        steps.insert(1, f"echo 0 > {shlex.quote(str(group))}/cgroup.procs")
    return ["/bin/sh", "-c", " && ".join(steps), "sh", *command]
