"""The first process of a box: it mounts the box's root, and then executes commands in it.

What it is asked for comes on the socket that is its standard input. When that ends, it ends, and with it all
that the box had: its processes, its mounts, its files. A command is a child that gives up its rights before
it executes. It sees of this process neither memory nor files, and the kernel delivers it no signal from
inside. The few rights that a command of root keeps are about the box's own files and users.

In bubblewrap it is a copy of a template, a process that has imported all that it needs: a box starts in
milliseconds. `marshal` reads the requests, which come from the process outside. Replies are fixed numbers and
raw bytes, so that nobody parses what a box wrote.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # `signal` takes milliseconds to import
import _socket
import ctypes
import fcntl
import gc
import marshal
import os
import resource
import select
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

# Of a reply: number of the request, status, how it ended, sizes of output and errors, which follow.
REPLY = struct.Struct("=IiBQQ")

TEMPLATE = "template"  # argument of the program
HOST = "/host"  # the files of the machine, in a template

EXITED, OUT_OF_TIME, OUT_OF_MEMORY, NOT_STARTED = range(4)  # how a command ended

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC = 1, 2, 4, 8, 32, 4096, 16384
_MNT_DETACH = 2
_NEW_NAMESPACES, _NEW_NETWORK = 0x2E020000, 0x40000000  # mount, cgroup, UTS, IPC and PID; network
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 4, 24, 22, 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_CAPABILITY_VERSION = 0x20080522
# CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, NET_BIND_SERVICE, SETFCAP
_KEPT = sum(1 << n for n in (0, 1, 3, 4, 5, 6, 7, 8, 10, 31))

_READ_ONLY = ("/proc/1", "/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs")
_EMPTY = ("/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/kmsg", "/proc/sched_debug")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_COUNTED, _SHARED = (b"RssAnon", b"VmSwap", b"VmPTE"), b"RssShmem"
_WITHOUT_FILE = (b"/dev/zero (deleted)", b"/memfd:")  # what maps say of shared memory
_SHARING_SECONDS = 0.25  # of a processor, for one look
_SEMAPHORES, _QUEUES = "250 32000 32 128", "128"  # of a box: as few as Linux had by itself until 3.19
_TERMINALS = 32  # of a box: a machine has 3072 for all
_OPEN_FILES = 4096  # of a command
_LOOK_SECONDS = 0.1
_MOST_FILES = 1 << 16
_BACKLOG = 128
_FILE = struct.Struct("=i")
_SET_FLAGS, _IS_UP = 0x8914, 0x41  # SIOCSIFFLAGS; IFF_UP and IFF_RUNNING
_CHUNK = 1 << 16
_ANOTHER_GROUP = 1
_MOST_REASON = 1 << 9  # bytes of what says why a command does not start
_MOST_USERS = 1 << 20  # bytes of /etc/passwd that are read
_FIRST_PID_LIMIT = (6, 14)  # since then each namespace has its own; before, it is the machine's

_libc = ctypes.CDLL(None, use_errno=True)
_replies = 0  # the file that replies go to
_as_text = False  # whether they are lines of base64: what carries them out of a machine takes text alone


def main() -> None:
    """Serve until the socket ends, as a template or as the first process of a box."""
    global _replies, _as_text
    if sys.argv[1:] == [TEMPLATE] and not _copied():
        return
    config = marshal.loads(_message(0) or b"")
    _replies, _as_text = config["replies"], config["machine"]
    # A program of 32 bits has other numbers, and this one may be of an image that has no other.
    config["filter"] = config["filters"].get(os.uname().machine) if sys.maxsize >> 32 else None
    try:
        if config["overlays"]:
            _isolate(config)
            _mount(config)
            _enter(config)
            _give_up(_KEPT)
        else:
            _enter_container(config)
            if config["machine"]:
                _give_up(_KEPT)
        if config["overlays"]:
            _hand_out(config)
    except OSError as error:
        _send(0, NOT_STARTED, 1, b"", str(error).encode())
        return
    _send(0, EXITED, 0, b"", b"")
    Box(config).serve()


# The template


def _copied() -> bool:
    """Make a copy of this process for each two sockets that come: its standard input and output. True in the
    copy; False at the end of the template."""
    _import_all()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # see `_run`
    gc.freeze()  # a look at it would copy it
    _signal.signal(_signal.SIGCHLD, _signal.SIG_IGN)  # the kernel collects what has ended
    way_in = _socket.socket(fileno=0)
    while True:
        data, control, _, _ = way_in.recvmsg(1, _socket.CMSG_SPACE(2 * _FILE.size))
        if not data:
            return False
        files = [number for (number,) in _FILE.iter_unpack(control[0][2])]
        try:
            process = os.fork()
        except OSError:  # the machine has no room for one more: there is no copy, and the others go on
            process = -1
        if process == 0:
            way_in.detach()
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
            return True
        for file in files:
            os.close(file)


def _import_all() -> None:
    """Import at once all that is ever imported: an agent may change the files."""
    import re  # noqa: F401
    import shutil  # noqa: F401
    import tarfile  # noqa: F401


def _isolate(config: dict[str, Any]) -> None:
    """Become the first process of new namespaces. The process that was is gone."""
    network = 0 if config["network"] else _NEW_NETWORK
    _call(_libc.unshare, _NEW_NAMESPACES | network, what="cannot make the namespaces")
    if os.fork():
        os._exit(0)
    os.setsid()
    if network:  # its loopback is down at first
        any_socket = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("=16sh22x", b"lo", _IS_UP))
        any_socket.close()


def _hand_out(config: dict[str, Any]) -> None:
    """Send a handle of this process, and the sockets at which it listens, to the process outside, which
    accepts. Standard output is a socket to it; commands have another one."""
    files = [os.pidfd_open(os.getpid()), *map(_listener, config["listens"])]
    way_out = _socket.socket(fileno=1)
    data = b"".join(map(_FILE.pack, files))
    way_out.sendmsg([b"."], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, data)])
    way_out.detach()
    for file in files:
        os.close(file)


def _listener(port: int) -> int:
    """Listen at a port of the box's loopback; at any for 0."""
    listener = _socket.socket()
    listener.bind(("127.0.0.1", port))
    listener.listen(_BACKLOG)
    return listener.detach()


