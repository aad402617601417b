"""What both sandboxes do: a lasting namespace, programs, limits, deaths, a pool, and nothing left behind."""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.processes import is_running
from support.sandboxes import BOTH, children, sandbox_of
from support.waiting import until

from gym_serve.observe.catalogue import SANDBOX_RUNNING
from gym_serve.sandbox import (
    Execution,
    Limits,
    PlainProcess,
    ProgramRun,
    SandboxDied,
    SandboxedPython,
    SandboxName,
    SandboxPool,
    find_sandbox,
    process,
)
from gym_serve.sandbox.inside.output import cut, describe
from gym_serve.types.errors import Unavailable

LONG = 60.0
MEMORY = 256 << 20

Start = Callable[..., Any]


@pytest.fixture(params=BOTH)
async def name(request: pytest.FixtureRequest) -> AsyncIterator[SandboxName]:
    before = children()
    yield request.param
    await until(lambda: children() <= before)


@pytest.fixture
async def start(name: SandboxName) -> AsyncIterator[Start]:
    started: list[SandboxedPython] = []

    async def start(**limits: int) -> SandboxedPython:
        python = SandboxedPython(sandbox_of(name), Limits(**{"memory_bytes": MEMORY, **limits}))
        started.append(python)
        await python.start()
        return python

    yield start
    for python in started:
        await python.stop()


@pytest.fixture
async def python(start: Start) -> SandboxedPython:
    python: SandboxedPython = await start()
    return python


async def execute(python: SandboxedPython, code: str, timeout: float = LONG, limit: int = 1000) -> Execution:
    return await python.execute(code, timeout=timeout, output_limit=limit)


async def run(python: SandboxedPython, code: str, timeout: float = LONG, **more: Any) -> ProgramRun:
    return await python.run(code, timeout=timeout, **{"output_limit": 1000, **more})


async def test_processes_that_run_are_counted(start: Start) -> None:
    def running() -> float:
        return sum(point.value for point in SANDBOX_RUNNING.points())

    before = running()
    python = await start()
    assert running() == before + 1
    await python.stop()
    assert running() == before


# A lasting namespace


async def test_names_last(python: SandboxedPython) -> None:
    await execute(python, "import math\ndef area(r):\n    return math.pi * r**2")
    await execute(python, "class Point:\n    x = 3\np = Point()")
    assert (await execute(python, "round(area(p.x), 2)")).result == "28.27"


async def test_functions_call_themselves_and_one_another(python: SandboxedPython) -> None:
    code = "def odd(n): return n > 0 and even(n - 1)\ndef even(n): return n == 0 or odd(n - 1)\n"
    code += "[even(10), odd(10)]"
    assert (await execute(python, code)).result == "[True, False]"
    assert (await execute(python, "k = 3\n[k * n for n in range(3)]")).result == "[0, 3, 6]"


async def test_a_last_expression_is_evaluated_once(python: SandboxedPython) -> None:
    done = await execute(
        python, "calls = []\ndef f():\n    calls.append(1)\n    print('in f')\n    return 'x'\nf()"
    )
    assert done == Execution(stdout="in f\n", stderr="", result="x", error=None)
    assert (await execute(python, "len(calls)")).result == "1"


@pytest.mark.parametrize(
    "code", ["x = 1", "print(end='')", "None", "", "# nothing", "def f(): return 1", "if 1: 2"]
)
async def test_nothing_is_echoed(python: SandboxedPython, code: str) -> None:
    assert await execute(python, code) == Execution(stdout="", stderr="", result=None, error=None)


async def test_an_expression_over_many_lines(python: SandboxedPython) -> None:
    assert (await execute(python, "a = 1; b = 2\n(a +\n b)")).result == "3"


