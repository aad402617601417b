"""`Confinement`: a way to confine a process, and the two that there are.

`Bubblewrap` confines: the code sees no network, no process but its own and its supervisor, and no files but
an empty folder and a read-only Python with the system's libraries and the packages that it was given.
`PlainProcess` does not: the code can do all that the user of this process may do. Hence it is never a
fallback: where Bubblewrap does not work, `find_sandbox` refuses.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any, Literal, Protocol

import gym_serve
from gym_serve.sandbox.cgroups import ControlGroups
from gym_serve.sandbox.inside import main as inside  # also compiles it, once for all
from gym_serve.sandbox.inside.confinement import MACHINES
from gym_serve.sandbox.inside.resident import HOST, TEMPLATE
from gym_serve.sandbox.orphans import FIRST, end_orphans, remove_folders
from gym_serve.types.errors import GraphError

logger = logging.getLogger("gym_serve")

PACKAGES = "/sandbox/packages"  # folder of packages in the sandbox

_LINKS = ("/lib", "/lib32", "/lib64", "/libx32", "/usr/lib64")
_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime", "/usr/share/zoneinfo")
_PACKAGE_FOLDERS = ("site-packages", "dist-packages")
_REQUIRED = re.compile(r"([A-Za-z0-9._-]+)(?!.*\bextra\b)")
SandboxName = Literal["bubblewrap", "process"]  # names of the sandboxes in a graph file

_CHECK_SECONDS = 30.0
_RIGHTS_OF_TEMPLATE = (
    *("SYS_ADMIN", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP"),
    *("NET_ADMIN", "NET_BIND_SERVICE", "SETFCAP"),
)
_NAMESPACES = ("ipc", "mnt", "net", "pid", "uts")
_NOBODY = 65534
_INSIDE = Path(inside.__file__).parent
# Runs code that comes compiled: Python would compile it each time where nothing may be written.
RESIDENT = (
    "import os, marshal; size = int.from_bytes(os.read(0, 8), 'little'); code = b''\n"
    "while len(code) < size: code += os.read(0, size - len(code)) or os._exit(1)\n"
    "exec(marshal.loads(code), {'__name__': 'resident'})"
)
_START = ("-c", "import sys; sys.path.append(sys.argv.pop()); from inside.main import main; main()")

_NEXT_STEP = (
    "install it (apt-get install bubblewrap, dnf install bubblewrap), or, if you trust the code as you "
    "trust your own, set sandbox: process (limits of time and memory, and no others)"
)

# Environment variables of sandboxed code; it gets none of this process's.
VARIABLES = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    # One core per sandbox: with more, the threads of one would slow down those of others.
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}


@dataclass(frozen=True)
class Limits:
    """Limits of one sandbox: sizes in bytes, and the number of open files."""

    memory_bytes: int = 1 << 30  # address space of each process; confined code has one process
    file_bytes: int = 16 << 20  # size of each file that it writes, standard output included
    disk_bytes: int = 64 << 20  # size of all files together, in memory; ``process`` does not limit it
    open_files: int = 64


def python_and_libraries() -> list[str]:
    """Arguments of ``bwrap`` that show Python without packages, and the libraries it is linked to."""
    folders, arguments = _libraries()
    prefixes = {"base": sys.base_prefix, "installed_base": sys.base_prefix}
    prefixes |= {"platbase": sys.base_exec_prefix, "installed_platbase": sys.base_exec_prefix}
    shown = [*folders, *(sysconfig.get_path(name, vars=prefixes) for name in ("stdlib", "platstdlib"))]
    base = Path(sys.base_prefix, "lib")
    files = [os.path.realpath(sys.executable), *map(str, sorted(base.glob("lib*.so*"))), *_FILES]
    for path in dict.fromkeys(filter(os.path.exists, (*shown, *files))):
        if not any(Path(path).is_relative_to(folder) for folder in shown if folder != path):
            arguments += _shown(path, path)
    for folder in shown:
        for name in _PACKAGE_FOLDERS:
            if os.path.isdir(packages := os.path.join(folder, name)):
                arguments += ["--tmpfs", packages, "--remount-ro", packages]
    return arguments


def _libraries() -> tuple[list[str], list[str]]:
    arguments, folders = [], []
    triple = sysconfig.get_config_var("MULTIARCH") or "-"
    for folder in filter(os.path.isdir, (*_LINKS, f"/usr/lib/{triple}", "/usr/lib")):
        if os.path.islink(folder):
            arguments += ["--symlink", os.readlink(folder), folder]
        elif folder != "/usr/lib" or not os.path.isdir(f"/usr/lib/{triple}"):
            folders.append(folder)
    return folders, arguments


def shown_packages(names: Iterable[str]) -> list[str]:
    """Arguments of ``bwrap`` that show packages with their requirements, and no others."""
    arguments = ["--dir", PACKAGES]
    entries = {Path(path).name: path for name in packages_of(names) for path in _entries(name)}
    for name, path in sorted(entries.items()):
        arguments += _shown(path, f"{PACKAGES}/{name}")
    return arguments


def _shown(path: str, place: str) -> list[str]:
    # Folders that bwrap makes by itself are readable by its own user only, who may be root.
    return ["--dir", os.path.dirname(place), "--ro-bind", path, place]


def packages_of(names: Iterable[str]) -> list[str]:
    """Packages with all their requirements, except those that are not installed."""
    folders: dict[str, None] = {}
    wanted = list(names)
    missing = []
    while wanted:
        name = re.sub(r"[-_.]+", "-", wanted.pop(0)).lower()
        if name in folders:
            continue
        try:
            required = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            continue
        folders[name] = None
        wanted += [match[1] for match in map(_REQUIRED.match, required) if match]
    if missing:
        names = ", ".join(missing)
        logger.info("sandboxed code cannot import these packages, which are not installed: %s", names)
    return list(folders)


def _entries(name: str) -> Iterator[str]:
    package = importlib.metadata.distribution(name)
    tops = dict.fromkeys(file.parts[0] for file in package.files or ())
    for top in tops:
        path = str(package.locate_file(top))
        if top not in ("..", "__pycache__") and os.path.exists(path):
            yield path


def compile_packages(names: Iterable[str]) -> None:
    """Compile packages that their installer left as they were, as uv does. In a sandbox each program would
    compile them anew, in its own time, as it cannot keep what it compiles."""
    folders = [
        entry
        for name in packages_of(names)
        for entry in _entries(name)
        if not all(map(os.path.exists, map(cache_from_source, map(str, Path(entry).glob("*.py")))))
    ]
    if folders:  # one that cannot be written stays as it is
        compiling = (sys.executable, "-W", "ignore", "-m", "compileall", "-qq", "-j", "0", *folders)
        subprocess.run(compiling, stdout=subprocess.DEVNULL, check=False)


class Confinement(Protocol):
    """How a Python process is confined.

    ``confines``: the code has no access to files, network and other processes; then the filter of
    `inside.confinement` also refuses it system calls.
    """

    confines: bool
    path: list[str]  # folders of the packages that the code may import
    user: int | None  # id of the user that the code runs as; None for that of its supervisor
    groups: ControlGroups | None

    def command(self, limits: Limits) -> list[str]:
        """The command line that starts Python with the package ``inside`` in the sandbox, whose disk it
        limits; the package sets the other limits."""
        ...


class PlainProcess:
    """No sandbox: a process with an empty environment, in a temporary folder. For trusted code."""

    confines = False
    user: int | None = None
    groups: ControlGroups | None = None

    def __init__(self) -> None:
        names = ("site-packages", "dist-packages")
        self.path = [folder for folder in sys.path if Path(folder).name in names and os.path.isdir(folder)]

    def command(self, limits: Limits) -> list[str]:
        return [*_python(), *_START, str(_INSIDE.parent)]


class Bubblewrap:
    """Linux namespaces, set up by the program ``bwrap``, version 0.7 or newer.

    The sandboxes of an ordinary user have a user namespace each. Those of root have none: in it, code would
    still be the machine's root, who owns the kernel's settings. Instead the supervisor runs the code as
    ``nobody``. It may import ``packages`` with their requirements.
    """

    confines = True

    def __init__(self, program: str, packages: Iterable[str] = ()) -> None:
        self.program = program
        self.user = _NOBODY if os.geteuid() == 0 and _exists(_NOBODY) else None
        self.groups = ControlGroups.found()
        self.path = [PACKAGES]
        self._files = [*python_and_libraries(), *shown_packages(packages_of(packages))]

    def command(self, limits: Limits) -> list[str]:
        return [*self._arguments(limits), "--", *_python(), *_START, "/sandbox"]

    def template(self) -> list[str]:
        """``bwrap`` that starts the template of boxes (`gym_serve.sandbox.inside.resident`). It sees this
        machine, and is root in its namespaces."""
        rights = ["--cap-add", "ALL"] if self.user is None else _capabilities(_RIGHTS_OF_TEMPLATE)
        who = [] if self.user is not None else ["--unshare-user", "--uid", "0", "--gid", "0"]
        return [
            *self._first((*who, *_unshared(network=True), "--cap-drop", "ALL", *rights)),
            *self._files,
            # Of an ordinary user, the kernel demands one that is whole for each further one.
            *("--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"),
            *("--bind", "/", HOST, "--dir", "/rw", "--dir", "/lower", "--dir", "/box", "--remount-ro", "/"),
            *_variables(),
            "--",
            *_python(),
            *("-c", RESIDENT, TEMPLATE),
        ]

    def _first(self, rights: Iterable[str]) -> list[str]:
        return [self.program, *rights, *FIRST]

    def _arguments(self, limits: Limits) -> list[str]:
        return [
            *self._first(self._rights()),
            *_shown(str(_INSIDE), "/sandbox/inside"),
            # Before the files: Python may lie below /tmp.
            *("--perms", "1777", "--size", str(limits.disk_bytes), "--tmpfs", "/tmp"),
            *self._files,
            # The kernel's settings twice: behind an empty folder, and read-only like all of /proc.
            *("--proc", "/proc", "--tmpfs", "/proc/sys"),
            *("--remount-ro", "/proc/sys", "--remount-ro", "/proc"),
            # Without the device that is memory of no file, and of no limit, where it is shared.
            *("--dev", "/dev", "--ro-bind", "/dev/null", "/dev/zero", "--remount-ro", "/dev"),
            *("--chdir", "/tmp", "--remount-ro", "/"),
            *_variables(),
        ]

    def _rights(self) -> list[str]:
        if self.user is None:
            return ["--unshare-all", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL"]
        # To become another user, and to supervise that.
        return [*_unshared(), "--cap-drop", "ALL", *_capabilities(("SETUID", "SETGID", "KILL", "SYS_NICE"))]

    def problem(self) -> str | None:
        """Why it does not confine on this machine; None if it does."""
        if os.uname().machine not in MACHINES:
            return f"{os.uname().machine} has no list of system calls, only {', '.join(MACHINES)} have"
        limits = Limits()
        packages = [word for word in self._files if word.startswith(f"{PACKAGES}/")]
        with tempfile.NamedTemporaryFile(prefix="gym-serve-") as canary:
            config = {
                **configuration(self, limits),
                "path": packages or self.path,
                "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES},
                "hidden": [canary.name, os.path.realpath(gym_serve.__file__), "/etc/passwd"],
                "variables": [*VARIABLES, "LC_CTYPE", "PWD"],  # Python and bwrap set two more
            }
            probe = ("-c", _INSIDE.joinpath("probe.py").read_text())
            command = [*self._arguments(limits), "--", *_python(), *probe]
            request = json.dumps(config).encode()
            try:
                done = subprocess.run(
                    command, input=request, capture_output=True, timeout=_CHECK_SECONDS, env={}, check=False
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                return str(error)
        if done.returncode != 0:
            errors = done.stderr.decode("utf-8", "replace").strip()
            return errors[-500:] or f"exit status {done.returncode}"
        try:
            problems = json.loads(done.stdout)
        except ValueError:
            return "the check that ran in it reported nothing"
        return f"it does not confine: {'; '.join(problems)}" if problems else None


def configuration(sandbox: Confinement, limits: Limits) -> dict[str, Any]:
    """The configuration of the supervisor, without the prelude."""
    return {
        "path": sandbox.path,
        "user": sandbox.user,
        "filter": sandbox.confines,
        "memory_bytes": limits.memory_bytes,
        "file_bytes": limits.file_bytes,
        "open_files": limits.open_files,
    }


def find_sandbox(name: SandboxName, packages: Iterable[str] = ()) -> Confinement:
    """The sandbox of a name, ready to use on this machine, where nothing is left of those whose owner was
    killed. Raises `GraphError` if it does not work here.

    Its code may import ``packages`` with their requirements; ``process`` has all that are installed.
    """
    if name == "process":
        logger.warning("`sandbox: process` runs code with this user's rights; use it for trusted code only")
        remove_folders()
        return PlainProcess()
    program = shutil.which("bwrap")
    if program is None:
        raise GraphError(f"sandbox: bubblewrap: there is no bwrap on the PATH; {_NEXT_STEP}")
    bubblewrap = Bubblewrap(program, packages)
    if problem := bubblewrap.problem():
        needs = (
            "root's right to mount (CAP_SYS_ADMIN); a server that runs as an ordinary user needs none"
            if bubblewrap.user is not None
            else "unprivileged user namespaces (in a container: a seccomp profile that allows them)"
        )
        raise GraphError(
            f"sandbox: bubblewrap: bwrap does not work here: {problem}; it needs version 0.7 or newer and "
            f"{needs}; {_NEXT_STEP}"
        )
    end_orphans()
    compile_packages(packages)
    return bubblewrap


def sandbox_problems(name: SandboxName, packages: Iterable[str] = ()) -> list[str]:
    """The problems for which `find_sandbox` would raise, with the same arguments."""
    if name == "process":
        return []
    try:
        find_sandbox(name, packages)
    except GraphError as error:
        return error.problems
    return []


def _exists(user: int) -> bool:
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = map(int, line.split())
        if first <= user < first + count:
            return True
    return False


def _unshared(*, network: bool = False) -> list[str]:
    names = ("ipc", "pid", "uts", "cgroup-try", *(() if network else ("net",)))
    return [f"--unshare-{name}" for name in names]


def _capabilities(names: Iterable[str]) -> list[str]:
    return [word for name in names for word in ("--cap-add", f"CAP_{name}")]


def _python() -> list[str]:
    # Without `site`: no .pth file runs, and the configuration names the folders of packages.
    return [os.path.realpath(sys.executable), "-I", "-S", "-X", "utf8"]


def _variables() -> Sequence[str]:
    return [word for name, value in VARIABLES.items() for word in ("--setenv", name, value)]
