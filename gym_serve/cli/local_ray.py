"""The Ray that `gym-serve up` starts on this machine.

It outlives the command. A state file has its address, and its first process holds the lock of that file as
long as it lives. So `started` never takes another process for it, even if the process id was reused, and
`stop` touches no other Ray. This module imports Ray only when it is needed.
"""

from __future__ import annotations

import fcntl
import gc
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from gym_serve.cluster.starting import (
    START_LOG,
    free_port,
    haproxy_folder,
    private_files,
    ray_environment,
    ray_folder,
    try_twice,
)
from gym_serve.types.errors import BadRequest, Conflict, Unavailable

_log = logging.getLogger(START_LOG)

_START_SECONDS = 180.0
_STOP_SECONDS = 10.0
_AUTH = "RAY_AUTH_MODE"
_ADDRESS_FILE = "ray_current_cluster"
_RAY = [sys.executable, "-m", "ray.scripts.scripts"]


@dataclass(frozen=True)
class LocalRay:
    """A Ray started by `up`. ``address``: where it is, ``127.0.0.1:port``; ``auth_mode``: ``RAY_AUTH_MODE``
    for processes that join it; ``pid``: its first process, which leads a process group of its own;
    ``folder``: Ray's folder, in which ``ray start`` writes the address; ``files``: a folder for HAProxy."""

    address: str
    auth_mode: str
    pid: int
    folder: str
    files: str


def started() -> LocalRay | None:
    """The running Ray that `up` has started; None without one. Raises Conflict: it is being started right
    now."""
    try:
        with open(_state(), encoding="utf-8") as file:
            gone = _lock(file.fileno())  # no process holds it
            content = file.read()
    except FileNotFoundError:
        return None
    try:
        ray = LocalRay(**json.loads(content))
    except (ValueError, TypeError):
        if gone:
            return None
        raise Conflict(f"Another command is starting Ray ({_state()}). Try again in a moment.") from None
    if gone:
        _forget_address(ray)
    return None if gone else ray


def start() -> LocalRay:
    """Start a Ray that outlives this process and is reachable from this machine only. Raises Conflict: one
    runs already; Unavailable: Ray did not start."""
    _log.info("Starting Ray…")
    with private_files():
        return try_twice("Ray", _start, lambda: None, lambda error: isinstance(error, RuntimeError))


