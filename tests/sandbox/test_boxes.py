"""Boxes of bubblewrap: what a command sees, what it may use, and that nothing of a box is left."""

import asyncio
import io
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.ordinary_user import as_ordinary_user, why_not
from support.sandboxes import ON_THE_FIRST, children, needs_bubblewrap
from support.waiting import until, wait_until

from gym_serve.sandbox import (
    Bubblewrap,
    Keeps,
    Listens,
    Sandbox,
    SandboxProvider,
    SandboxRefused,
    SandboxSpec,
    find_provider,
    find_sandbox,
    resident_boxes,
    templates,
)
from gym_serve.sandbox.cgroups import ControlGroups
from gym_serve.sandbox.orphans import end_orphans
from gym_serve.types.errors import GraphError, SessionLost, Unavailable

pytestmark = needs_bubblewrap

LONG = 30.0
Create = Callable[..., Awaitable[Sandbox]]


@pytest.fixture(scope="module")
def shared() -> SandboxProvider:
    return find_provider("bubblewrap")


@pytest.fixture
async def provider(shared: SandboxProvider) -> SandboxProvider:
    await (await shared.create(SandboxSpec())).close()  # its template stays, which is no process of a box
    return shared


@pytest.fixture
async def create(provider: SandboxProvider) -> AsyncIterator[Create]:
    boxes: list[Sandbox] = []
    before = children()

    async def create(layer: Path | None = None, **spec: Any) -> Sandbox:
        box = await provider.create(SandboxSpec(**{"workdir": "/app", **spec}), layer=layer)
        boxes.append(box)
        return box

    yield create
    for box in boxes:
        await box.close()
    await until(lambda: children() <= before)


def test_a_provider_that_is_not_there() -> None:
    with pytest.raises(GraphError, match=r"there is no provider 'bwrap', only .*bubblewrap"):
        find_provider("bwrap")


