"""Attempts to get out of bubblewrap, or to take the machine down. They run only where bwrap works."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.sandboxes import children, needs_bubblewrap, sandbox_of

import gym_serve
from gym_serve.servers.sandbox import Execution, Limits, SandboxDied, SandboxedPython

pytestmark = [needs_bubblewrap, pytest.mark.asyncio(loop_scope="module")]

LIMITS = Limits(memory_bytes=256 << 20, disk_bytes=8 << 20)
RAW = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
X86_64 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of system calls of x86-64")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def python() -> AsyncIterator[SandboxedPython]:
    """One for all: an attempt that damages it fails the next."""
    python = SandboxedPython(sandbox_of("bubblewrap"), LIMITS)
    await python.start()
    yield python
    await python.stop()


async def execute(python: SandboxedPython, code: str) -> Execution:
    return await python.execute(code, timeout=60, output_limit=2000)


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.fork()",
        "import os; os.forkpty()",
        "import os; os.system('true') and 1/0",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import os; os.execv('/bin/true', ['true'])",
        "import subprocess; subprocess.run(['true'])",
        "import multiprocessing; multiprocessing.get_context('fork').Process(target=print).start()",
        "import pty; pty.spawn('/bin/sh')",
    ],
)
async def test_no_other_process(python: SandboxedPython, code: str) -> None:
    assert (await execute(python, code)).error is not None
    assert (
        await execute(python, "import os; [p for p in os.listdir('/proc') if p.isdigit()]")
    ).result == "['1']"


@pytest.mark.parametrize(
    "call",
    [
        pytest.param("fork()", id="fork"),
        pytest.param("vfork()", id="vfork"),
        pytest.param("ptrace(0, 0, 0, 0)", id="ptrace"),
        pytest.param("unshare(0x10000000)", id="unshare"),
        pytest.param("setns(0, 0)", id="setns"),
        pytest.param("mount(b'none', b'/tmp', b'tmpfs', 0, None)", id="mount"),
        pytest.param("umount2(b'/tmp', 2)", id="umount"),
        pytest.param("chroot(b'/tmp')", id="chroot"),
        pytest.param("memfd_create(b'x', 0)", id="memfd"),
        pytest.param("shmget(0, 4096, 0o1600)", id="shm"),
        pytest.param("socket(2, 1, 0)", id="socket"),
        pytest.param("setuid(1)", id="setuid"),
        pytest.param("keyctl(0)", id="keyctl"),
        pytest.param("reboot(0)", id="reboot"),
        pytest.param("syscall(41, 2, 1, 0)", id="socket by number", marks=X86_64),
        pytest.param("syscall(56, 17, 0, 0, 0, 0)", id="clone by number", marks=X86_64),
        pytest.param("syscall(435, 0, 0)", id="clone3 by number"),
        pytest.param("syscall(0x40000000 + 57)", id="fork in the x32 numbers", marks=X86_64),
        pytest.param("syscall(425, 1, 0)", id="io_uring"),
        pytest.param("syscall(321, 0, 0, 0)", id="bpf", marks=X86_64),
    ],
)
async def test_system_calls(python: SandboxedPython, call: str) -> None:
    name, _, arguments = call.partition("(")
    done = await execute(python, f"{RAW}getattr(libc, {name!r}, lambda *a: -1)({arguments}")
    assert (done.result, done.error) == ("-1", None)


async def test_threads_work_and_are_bounded(python: SandboxedPython) -> None:
    code = "from concurrent.futures import ThreadPoolExecutor\nsum(ThreadPoolExecutor(4).map(int, '1234'))"
    assert (await execute(python, code)).result == "10"
    code = """
import threading
stop = threading.Event()
threads = []
try:
    for _ in range(10_000):
        threads.append(threading.Thread(target=stop.wait))
        threads[-1].start()
except RuntimeError:
    print("refused")
finally:
    stop.set()
for thread in threads[:-1]:
    thread.join()
