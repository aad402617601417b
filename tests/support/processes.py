"""Processes beside the tests: what programs find in their environment, modules of this folder that run with a
Ray of their own, and Ray's processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import psutil

__all__ = ["can_mount", "children_titled", "environment", "is_running", "replicas_of", "run_module"]

TESTS = Path(__file__).parents[1]
_LEAN = str(TESTS / "support" / "lean")
"""Makes a Python with Serve start in three quarters of the time: pandas and chardet, which the wheel does not
bring and Serve imports where they are, are hidden; and garbage is collected as seldom as in a replica."""


RAY_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5" * 64}
"""For a Ray of its own: its token, which programs with another home need too."""


def environment(*hidden: str, tests: bool = False, lean: bool = False) -> dict[str, str]:
    """The environment for a program that a test starts.

    Args:
        hidden: beginnings of the names of variables that it does not get.
        tests: whether it finds the modules of the tests, as a replica does. A user's program does not.
        lean: whether it starts quickly, with no pandas, as where the wheel alone is installed.
    """
    found = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    others = found.pop("PYTHONPATH", "").split(os.pathsep)
    paths = [_LEAN] * lean + [str(TESTS)] * tests
    paths += [path for path in others if path not in ("", str(TESTS), _LEAN)]
    return found | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})


def can_mount() -> bool:
    """Whether a process may have a /tmp of its own here."""
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "-m", "mount", "--bind", "/tmp", "/tmp"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def run_module(module: str, *arguments: str) -> dict[str, Any]:
    """What a module printed last: a JSON object. What it says on standard error is passed on."""
    command = [sys.executable, "-m", module, *arguments]
    env = environment("RAY_ADDRESS", tests=True, lean=True) | RAY_TOKEN
    result = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True)
    objects = [line for line in result.stdout.splitlines() if line.startswith(b"{")]
    printed: dict[str, Any] = orjson.loads(objects[-1])
    return printed


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it has not ended yet."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def children_titled(title: str) -> dict[int, str]:
    """The children of this process whose title begins so, by process id, oldest first.

    Ray calls a worker ``ray::Class:more``, followed by ``.method`` while one runs, which is left out here.
    """
    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            name = (process.cmdline() or [""])[0].partition(".")[0]
            if name.startswith(title):
                found[process.pid] = name
    return dict(sorted(found.items()))


def replicas_of(application: str) -> dict[str, set[int]]:
    """Processes of an application's replicas, by server."""
    found: dict[str, set[int]] = {}
    for pid, title in children_titled(f"ray::ServeReplica:{application}:").items():
        found.setdefault(title.split(":")[4], set()).add(pid)
    return found
