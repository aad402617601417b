"""The environment as a whole: fixtures, the interpreter of a session, its limits and deaths, the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from support.environments import Bench, examples, said
from support.sandboxes import AVAILABLE, children, needs_bubblewrap
from support.waiting import until

from gym_serve.environments.math_with_code import MathWithCode
from gym_serve.sandbox import SandboxedPython, process
from gym_serve.servers import Call
from gym_serve.types.errors import InvalidRequest, Unavailable, VerifierFailed

LOOP = pytest.mark.asyncio(loop_scope="module")  # one pool of sandboxes for all
SETTINGS: dict[str, Any] = {"sandbox": AVAILABLE, "memory_mb": 512, "max_execution_time": 20}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[MathWithCode]:
    before = children()
    server = MathWithCode(**SETTINGS)
    await server.start()
    yield server
    await server.stop()
    await until(lambda: children() <= before)


@pytest_asyncio.fixture(loop_scope="module")
async def bench(server: MathWithCode) -> AsyncIterator[Bench]:
    bench = Bench(server)
    yield bench
    server.reconfigure({"max_execution_time": 20})
    if bench.session:
        await bench.call("close_session")


async def execute(bench: Bench, code: str) -> dict[str, Any]:
    result: dict[str, Any] = await bench.tool("execute_python", code=code)
    return result


@LOOP
async def test_example_rows_accept_their_own_answer(bench: Bench) -> None:
    rows = examples(MathWithCode)
    assert len(rows) >= 5
    for row in rows:
        right, wrong = f"So \\boxed{{{row['expected_result']}}}.", "So \\boxed{-987654}."
        assert (await bench.verify(row, said(right)))["reward"] == 1.0
        assert (await bench.verify(row, said(wrong)))["reward"] == 0.0
        (tool,) = row["responses_create_params"]["tools"]
        assert tool["name"] in MathWithCode.tools


# The interpreter


@LOOP
async def test_a_session_keeps_its_names(bench: Bench) -> None:
    await execute(bench, "import sympy\nx = sympy.Symbol('x')\ndef f(n): return 1 if n < 2 else n * f(n - 1)")
    done = await execute(bench, "sympy.factor(x**2 - 1), f(10)")
    assert done == {
        "success": True,
        "stdout": "",
        "stderr": "",
        "error_message": None,
        "result": "((x - 1)*(x + 1), 3628800)",
    }


@LOOP
async def test_numpy(bench: Bench) -> None:
    code = "import numpy as np\nnp.linalg.det(np.array([[2.0, 1.0], [1.0, 3.0]])).round(6)"
    assert (await execute(bench, code))["result"] == "5.0"


@LOOP
async def test_sessions_are_apart(server: MathWithCode, bench: Bench) -> None:
    other = Bench(server)
    await execute(bench, "x = 1")
    assert (await execute(other, "x"))["error_message"] == "NameError: name 'x' is not defined"
    await other.call("close_session")
    assert (await execute(bench, "x"))["result"] == "1"


@LOOP
async def test_exceptions_are_told(bench: Bench) -> None:
    done = await execute(bench, "print('so far')\n1/0")
    assert (done["success"], done["stdout"]) == (False, "so far\n")
    assert done["error_message"] == "ZeroDivisionError: division by zero"
    assert done["stderr"].startswith("Traceback (most recent call last):\n")


@LOOP
async def test_an_endless_loop_is_stopped_and_names_are_kept(server: MathWithCode, bench: Bench) -> None:
    await execute(bench, "x = 5")
    server.reconfigure({"max_execution_time": 0.3})
    done = await execute(bench, "print('looping')\nwhile True: pass")
    assert done["error_message"] == "TimeoutError: stopped after 0.3 s; variables are kept"
    assert done["stdout"] == "looping\n"
    assert (await execute(bench, "x"))["result"] == "5"


@LOOP
@pytest.mark.parametrize("code", ["import os; os._exit(0)", "import ctypes; ctypes.string_at(0)"])
async def test_a_death_is_told_and_the_session_goes_on(bench: Bench, code: str) -> None:
    await execute(bench, "x = 5")
    done = await execute(bench, code)
    assert done["success"] is False
    assert (
        "the next call starts a new one: variables, functions and imports are lost" in done["error_message"]
    )
    assert (await execute(bench, "x"))["error_message"] == "NameError: name 'x' is not defined"


@LOOP
async def test_code_that_takes_no_notice_of_time(
    server: MathWithCode, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_GRACE_SECONDS", 0.3)
    server.reconfigure({"max_execution_time": 0.1})
    done = await execute(bench, "sum(range(10**15))")
    assert done["error_message"].startswith("the interpreter ended (no answer in")
    server.reconfigure({"max_execution_time": 20})
    assert (await execute(bench, "1"))["result"] == "1"


@LOOP
@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("x = bytearray(10**10)", "MemoryError"),
        ("a = []\nwhile True: a.append(bytearray(10**8))", "MemoryError"),
        ("while True: print('x' * 10**5)", "OSError: [Errno 27] File too large"),
        ("10**10**5", "ValueError: Exceeds the limit"),
        ("def f(): return f()\nf()", "RecursionError: maximum recursion depth exceeded"),
        ("input()", "EOFError: EOF when reading a line"),
    ],
)
async def test_bombs(bench: Bench, code: str, error: str) -> None:
    await execute(bench, "kept = 1")
    done = await execute(bench, code)
    assert done["error_message"].startswith(error)
    assert len(done["stdout"]) < 30_000
    assert (await execute(bench, "a = None; kept"))["result"] == "1"


@LOOP
@needs_bubblewrap
@pytest.mark.parametrize(
    "code",
    [
        "import os\nwhile True: os.fork()",
        "import urllib.request; urllib.request.urlopen('http://example.com')",
        "open('/etc/passwd').read()",
        "from gym_serve.grading import math_worker",
        "import subprocess; subprocess.run(['ls', '/'])",
        "import os; os.environ['OPENAI_API_KEY']",
    ],
)
async def test_attempts_to_get_out_are_told(bench: Bench, code: str) -> None:
    await execute(bench, "kept = 1")
    assert (await execute(bench, code))["success"] is False
    assert (await execute(bench, "kept"))["result"] == "1"


@LOOP
async def test_a_long_output_is_cut(bench: Bench) -> None:
    done = await execute(bench, "print('x' * 10**6)\n'y' * 10**6")
    assert (len(done["stdout"]), len(done["result"])) == (20_018, 20_018)
    assert done["stdout"].endswith("\n... (980001 more)")


@LOOP
async def test_calls_at_the_same_time_run_one_after_the_other(bench: Bench) -> None:
    await execute(bench, "log = []")
    codes = [f"log.append({n}); import time; time.sleep(0.01); log.append({n})" for n in range(5)]
    await asyncio.gather(*(execute(bench, code) for code in codes))
    log = (await execute(bench, "log"))["result"]
    assert log == str([n for n in range(5) for _ in range(2)])


@LOOP
async def test_end_session_forgets(bench: Bench) -> None:
    await execute(bench, "x = 1")
    done = await bench.tool("end_session")
    assert (done["success"], done["error_message"]) == (True, None)
    assert "NameError" in (await execute(bench, "x"))["error_message"]
    assert (await bench.tool("end_session"))["success"]


@LOOP
async def test_a_cancelled_call_is_told_with_the_next(bench: Bench) -> None:
    await execute(bench, "x = 1")
    host, body = bench.host, b'{"code": "while True: pass"}'
    reply = await host.dispatch(Call("tools/execute_python", body, bench.session, timeout=1.0))
    assert reply.status == 504
    done = await execute(bench, "print('x' in globals())")
    assert done["stdout"] == "False\n"
    assert done["stderr"].startswith("(the interpreter was started anew")


@LOOP
async def test_nobody_is_held_up_by_many_sessions(server: MathWithCode) -> None:
    benches = [Bench(server) for _ in range(12)]
    results = await asyncio.gather(*(execute(bench, f"print({n})") for n, bench in enumerate(benches)))
    assert [result["stdout"] for result in results] == [f"{n}\n" for n in range(12)]
    await asyncio.gather(*(bench.call("close_session") for bench in benches))


@LOOP
@pytest.mark.parametrize("arguments", [{}, {"code": 1}, {"code": None}])
async def test_arguments_that_do_not_fit(bench: Bench, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        await bench.tool("execute_python", **arguments)


@LOOP
async def test_prelude() -> None:
    server = MathWithCode(**SETTINGS, prelude="from fractions import Fraction", warm_sandboxes=1)
    await server.start()
    try:
        bench = Bench(server)
        assert (await execute(bench, "Fraction(1, 3) + Fraction(1, 6)"))["result"] == "1/2"
        await bench.call("close_session")
    finally:
        await server.stop()
    with pytest.raises(Unavailable):
        await execute(Bench(server), "1")


# Starting


async def test_without_a_verifier_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(self: object) -> None:
        raise VerifierFailed("no math-verify")

    before = children()
    monkeypatch.setattr("gym_serve.grading.MathVerifyPool.start", start)
    with pytest.raises(VerifierFailed, match="no math-verify"):
        await MathWithCode(**SETTINGS).start()
    await until(lambda: children() <= before)


async def test_a_sandbox_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(self: object) -> None:
        raise Unavailable("a sandbox does not start: no memory")

    monkeypatch.setattr(SandboxedPython, "start", start)
    with pytest.raises(Unavailable, match="no memory"):
        await MathWithCode(**SETTINGS).start()