del threads
"""
    assert (await execute(python, code)).stdout == "refused\n"


async def test_disk(python: SandboxedPython) -> None:
    code = "for n in range(64):\n    with open(f'f{n}', 'wb') as file: n = file.write(bytes(1 << 20))"
    done = await execute(python, code)
    assert done.error == "OSError: [Errno 28] No space left on device"
    assert (
        await execute(python, "import os\nfor f in os.listdir('.'): os.path.isfile(f) and os.unlink(f)")
    ).error is None


@pytest.mark.parametrize(
    "code",
    [
        "x = bytearray(1 << 30)",
        "import mmap; x = [mmap.mmap(-1, 1 << 20) for _ in range(1000)]",
        "import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))",
        "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (-1, -1))",
        "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (9999, 9999))",
    ],
)
async def test_limits_hold(python: SandboxedPython, code: str) -> None:
    assert (await execute(python, code)).error is not None
    assert (await execute(python, "x = None; 1")).result == "1"


async def test_no_network(python: SandboxedPython) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for code in (
            f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
            f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}', timeout=1)",
            "import socket; socket.getaddrinfo('example.com', 80)",
        ):
            assert (await execute(python, code)).error is not None
    names = await execute(
        python, "import os; sorted(os.listdir('/sys')) if os.path.exists('/sys') else 'none'"
    )
    assert names.result == "none"


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "/etc/shadow",
        "/etc/hostname",
        "/var/run/secrets",
        "/root/.ssh",
        "/root/.bash_history",
        "/home",
        "/sys",
        "/dev/mem",
        "/dev/kmsg",
        "/dev/sda",
        "/proc/2",
        str(Path(__file__)),
        str(Path(gym_serve.__file__)),
        str(Path.cwd() / "pyproject.toml"),
        str(Path.cwd() / "environments"),
    ],
)
async def test_files_that_are_not_there(python: SandboxedPython, path: str) -> None:
    code = f"import os\nopen({path!r}, 'rb').read(1) if os.path.isfile({path!r}) else os.listdir({path!r})"
    done = await execute(python, code)
    assert done.error is not None
    assert done.error.startswith(("FileNotFoundError", "PermissionError"))


async def test_the_verifier_cannot_be_imported(python: SandboxedPython) -> None:
    for module in ("gym_serve", "gym_serve.environments.code_gen", "environments", "support"):
        done = await execute(python, f"import {module}")
        assert done.error is not None
        assert "ModuleNotFoundError" in done.error


async def test_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    python = SandboxedPython(sandbox_of("bubblewrap"), LIMITS)
    await python.start()
    try:
        code = """
import glob, os
found = [str(dict(os.environ))]
for pattern in ("/proc/*/environ", "/proc/*/cmdline", "/proc/*/task/*/environ"):
    for path in glob.glob(pattern):
        try:
            found.append(open(path, errors="replace").read())
        except OSError:
            pass
'sk-secret' in ''.join(found)
"""
        assert (await execute(python, code)).result == "False"
    finally:
        await python.stop()


@pytest.mark.parametrize("folder", ["/", "/usr", "/usr/lib", "/etc", "/dev", "/sandbox/inside", sys.prefix])
async def test_only_the_temporary_folder_can_be_written(python: SandboxedPython, folder: str) -> None:
    done = await execute(python, f"open('{folder}/x', 'w')")
    assert done.error is not None
    assert done.error.startswith(("OSError: [Errno 30]", "PermissionError", "FileNotFoundError"))


async def test_the_interpreter_cannot_be_changed_for_others(python: SandboxedPython) -> None:
    code = "import json; open(json.__file__, 'a')"
    assert (await execute(python, code)).error is not None
    code = "import os, json; os.chmod(json.__file__, 0o777)"
    assert (await execute(python, code)).error is not None


async def test_no_rights(python: SandboxedPython) -> None:
    code = "lines = [line.split() for line in open('/proc/self/status')]\n"
    code += "[line[1] for line in lines if line[0] in ('CapEff:', 'CapBnd:', 'NoNewPrivs:')]"
    assert (await execute(python, code)).result == "['0000000000000000', '0000000000000000', '1']"
    assert (await execute(python, "import os; os.getuid(), os.getgid()")).result == "(65534, 65534)"


async def test_killing_everybody(python: SandboxedPython) -> None:
    code = "import os\ntry:\n    os.kill(-1, 9)\nexcept ProcessLookupError:\n    print('nobody')"
    assert (await execute(python, code)).stdout == "nobody\n"
    assert (await execute(python, f"import os; os.kill({os.getpid()}, 9)")).error == (
        "ProcessLookupError: [Errno 3] No such process"
    )


async def test_two_sandboxes_see_nothing_of_each_other(python: SandboxedPython) -> None:
    other = SandboxedPython(sandbox_of("bubblewrap"), LIMITS)
    await other.start()
    try:
        await execute(other, "open('/tmp/mark', 'w').close()")
        assert (await execute(python, "import os; os.path.exists('/tmp/mark')")).result == "False"
    finally:
        await other.stop()


async def test_a_program_cannot_end_or_read_its_sandbox() -> None:
    python = SandboxedPython(sandbox_of("bubblewrap"), LIMITS)
    await python.start()
    try:
        attack = """
import os, signal
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGSEGV):
    os.kill(1, number)
for path in ("/proc/1/mem", "/proc/1/environ"):
    try:
        open(path, "rb").read(1)
        print("read", path)
    except OSError:
        pass
for fd in range(3, 64):
    try:
        os.write(fd, b'{"status": 0}\\n')
    except OSError:
        pass
print("end")
"""
        done = await python.run(attack, timeout=10, output_limit=1000, stdin="secret")
        assert (done.stdout.splitlines()[-1], done.status) == ("end", 0)
        assert "/proc/1/mem" not in done.stdout
        bomb = "import os\nwhile True: os.fork()"
        assert (await python.run(bomb, timeout=10, output_limit=1000)).status == 1
        assert (await python.run("print(1)", timeout=10, output_limit=1000)).stdout == "1\n"
    finally:
        await python.stop()


async def test_nothing_is_left() -> None:
    before = children()
    python = SandboxedPython(sandbox_of("bubblewrap"), LIMITS)
    await python.start()
    with pytest.raises(SandboxDied):
        await execute(python, "import os; os._exit(1)")
    while not children() <= before:  # noqa: ASYNC110 - processes set no event
        await asyncio.sleep(0.01)