# The root


def _mount(config: dict[str, Any]) -> None:
    _tmpfs("/lower", config["disk"])
    if config["layer"] is None:
        _tmpfs("/rw", config["disk"])
    else:
        _bind(HOST + config["layer"], "/rw")
    for name in ("/rw/upper", "/rw/work", "/lower/root"):
        os.makedirs(name, exist_ok=True)
    for source, place in config["shown"]:
        os.makedirs(place, exist_ok=True)
        _bind(HOST + source, place)
    for name, mode in config["folders"]:
        os.makedirs("/lower/root/" + name, exist_ok=True)
        os.chmod("/lower/root/" + name, mode)
    for name, target in config["links"]:
        os.symlink(target, "/lower/root/" + name)
    for place, key, lowers in config["overlays"]:
        upper, work = "/rw/upper/" + key, "/rw/work/" + key
        for folder in (upper, work):
            os.makedirs(folder, exist_ok=True)
        _cover(upper, key, config)
        options = f"lowerdir={':'.join(lowers)},upperdir={upper},workdir={work}"
        os.makedirs("/box" + place, exist_ok=True)
        _call(_libc.mount, b"overlay", ("/box" + place).encode(), b"overlay", _MS_NOSUID | _MS_NODEV,
              (options + config["options"]).encode(), what="cannot mount an overlay")  # fmt: skip
    for name in ("proc", "dev", *config["mounts"]):
        os.makedirs("/box/" + name, exist_ok=True)
    _bind("/dev", "/box/dev")
    _tmpfs("/box/dev/shm", config["shared"], "mode=1777")
    _call(_libc.mount, b"devpts", b"/box/dev/pts", b"devpts", _MS_NOSUID | _MS_NOEXEC,
          b"newinstance,ptmxmode=0666,mode=620,max=%d" % _TERMINALS)  # fmt: skip
    _call(_libc.mount, b"proc", b"/box/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, None)
    release = os.uname().release.split("-")[0].split(".")
    if (int(release[0]), int(release[1])) >= _FIRST_PID_LIMIT:
        with open("/box/proc/sys/kernel/pid_max", "w") as file:
            file.write(str(config["pids"]))
    for name, value in (
        ("shmall", str(config["memory"] // _PAGE)),
        ("shm_rmid_forced", "1"),  # no segment outlives its users
        ("sem", _SEMAPHORES),
        ("msgmni", _QUEUES),
    ):
        try:
            with open("/box/proc/sys/kernel/" + name, "w") as file:
                file.write(value)
        except OSError:  # before Linux 5.19, of the machine's root alone
            pass
    for path in _READ_ONLY:
        if os.path.exists("/box" + path):
            _bind("/box" + path, "/box" + path)
            flags = _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
            _call(_libc.mount, None, ("/box" + path).encode(), None, flags, None)
    for path in _EMPTY:
        if os.path.exists("/box" + path):
            _bind("/dev/null", "/box" + path)


def _cover(upper: str, key: str, config: dict[str, Any]) -> None:
    """Hide or replace files, before the overlay is mounted."""
    for overlay, name, data in config["covered"]:
        path = os.path.join(upper, name)
        if overlay != key or os.path.lexists(path):
            continue
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if data is None:
            os.mknod(path, 0o020000, 0)  # a whiteout
        else:
            with open(path, "wb") as file:
                file.write(data)


def _tmpfs(place: str, size: int, options: str = "mode=755") -> None:
    text = f"size={size},nr_inodes={size // _PAGE},{options}".encode()
    _call(_libc.mount, b"tmpfs", place.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, text)


def _bind(source: str, place: str) -> None:
    _call(_libc.mount, source.encode(), place.encode(), None, _MS_BIND | _MS_REC, None)


def _enter(config: dict[str, Any]) -> None:
    os.chdir("/box")
    number = _PIVOT_ROOT[os.uname().machine]
    _call(_libc.syscall, number, b".", b".", what="cannot change the root")
    _call(_libc.umount2, b".", _MNT_DETACH)
    os.chdir("/")
    for folder in (config["workdir"], *config["made"]):
        os.makedirs(folder, exist_ok=True)
    sys.path.clear()  # nothing is imported from the box
    _protect()


def _enter_container(config: dict[str, Any]) -> None:
    if os.getuid():
        raise OSError(f"its first process must be root of the container, not user {os.getuid()}")
    _import_all()
    os.chdir("/")
    for folder in (config["workdir"], *config["made"]):
        os.makedirs(folder, exist_ok=True)
    config["env"] = {**os.environ, **config["env"]}
    try:  # noqa: SIM105 - see `_signal_to`
        # The kernel lets a process with all ids of another one set its limits: no command has these two.
        os.setresgid(-1, -1, _ANOTHER_GROUP)
    except OSError:
        pass  # its namespace has one group, and the filter is all that there is
    _protect()


def _protect() -> None:
    """Nobody but this process may look at it; and no signal from inside reaches one that it does not
    handle, as Python does the one of Ctrl-C."""
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    _call(_libc.prctl, _PR_SET_DUMPABLE, 0, 0, 0, 0)


def _give_up(kept: int) -> None:
    for capability in range(64):
        if not kept >> capability & 1:
            _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    data = ctypes.create_string_buffer(24)
    _call(_libc.capget, header, data)
    has = struct.unpack("=6I", data.raw)
    low, high = has[1] & kept & 0xFFFFFFFF, has[4] & kept >> 32
    _call(_libc.capset, header, struct.pack("=6I", low, low, 0, high, high, 0))


def _call(function: Any, *arguments: Any, what: str = "") -> None:
    if function(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what or function.__name__}: {os.strerror(number)}")


# Commands


class Output:
    """The start and the end of what a command writes, ``limit`` bytes at most."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._start = self._end = b""
        self.size = 0

    def add(self, chunk: bytes) -> None:
        space = max(0, self._limit // 2 - len(self._start))
        self._start += chunk[:space]
        self._end += chunk[space:]
        if len(self._end) > self._limit:
            self._end = self._end[-(self._limit // 2) :]
        self.size += len(chunk)

    def text(self) -> bytes:
        if self.size <= self._limit:
            return self._start + self._end
        end = self._end[-(self._limit // 2) :]
        left_out = self.size - len(self._start) - len(end)
        return b"%s\n... (%d bytes are left out) ...\n%s" % (self._start, left_out, end)


class Command:
    """One command that runs, or has ended and left processes that hold its output."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.id = request["id"]
        self.until: float = time.monotonic() + request["timeout"]
        self.stdin = request["stdin"]
        self.outputs = {"out": Output(request["limit"]), "err": Output(request["limit"])}
        self.most = 64 * request["limit"]
        self.report = -1  # the end of a pipe: why it was not executed, or nothing
        self.ended = EXITED
        self.answered = False


class Box:
    """Answers requests, until there is nobody to answer."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._poll = select.epoll()
        self._poll.register(0, select.EPOLLIN)
        self._running: dict[int, Command] = {}  # by process
        self._files: dict[int, tuple[Command, str]] = {}  # by descriptor
        self._looked = 0.0

    def serve(self) -> None:
        while True:
            for file, _ in self._poll.poll(self._patience()):
                if file == 0:
                    message = _message(0)
                    if message is None:
                        return
                    self._ask(marshal.loads(message))
                elif file in self._files:
                    self._move(file, *self._files[file])
            self._reap()
            self._watch()

    def _patience(self) -> float | None:
        if not self._running:
            return 1.0 if self._alive() else None
        return max(0.0, min(_LOOK_SECONDS, min(c.until for c in self._running.values()) - time.monotonic()))

    def _alive(self) -> bool:
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True

    def _ask(self, request: dict[str, Any]) -> None:
        if request["op"] == "cancel":
            for command in list(self._running.values()):
                if command.id == request["id"]:
                    command.until = 0.0
            return
        command = Command(request)
        try:
            self._start(command, request)
        except OSError as error:
            _send(command.id, NOT_STARTED, 1, b"", str(error).encode())

    def _start(self, command: Command, request: dict[str, Any]) -> None:
        ends = {name: os.pipe() for name in ("in", "out", "err", "go")}
        theirs = [ends["in"][0], ends["out"][1], ends["err"][1], ends["go"][1]]
        ours = [ends["in"][1], ends["out"][0], ends["err"][0], ends["go"][0]]
        process = 0
        try:
            process = self._fork()
            if process == 0:
                _run(request, self._config, theirs)
            watched = {"in": ours[0], "out": ours[1], "err": ours[2], "end": os.pidfd_open(process)}
            ours.append(watched["end"])
            for name, end in watched.items():
                os.set_blocking(end, False)
                self._poll.register(end, select.EPOLLOUT if name == "in" else select.EPOLLIN)
        except OSError:  # so many files of this user are watched that the kernel watches no further one
            if process:
                _signal_to(process, _signal.SIGKILL)
            for end in ours:
                os.close(end)
            raise
        finally:
            for end in theirs:
                os.close(end)
        # Read when it has ended: until it executes, others of the box may stop it.
        command.report = ours[3]
        self._running[process] = command
        self._files.update((end, (command, name)) for name, end in watched.items())

    def _fork(self) -> int:
        for _ in range(100):
            try:
                return os.fork()
            except BlockingIOError:  # the box has as many processes as it may: a fork bomb, mostly
                _signal_to(-1, _signal.SIGKILL)
                time.sleep(0.01)
                self._reap()
        sys.exit()  # it has no process left, so it is not the box that has too many: the machine fails it

    def _move(self, file: int, command: Command, name: str) -> None:
        if name == "end":
            self._close(file)  # `_reap` comes next
            return
        try:
            if name == "in":
                if command.stdin:
                    command.stdin = command.stdin[os.write(file, command.stdin[:_CHUNK]) :]
                if not command.stdin:
                    self._close(file)
            elif chunk := os.read(file, _CHUNK):
                if not command.answered:
                    command.outputs[name].add(chunk)
            else:
                self._close(file)
        except BlockingIOError:
            pass
        except OSError:  # it reads no more
            self._close(file)

    def _close(self, file: int) -> None:
        del self._files[file]
        self._poll.unregister(file)
        os.close(file)

    def _reap(self) -> None:
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not process:
                return
            if (command := self._running.pop(process, None)) is not None:
                self._finish(command, os.waitstatus_to_exitcode(status))

    def _finish(self, command: Command, status: int) -> None:
        for file, (owner, name) in list(self._files.items()):
            if owner is command and name in ("out", "err"):
                # What it left in the pipes. Processes that it left go on, and are read from, for nothing.
                output, before = command.outputs[name], -1
                while file in self._files and before < output.size <= command.most:
                    before = output.size
                    self._move(file, command, name)
            elif owner is command and name == "in":
                self._close(file)
        failure = os.read(command.report, _MOST_REASON)
        os.close(command.report)
        if failure:
            _send(command.id, NOT_STARTED, 1, b"", failure)
        else:
            _send(command.id, command.ended, status, *(output.text() for output in command.outputs.values()))
        command.answered = True

    def _watch(self) -> None:
        now = time.monotonic()
        for process, command in self._running.items():
            if command.until <= now and command.ended == EXITED:
                command.ended = OUT_OF_TIME
                _kill_session(process)
                _signal_to(process, _signal.SIGKILL)  # it may have been stopped before it had a session
        if now - self._looked < _LOOK_SECONDS or not self._alive():
            return
        self._looked = now
        processes, segments, limit = _processes(), _segments(), self._config["memory"]
        own, shared = {}, {}
        for process in processes:
            own[process], shared[process] = _memory(process)
        if len(processes) > self._config["pids"]:
            _signal_to(-1, _signal.SIGKILL)
        elif processes and segments + sum(own.values()) + sum(shared.values()) > limit:
            until = time.process_time() + _SHARING_SECONDS
            sizes = {process: own[process] + _part(process, shared[process], until) for process in processes}
            largest = max(processes, key=sizes.__getitem__)
            if segments > sizes[largest]:  # whose they are is not known; with the last user, each goes
                for command in self._running.values():
                    command.ended = OUT_OF_MEMORY
                _signal_to(-1, _signal.SIGKILL)
            elif segments + sum(sizes.values()) > limit:
                session = _session(largest)
                if session in self._running:
                    self._running[session].ended = OUT_OF_MEMORY
                _signal_to(largest, _signal.SIGKILL)


def _run(request: dict[str, Any], config: dict[str, Any], ends: list[int]) -> NoReturn:
    """In the child: become the command. Never returns."""
    report = ends[3]
    gc.disable()  # to look at what the parent made, would copy it
    try:
        os.setsid()
        for number, end in enumerate(ends[:3]):
            os.dup2(end, number)
        for signal in (_signal.SIGPIPE, _signal.SIGXFSZ):  # which Python ignores
            _signal.signal(signal, _signal.SIG_DFL)
        environment, user = dict(config["env"]), request["user"]
        home = _become(config["user"] if user is None else user)
        environment.setdefault("HOME", home)
        environment.update(request["env"])
        if config["cores"]:
            os.sched_setaffinity(0, config["cores"])
        # Of 0 bytes, the kernel would still start the machine's program for cores; of 1, it does not.
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
        if config["overlays"]:
            # Fewer than the first process may have: what a user has sent and nobody has taken counts for all
            # boxes, and whoever is at the limit sends no file.
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            most = min(hard // 2, _OPEN_FILES)
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, most), most))
        os.chdir(request["cwd"] or config["workdir"])
        if request["op"] != "exec":
            report = 2
            os.closerange(3, _MOST_FILES)  # else it would hold the end of the pipe that it reads
            _files(request)
            os._exit(0)
        if config["filter"]:
            _filter(config["filter"])
        _execute(request["argv"], environment)
    except BaseException as error:
        reason = (str(error) or type(error).__name__).encode("utf-8", "replace")
        os.write(report, reason[-_MOST_REASON:])
        os._exit(127)


def _execute(argv: list[str], environment: dict[str, str]) -> NoReturn:
    if "/" in argv[0]:
        os.execve(argv[0], argv, environment)
    failure = None
    for folder in environment.get("PATH", "/usr/bin:/bin").split(":"):
        try:
            os.execve(os.path.join(folder or ".", argv[0]), argv, environment)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError as error:
            failure = error
    raise failure or FileNotFoundError(f"there is no program {argv[0]} on the PATH")


def _become(user: str | int | None) -> str:
    """Become a user of the box, by name or number; returns the home folder."""
    name, numbers = str(user or 0), None
    for line in _users().splitlines():
        fields = line.split(":")
        if len(fields) > 5 and name in (fields[0], fields[2]) and (fields[2] + fields[3]).isdecimal():
            numbers = int(fields[2]), int(fields[3]), fields[5]
            break
    if numbers is None:
        if not name.isdecimal():
            raise OSError(f"the box has no user {name}")
        numbers = int(name), int(name), "/"
    if numbers[0] != os.getuid():
        try:
            os.setgroups([numbers[1]])
            os.setresgid(numbers[1], numbers[1], numbers[1])
            os.setresuid(numbers[0], numbers[0], numbers[0])
        except OSError as error:
            raise OSError(f"cannot become user {name}, for which the server must be root: {error}") from None
    return numbers[2]


def _users() -> str:
    # An agent may have put a pipe or a device there, which is read neither for ever nor to the end.
    try:
        file = os.open("/etc/passwd", os.O_RDONLY | os.O_NONBLOCK)
        with open(file, "rb", buffering=0) as users:
            return (users.read(_MOST_USERS) or b"").decode("utf-8", "replace")
    except OSError:
        return ""


def _filter(program: bytes) -> None:
    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))

    _call(_libc.prctl, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call(_libc.prctl, _PR_SET_SECCOMP, 2, ctypes.byref(Filter(len(program) // 8, program)), 0, 0)


# Files, in a child as well: a path may be a pipe, a link or a device, but it is the box's


def _files(request: dict[str, Any]) -> None:
    path = request["path"]
    if request["op"] == "read":
        bounded = Bounded(request["limit"])
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                bounded.write(chunk)
    elif request["op"] == "write":
        # Not through a link that the agent left: what is written is a new file.
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        _remove(path)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, request["mode"]), "wb") as file:
            os.fchmod(file.fileno(), request["mode"])
            while chunk := os.read(0, _CHUNK):
                file.write(chunk)
    else:
        import tarfile

        if request["op"] == "get":
            out: Any = Bounded(request["limit"])
            # Extended headers, which hold parts of a second, would need `re` on the other side.
            with tarfile.open(fileobj=out, mode="w|", format=tarfile.GNU_FORMAT) as archive:
                archive.add(path, arcname=".", filter=lambda member: None if member.isdev() else member)
        else:
            if request["clear"]:
                _clear(path)
            os.makedirs(path, exist_ok=True)
            with tarfile.open(fileobj=open(0, "rb"), mode="r|") as archive:
                # The archive is of a box, as this process is.
                archive.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
                archive.extractall(path)


def _clear(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        for name in os.listdir(path):
            _remove(os.path.join(path, name))
    else:
        _remove(path)


class Bounded:
    """Standard output, for so many bytes and a few more, by which the other side sees that it is too much."""

    def __init__(self, limit: int) -> None:
        self._left = limit

    def write(self, data: bytes) -> int:
        if self._left < 0:
            os._exit(1)
        _write(1, data)
        self._left -= len(data)
        return len(data)


def _remove(path: str) -> None:
    """Remove a file or a whole folder, never what a link leads to."""
    if os.path.isdir(path) and not os.path.islink(path):
        for name in os.listdir(path):
            _remove(os.path.join(path, name))
        os.rmdir(path)
    elif os.path.lexists(path):
        os.unlink(path)


# Processes


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and name != "1"]


def _memory(process: int) -> tuple[int, int]:
    """Memory of a process in bytes: its own, page tables included, and what it may share with others."""
    sizes = {}
    try:
        with open(f"/proc/{process}/status", "rb") as file:
            for line in file:
                name, _, value = line.partition(b":")
                if name in _COUNTED or name == _SHARED:
                    sizes[name] = int(value.split()[0]) << 10
    except OSError:
        pass  # it has ended
    return sum(sizes.get(name, 0) for name in _COUNTED), sizes.get(_SHARED, 0)


def _part(process: int, shared: int, until: float) -> int:
    """Of what a process may share, its part of the memory without a file: each page divided by those who
    have it. What it has of the box's files counts as disk, and segments are counted as a whole. All of it
    is the part of one that keeps others from looking, or has so many mappings that ``until`` passes."""
    counts, part = False, 0
    try:
        with open(f"/proc/{process}/smaps", "rb") as file:
            for line in file if shared else ():
                words = line.split()
                if b"-" in words[0]:
                    if time.process_time() > until:
                        return shared
                    counts = b" ".join(words[5:]).startswith(_WITHOUT_FILE)
                elif counts and words[0] == b"Pss:":
                    part += int(words[1]) << 10
    except PermissionError:
        return shared
    except OSError:
        return 0  # it has ended
    return part


def _segments() -> int:
    """Memory of the segments of System V in bytes, also of those that no process has mapped."""
    try:
        with open("/proc/sysvipc/shm", "rb") as file:
            return sum(int(line.split()[14]) for line in file.readlines()[1:])
    except OSError:
        return 0  # a kernel without them


def _session(process: int) -> int:
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[3])
    except (OSError, ValueError):
        return 0


def _kill_session(session: int) -> None:
    """Kill the processes of a session, in all its groups; once they stand still, none starts others."""
    still: set[int] = set()
    while new := {process for process in _processes() if _session(process) == session} - still:
        for process in new:
            _signal_to(process, _signal.SIGSTOP)
        still |= new
    for process in still:
        _signal_to(process, _signal.SIGKILL)


def _signal_to(process: int, signal: int) -> None:
    try:  # noqa: SIM105 - `contextlib` takes milliseconds to import
        os.kill(process, signal)
    except ProcessLookupError:
        pass


# Messages


def _message(file: int) -> bytes | None:
    size = _exactly(file, 8)
    return None if size is None else _exactly(file, int.from_bytes(size, "little"))


def _exactly(file: int, size: int) -> bytes | None:
    parts = []
    while size:
        chunk = os.read(file, min(size, 1 << 20))
        if not chunk:
            return None
        parts.append(chunk)
        size -= len(chunk)
    return b"".join(parts)


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _send(number: int, ended: int, status: int, out: bytes, err: bytes) -> None:
    message = REPLY.pack(number, status, ended, len(out), len(err)) + out + err
    if _as_text:
        import binascii

        parts = (message[start : start + _CHUNK] for start in range(0, len(message), _CHUNK))
        message = b"".join(map(binascii.b2a_base64, parts))
    _write(_replies, message)


if __name__ == "resident":
    main()
