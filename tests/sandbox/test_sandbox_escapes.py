"""Attacks on bubblewrap: the catalogue, as root and as an ordinary user, and those on something outside."""

import ast
import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.attacks import ATTACKS, CATALOGUE, outcomes
from support.ordinary_user import as_ordinary_user, why_not
from support.sandboxes import children, needs_bubblewrap, sandbox_of
from support.waiting import until

import gym_serve
from gym_serve.environments.code_gen.running import PRELUDE
from gym_serve.sandbox import Execution, Limits, SandboxDied, SandboxedPython, find_sandbox, process

pytestmark = [needs_bubblewrap, pytest.mark.asyncio(loop_scope="module")]

LIMITS = Limits(memory_bytes=256 << 20, disk_bytes=8 << 20)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def python() -> AsyncIterator[SandboxedPython]:
    """One for all: an attempt that damages it fails the next."""
    python = SandboxedPython(sandbox_of("bubblewrap"), LIMITS)
    await python.start()
    yield python
    await python.stop()


async def execute(python: SandboxedPython, code: str) -> Execution:
    return await python.execute(code, timeout=60, output_limit=2000)


# The catalogue


def misses(found: dict[str, str]) -> list[str]:
    """Attacks that did not get what they must."""
    return [
        f"{attack.name}: {found[attack.name]}, not {' or '.join(attack.gets)}"
        for attack in ATTACKS
        if not attack.got(found[attack.name])
    ]


async def test_every_attack_gets_a_zero() -> None:
    assert len({attack.name for attack in CATALOGUE}) == len(CATALOGUE) >= 60
    assert misses(await outcomes(find_sandbox("bubblewrap"), ATTACKS)) == []


async def test_every_attack_gets_a_zero_from_an_ordinary_user() -> None:
    if problem := why_not():
        pytest.skip(problem)
    command = as_ordinary_user("-B", "-m", "support.attacks")
    tests = str(Path(__file__).parents[1])
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=tests, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    assert misses(json.loads(done.stdout)) == []


