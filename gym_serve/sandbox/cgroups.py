"""`ControlGroups`: one processor and so many threads for each sandbox, where there are control groups.

A server may make groups where it was given a part of the tree of version 2 to manage: a service of systemd
with ``Delegate=yes``, a container with a tree of its own. Elsewhere the supervisor in the sandbox holds a
program to one core, see `gym_serve.sandbox.inside.watch`.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

logger = logging.getLogger("gym_serve")

_PERIOD = 100_000  # microseconds
_TASKS = "512"
_REMOVE_SECONDS = 2.0
_PREFIX = "gym-serve-"


class ControlGroups:
    """Groups below one that this process may manage."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._numbers = count()

    @classmethod
    def found(
        cls, mounts: Path = Path("/proc/self/mountinfo"), groups: Path = Path("/proc/self/cgroup")
    ) -> ControlGroups | None:
        """Those of this process; None where there are none that it may manage."""
        try:
            root, own = _root(mounts), _own(groups)
        except OSError:  # a system without them
            return None
        if root is None or own is None:
            return None
        for parent in (own, *own.parents):
            candidate = root / parent.relative_to("/")
            if _manageable(candidate):
                controls = cls(candidate)
                controls._remove_those_of_the_dead()
                try:
                    controls.remove(controls.create())
                except OSError as error:
                    logger.info("no control groups for sandboxes below %s: %s", candidate, error)
                    return None
                return controls
        return None

    def create(self, cpus: float = 1.0) -> Path:
        """A new group for one sandbox; a process joins it by writing ``0`` to its ``cgroup.procs``."""
        group = self._parent / f"{_PREFIX}{os.getpid()}-{next(self._numbers)}"
        group.mkdir()
        try:
            (group / "cpu.max").write_text(f"{round(cpus * _PERIOD)} {_PERIOD}")
            if "pids" in _controllers(self._parent):
                (group / "pids.max").write_text(_TASKS)
        except OSError:
            group.rmdir()
            raise
        return group

    def remove(self, group: Path) -> None:
        """Remove the group of a sandbox that has ended; waits for the last of its processes to be gone."""
        until = time.monotonic() + _REMOVE_SECONDS
        while True:
            try:
                group.rmdir()
            except FileNotFoundError:
                return
            except OSError as error:
                if time.monotonic() > until:
                    logger.warning("the control group %s stays behind: %s", group, error)
                    return
                time.sleep(0.01)
            else:
                return

    def _remove_those_of_the_dead(self) -> None:
        for group in self._parent.glob(f"{_PREFIX}*-*"):
            process = group.name.removeprefix(_PREFIX).split("-")[0]
            if process.isdecimal() and not os.path.exists(f"/proc/{process}"):
                with suppress(OSError):  # another server removes it at the same time
                    group.rmdir()


def _root(mounts: Path) -> Path | None:
    for line in mounts.read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.startswith("cgroup2 "):
            return Path(before.split()[4])
    return None


def _own(groups: Path) -> Path | None:
    for line in groups.read_text().splitlines():
        if line.startswith("0::/"):
            return Path(os.path.normpath(line[3:]))
    return None


def _controllers(group: Path) -> list[str]:
    try:
        return (group / "cgroup.subtree_control").read_text().split()
    except OSError:
        return []


def _manageable(group: Path) -> bool:
    # Who moves a process needs to write to the group above both its places.
    return "cpu" in _controllers(group) and all(
        os.access(path, os.W_OK) for path in (group, group / "cgroup.procs")
    )