async def test_annotations_are_evaluated(python: SandboxedPython) -> None:
    assert (await execute(python, "def f(x: int): ...\nf.__annotations__['x'] is int")).result == "True"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("1/0", "ZeroDivisionError: division by zero"),
        ("x +", "SyntaxError: invalid syntax (<cell 1>, line 1)"),
        ("raise SystemExit", "SystemExit: None; the session goes on"),
        ("exit(3)", "SystemExit: 3; the session goes on"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("input()", "EOFError: EOF when reading a line"),
        ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded"),
        ("class E(Exception):\n    def __str__(self): raise self\nraise E", "E: ?"),
    ],
)
async def test_exceptions(python: SandboxedPython, code: str, error: str) -> None:
    told = (await execute(python, code)).error
    assert told is not None
    assert told.startswith(error)
    assert (await execute(python, "40 + 2")).result == "42"


async def test_a_traceback_shows_the_code_alone(python: SandboxedPython) -> None:
    await execute(python, "def half(n):\n    return 1 / n")
    done = await execute(python, "print('so far')\nhalf(0)")
    assert done.stdout == "so far\n"
    assert "<cell 1>" in done.stderr
    assert "return 1 / n" in done.stderr
    assert "inside/" not in done.stderr


async def test_all_ways_of_writing_are_caught_in_order(python: SandboxedPython) -> None:
    code = "import os, sys\nprint('a', flush=True)\nos.write(1, b'b\\n')\n"
    code += "sys.stdout.write('c\\n')\nos.write(2, b'd\\n')"
    done = await execute(python, code)
    assert (done.stdout, done.stderr) == ("a\nb\nc\n", "d\n")
    assert done.result == "2"


@pytest.mark.parametrize(
    "vandalism",
    [
        "import sys; sys.stdout = sys.stderr = None",
        "import sys; sys.stdout.close(); sys.__stdout__.close()",
        "import os; os.close(1); os.close(2)",
        "import os; os.dup2(2, 1)",
        "import sys; sys.stdout = object()",
        "import builtins; builtins.print = None",
        "import signal; signal.signal(signal.SIGALRM, signal.SIG_IGN)",
    ],
)
async def test_output_survives_vandalism(python: SandboxedPython, vandalism: str) -> None:
    await execute(python, vandalism)
    assert (await execute(python, "import sys; n = sys.stdout.write('here\\n')")).stdout == "here\n"


async def test_a_long_output_is_cut(python: SandboxedPython) -> None:
    done = await execute(python, "print('x' * 5000)\n'y' * 3000", limit=100)
    assert done.stdout == "x" * 100 + "\n... (4901 more)"
    assert done.result == "y" * 100 + "\n... (2900 more)"


async def test_endless_output_ends_and_leaves_no_trace(start: Start) -> None:
    python = await start(file_bytes=1 << 20)
    done = await execute(python, "while True: print('x' * 999)")
    assert done.error == "OSError: [Errno 27] File too large"
    assert await execute(python, "print('next')") == Execution(
        stdout="next\n", stderr="", result=None, error=None
    )


async def test_characters_of_any_kind(python: SandboxedPython) -> None:
    done = await execute(python, "import os; n = os.write(1, b'\\xff\\xfe'); print('é√😀')\n'\\ud800'")
    assert done.stdout == "\ufffd\ufffdé√😀\n"
    assert done.result == "?"


# Limits


@pytest.mark.parametrize(
    "code",
    ["while True: pass", "import time; time.sleep(99)", "try:\n    while True: pass\nexcept Exception: pass"],
)
async def test_time_out_keeps_the_names(python: SandboxedPython, code: str) -> None:
    await execute(python, "kept = 7")
    done = await execute(python, f"print('before')\n{code}", timeout=0.5)
    assert done.error == "TimeoutError: stopped after 0.5 s; variables are kept"
    assert done.stdout == "before\n"
    assert (await execute(python, "kept")).result == "7"


