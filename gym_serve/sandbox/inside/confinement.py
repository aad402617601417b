"""Takes rights from a process before it runs untrusted code: limits, another user, a seccomp filter.

Namespaces decide what code can see; the filter decides what it can ask the kernel for. It rules out

- new processes (so that a memory limit of the one process is a limit of all), other programs and sockets;
- everything that reaches another process by its number: its supervisor stands beside it. Signals and limits
  are for itself alone;
- choosing its own share of the processors: a process that gives itself little could blame the machine;
- memory outside of the address space, which no rlimit counts;
- the parts of the kernel that ordinary programs never use and most exploits do, and system calls that are
  newer than this list.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, (16, 24, 32, 40)  # offsets in struct seccomp_data
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS = _FAIL | errno.EPERM, _FAIL | errno.ENOSYS
_CLONE_THREAD = 0x00010000
_CLONE_NAMESPACES = 0x7E020080  # CLONE_NEW*: of mounts, users, processes, networks and others
_NEWEST = 462  # mseal, of Linux 6.10; from 424 on, the numbers are the same on all machines

_SIGNALS_OF_FILES = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: a signal to anybody when a file is ready
_SHARED, _ANONYMOUS = 0x01, 0x20  # MAP_*
_TYPES_INTO_TERMINAL = 0x5412  # TIOCSTI
_SIGNALS_OF_SOCKETS = (0x8901, 0x8902, _TYPES_INTO_TERMINAL)  # FIOSETOWN, SIOCSPGRP
_SHARED_CORE = (62,)  # PR_SCHED_CORE takes another process along

_EVERYWHERE = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "pidfd_open": 434, "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443,
    "memfd_secret": 447, "process_mrelease": 448,
}  # fmt: skip
_CLONE3 = 435

# What a program is refused, and a box is not: it has several processes, which may reach each other.
_NOT_IN_BOXES = frozenset(
    (
        *(
            "socket",
            "fork",
            "vfork",
            "execve",
            "execveat",
            "kill",
            "tkill",
            "rt_sigqueueinfo",
            "mknod",
            "mknodat",
        ),
        *(
            "rt_tgsigqueueinfo",
            "get_robust_list",
            "ioprio_set",
            "membarrier",
            "sync",
            "syncfs",
        ),
        *("ptrace", "process_vm_readv", "process_vm_writev", "shmget", "semget", "msgget"),
        *("mq_open", "chroot", "name_to_handle_at", "pidfd_send_signal", "pidfd_open", "pidfd_getfd"),
        *("process_madvise", "process_mrelease"),
    )
)

_Instruction = tuple[int, int, int, int]

_RESERVE = 64 << 20
_STACK = 120 << 20  # what the kernel leaves below the first mapping
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER = 2


class _Machine(NamedTuple):
    architecture: int
    clone: int
    kill: int
    tgkill: int
    prlimit: int
    fcntl: int
    ioctl: int
    prctl: int
    mmap: int
    refused: dict[str, int]


MACHINES = {
    "x86_64": _Machine(
        architecture=0xC000003E, clone=56, kill=62, tgkill=234, prlimit=302, fcntl=72, ioctl=16, prctl=157,
        mmap=9,
        refused={
            "socket": 41, "fork": 57, "vfork": 58, "execve": 59, "execveat": 322,
            "tkill": 200, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "get_robust_list": 274,
            "setpriority": 141, "sched_setparam": 142, "sched_setscheduler": 144, "sched_setaffinity": 203,
            "sched_setattr": 314, "ioprio_set": 251, "migrate_pages": 256, "move_pages": 279,
            "membarrier": 324, "sync": 162, "syncfs": 306, "personality": 135,
            "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
            "memfd_create": 319, "shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240,
            "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161,
            "name_to_handle_at": 303, "open_by_handle_at": 304, "mknod": 133, "mknodat": 259,
            "keyctl": 250, "add_key": 248, "request_key": 249, "bpf": 321, "perf_event_open": 298,
            "userfaultfd": 323, "init_module": 175, "finit_module": 313, "delete_module": 176,
            "kexec_load": 246, "kexec_file_load": 320, "reboot": 169, "swapon": 167, "swapoff": 168,
            "quotactl": 179, "acct": 163, "iopl": 172, "ioperm": 173, "modify_ldt": 154, "syslog": 103,
            "settimeofday": 164, "clock_settime": 227, "clock_adjtime": 305, "adjtimex": 159,
            "fanotify_init": 300,
        },
    ),
    "aarch64": _Machine(
        architecture=0xC00000B7, clone=220, kill=129, tgkill=131, prlimit=261, fcntl=25, ioctl=29, prctl=167,
        mmap=222,
        refused={
            "socket": 198, "execve": 221, "execveat": 281,
            "tkill": 130, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240, "get_robust_list": 100,
            "setpriority": 140, "sched_setparam": 118, "sched_setscheduler": 119, "sched_setaffinity": 122,
            "sched_setattr": 274, "ioprio_set": 30, "migrate_pages": 238, "move_pages": 239,
            "membarrier": 283, "sync": 81, "syncfs": 267, "personality": 92,
            "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
            "memfd_create": 279, "shmget": 194, "semget": 190, "msgget": 186, "mq_open": 180,
            "unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51,
            "name_to_handle_at": 264, "open_by_handle_at": 265, "mknodat": 33,
            "keyctl": 219, "add_key": 217, "request_key": 218, "bpf": 280, "perf_event_open": 241,
            "userfaultfd": 282, "init_module": 105, "finit_module": 273, "delete_module": 106,
            "kexec_load": 104, "kexec_file_load": 294, "reboot": 142, "swapon": 224, "swapoff": 225,
            "quotactl": 60, "acct": 89, "syslog": 116, "settimeofday": 170, "clock_settime": 112,
            "clock_adjtime": 266, "adjtimex": 171, "fanotify_init": 262,
        },
    ),
}  # fmt: skip
"""The numbers of system calls on the machines that there is a filter for."""


def filter_program(machine: str, process: int) -> bytes:
    """The filter as an array of ``struct sock_filter``."""
    numbers = MACHINES[machine]
    program = [
        *_by_argument(numbers.kill, 0, (process,), met=_ALLOW, otherwise=_EPERM),
        *_by_argument(numbers.tgkill, 0, (process,), met=_ALLOW, otherwise=_EPERM),
        *_by_argument(numbers.prlimit, 0, (0, process), met=_ALLOW, otherwise=_EPERM),
    ]
    return _packed(_before(numbers)) + _packed(program) + _after(machine)


@cache
def box_filters() -> dict[str, bytes]:
    """The filters for the commands of a box, by machine: no new namespaces, no mounts, and nothing of the
    machine's.

    The first process's limits, and its turns on the processors, are not theirs: a limit of processor time
    would end it, and one that never has its turn answers nobody. Nor are files without a name, whose memory
    is nowhere to be seen while they are on their way through a socket.
    """
    return {machine: _box_filter(numbers) for machine, numbers in MACHINES.items()}


def _box_filter(numbers: _Machine) -> bytes:
    refused = {**_EVERYWHERE, **numbers.refused}
    return _packed(
        [
            *_before(numbers, _CLONE_NAMESPACES, met=_EPERM, otherwise=_ALLOW),
            *_by_argument(numbers.prlimit, 0, (1,), met=_EPERM, otherwise=_ALLOW),
            *_by_argument(numbers.ioctl, 1, (_TYPES_INTO_TERMINAL,), met=_EPERM, otherwise=_ALLOW),
            (_EQUAL, 0, 6, refused.pop("setpriority")),  # but for the process that asks: PRIO_PROCESS, 0
            (_LOAD, 0, 0, _ARGUMENTS[0]),
            (_EQUAL, 0, 3, 0),
            (_LOAD, 0, 0, _ARGUMENTS[1]),
            (_EQUAL, 0, 1, 0),
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, _EPERM),
            *_refused(number for name, number in refused.items() if name not in _NOT_IN_BOXES),
        ]
    )


def _before(
    numbers: _Machine, flags: int = _CLONE_THREAD, *, met: int = _ALLOW, otherwise: int = _EPERM
) -> list[_Instruction]:
    return [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, numbers.architecture),
        (_RETURN, 0, 0, _KILL),  # another architecture's numbers mean other calls
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _NEWEST + 1),  # those of x32 included
        (_RETURN, 0, 0, _ENOSYS),
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _ENOSYS),  # its flags are behind a pointer; the C library falls back to clone
        (_EQUAL, 0, 4, numbers.clone),
        (_LOAD, 0, 0, _ARGUMENTS[0]),
        (_ANY_BIT, 1, 0, flags),
        (_RETURN, 0, 0, otherwise),
        (_RETURN, 0, 0, met),
    ]


def _refused(calls: Iterable[int]) -> list[_Instruction]:
    program = [step for number in sorted(calls) for step in ((_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM))]
    return [*program, (_RETURN, 0, 0, _ALLOW)]


@cache
def _after(machine: str) -> bytes:
    numbers = MACHINES[machine]
    program = [
        *_by_argument(numbers.fcntl, 1, _SIGNALS_OF_FILES, met=_EPERM, otherwise=_ALLOW),
        *_by_argument(numbers.ioctl, 1, _SIGNALS_OF_SOCKETS, met=_EPERM, otherwise=_ALLOW),
        *_by_argument(numbers.prctl, 0, _SHARED_CORE, met=_EPERM, otherwise=_ALLOW),
        (_EQUAL, 0, 5, numbers.mmap),  # shared memory stays, as a whole, until its last page is given back
        (_LOAD, 0, 0, _ARGUMENTS[3]),
        (_ANY_BIT, 0, 2, _SHARED),
        (_ANY_BIT, 0, 1, _ANONYMOUS),
        (_RETURN, 0, 0, _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return _packed([*program, *_refused({**_EVERYWHERE, **numbers.refused}.values())])


def _by_argument(
    number: int, argument: int, values: tuple[int, ...], *, met: int, otherwise: int
) -> list[_Instruction]:
    """One answer to a call whose argument, an ``int``, is among values, and another one if it is not."""
    checks = [
        instruction for value in values for instruction in ((_EQUAL, 0, 1, value), (_RETURN, 0, 0, met))
    ]
    return [
        (_EQUAL, 0, len(checks) + 2, number),
        (_LOAD, 0, 0, _ARGUMENTS[argument]),  # its lower half, as that is all that the kernel reads
        *checks,
        (_RETURN, 0, 0, otherwise),
    ]


def _packed(program: Iterable[_Instruction]) -> bytes:
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def protect() -> None:
    """Keep this process, the supervisor, from its children.

    No child reads its memory. It handles no signal, and to the first process of a namespace the kernel
    delivers none from inside that it does not handle.
    """
    _set_dumpable(False)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def confine(config: dict[str, Any], seconds: int | None = None) -> None:
    """Give this process, a child of the supervisor, its limits and for good its rights, which are few.

    ``config`` has ``memory_bytes``, ``file_bytes``, ``open_files``; ``user``: the id to become, or None;
    ``filter``: whether to refuse system calls. ``seconds`` of processor time, or no limit.
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
