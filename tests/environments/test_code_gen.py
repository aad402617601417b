"""The environment as a whole: fixtures, example rows, limits, failures, many at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from support.environments import Bench, examples, said
from support.sandboxes import AVAILABLE, children, needs_bubblewrap
from support.waiting import until

from gym_serve.environments.code_gen import CodeGen, running
from gym_serve.sandbox import ProgramRun, SandboxDied, SandboxedPython
from gym_serve.types.errors import Unavailable, VerifierFailed

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one pool of sandboxes for all

SUM = "a, b = map(int, input().split())\nprint(a + b)"


def row(*tests: tuple[str, str], fn_name: str | None = None, **metadata: Any) -> dict[str, Any]:
    unit_tests = {"inputs": [i for i, _ in tests], "outputs": [o for _, o in tests], "fn_name": fn_name}
    return {"verifier_metadata": {"unit_tests": unit_tests, **metadata}}


SUMS = row(("1 2\n", "3\n"), ("5 -7\n", "-2\n"))


def program(code: str) -> list[dict[str, Any]]:
    return said(f"```python\n{code}\n```")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[CodeGen]:
    before = children()
    server = CodeGen(sandbox=AVAILABLE, num_processes=2, memory_mb=512)
    await server.start()
    yield server
    await server.stop()
    await until(lambda: children() <= before)


@pytest.fixture
def bench(server: CodeGen) -> Bench:
    return Bench(server)


async def test_example_rows_are_sound(bench: Bench) -> None:
    rows = examples(CodeGen)
    assert len(rows) >= 5
    for example in rows:
        verdict = await bench.verify(example, program("pass"))
        assert (verdict["reward"], verdict["error_code"]) == (
            (0.0, -2) if not example["verifier_metadata"]["unit_tests"].get("fn_name") else (0.0, -4)
        )
        assert verdict["difficulty"] == example["verifier_metadata"]["difficulty"]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import os; os.abort()", -1),
        ("raise SystemExit(1)", -2),
        ("bytearray(10**9)", -4),
        ("while True: print('x' * 10**6)", -4),
    ],
)
async def test_programs_out_of_bounds(bench: Bench, code: str, error: int) -> None:
    await check_out_of_bounds(bench, code, error)


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(99)"])
async def test_programs_out_of_time(bench: Bench, server: CodeGen, code: str) -> None:
    server.reconfigure({"unit_test_timeout_secs": 1})
    try:
        await check_out_of_bounds(bench, code, -3)
    finally:
        server.reconfigure({"unit_test_timeout_secs": 10})


async def check_out_of_bounds(bench: Bench, code: str, error: int) -> None:
    verdict = await bench.verify(SUMS, program(code))
    assert (verdict["reward"], verdict["result"], verdict["error_code"]) == (0.0, [error], error)
    assert (await bench.verify(SUMS, program(SUM)))["reward"] == 1.0


@needs_bubblewrap
@pytest.mark.parametrize(
    "code",
    [
        "import os\nwhile True: os.fork()",
        "import socket; socket.create_connection(('1.1.1.1', 53))",
        "open('/etc/passwd').read()",
        "import subprocess; subprocess.check_output(['ls'])",
        "import gym_serve",
    ],
)
async def test_programs_that_try_to_get_out(bench: Bench, code: str) -> None:
    verdict = await bench.verify(SUMS, program(f"{code}\n{SUM}"))
    assert (verdict["reward"], verdict["error_code"]) == (0.0, -4)


GCD = row(("12\n18", "6"), ("7\n5", "1"), fn_name="gcd")


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("gcd", "12\n18", "6"),
        ("factorial", "3", "6"),
        ("sorted", "[2, 1]", "[1, 2]"),
        ("max", "1\n2", "2"),
        ("reduce", "1\n2", "null"),
        ("Counter", "[]", "{}"),
        ("__repr__", "", '"x"'),
    ],
)
@pytest.mark.parametrize("code", ["pass", "import math, builtins", "class Solution: pass"])
async def test_a_function_of_a_library_is_no_answer(
    bench: Bench, name: str, given: str, expected: str, code: str
) -> None:
    verdict = await bench.verify(row((given, expected), fn_name=name), program(code))
    assert verdict["reward"] == 0.0, verdict


@pytest.mark.parametrize(
    "code",
    [
        "from math import gcd",
        "import math\ngcd = math.gcd",
        "def gcd(a, b): return a if b == 0 else gcd(b, a % b)",
        "f = gcd\ndef gcd(a, b): return f(a, b)",
        "class Solution:\n    def gcd(self, a, b): return gcd(a, b)",
    ],
)
async def test_a_program_may_use_a_library_for_its_answer(bench: Bench, code: str) -> None:
    assert (await bench.verify(GCD, program(code)))["reward"] == 1.0


@pytest.mark.parametrize(
    "code",
    [
        "print(deque([3])[0] + len(Counter()) + math.floor(pi) - 3)",
        "def f(xs: List[int]) -> Optional[int]: return reduce(add, xs)\nprint(f([1, 2]))",
        "exec('print(gcd(3, 6))', {})",
        "import builtins\nsay = builtins.print\nbuiltins.print = lambda x: say(x + 1)\nprint(2)",
        "globals().clear()\nprint(3)",
    ],
)
async def test_names_that_need_no_import(bench: Bench, code: str) -> None:
    assert (await bench.verify(row(("", "3\n")), program(code)))["reward"] == 1.0


@pytest.mark.parametrize("text", ["x", "1 ", "1\\n", "\\U0001f600"])
async def test_a_long_output_is_cut_where_it_is_made(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Of 30 MB, the replica gets what the test may need, and compares that beside its event loop."""
    taken, compared = [], []
    original, code_of = SandboxedPython.run, running._code

    async def run(self: SandboxedPython, *args: Any, **kwargs: Any) -> ProgramRun:
        taken.append(await original(self, *args, **kwargs))
        return taken[-1]

    def compare(*args: Any) -> int | None:
        compared.append(threading.current_thread())
        return code_of(*args)

    monkeypatch.setattr(SandboxedPython, "run", run)
    monkeypatch.setattr(running, "_code", compare)
    code = f"import os\nfor _ in range(30): os.write(1, ('{text}'.encode() * (1 << 20))[:1 << 20])"
    verdict = await bench.verify(SUMS, program(code))
    assert (verdict["reward"], verdict["error_code"]) == (0.0, -2)
    assert len(taken[0].stdout) <= 65 << 10
    long = "\n".join(map(str, range(50_000)))
    right = "print('\\n'.join(f'{n}.000' for n in range(50_000)))"
    assert (await bench.verify(row(("", long)), program(right)))["reward"] == 1.0
    assert threading.main_thread() not in compared[1:]