@pytest.mark.parametrize("user", ["this", "ordinary"])
async def test_the_supervisor_itself_opens_nothing_for_writing(user: str) -> None:
    """Where the server is root, it is root without rights; it walks as it is started, without any filter."""
    walk = """
import os
found = []
for top in ("/proc", "/sys", "/usr", "/sandbox", "/etc"):
    for at, _, names in os.walk(top):
        for path in (os.path.join(at, name) for name in names):
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW))
                found.append(path)
            except OSError:
                pass
print(len(os.listdir("/proc")) > 10, found)
"""
    script = """
import subprocess, sys
from gym_serve.sandbox import Bubblewrap, Limits
command = Bubblewrap("bwrap").command(Limits())
command[command.index("-c") :] = ["-c", sys.argv[1]]
subprocess.run(command, check=True)
"""
    if user == "ordinary" and (problem := why_not()):
        pytest.skip(problem)
    command = [sys.executable, "-c"] if user == "this" else as_ordinary_user("-B", "-c")
    done = await asyncio.to_thread(
        subprocess.run, [*command, script, walk], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout == "True []\n", done.stderr


async def test_in_a_session_an_attack_gets_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, too, it never makes a failure: it is told an exception, or that its interpreter has ended."""
    monkeypatch.setattr(process, "_GRACE_SECONDS", 0.3)
    waiting = [attack for attack in ATTACKS if attack.function is None]
    # What it writes as an answer is its answer; and the supervisor measures the time of a session.
    own_affairs = ("write a forged reply to every descriptor", "setrlimit(RLIMIT_CPU)")

    async def work() -> None:
        python = SandboxedPython(sandbox_of("bubblewrap"), LIMITS, PRELUDE)
        while waiting:
            attack = waiting.pop()
            if attack.spoils or not python.running:
                await python.stop()
                await python.start()
            try:
                done = await python.execute(attack.program, timeout=0.5, output_limit=2000)
            except SandboxDied:
                assert not python.running
            else:
                assert "reached" not in done.stdout or attack.name in own_affairs
                if attack.spoils:
                    await python.stop()
        await python.stop()

    await asyncio.gather(work(), work())


async def test_the_page_counts_the_attacks() -> None:
    """Each class in the table of docs/security.md, with the number of its attacks and of what they get."""
    page = Path(__file__).parents[2].joinpath("docs/security.md").read_text("utf-8")
    ends = ("exception", "wrong answer", "time", "killed")
    counts: dict[str, Counter[str]] = {}
    for attack in CATALOGUE:
        counts.setdefault(attack.kind, Counter())[attack.gets[0].split(":")[0]] += 1
    expected = {
        kind: [sum(count.values()), *(count[end] for end in ends)] for kind, count in sorted(counts.items())
    }
    expected["all"] = [sum(numbers) for numbers in zip(*expected.values(), strict=True)]
    rows = re.findall(r"^\| ([a-z ]+?) \|[^|]*" + r"\| *(\d*) " * 5 + r"\|$", page, re.M)
    assert {kind: [int(number or 0) for number in numbers] for kind, *numbers in rows} == expected
    assert f"A catalogue of {len(CATALOGUE)} programs" in page


# With something outside to reach


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


async def test_threads_that_are_left_behind_stand_still() -> None:
    python = SandboxedPython(sandbox_of("bubblewrap"), LIMITS)
    await python.start()
    try:
        code = """
import threading, time
turns = 0
def spin():
    global turns
    while True: turns += 1
threading.Thread(target=spin, daemon=True).start()
time.sleep(0.05)
"""
        await execute(python, code)
        clock = "import time; time.process_time_ns()"
        before = int((await execute(python, clock)).result or 0)
        await asyncio.sleep(1)
        assert int((await execute(python, clock)).result or 0) - before < 0.5e9
        assert (await execute(python, "turns > 0")).result == "True"
    finally:
        await python.stop()


async def test_no_network(python: SandboxedPython) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for code in (
            f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
            f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}', timeout=1)",
        ):
            assert (await execute(python, code)).error is not None


@pytest.mark.parametrize("path", [__file__, gym_serve.__file__, os.environ.get("HOME", "/root"), os.getcwd()])
async def test_files_that_are_not_there(python: SandboxedPython, path: str) -> None:
    """Of a folder, at most the way to Python is there, and Python."""
    code = f"""
import os, sys
ours = (os.path.dirname(os.__file__), os.path.dirname(sys.executable), "{sys.base_prefix}/lib")
[at for at, _, files in os.walk({path!r}) if files and not at.startswith(ours)] + [os.path.isfile({path!r})]
"""
    assert (await execute(python, code)).result == "[False]"


async def test_no_package_but_those_it_was_given() -> None:
    python = SandboxedPython(find_sandbox("bubblewrap", ["numpy"]), Limits())
    await python.start()
    try:
        code = "import os; sorted(os.listdir('/sandbox/packages')), sorted(os.listdir('/sandbox'))"
        shown, folders = ast.literal_eval((await execute(python, code)).result or "")
        assert folders == ["inside", "packages"]
        assert {name.partition("-")[0].partition(".")[0] for name in shown} == {"numpy"}
        assert (await execute(python, "import numpy; int(numpy.arange(4).sum())")).result == "6"
        assert (await execute(python, "import sympy")).error == "ModuleNotFoundError: No module named 'sympy'"
    finally:
        await python.stop()


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


async def test_no_rights(python: SandboxedPython) -> None:
    code = "lines = [line.split() for line in open('/proc/self/status')]\n"
    code += "[line[1] for line in lines if line[0] in ('CapPrm:', 'CapEff:', 'CapAmb:', 'NoNewPrivs:')]"
    assert (await execute(python, code)).result == f"['{'0' * 16}', '{'0' * 16}', '{'0' * 16}', '1']"
    assert (await execute(python, "import os; os.getuid() * os.getgid() > 0, os.getgroups()")).result in (
        "(True, [])",
        "(True, [65534])",  # in a user namespace: groups that it does not know
    )


async def test_processes_of_this_machine_cannot_be_named(python: SandboxedPython) -> None:
    assert (await execute(python, f"import os; os.kill({os.getpid()}, 0)")).error == (
        "PermissionError: [Errno 1] Operation not permitted"
    )
    assert (await execute(python, f"open('/proc/{os.getpid()}/status')")).error is not None


async def test_two_sandboxes_see_nothing_of_each_other(python: SandboxedPython) -> None:
    other = SandboxedPython(sandbox_of("bubblewrap"), LIMITS)
    await other.start()
    try:
        await execute(other, "open('/tmp/mark', 'w').close()")
        assert (await execute(python, "import os; os.path.exists('/tmp/mark')")).result == "False"
    finally:
        await other.stop()


async def test_nothing_is_left() -> None:
    before = children()
    python = SandboxedPython(sandbox_of("bubblewrap"), LIMITS)
    await python.start()
    with pytest.raises(SandboxDied):
        await execute(python, "import os; os._exit(1)")
    await until(lambda: children() <= before)