@pytest.mark.parametrize(
    "code",
    [
        "sum(range(10**15))",
        "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
    ],
)
async def test_code_that_takes_no_notice_costs_the_process(
    python: SandboxedPython, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_GRACE_SECONDS", 0.3)
    with pytest.raises(SandboxDied, match="no answer in"):
        await execute(python, code, timeout=0.1)
    assert not python.running


async def test_memory(python: SandboxedPython) -> None:
    assert (await execute(python, "x = bytearray(10**9)")).error == "MemoryError"
    assert (await execute(python, "a = []\nwhile True: a.append(bytearray(10**8))")).error == "MemoryError"
    assert (await execute(python, "del a\nlen(bytearray(10**8))")).result == "100000000"


async def test_large_files(start: Start) -> None:
    python = await start(file_bytes=1 << 20)
    done = await execute(python, "open('f', 'wb').write(bytes(2 << 20))")
    assert done.error == "OSError: [Errno 27] File too large"


async def test_many_files(python: SandboxedPython) -> None:
    done = await execute(python, "fs = []\nfor n in range(999): fs.append(open(f'f{n}', 'w'))")
    assert done.error is not None
    assert done.error.startswith("OSError: [Errno 24] Too many open files")
    assert (await execute(python, "del fs\n1")).result == "1"


# Deaths


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("import os; os._exit(3)", "exit status 3"),
        ("import ctypes; ctypes.string_at(0)", "signal 11"),
    ],
)
async def test_code_that_ends_its_process(
    python: SandboxedPython, code: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_END_SECONDS", LONG)
    with pytest.raises(SandboxDied, match=end):
        await execute(python, code)
    with pytest.raises(SandboxDied, match="not started"):
        await execute(python, "1")


@pytest.mark.parametrize(
    "forge",
    [
        "os.write(fd, b'[1]\\n')",
        "os.truncate(fd, 1 << 20)",
        "os.pwrite(fd, b'\\xff' * 100_000, 0)",
        "os.close(fd)",
        "os.dup2(1, fd)",
    ],
)
async def test_what_code_does_to_its_descriptors_is_its_own_affair(
    python: SandboxedPython, forge: str
) -> None:
    """It may claim things about itself, or end; the process outside gets an answer of the right form."""
    code = f"import os\nfor fd in range(3, 64):\n    try:\n        {forge}\n    except OSError: pass\nx = 1"
    try:
        done = await execute(python, code)
    except SandboxDied:
        assert not python.running
        return
    assert len(done.stdout) + len(done.stderr) < 100_000
    with suppress(SandboxDied):
        await execute(python, "x")


async def test_a_cancelled_call_ends_the_process(python: SandboxedPython) -> None:
    call = asyncio.create_task(execute(python, "while True: pass"))
    await asyncio.sleep(0.1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not python.running


async def test_stop_twice(python: SandboxedPython) -> None:
    assert await python.stop() == "signal 9"
    assert await python.stop() == "no process"


# Programs


@pytest.mark.parametrize(
    "code",
    [
        "print(sum(int(x) for x in input().split()))",
        "import sys\nfor line in sys.stdin:\n    print(sum(map(int, line.split())))",
        "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))",
        "import os\nprint(sum(map(int, os.read(0, os.fstat(0).st_size).split())))",
        "print(sum(map(int, open(0).read().split())))",
        "print(sum(map(int, open('/dev/stdin').read().split())))",
        "import os\na, b = map(int, input().split())\nos.write(1, f'{a + b}\\n'.encode())\nos._exit(0)",
        "import sys\nprint(sum(map(int, input().split())))\nsys.exit(1)",
        "import threading\ndef main(): print(sum(map(int, input().split())))\n"
        "threading.Thread(target=main).start()",
        "import atexit\natexit.register(lambda: print(sum(map(int, input().split()))))",
        "n = 0\ndef main():\n    global n\n    n += sum(map(int, input().split()))\n    print(n)\n"
        "if __name__ == '__main__':\n    main()",
        "import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)\n"
        "assert f(50_000) == 50_000\nprint(sum(map(int, input().split())))",
        "import io, sys\nsys.stdin = io.StringIO(sys.stdin.read())\nprint(sum(map(int, input().split())))",
        "import sys\ninput = sys.stdin.readline\nprint(sum(map(int, input().split())), end='')",
    ],
)
async def test_ways_to_write_a_program(python: SandboxedPython, code: str) -> None:
    done = await run(python, code, stdin="2 40\n")
    assert (done.stdout.strip(), done.status, done.stderr) == ("42", 0, "")


async def test_programs_see_nothing_of_one_another(python: SandboxedPython) -> None:
    await run(python, "import builtins, math\nbuiltins.mark = math.mark = 1\nimport random; random.seed(1)")
    done = await run(python, "import builtins, math\nprint(hasattr(builtins, 'mark'), hasattr(math, 'mark'))")
    assert done.stdout == "False False\n"


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("print(1)\n1/0", 1, "ZeroDivisionError: division by zero"),
        ("print('", 1, "SyntaxError: unterminated string literal (detected at line 1) (<program>, line 1)"),
        ("input(); input()", 1, "EOFError: EOF when reading a line"),
        ("x = [0] * 10**9", 1, "MemoryError"),
        ("import os; os.abort()", -6, ""),
    ],
)
async def test_programs_that_fail(python: SandboxedPython, code: str, status: int, error: str) -> None:
    done = await run(python, code, stdin="1\n")
    assert (done.status, done.stderr.rpartition("\n")[2], done.timed_out) == (status, error, False)


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(99)", "sum(range(10**15))"])
async def test_a_program_out_of_time(python: SandboxedPython, code: str) -> None:
    done = await run(python, code, timeout=0.6)  # of ten times that, the machine is said to be overloaded
    assert (done.timed_out, done.starved) == (True, False)
    assert (await run(python, "print(1)")).stdout == "1\n"


