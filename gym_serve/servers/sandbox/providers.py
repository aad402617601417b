"""`Sandbox`: a way to confine a process, and the two that there are.

`Bubblewrap` confines: the code sees no network, no process but its own, a read-only Python and an
empty folder. `PlainProcess` does not: it has the same limits of time and memory, but whoever asks for
it trusts the code with everything that the user of this process may do. Hence it is never a fallback:
where Bubblewrap does not work, `find_sandbox` refuses and says what to do.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

import gym_serve
from gym_serve.servers.sandbox.inside import main as inside  # also compiles it, once for all
from gym_serve.servers.sandbox.limits import Limits
from gym_serve.types.errors import GraphError

__all__ = ["Bubblewrap", "PlainProcess", "Sandbox", "SandboxName", "find_sandbox"]

logger = logging.getLogger("gym_serve")

SandboxName = Literal["bubblewrap", "process"]
"""Names of the sandboxes in a graph file."""

_CHECK_SECONDS = 30.0
_SYSTEM_FOLDERS = ("/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
_INSIDE = Path(inside.__file__).parent
_START = ("-c", "import sys; sys.path.append(sys.argv.pop()); from inside.main import main; main()")


class Sandbox(Protocol):
    """How a Python process is confined.

    Attributes:
        confines: whether the code is kept from files, network and other processes; if so, the process
            also refuses it the system calls of `seccomp.filter_program`.
    """

    confines: bool

    def command(self, limits: Limits) -> list[str]:
        """The command line that starts Python with the package ``inside`` in the sandbox.

        Args:
            limits: the sandbox enforces that of the disk; the package sets the others.
        """
        ...


class PlainProcess:
    """No sandbox: a process with an empty environment, in a temporary folder. For trusted code."""

    confines = False

    def command(self, limits: Limits) -> list[str]:
        """Python itself."""
        return [*_python(), *_START, str(_INSIDE.parent)]


class Bubblewrap:
    """Linux namespaces, set up by the program ``bwrap``, without any privilege.

    Args:
        program: path of ``bwrap``, version 0.7 or newer.
    """

    confines = True

    def __init__(self, program: str) -> None:
        self.program = program

    def command(self, limits: Limits) -> list[str]:
        """``bwrap`` with its arguments, then Python."""
        return [
            *(self.program, "--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1"),
            *("--uid", "65534", "--gid", "65534", "--hostname", "sandbox", "--cap-drop", "ALL", "--clearenv"),
            *_system(),
            # Before the packages: a virtual environment may lie below /tmp.
            *("--size", str(limits.disk_bytes), "--tmpfs", "/tmp"),
            *_interpreter(),
            *("--ro-bind", str(_INSIDE), "/sandbox/inside"),
            *("--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"),
            *("--chdir", "/tmp", "--remount-ro", "/"),
            *_variables(),
            *("--", *_python(), *_START, "/sandbox"),
        ]

    def problem(self) -> str | None:
        """Why it does not work on this machine, or None if it does."""
        command = self.command(Limits())
        command[command.index("--") + 1 :] = [*_python(), "-c", "pass"]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_CHECK_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if done.returncode == 0:
            return None
        return done.stderr.decode("utf-8", "replace").strip()[-500:] or f"exit status {done.returncode}"


def find_sandbox(name: SandboxName) -> Sandbox:
    """The sandbox of a name, ready to use on this machine.

    Raises:
        GraphError: it does not work here; says why and what to do.
    """
    if name == "process":
        logger.warning("sandbox: process runs code with this user's rights; it is for trusted code only")
        return PlainProcess()
    program = shutil.which("bwrap")
    if program is None:
        raise GraphError(f"sandbox: bubblewrap: there is no bwrap on the PATH; {_NEXT_STEP}")
    bubblewrap = Bubblewrap(program)
    if problem := bubblewrap.problem():
        raise GraphError(
            f"sandbox: bubblewrap: bwrap does not work here: {problem}; it needs version 0.7 or newer and "
            f"unprivileged user namespaces (in a container: a seccomp profile that allows them); {_NEXT_STEP}"
        )
    return bubblewrap


_NEXT_STEP = (
    "install it (apt-get install bubblewrap, dnf install bubblewrap), or, if you trust the code as you "
    "trust your own, set sandbox: process (limits of time and memory, and no others)"
)


def _python() -> list[str]:
    # Without `site`: no .pth file runs, and the script is told which folders of packages there are.
    return [os.path.realpath(sys.executable), "-I", "-S", "-X", "utf8"]


def _system() -> list[str]:
    arguments = ["--ro-bind", "/usr", "/usr"]
    for folder in filter(os.path.exists, _SYSTEM_FOLDERS):
        if os.path.islink(folder):
            arguments += ["--symlink", os.readlink(folder), folder]
        else:
            arguments += ["--ro-bind", folder, folder]
    for file in filter(os.path.exists, _SYSTEM_FILES):
        arguments += ["--ro-bind", file, file]
    return arguments


def _interpreter() -> list[str]:
    """Python and its packages, less gym_serve: verifiers and example data are in there."""
    shown: list[str] = ["/usr"]
    arguments = []
    for folder in (sys.base_prefix, sys.prefix, *package_folders()):
        if not any(_inside(folder, parent) for parent in shown):
            arguments += ["--ro-bind", folder, folder]
            shown.append(folder)
    for folder in map(os.path.realpath, gym_serve.__path__):
        if any(_inside(folder, parent) for parent in shown):
            arguments += ["--tmpfs", folder, "--remount-ro", folder]
    return arguments


def package_folders() -> list[str]:
    """The folders of installed packages on this process's path."""
    names = ("site-packages", "dist-packages")
    return [folder for folder in sys.path if Path(folder).name in names and os.path.isdir(folder)]


def _inside(path: str, folder: str) -> bool:
    return Path(path).is_relative_to(folder)


VARIABLES = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    # One core per sandbox: with more, a library's threads would fight those of the others.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""The environment of sandboxed code: none of this process's own."""


def _variables() -> Sequence[str]:
    return [word for name, value in VARIABLES.items() for word in ("--setenv", name, value)]