async def test_metadata_of_a_failed_test(bench: Bench) -> None:
    verdict = await bench.verify(SUMS, program(SUM.replace("a + b", "abs(a + b)")))
    assert verdict["result"] == [True, -2]
    assert verdict["metadata"] == {
        "error_code": -2,
        "error_message": "Wrong Answer",
        "inputs": "5 -7\n",
        "expected": "-2\n",
        "output": "2\n",
        "error": None,
    }
    verdict = await bench.verify(SUMS, program("raise ValueError('no')"))
    assert verdict["metadata"]["error"] == "ValueError: no"


async def test_debug_keeps_standard_error() -> None:
    server = CodeGen(sandbox=AVAILABLE, num_processes=1, debug=True)
    await server.start()
    try:
        code = "import sys\nprint('note', file=sys.stderr)\n1/0"
        verdict = await Bench(server).verify(SUMS, program(code))
        assert verdict["metadata"]["stderr"] == "note\nZeroDivisionError: division by zero"
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("code", "rate"),
    [
        (said(f"</think>```\n{SUM}\n```"), 1.0),
        (said(f"</think>\n```\n{SUM}\n```"), 1.0),
        ([{"type": "reasoning", "summary": [{"text": "<think>a<think>b"}]}, *program(SUM)], 1.0),
        ([{"type": "reasoning", "summary": [{"text": "<think>a</think>"}]}, *program(SUM)], 0.0),
        ([{"type": "reasoning", "summary": [None, {"text": 1}]}, *program(SUM)], 0.0),
        ([{"type": "reasoning", "summary": None}, *program(SUM)], 0.0),
    ],
)
async def test_format_of_reasoning(bench: Bench, code: list[dict[str, Any]], rate: float) -> None:
    verdict = await bench.verify(SUMS, code)
    assert (verdict["reasoning_format_violation_rate"], verdict["reward"]) == (rate, 1.0 - rate)