@pytest.mark.parametrize(
    ("command", "options", "status", "output"),
    [
        ("echo $PWD $A $HOME; id -u; exit 3", {"env": {"A": "b c"}}, 3, "/app b c /root\n0\n"),
        (["printf", "%s.", "a b", "$HOME"], {}, 0, "a b.$HOME."),
        ("cat; pwd", {"stdin": b"given\n", "cwd": "/tmp"}, 0, "given\n/tmp\n"),
        ("kill -TERM $$", {}, -signal.SIGTERM, ""),
        ("yes | head -2", {}, 0, "y\ny\n"),
        ("echo out; echo error >&2", {}, 0, "out\nerror\n"),
        ("seq 100000 | tail -1; cat /proc/sys/kernel/hostname", {}, 0, "100000\nsandbox\n"),
        ("sleep 100 & echo left behind", {}, 0, "left behind\n"),
        ("python3 -c 'import ssl, sqlite3; print(6 * 7)'", {}, 0, "42\n"),
    ],
)
async def test_a_command(
    create: Create, command: str | list[str], options: dict[str, Any], status: int, output: str
) -> None:
    box = await create()
    done = await box.exec(command, timeout=LONG, **options)
    assert (done.status, done.text, done.ended, done.cut) == (status, output, "exit", False)
    assert done.ok == (status == 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only boxes of root have several users")
async def test_users_and_what_root_may(create: Create) -> None:
    box = await create()
    done = await box.exec("id -un; touch /app/x || echo no", timeout=LONG, user="nobody")
    assert done.stdout == b"nobody\nno\n"
    command = "echo a > b; chown 1234 b; stat -c %u b; useradd -m dev; su dev -c 'id -un; echo $HOME'"
    assert (await box.exec(command, timeout=LONG)).stdout == b"1234\ndev\n/home/dev\n"
    assert (await box.exec("id -un", timeout=LONG, user="dev")).stdout == b"dev\n"


@pytest.mark.parametrize(
    ("command", "options", "reason"),
    [
        (["nothing-of-this-name"], {}, "there is no program nothing-of-this-name"),
        (["/etc/hostname"], {}, "Permission denied"),
        ("true", {"cwd": "/nowhere"}, "No such file or directory: '/nowhere'"),
        ("true", {"user": "nobody-of-this-name"}, "no user nobody-of-this-name"),
        (["a\0b"], {}, "NUL"),
        ([], {}, "must have words"),
    ],
)
async def test_a_command_that_cannot_start(
    create: Create, command: str | list[str], options: dict[str, Any], reason: str
) -> None:
    box = await create()
    with pytest.raises(SandboxRefused, match=reason):
        await box.exec(command, timeout=LONG, **options)
    assert (await box.exec("echo goes on", timeout=LONG)).stdout == b"goes on\n"


@pytest.mark.parametrize(
    "change",
    [
        "mkfifo /etc/passwd",
        "mkfifo /etc/passwd; (sleep 100 > /etc/passwd &)",
        "ln -s /dev/zero /etc/passwd",
        "mkdir /etc/passwd",
        "echo 'root:x:0:nobody::/::' > /etc/passwd",
    ],
)
async def test_a_list_of_users_that_is_none(create: Create, change: str) -> None:
    box = await create()
    assert (await box.exec(f"rm /etc/passwd; {change}", timeout=LONG)).ok
    assert (await box.exec("echo goes on; id -u", timeout=LONG)).stdout == b"goes on\n0\n"
    await box.write("/app/file", b"a")
    assert await box.read("/app/file") == b"a"


async def test_long_output_is_cut_in_the_middle(create: Create) -> None:
    box = await create()
    done = await box.exec(
        "echo start; head -c 50000000 /dev/zero | tr '\\0' x; echo end", timeout=LONG, output_limit=1000
    )
    assert done.cut
    assert done.stdout.startswith(b"start\nxxx")
    assert done.stdout.endswith(b"xxxend\n")
    assert b"bytes are left out" in done.stdout
    assert len(done.stdout) < 1100


@pytest.mark.parametrize(
    "command",
    [
        "echo before; sleep 100",
        "echo before; trap '' TERM HUP; (sleep 99 &) ; while :; do sleep 1; done",
        "echo before; sh -c 'sleep 98 & sleep 97 | cat'",
    ],
)
async def test_a_command_at_its_time_limit_is_killed_with_its_session(create: Create, command: str) -> None:
    box = await create()
    done = await box.exec(command, timeout=0.3)
    assert (done.status, done.ended, done.stdout) == (-signal.SIGKILL, "timeout", b"before\n")
    assert b"sleep" not in (await box.exec("cat /proc/[0-9]*/comm", timeout=LONG)).stdout


async def test_a_call_that_is_cancelled_ends_its_command(create: Create) -> None:
    box = await create()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(box.exec("sleep 100", timeout=LONG), 0.2)

    async def gone() -> bool:
        return b"sleep" not in (await box.exec("cat /proc/[0-9]*/comm", timeout=LONG)).stdout

    for _ in range(100):
        if await gone():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the command of a cancelled call still runs")


async def test_commands_run_at_the_same_time(create: Create) -> None:
    box = await create()
    waits = box.exec("until [ -e /tmp/go ]; do sleep 0.01; done; echo went", timeout=LONG)
    waiting = asyncio.create_task(waits)
    await box.exec("touch /tmp/go", timeout=LONG)
    assert (await waiting).stdout == b"went\n"


async def test_files(create: Create) -> None:
    box = await create()
    await box.write("/app/deep/er/file", b"\0\xff" * 1000, mode=0o755)
    assert await box.read("/app/deep/er/file") == b"\0\xff" * 1000
    assert (
        await box.exec("stat -c %a deep/er/file; ln -s /etc/hostname link", timeout=LONG)
    ).stdout == b"755\n"
    await box.write("/app/link", b"not through the link")
    assert await box.read("/etc/hostname") == b"sandbox\n"
    archive = await box.get("/app")
    other = await create()
    await other.exec("mkdir -p old/er; echo old > old/er/file", timeout=LONG)
    await other.put("/app", archive, clear=True)
    listing = (await other.exec("find . | sort; stat -c %a deep/er/file", timeout=LONG)).stdout
    assert listing == b".\n./deep\n./deep/er\n./deep/er/file\n./link\n755\n"


@pytest.mark.parametrize(
    ("make", "call", "reason"),
    [
        ("true", lambda box: box.read("/app/none"), "No such file"),
        ("truncate -s 10G big", lambda box: box.read("/app/big", limit=1000), "more than 1000 bytes"),
        ("truncate -s 10G big", lambda box: box.get("/app", limit=100_000), "more than 100000 bytes"),
        ("echo a > file", lambda box: box.write("/app/file/b", b""), "(File exists|Not a directory)"),
        ("true", lambda box: box.put("/app", b"no archive"), "cannot put"),
        ("true", lambda box: box.read("a\0b"), "NUL"),
    ],
)
async def test_files_that_are_refused(create: Create, make: str, call: Any, reason: str) -> None:
    box = await create()
    assert (await box.exec(make, timeout=LONG)).ok
    with pytest.raises(SandboxRefused, match=reason):
        await call(box)
    assert (await box.exec("echo goes on", timeout=LONG)).ok


async def test_an_archive_cannot_leave_the_box(create: Create, tmp_path: Path) -> None:
    text = io.BytesIO()
    with tarfile.open(fileobj=text, mode="w") as archive:
        for name in ("../../../../escaped", f"{tmp_path}/escaped"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    await (await create()).put("/app", text.getvalue())
    assert not (tmp_path / "escaped").exists()
    assert "escaped" not in os.listdir("/")


REACH = {
    "the machine's own files": "cat /root/* /work/* /home/* /opt/* 2>/dev/null",
    "what not every user may read": "cat /etc/shadow /etc/gshadow /etc/sudoers 2>/dev/null",
    "the first process's memory": "cat /proc/1/mem /proc/1/environ /proc/1/fd/0 /proc/1/maps 2>/dev/null",
    "the network": "ls /sys/class/net 2>/dev/null; (echo > /dev/tcp/127.0.0.1/22) 2>/dev/null && echo open",
    "the kernel's settings": "(echo 1 > /proc/sys/kernel/panic) 2>/dev/null && echo wrote",
    "a system request": "(echo h > /proc/sysrq-trigger) 2>/dev/null && echo wrote",
    "devices": "mknod /tmp/d b 254 0 2>/dev/null && echo made; ls /dev/vda /dev/sda /dev/mem 2>/dev/null",
    "mounts": "mount -t tmpfs a /mnt 2>/dev/null && echo mounted; umount /proc/sys 2>/dev/null && echo gone",
    "new namespaces": "unshare -U true 2>/dev/null && echo users; unshare -m true 2>/dev/null && echo mounts",
    "the first process's end": "kill -9 1; kill -INT 1; kill -SEGV 1; kill -PIPE 1; sleep 0.2",
    "the first process's limits": "for i in cpu as nofile; do prlimit -p 1 --$i=0:0 2>&- && echo set; done",
    "the clock": "date -s 2001-01-01 >/dev/null 2>&1 && echo set",
}


@pytest.mark.parametrize("what", REACH)
async def test_what_a_command_does_not_reach(create: Create, what: str) -> None:
    box = await create()
    done = await box.exec(["/bin/bash", "-c", REACH[what]], timeout=LONG)
    assert done.stdout == b""
    assert (await box.exec("echo goes on", timeout=LONG)).ok


async def test_what_a_command_can_do_to_the_first_process(create: Create) -> None:
    box = await create()
    done = await box.exec(["python3", "-c", ON_THE_FIRST], timeout=LONG)
    assert (done.status, done.text) == (0, "")
    # All that root may write there, had it no right to look into it.
    write = "for f in /proc/1/* /proc/1/task/1/*; do (echo 19 >$f) 2>/dev/null && echo $f; done"
    assert (await box.exec(write, timeout=LONG)).text == ""
    slowed = str(min(19, os.nice(0) + 5))
    assert (await box.exec("nice -n 5 nice; ps -p 1 -o comm=", timeout=LONG)).text.split()[0] == slowed


@pytest.mark.parametrize("what", ["fork", "threads"])
async def test_processes_are_limited(create: Create, what: str) -> None:
    bombs = {
        "fork": "f() { f | f & }; f",
        "threads": "python3 -c 'import threading, time\nt = threading.Thread\n"
        "while 1: t(target=time.sleep, args=(9,)).start()'",
    }
    box = await create(pids=320)
    await box.exec(["/bin/bash", "-c", bombs[what]], timeout=1.0)
    assert (await box.exec("echo goes on", timeout=LONG)).stdout == b"goes on\n"


async def test_memory_is_limited(create: Create) -> None:
    box = await create(memory_mb=64)
    done = await box.exec(["python3", "-c", "a = []\nwhile 1: a.append(bytearray(1 << 20))"], timeout=LONG)
    assert (done.status, done.ended) == (-signal.SIGKILL, "memory")
    assert (await box.exec("echo goes on", timeout=LONG)).ok


TAKERS = {
    "shared": "a = []\nwhile 1: a.append(mmap.mmap(-1, 1 << 20)); a[-1].write(b'x' * (1 << 20))",
    "shared, and hidden": "libc.prctl(4, 0)\na = mmap.mmap(-1, 1 << 30)\nwhile 1: a.write(b'x' * (1 << 20))",
    "tables of pages": "a = mmap.mmap(-1, 1 << 40, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, 1)\n"
    "a.madvise(mmap.MADV_NOHUGEPAGE)\nfor i in range(1 << 19): a[i << 21]",
    "a segment": "id = libc.shmget(0, 60 << 20, 0o1600)\na = libc.shmat(id, None, 0)\n"
    "ctypes.memset(a, 1, 60 << 20)\nlibc.shmat(id, None, 0)\nlibc.shmdt(ctypes.c_void_p(a))\n"
    "b = bytearray(b'x' * (20 << 20))\ntime.sleep(30)",
}
PRELUDE = "import ctypes, mmap, os, time\nlibc = ctypes.CDLL(None)\nlibc.shmat.restype = ctypes.c_void_p\n"


@pytest.mark.parametrize("what", TAKERS)
async def test_memory_of_any_kind_is_limited(create: Create, what: str) -> None:
    box = await create(memory_mb=64)
    done = await box.exec(["python3", "-c", PRELUDE + TAKERS[what]], timeout=LONG)
    assert (done.status, done.ended) == (-signal.SIGKILL, "memory")
    assert (await box.exec("wc -l </proc/sysvipc/shm", timeout=LONG)).stdout == b"1\n"


@pytest.mark.parametrize(
    "what",
    [
        "os.memfd_create('a')",
        "libc.shmget(0, 100 << 20, 0o1600) + 1 or 1 / 0",
        "[libc.semget(0, 250, 0o1600) for _ in range(200)][-1] + 1 or 1 / 0",
        "while 1: open(f'/tmp/{time.monotonic_ns()}', 'w')",
    ],
)
async def test_memory_that_no_process_has_is_refused(create: Create, what: str) -> None:
    box = await create(memory_mb=64, disk_mb=8)
    assert (await box.exec(["python3", "-c", PRELUDE + what], timeout=LONG)).status == 1


async def test_what_processes_share_counts_once(create: Create) -> None:
    box = await create(memory_mb=256)
    fork = "a = mmap.mmap(-1, 20 << 20)\na.write(b'x' * (20 << 20))\n"
    fork += "for _ in range(20): os.fork() or (a[:], time.sleep(2), os._exit(0))\nwhile os.wait(): pass"
    done = await box.exec(["python3", "-c", PRELUDE + fork], timeout=LONG)
    assert b"ChildProcessError" in done.stderr, done
    mapped = "f = open('/app/f', 'w+b')\nf.truncate(500 << 20)\na = mmap.mmap(f.fileno(), 0)\n"
    mapped += "for _ in range(500): a.write(b'x' * (1 << 20))\ntime.sleep(0.5)"
    assert (await box.exec(["python3", "-c", PRELUDE + mapped], timeout=LONG)).ok


GREEDY = {
    "files on their way": "f = os.open('/dev/null', 0)\na = [socket.socketpair() for _ in range(500)]\n"
    "for b, _ in a:\n  b.setblocking(False)\n  try:\n    while 1: socket.send_fds(b, [b'x'], [f] * 250)\n"
    "  except OSError as error:\n    if error.errno == errno.ETOOMANYREFS: break",
    "terminals": "try:\n  while 1: os.openpty()\nexcept OSError: pass",
}


@pytest.mark.parametrize("what", GREEDY)
async def test_one_box_leaves_something_for_others(create: Create, what: str) -> None:
    greedy = await create()
    limits = "import errno, os, resource, socket, time\nh = resource.getrlimit(7)[1]\n"
    limits += "resource.setrlimit(7, (h, h))\n"
    await greedy.write("/greedy.py", f"{limits}{GREEDY[what]}\nopen('/app/x', 'w')\ntime.sleep(60)".encode())
    wait = "python3 /greedy.py >/dev/null 2>&1 & until [ -e /app/x ]; do sleep 0.1; done"
    assert (await greedy.exec(wait, timeout=LONG)).ok
    box = await create()
    assert (await box.exec(["python3", "-c", "import os; os.openpty()"], timeout=LONG)).ok


async def test_the_disk_is_limited(create: Create) -> None:
    box = await create(disk_mb=8)
    for folder in ("/app", "/usr", "/tmp", "/etc"):
        done = await box.exec(f"head -c 100000000 /dev/zero > {folder}/big; rm {folder}/big", timeout=LONG)
        assert b"No space left" in done.stderr
    done = await box.exec("head -c 100000000 /dev/zero > /dev/shm/big", timeout=LONG)
    assert b"No space left" in done.stderr


async def test_processors_are_limited(create: Create) -> None:
    box = await create(cpus=1)
    assert (await box.exec("nproc; taskset -p 3 $$ >/dev/null 2>&1; nproc", timeout=LONG)).stdout == b"1\n1\n"


async def test_the_network_of_the_machine(create: Create) -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    connect = ["/bin/bash", "-c", f"echo > /dev/tcp/127.0.0.1/{port}"]
    async with server:
        assert (await (await create(network="full")).exec(connect, timeout=LONG)).ok
        assert not (await (await create()).exec(connect, timeout=LONG)).ok


async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"hello\n")
    writer.close()


@pytest.mark.parametrize("network", ["model", "full"])
async def test_a_port_that_the_owner_answers(create: Create, network: str) -> None:
    box = await create(network=network)
    assert isinstance(box, Listens)
    listener = await box.listen()
    port = listener.getsockname()[1]
    async with await asyncio.start_server(greet, sock=listener):
        done = await box.exec(["/bin/bash", "-c", f"cat < /dev/tcp/127.0.0.1/{port}"], timeout=LONG)
    assert done.text == "hello\n"


async def test_a_box_with_the_model_reaches_nothing_else(create: Create) -> None:
    box = await create(network="model")
    assert isinstance(box, Listens)
    listener = await box.listen()
    async with (
        await asyncio.start_server(greet, sock=listener) as answering,
        await asyncio.start_server(greet, "0.0.0.0", 0) as server,
    ):
        open_port, port = (each.sockets[0].getsockname()[1] for each in (server, answering))
        tries = [f"cat < /dev/tcp/{host}/{open_port}" for host in ("127.0.0.1", "::1", "10.0.0.1")]
        tries += ["getent hosts pypi.org", "cat < /dev/tcp/1.1.1.1/53", "ls /sys/class/net"]
        for command in tries:
            done = await box.exec(["/bin/bash", "-c", f"{command} 2>/dev/null"], timeout=LONG)
            assert (done.ok, done.stdout) == (False, b""), command
        # Nor does another process of the machine answer in its place, or get at the port.
        with pytest.raises(OSError, match="Connect call failed"):
            await asyncio.open_connection("127.0.0.1", port)
        taken = await box.exec(
            ["python3", "-c", f"import socket; socket.create_server(('', {port}))"], timeout=LONG
        )
        assert b"Address already in use" in taken.stderr


async def test_a_box_without_a_network_has_no_port(create: Create) -> None:
    box = await create()
    assert isinstance(box, Listens)
    with pytest.raises(SandboxRefused, match="the network of the box is none"):
        await box.listen()


async def test_what_it_changes_is_a_layer_of_others(create: Create, tmp_path: Path) -> None:
    first = await create(layer=tmp_path)
    command = "echo a > /app/a; echo b > /usr/local/bin/b; rm /usr/bin/[ /etc/hosts; mkdir /data"
    assert (await first.exec(command, timeout=LONG)).ok
    await first.close()
    for _ in range(2):
        box = await create(layers=[tmp_path])
        done = await box.exec(
            "cat /app/a /usr/local/bin/b; ls -d /usr/bin/[ /data /usr/bin/env; echo c > /app/c", timeout=LONG
        )
        assert done.stdout == b"a\nb\n/data\n/usr/bin/env\n"
        await box.close()
    assert sorted(os.listdir(tmp_path / "upper" / "root" / "app")) == ["a"]


async def test_a_root_folder_without_python(create: Create, tmp_path: Path) -> None:
    for program in ("/bin/sh", "/bin/cat", "/bin/ls"):
        linked = subprocess.check_output(["ldd", program], text=True)  # noqa: ASYNC221
        for path in (program, *(word for word in linked.split() if word.startswith("/"))):
            (place := tmp_path / path.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)
    box = await create(root=tmp_path)
    done = await box.exec("echo new > file; ls / /app; cat file", timeout=LONG)
    assert set(done.stdout.decode().split()) >= {"/app:", "bin", "proc", "dev", "file", "new"}
    assert await box.get("/app")
    assert not (tmp_path / "app").exists()


async def test_a_box_that_does_not_start(create: Create, tmp_path: Path) -> None:
    (tmp_path / "proc").write_text("a file")
    with pytest.raises(Unavailable, match="a box does not start"):
        await create(root=tmp_path)


@pytest.mark.parametrize("what", ["create", "join"])
async def test_a_box_whose_control_group_cannot_be_made(
    create: Create, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = os.listdir("/proc/self/fd")
    monkeypatch.setattr(ControlGroups, "found", lambda: ControlGroups(tmp_path / "group"))
    if what == "join":
        (tmp_path / "group").mkdir()  # and what is made there has no list of processes
        monkeypatch.setattr(ControlGroups, "create", lambda self, cpus: self._parent / "none")
    provider = find_provider("bubblewrap")
    assert isinstance(provider, Keeps)
    with pytest.raises(Unavailable, match=r"a box does not start: .*No such file or directory"):
        await provider.create(SandboxSpec(network="allowlist", allowed_hosts=("named.test",)))
    await provider.stop()
    assert os.listdir("/proc/self/fd") == files


async def test_a_closed_box(create: Create) -> None:
    box = await create()
    waiting = asyncio.create_task(box.exec("sleep 100", timeout=LONG))
    await asyncio.sleep(0.2)
    await box.close()
    await box.close()
    with pytest.raises(SessionLost, match="it was closed"):
        await waiting
    with pytest.raises(SessionLost, match="it was closed"):
        await box.read("/etc/hostname")


async def test_a_box_whose_time_to_live_is_over(create: Create) -> None:
    before = children()
    box = await create(ttl=0.5, folders=("/data/a", "/logs"))
    assert (await box.exec("ls -d /data/a /logs", timeout=LONG)).ok
    assert box.alive
    with pytest.raises(SessionLost, match=r"its time to live, 0\.5 s, is over"):
        await box.exec("sleep 100", timeout=LONG)
    assert not box.alive
    await until(lambda: children() <= before)
    with pytest.raises(SessionLost, match="is over"):
        await box.read("/etc/hostname")


async def test_archives_keep_names_and_numbers_that_are_long(create: Create) -> None:
    box = await create()
    name = "/app/" + "/".join(["x" * 100] * 3) + "/\u00e9"
    await box.exec(
        f"mkdir -p '{name}'; echo a > '{name}/f'; ln '{name}/f' /app/hard; ln -s hard /app/soft", timeout=LONG
    )
    await box.put("/b", await box.get("/app"))
    pax = io.BytesIO()
    with tarfile.open(fileobj=pax, mode="w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("\u00e9" * 120)
        member.mtime = 1.5
        archive.addfile(member)
    await box.put("/c", pax.getvalue())
    done = await box.exec(f"cat '/b{name[4:]}/f' /b/soft; stat -c %h /b/hard; ls /c | wc -m", timeout=LONG)
    assert done.stdout.decode().split() == ["a", "a", "2", "121"]


async def test_a_box_whose_first_process_is_killed(create: Create) -> None:
    before = children()
    box = await create()
    waiting = asyncio.create_task(box.exec("sleep 100", timeout=LONG))
    await asyncio.sleep(0.2)
    for child in children() - before:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(child).kill()
    with pytest.raises(SessionLost, match="its first process ended"):
        await waiting


STOPPER = """
import os, signal
while True:
    try:
        os.kill(-1, signal.SIGSTOP)
    except ProcessLookupError:
        pass
"""


async def test_a_command_that_is_stopped_before_it_is_executed(create: Create) -> None:
    box = await create()
    await box.write("/stopper.py", STOPPER.encode())
    await box.exec("setsid python3 /stopper.py >/dev/null 2>&1 & sleep 0.5", timeout=1.0)
    for _ in range(20):
        await asyncio.wait_for(box.exec(["true"], timeout=0.05), LONG)


async def test_boxes_share_nothing_that_they_write(create: Create) -> None:
    first, second = await create(), await create()
    places = "for place in /dev/shm /tmp /app /etc /usr /var/lib/dpkg; do"
    terminal = "import os, time; os.openpty(); time.sleep(100)"
    begin = f"{places} touch $place/mark; done; python3 -c '{terminal}' & "
    assert (await first.exec(f"{begin} until [ -e /dev/pts/0 ]; do sleep 0.1; done", timeout=LONG)).ok
    look = f"{places} ls $place/mark; done 2>/dev/null; ls /dev/pts; ls -d /host /lower /rw /box 2>/dev/null"
    assert (await second.exec(look, timeout=LONG)).stdout == b"ptmx\n"
    assert b"openpty" not in (await second.exec("cat /proc/[0-9]*/cmdline", timeout=LONG)).stdout


async def test_a_provider_that_stops_keeps_the_boxes_that_live() -> None:
    provider, before = find_provider("bubblewrap"), children()
    assert isinstance(provider, Keeps)
    box = await provider.create(SandboxSpec())
    await provider.stop()
    assert (await box.exec(["true"], timeout=LONG)).ok
    await box.close()
    assert children() <= before
    await (await provider.create(SandboxSpec())).close()
    await provider.stop()
    assert children() <= before


async def test_what_boxes_are_copies_of_is_killed() -> None:
    provider, before = find_provider("bubblewrap"), children()
    assert isinstance(provider, Keeps)
    lost = await provider.create(SandboxSpec())
    for child in children() - before:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(child).kill()
    with pytest.raises(SessionLost, match="its first process ended"):
        await lost.exec("sleep 100", timeout=LONG)
    await lost.close()
    box = await provider.create(SandboxSpec())
    assert (await box.exec(["true"], timeout=LONG)).ok
    await box.close()
    await provider.stop()
    assert children() <= before


async def test_what_boxes_are_copies_of_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_boxes, "_START_SECONDS", 1.0)
    monkeypatch.setattr(templates, "_END_SECONDS", 0.5)
    provider, before = find_provider("bubblewrap"), children()
    assert isinstance(provider, Keeps)
    await (await provider.create(SandboxSpec())).close()
    stopped = children() - before
    live = await provider.create(SandboxSpec())
    for child in stopped:
        psutil.Process(child).suspend()
    with pytest.raises(Unavailable, match="a box does not start: not in time"):
        await asyncio.wait_for(provider.create(SandboxSpec()), LONG)
    box = await provider.create(SandboxSpec())
    assert children() >= stopped
    for each in (box, live):
        assert (await each.exec(["true"], timeout=LONG)).ok
        await each.close()
    assert not children() & stopped  # with the last box of them
    await provider.stop()
    assert children() <= before


OWNER = """
import asyncio, sys
from gym_serve.sandbox import SandboxSpec, find_provider

async def main():
    provider = find_provider("bubblewrap")
    boxes = await asyncio.gather(*(provider.create(SandboxSpec(workdir="/app")) for _ in range(8)))
    for box in boxes:
        await box.exec("echo a > file; (setsid sleep 12345 &); sleep 12345 &", timeout=10)
    print("ready", flush=True)
    await asyncio.gather(*(box.exec("sleep 12345", timeout=1000) for box in boxes))

asyncio.run(main())
"""


def _left() -> list[str]:
    processes = [
        " ".join(process.info["cmdline"])
        for process in psutil.process_iter(["cmdline"])
        if any(word in ("12345", "bwrap") or "resident" in word for word in process.info["cmdline"] or ())
    ]
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if "/lower/" in line]
    return processes + mounts


@pytest.mark.alone  # it counts the boxes of this machine
@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.slow)])
async def test_nothing_is_left_of_an_owner_that_is_killed(rounds: int, tmp_path: Path) -> None:
    before = _left()
    folders = sorted(os.listdir("/tmp"))
    for _ in range(rounds):
        owner = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)}
        )
        assert owner.stdout is not None
        try:
            with owner.stdout:
                assert await asyncio.to_thread(owner.stdout.readline) == b"ready\n"
            assert len(_left()) >= len(before) + 8 * 3
        finally:
            owner.kill()
            owner.wait()
        assert await until(lambda: len(_left()) <= len(before)) < 10
    assert os.listdir(tmp_path) == []
    assert not [name for name in set(os.listdir("/tmp")) - set(folders) if "gym-serve" in name]


