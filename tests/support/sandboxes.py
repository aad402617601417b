"""The sandboxes that tests can run on this machine."""

from __future__ import annotations

import importlib
import io
import shutil
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from gym_serve.sandbox import Confinement, Listens, Sandbox, SandboxName, SandboxRefused, find_sandbox
from gym_serve.types.errors import GraphError

__all__ = [
    "AVAILABLE",
    "BOTH",
    "ON_THE_FIRST",
    "check_remote_box",
    "children",
    "needs_bubblewrap",
    "sandbox_of",
    "with_pytest",
]


@cache
def sandbox_of(name: SandboxName) -> Confinement:
    """`find_sandbox`, which tries bubblewrap out, once per name; with NumPy in it."""
    return find_sandbox(name, ("numpy",))


def _problem() -> str | None:
    try:
        sandbox_of("bubblewrap")
    except GraphError as error:
        return error.problems[0]
    return None


_PROBLEM = _problem()

needs_bubblewrap = pytest.mark.skipif(_PROBLEM is not None, reason=_PROBLEM or "")
"""For tests of what only bubblewrap keeps code from."""

AVAILABLE: SandboxName = "process" if _PROBLEM else "bubblewrap"
"""The stronger one of those that work here."""

BOTH: list[Any] = [pytest.param("bubblewrap", marks=needs_bubblewrap), "process"]
"""Parameters for tests of what both do."""


def children() -> set[int]:
    """Process ids of this process's children: compare two of them, as a test has not started them all."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def with_pytest(folder: Path) -> Path:
    """Make a folder that of an image with pytest."""
    for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        package = importlib.import_module(name).__path__[0]
        shutil.copytree(package, folder / "packages" / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(Path(pytest.__path__[0]).parent / "py.py", folder / "packages")
    (folder / "Dockerfile").write_text("FROM python:3\nCOPY packages /usr/lib/python3/dist-packages/\n")
    return folder


ON_THE_FIRST = """
import ctypes, os, resource, signal

libc = ctypes.CDLL(None, use_errno=True)
for each in set(signal.Signals) - {signal.SIGCHLD}:
    os.kill(1, each)
tries = {
    "limit": lambda: resource.prlimit(1, resource.RLIMIT_CPU, (0, 0)),
    "nice": lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
    "nice to all": lambda: os.setpriority(os.PRIO_USER, 0, 19),
    "idle": lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
    "traced": lambda: libc.ptrace(16, 1, None, None) and (1 / 0),
    "memory": lambda: open("/proc/1/mem", "wb"),
    "file": lambda: os.pidfd_open(1) and libc.syscall(438, os.pidfd_open(1), 0, 0) < 0 and (1 / 0),
}
for name, attempt in tries.items():
    try:
        attempt()
    except (OSError, ZeroDivisionError):
        continue
    print(name)
"""
"""A program that prints what it can do to the first process of a box, after each signal that there is."""


async def check_remote_box(box: Sandbox) -> None:
    """What a box of ``/app`` does whose machine is elsewhere: commands, time limits, files and archives."""
    done = await box.exec("echo $PWD $A; cat; exit 3", stdin=b"given\n", timeout=60.0)
    assert (done.status, done.text, done.ended) == (3, "/app b c\ngiven\n", "exit")
    slow = await box.exec("sleep 60", timeout=0.5)
    assert slow.ended == "timeout"
    data = bytes(range(256)) * 4096
    await box.write("/app/a/data", data)
    assert await box.read("/app/a/data") == data
    await box.put("/tmp/b", await box.get("/app/a"))
    assert (await box.exec(["cmp", "/app/a/data", "/tmp/b/data"], timeout=60.0)).ok
    with tarfile.open(fileobj=io.BytesIO(await box.get("/tmp/b"))) as archive:
        assert "data" in {name.removeprefix("./") for name in archive.getnames()}
    with pytest.raises(SandboxRefused, match="none"):
        await box.read("/app/none")
    assert not isinstance(box, Listens)