async def test_settings_of_a_running_server(bench: Bench, server: CodeGen) -> None:
    third = row(("", "0.333333\n"))
    code = program("print(1 / 3)")
    wrong = said(f"<think>```\n{SUM}\n```")
    assert (await bench.verify(third, code))["reward"] == 0.0
    server.reconfigure({"float_tolerance": 1e-5, "reasoning_format_penalty": -0.5})
    try:
        assert (await bench.verify(third, code))["reward"] == 1.0
        assert (await bench.verify(SUMS, wrong))["reward"] == -0.5
    finally:
        server.reconfigure({"float_tolerance": 0.0, "reasoning_format_penalty": 0.0})


async def test_no_false_zeros_at_once(bench: Bench) -> None:
    answers = [program(f"a, b = map(int, input().split())\nprint(a + b + {n} - {n})") for n in range(40)]
    verdicts = await asyncio.gather(*(bench.verify(SUMS, answer) for answer in answers))
    assert [verdict["reward"] for verdict in verdicts] == [1.0] * 40


async def test_a_sandbox_that_dies_is_replaced_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    original = SandboxedPython.run
    deaths = 1

    async def run(self: SandboxedPython, *args: Any, **kwargs: Any) -> ProgramRun:
        nonlocal deaths
        if deaths:
            deaths -= 1
            raise SandboxDied("signal 9")
        return await original(self, *args, **kwargs)

    monkeypatch.setattr(SandboxedPython, "run", run)
    assert (await bench.verify(SUMS, program(SUM)))["reward"] == 1.0
    deaths = 2
    with pytest.raises(VerifierFailed, match="two sandboxes died on this program: signal 9"):
        await bench.verify(SUMS, program(SUM))


async def test_a_starved_machine_is_no_zero(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(*args: Any, **kwargs: Any) -> ProgramRun:
        return ProgramRun(
            status=-9, timed_out=False, starved=True, stdout="", stderr="", value=None, cut=False
        )

    monkeypatch.setattr(SandboxedPython, "run", run)
    with pytest.raises(VerifierFailed, match="overloaded"):
        await bench.verify(SUMS, program(SUM))


async def test_a_cancelled_verification_leaves_its_turn(bench: Bench) -> None:
    slow = [asyncio.create_task(bench.verify(SUMS, program("while True: pass"))) for _ in range(4)]
    await asyncio.sleep(0.2)  # two are at work by then, or soon: either is to be cancelled well
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    assert (await bench.verify(SUMS, program(SUM)))["reward"] == 1.0


async def test_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    server = CodeGen(sandbox=AVAILABLE, num_processes=1)
    await server.start()
    await server.stop()
    with pytest.raises(Unavailable):
        await Bench(server).verify(SUMS, program(SUM))


async def test_all_tests_together_have_a_budget() -> None:
    server = CodeGen(sandbox=AVAILABLE, num_processes=1, answer_timeout_secs=1)
    await server.start()
    try:
        sleepy = program("import time\ntime.sleep(0.4)\nprint(1)")
        verdict = await Bench(server).verify(row(*[("", "1")] * 5), sleepy)
        assert (verdict["reward"], verdict["error_code"]) == (0.0, -3)
        assert "the tests took more than 1 s together" in verdict["reason"]
        assert (await Bench(server).verify(row(*[("", "1")] * 2), sleepy))["reward"] == 1.0
    finally:
        await server.stop()


async def test_long_programs_hold_up_nobody() -> None:
    server = CodeGen(sandbox=AVAILABLE, num_processes=1, unit_test_timeout_secs=2.5)
    await server.start()
    done: list[str] = []

    async def verify(name: str, code: str) -> dict[str, Any]:
        verdict = await Bench(server).verify(SUMS, program(code))
        done.append(name)
        return verdict

    try:
        burners = [verify("burner", f"while True: pass  # {n}") for n in range(3)]
        verdicts = await asyncio.gather(*burners, verify("honest", SUM), verify("wrong", "print(1)"))
        assert [verdict["reward"] for verdict in verdicts] == [0.0, 0.0, 0.0, 1.0, 0.0]
        assert done[1:3] == ["honest", "wrong"]  # the first one began when nobody waited
        assert verdicts[0]["reason"].startswith("test 1 of 2: time limit exceeded")
    finally:
        await server.stop()


async def test_reasons(bench: Bench) -> None:
    verdict = await bench.verify(SUMS, program(SUM.replace("a + b", "a - b")))
    assert verdict["reason"] == "test 1 of 2: wrong answer: expected '3', got '-1'"
    assert (await bench.verify(SUMS, said("No idea.")))["reason"] == (
        "no code block found: the text ends 'No idea.'"
    )