async def test_nothing_is_left_of_cancelled_starts(provider: SandboxProvider, tmp_path: Path) -> None:
    draw, before = random.Random(0), children()
    for _ in range(60):
        starts = [asyncio.create_task(provider.create(SandboxSpec(root=tmp_path))) for _ in range(4)]
        await asyncio.sleep(draw.uniform(0, 0.004))
        for start in starts:
            start.cancel()
        for box in await asyncio.gather(*starts, return_exceptions=True):
            if not isinstance(box, BaseException):
                await box.close()
    assert await until(lambda: children() <= before) < 10


STARTER = """
import asyncio, sys
from pathlib import Path
from gym_serve.sandbox import SandboxSpec, find_provider

async def start(provider):
    while True:
        await (await provider.create(SandboxSpec(root=Path(sys.argv[1])))).close()

async def main():
    provider = find_provider("bubblewrap")
    print("ready", flush=True)
    await asyncio.gather(*(start(provider) for _ in range(8)))

asyncio.run(main())
"""


@pytest.mark.parametrize("rounds", [3, pytest.param(50, marks=pytest.mark.slow)])
async def test_nothing_is_left_of_an_owner_that_is_killed_as_boxes_start(rounds: int, tmp_path: Path) -> None:
    draw = random.Random(0)
    for _ in range(rounds):
        with subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-c", STARTER, str(tmp_path)], stdout=subprocess.PIPE
        ) as owner:
            assert owner.stdout is not None
            try:
                assert await asyncio.to_thread(owner.stdout.readline) == b"ready\n"
                process = psutil.Process(owner.pid)
                # bwrap, the template, a box
                await until(lambda process=process: len(process.children(recursive=True)) > 2)
                await asyncio.sleep(draw.uniform(0, 0.1))
                process.suspend()  # all that it has started is there to be seen
                below = process.children(recursive=True)
            finally:
                owner.kill()
        assert await until(lambda below=below: not any(each.is_running() for each in below)) < 10


