"""What a process asks the kernel to keep it from, before it runs code that nobody has read."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .seccomp import filter_program

__all__ = ["confine", "die_with_parent", "protect", "reserve"]

_RESERVE = 64 << 20
_STACK = 120 << 20  # what the kernel leaves below the first mapping
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER = 2


def protect() -> None:
    """Keep this process, the supervisor, from its children.

    No child reads its memory. It handles no signal, and to the first process of a namespace the kernel
    delivers none from inside that it does not handle.
    """
    _set_dumpable(False)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def confine(config: dict[str, Any], seconds: int | None = None) -> None:
    """Give this process, a child of the supervisor, its limits and for good its rights, which are few.

    Args:
        config: ``memory_bytes``, ``file_bytes``, ``open_files``; ``user``: the id to become, or None;
            ``filter``: whether to refuse system calls.
        seconds: of processor time, after which the kernel ends it.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _set_limits(config, seconds)
    if (user := config["user"]) is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    die_with_parent()  # after the change of user, which undoes it
    _set_dumpable(True)  # its /proc/self is its own again: /dev/stdin leads there
    if config["filter"]:
        _filter_system_calls()


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def reserve() -> Iterator[None]:
    """Let this package use the memory that is kept for it when code has used up its own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _set_limits(config: dict[str, Any], seconds: int | None) -> None:
    for number, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, config["open_files"]),
        (resource.RLIMIT_FSIZE, config["file_bytes"]),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_STACK, _STACK),  # for deep recursion; threads keep their default
    ):
        if value is not None:
            _set_limit(number, value, value)
    if sys.platform == "linux":  # elsewhere it cannot be set, or counts what is shared
        _set_limit(resource.RLIMIT_AS, config["memory_bytes"], config["memory_bytes"] + _RESERVE)


def _set_limit(number: int, soft: int, hard: int) -> None:
    _, ceiling = resource.getrlimit(number)
    if ceiling != resource.RLIM_INFINITY:
        hard = min(hard, ceiling)
    resource.setrlimit(number, (min(soft, hard), hard))


def _filter_system_calls() -> None:
    instructions = filter_program(os.uname().machine, os.getpid())

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))

    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(Filter(len(instructions) // 8, instructions)))


def _set_dumpable(dumpable: bool) -> None:
    if sys.platform == "linux":
        _prctl(_PR_SET_DUMPABLE, int(dumpable))


def _prctl(option: int, *arguments: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, *arguments, *([0] * (4 - len(arguments)))) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")