def _start() -> LocalRay:
    """One attempt; raises RuntimeError if Ray did not start, and leaves nothing behind."""
    started()  # removes the address file of a Ray that died
    port = free_port()
    arguments = ["start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}"]
    # Free ports: `ray start` tries only the default one, and fails beside another Ray.
    arguments += [f"--dashboard-port={free_port(8265)}", f"--ray-client-server-port={free_port(10001)}"]
    arguments += ["--disable-usage-stats", "--dashboard-agent-listen-port=0", f"--temp-dir={ray_folder()}"]
    mode = _auth_mode()
    state = _state()
    state.parent.mkdir(parents=True, exist_ok=True)
    with open(state, "a+", encoding="utf-8") as file, open(state.with_suffix(".log"), "wb") as log:
        if not _lock(file.fileno()):
            raise Conflict(f"A Ray of gym-serve up runs on this machine already ({state}).")
        file.truncate(0)
        files = haproxy_folder()
        process = subprocess.Popen(
            [*_RAY, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[file.fileno()],  # that process holds the lock from now on
            start_new_session=True,
            env={
                **ray_environment(files),
                **os.environ,
                _AUTH: mode,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # includes the current folder
                "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # a single node has nowhere to drain to
            },
        )
        local_ray = LocalRay(f"127.0.0.1:{port}", mode, process.pid, str(ray_folder()), str(files))
        file.write(json.dumps(asdict(local_ray)))
    try:
        os.environ.setdefault(_AUTH, mode)  # Ray reads it when it is imported
        import_ray()  # takes seconds, in which that Ray starts
        deadline = time.monotonic() + _START_SECONDS
        while not _is_written(local_ray):
            if process.poll() is not None or time.monotonic() > deadline:
                lines = state.with_suffix(".log").read_text("utf-8", "replace").strip().splitlines() or [""]
                raise RuntimeError(f"{lines[-1]} (see {state.with_suffix('.log')})")
            time.sleep(0.05)
    except BaseException:
        stop(local_ray)
        raise
    return local_ray


def stop(ray: LocalRay) -> None:
    """Stop it with everything that runs in it, and no other Ray."""
    with suppress(ProcessLookupError):
        os.kill(ray.pid, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_SECONDS
        while started() == ray and time.monotonic() < deadline:
            time.sleep(0.1)
        # Kill what is left, e.g. a slow replica. The id of a process group with members is not reused.
        os.killpg(ray.pid, signal.SIGKILL)
    while started() == ray:
        time.sleep(0.1)
    shutil.rmtree(ray.files, ignore_errors=True)


def use(address: str | None) -> str | None:
    """The address to join: the given one, ``RAY_ADDRESS``, or that of the Ray of `up`; None without any."""
    address = address or os.environ.get("RAY_ADDRESS")
    if address is None and (own := started()) is not None:
        # With an explicit address, Ray sends its token only if the environment asks for it.
        os.environ.setdefault(_AUTH, own.auth_mode)
        return own.address
    return address


def head() -> str | None:
    """The address of the Ray that ``ray start`` has started on this machine, to join; None without one.

    It is told from a Ray of ``serve run`` or of a driver, which ends with its process, by the file in which
    ``ray start`` writes the address.
    """
    running = _running()
    for folder in _folders():
        with suppress(OSError):
            port = Path(folder, _ADDRESS_FILE).read_text().strip().rpartition(":")[2]
            for address, mode in running.items():
                if address.rpartition(":")[2] == port:
                    os.environ.setdefault(_AUTH, mode)
                    return address
    return None


def is_own(address: str | None) -> bool:
    """Whether the address of `use` is that of the Ray that `up` has started."""
    own = started()
    return own is not None and own.address == use(address)


def find(address: str | None) -> str:
    """Like `use`, and by default the only Ray of this machine, e.g. that of ``serve run``. Raises
    Unavailable: no Ray runs; BadRequest: several run."""
    if (named := use(address)) is not None:
        return named
    running = _running()
    if not running:
        raise Unavailable("No Ray runs on this machine. Start one with a graph: gym-serve up FILE")
    if len(running) > 1:
        raise BadRequest(
            f"Several Rays run on this machine. Choose one with --address: {', '.join(sorted(running))}"
        )
    ((place, mode),) = running.items()
    os.environ.setdefault(_AUTH, mode)
    return place


def connect(address: str | None) -> None:
    """Join the Ray of `find`. Raises Unavailable: no Ray runs; BadRequest: several run; Unauthorized,
    ClusterMismatch: see `gym_serve.client.cluster.join`."""
    address = find(address)
    import_ray()
    from gym_serve.client.cluster import join

    join(address)


def import_ray() -> None:
    """Import Ray and Serve faster than usual. Call `find` first: Ray reads the environment at import.

    If they are installed, Serve imports pandas, and requests (of Ray) chardet. No command needs either.
    """
    blocked = {name for name in ("pandas", "chardet") if name not in sys.modules}
    for name in blocked:
        sys.modules[name] = None  # type: ignore[assignment]  # importing it raises ImportError
    gc.disable()
    try:
        import gym_serve.client.deployed  # noqa: F401
    finally:
        gc.enable()
        for name in blocked:
            del sys.modules[name]


def _state() -> Path:
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "gym-serve" / "ray.json"


def _folders() -> set[str]:
    """Where the Rays of this user have their files: by our rule, and by Ray's."""
    temporary = os.environ.get("RAY_TMPDIR") or (sys.platform == "linux" and os.environ.get("TMPDIR"))
    return {os.path.realpath(folder) for folder in (ray_folder(), Path(temporary or "/tmp") / "ray")}


def _running() -> dict[str, str]:
    """This user's Rays on this machine: ``RAY_AUTH_MODE`` by address; empty without ``/proc``.

    Rays with their files elsewhere are left out.
    """
    rays, folders = {}, _folders()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            program, *arguments = (process / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
            options = dict(argument.partition("=")[::2] for argument in arguments)
            folder = os.path.realpath(options.get("--temp_dir", ""))
            if program.endswith("/raylet") and folder in folders:
                environment = (process / "environ").read_bytes().decode("utf-8", "replace").split("\0")
                modes = [value for name, _, value in (v.partition("=") for v in environment) if name == _AUTH]
                rays[options["--gcs-address"]] = modes[0] if modes else "disabled"
    return rays


def _forget_address(ray: LocalRay) -> None:
    """Remove the address file of a Ray that has ended: this user's Ray programs would wait for it."""
    if _is_written(ray):
        with suppress(OSError):
            _address_file(ray).unlink()


def _is_written(ray: LocalRay) -> bool:
    """Whether ``ray start`` has written this Ray's address, which it does once the node is up.

    The address is known by its port: Ray writes the machine's own where this command gave 127.0.0.1.
    """
    with suppress(OSError):
        return _address_file(ray).read_text().strip().rpartition(":")[2] == ray.address.rpartition(":")[2]
    return False


def _address_file(ray: LocalRay) -> Path:
    return Path(ray.folder, _ADDRESS_FILE)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _auth_mode() -> str:
    """``RAY_AUTH_MODE``: the user's, else ``token``, and a token for it."""
    if mode := os.environ.get(_AUTH):
        return mode
    if not (os.environ.get("RAY_AUTH_TOKEN") or (Path.home() / ".ray" / "auth_token").is_file()):
        command = [*_RAY, "get-auth-token", "--generate"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise Unavailable(
                f"Ray wrote no token: {result.stderr.strip()[-250:]}; put one into RAY_AUTH_TOKEN"
            )
    return "token"