def _with_word(word: Path) -> list[int]:
    """The processes that have an argument, also those without a parent."""
    running = psutil.process_iter(["cmdline"])
    return [process.pid for process in running if str(word) in (process.info["cmdline"] or ())]


@pytest.mark.skipif(os.geteuid() != 0, reason="the option that stops bwrap needs another user namespace")
def test_what_a_start_left_is_ended_by_the_next_owner(tmp_path: Path) -> None:
    """``bwrap`` is killed when it has a child that waits for it. That of another program stays as it is."""
    confinement = find_sandbox("bubblewrap")
    assert isinstance(confinement, Bubblewrap)
    ours = [*confinement.template(), str(tmp_path)]  # an argument that nobody reads
    others = [word for word in ours if word not in ("--hostname", "sandbox")]
    never, word = socket.socketpair()
    with never, word, open(os.devnull, "wb") as nothing:
        files = (word.fileno(), nothing.fileno())
        wait = ("--unshare-user", "--userns-block-fd", str(files[0]), "--info-fd", str(files[1]))
        starts = [subprocess.Popen([words[0], *wait, *words[1:]], pass_fds=files) for words in (ours, others)]
        try:
            wait_until(lambda: len(_with_word(tmp_path)) == 4)
            end_orphans()
            time.sleep(0.1)
            assert len(_with_word(tmp_path)) == 4
            for start in starts:
                start.kill()
                start.wait()
            assert len(_with_word(tmp_path)) == 2
            find_sandbox("bubblewrap")
            wait_until(lambda: len(_with_word(tmp_path)) == 1)
            (left,) = _with_word(tmp_path)
            assert "--hostname" not in psutil.Process(left).cmdline()
        finally:
            for process in _with_word(tmp_path):
                os.kill(process, signal.SIGKILL)
            for start in starts:
                start.wait()