async def test_output_that_is_too_long(start: Start) -> None:
    python = await start(file_bytes=1 << 20)
    done = await run(python, "print('x' * 2000)")
    assert (done.cut, done.status, len(done.stdout)) == (True, 0, 1000)
    assert (await run(python, "print('x' * (2 << 20))")).status == 1


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("def f(a, b): return a + b", 5),
        ("class Solution:\n    def f(self, a, b): return [a, b]", [2, 3]),
        ("class  Solution:\n    def f(self, a, b): return 5", 5),
        ("class Solution:\n    def __init__(self): self.f = max", 3),
        ("# no class Solution is needed\ndef f(a, b): return 5", 5),
        ("class SolutionOf: pass\ndef f(a, b): return 5", 5),
        ("class Solution: pass\ndef f(a, b): return 5", 5),
        ("def f(a, b): return ((a, b), {a: b})", [[2, 3], {"2": 3}]),
        ("from fractions import Fraction\ndef f(a, b): return Fraction(a, 4)", 0.5),
        ("import numpy as np\ndef f(a, b): return np.arange(a) + b", [3, 4]),
        ("f = max", 3),
        ("def f(a, b):\n    print('noise')\n    return None", None),
        ("def f(a, b):\n    import sys\n    sys.stdin.read()\n    return __name__", "solution"),
    ],
)
async def test_functions(python: SandboxedPython, code: str, value: Any) -> None:
    done = await run(python, code, function="f", arguments=[2, 3])
    assert done.value is not None, done
    assert json.loads(done.value) == value


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("def f(): return {1, 2}", 0),
        ("def f():\n    x = []\n    x.append(x)\n    return x", 0),
        ("def f(): return object()", 0),
        ("def f(): return b'1'", 0),
        ("def f():\n    import sys\n    sys.exit(0)", 0),
        ("def f(x): return x", 1),
        ("def g(): return 1", 1),
    ],
)
async def test_functions_without_a_value(python: SandboxedPython, code: str, status: int) -> None:
    done = await run(python, code, function="f", arguments=[])
    assert (done.value, done.status) == (None, status)


# The pool


async def test_pool_gives_fresh_ones(name: SandboxName) -> None:
    pool = SandboxPool(sandbox_of(name), Limits(), size=1, prelude="import math")
    await pool.start()
    try:
        for _ in range(3):
            python = await pool.take()
            done = await execute(python, "before = 'mark' in globals()\nmark = 1\nmath.floor(2.5), before")
            assert done.result == "(2, False)"
            await python.stop()
    finally:
        await pool.stop()
    with pytest.raises(Unavailable, match="not running"):
        await pool.take()