ORDINARY = """
import asyncio, resource
import psutil
from gym_serve.sandbox import SandboxRefused, SandboxSpec, find_provider
from gym_serve.types.errors import SessionLost, Unavailable

async def main():
    box = await find_provider("bubblewrap").create(SandboxSpec(workdir="/app"))
    done = await box.exec("id -u; echo a > file; mkdir /data; cat file /etc/hostname", timeout=30)
    assert done.stdout == b"0\\na\\nsandbox\\n", done
    reach = "touch /usr/bin/x; echo 1 > /proc/sys/kernel/panic; cat /proc/1/environ; mount -t tmpfs a /mnt"
    for command in ("unshare -U echo a", *reach.split("; ")):
        assert not (await box.exec(command, timeout=30)).ok, command
    await box.put("/data", await box.get("/app"))
    assert await box.read("/data/file") == b"a\\n"
    try:
        await box.exec("id", user="nobody", timeout=30)
    except SandboxRefused as error:
        assert "the server must be root" in str(error), error
    await box.close()

async def no_room():
    provider = find_provider("bubblewrap")
    await (await provider.create(SandboxSpec())).close()
    template = psutil.Process().children(recursive=True)
    box = await provider.create(SandboxSpec())
    limit(template, 0)
    try:
        raise AssertionError(await provider.create(SandboxSpec()))
    except Unavailable as error:
        assert "does not start" in str(error), error
    assert (await box.exec("true", timeout=30)).ok
    limit(template, -1)
    other = await provider.create(SandboxSpec())
    limit(psutil.Process().children(recursive=True), 0)
    try:
        raise AssertionError(await box.exec("true", timeout=30))
    except SessionLost as error:  # nothing of the box is to blame
        assert "its first process ended" in str(error), error
    await other.close()
    await box.close()

def limit(processes, most):
    for process in processes:
        hard = resource.prlimit(process.pid, resource.RLIMIT_NPROC)[1]
        resource.prlimit(process.pid, resource.RLIMIT_NPROC, (hard if most < 0 else most, hard))

asyncio.run(main())
asyncio.run(no_room())
"""


@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_boxes_of_an_ordinary_user() -> None:
    subprocess.run(as_ordinary_user("-B", "-c", ORDINARY), check=True)