async def test_packages_below_tmp(name: SandboxName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a virtual environment lies there, the sandbox's own /tmp must not hide it."""
    packages = tmp_path / "site-packages"
    about = packages / "shelf_of_tmp-1.0.dist-info"
    about.mkdir(parents=True)
    (packages / "shelf_of_tmp.py").write_text("BOOKS = 3\n")
    (about / "METADATA").write_text("Name: shelf-of-tmp\nVersion: 1.0\nRequires-Dist: not-installed>=1\n")
    (about / "RECORD").write_text("shelf_of_tmp.py,,\nshelf_of_tmp-1.0.dist-info/METADATA,,\n")
    monkeypatch.syspath_prepend(str(packages))
    python = SandboxedPython(find_sandbox(name, ["shelf_of_tmp"]), Limits())
    await python.start()
    try:
        assert (await execute(python, "import shelf_of_tmp\nshelf_of_tmp.BOOKS")).result == "3"
    finally:
        await python.stop()


async def test_pool_is_ready_before_it_is_asked(name: SandboxName) -> None:
    before = children()
    pool = SandboxPool(sandbox_of(name), Limits(), size=2)
    await pool.start()
    try:
        assert len(children() - before) >= 2
        both = await asyncio.gather(pool.take(), pool.take())
        assert both[0] is not both[1]
        await asyncio.gather(*(python.stop() for python in both))
    finally:
        await pool.stop()


async def test_stop_while_one_is_starting(name: SandboxName) -> None:
    before = children()
    pool = SandboxPool(sandbox_of(name), Limits(), size=1)
    await pool.start()
    python = await pool.take()
    await pool.stop()
    await python.stop()
    assert children() <= before


async def test_a_prelude_that_fails() -> None:
    pool = SandboxPool(PlainProcess(), Limits(), size=1, prelude="import no_such_module")
    with pytest.raises(Unavailable, match=r"does not start: ModuleNotFoundError: .*no_such_module"):
        await pool.start()


async def test_a_command_that_does_not_start() -> None:
    class Broken(PlainProcess):
        def command(self, limits: Limits) -> list[str]:
            return ["/bin/false"]

    before = children()
    with pytest.raises(Unavailable, match="does not start: the process ended"):
        await SandboxedPython(Broken(), Limits()).start()

    class Missing(PlainProcess):
        def command(self, limits: Limits) -> list[str]:
            return ["/no/such/program"]

    with pytest.raises(Unavailable, match="No such file"):
        await SandboxedPython(Missing(), Limits()).start()
    assert children() <= before


@pytest.mark.skipif(sys.platform != "linux", reason="Linux' killer of processes")
async def test_it_is_ended_before_others_for_lack_of_memory(python: SandboxedPython) -> None:
    run = await python.run("print(open('/proc/self/oom_score_adj').read())", timeout=60, output_limit=100)
    assert run.stdout.strip() == "1000"


async def test_the_process_dies_with_its_parent(
    name: SandboxName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = f"""
import asyncio, psutil
from gym_serve.sandbox import Limits, SandboxedPython, find_sandbox

async def main():
    python = SandboxedPython(find_sandbox({name!r}), Limits())
    await python.start()
    busy = asyncio.create_task(python.execute("while True: pass", timeout=1000, output_limit=9))
    await asyncio.sleep(0.2)
    print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
    await busy

asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in (await parent.stdout.readline()).split()]
    assert pids
    folders = os.listdir(tmp_path)
    find_sandbox(name)  # another owner leaves what is in use
    assert os.listdir(tmp_path) == folders
    assert len(folders) == (name == "process")
    parent.kill()
    await parent.communicate()
    await until(lambda: not any(map(is_running, pids)))
    find_sandbox(name)
    assert not os.listdir(tmp_path)


# Texts


@given(st.text(), st.integers(1, 50))
def test_cut(text: str, limit: int) -> None:
    assert cut(text, limit).startswith(text[:limit])
    assert (cut(text, limit) == text) == (len(text) <= limit)


def test_describe() -> None:
    assert describe(ValueError("no")) == "ValueError: no"
    assert describe(ValueError()) == "ValueError"
    assert len(describe(ValueError("x" * 10_000))) < 3000
