"""Running the unit tests of a program in a sandbox, up to the first that it fails.

The program gets its input and nothing else: what it should answer stays outside, and what it did
answer is compared outside. So a program that takes over its whole sandbox gains nothing by it.

Of its answer no more is taken than an answer to the test can need, so that one which is too long costs the
server nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from gym_serve.environments.code_gen.grading import same_output, same_value
from gym_serve.environments.code_gen.unit_tests import MAX_INPUT, UnitTests, decode
from gym_serve.sandbox import ProgramRun, SandboxedPython
from gym_serve.types.errors import VerifierFailed
from gym_serve.types.requests import JSON

__all__ = ["KILLED", "RUNTIME_ERROR", "TIMED_OUT", "WRONG_ANSWER", "TestReport", "run_tests"]

KILLED, WRONG_ANSWER, TIMED_OUT, RUNTIME_ERROR = -1, -2, -3, -4
"""Codes of a test that was not passed."""

_MESSAGES = {
    KILLED: "Killed",
    WRONG_ANSWER: "Wrong Answer",
    TIMED_OUT: "Time Limit Exceeded",
    RUNTIME_ERROR: "Runtime Error",
}
_SHOWN = 300
_LEAST_OUTPUT, _OUTPUT_RATIO = 1 << 16, 16  # a number may have many more digits than the expected one
_LONG = 1 << 16  # bytes that take longer to compare than another thread to be called


@dataclass(frozen=True)
class TestReport:
    """What came of the tests.

    Attributes:
        result: True for each test passed, and the code of the first one that was not.
        fault: that test: ``error_code``, ``error_message``, ``inputs``, ``expected``, ``output``, ``error``.
    """

    __test__ = False  # no test case of pytest's, whatever its name

    result: list[bool | int]
    fault: JSON | None


async def run_tests(
    python: SandboxedPython,
    code: str,
    tests: UnitTests,
    *,
    timeout: float,
    tolerance: float,
    debug: bool = False,
) -> TestReport:
    """Run tests until one is not passed.

    Args:
        python: a fresh sandbox.
        timeout: seconds for each test.
        tolerance: see `same_output` and `same_value`.
        debug: keep the end of the program's standard error.

    Raises:
        SandboxDied: the sandbox did not survive the program.
        VerifierFailed: the machine is too busy to tell.
    """
    result: list[bool | int] = []
    for number, expected in enumerate(tests.outputs):
        run = await python.run(
            code,
            timeout=timeout,
            output_limit=min(MAX_INPUT, _LEAST_OUTPUT + _OUTPUT_RATIO * len(expected)),
            stdin="" if tests.fn_name else tests.inputs[number],
            function=tests.fn_name,
            arguments=tests.arguments(number) if tests.fn_name else None,
        )
        if run.starved:
            raise VerifierFailed("the machine is overloaded: a test got less than a tenth of a processor")
        checked = (run, expected, tests.fn_name is not None, tolerance)
        is_long = len(run.stdout) + len(run.value or "") > _LONG
        error = await asyncio.to_thread(_code, *checked) if is_long else _code(*checked)
        result.append(error or True)
        if error is not None:
            fault = _fault(error, run, tests.inputs[number], expected)
            return TestReport(result, {**fault, "stderr": run.stderr} if debug else fault)
    return TestReport(result, None)


def _code(run: ProgramRun, expected: str, is_function: bool, tolerance: float) -> int | None:
    if run.timed_out:
        return TIMED_OUT
    if run.status < 0:
        return KILLED
    if run.status == 1:
        return RUNTIME_ERROR
    if run.cut:
        return WRONG_ANSWER
    if is_function:
        right = _returned(run.value, expected, tolerance)
    else:
        right = same_output(expected, run.stdout, tolerance)
    return None if right else WRONG_ANSWER


def _returned(value: str | None, expected: str, tolerance: float) -> bool:
    if value is None:
        return False
    try:
        return same_value(decode(expected), decode(value), tolerance)
    except (ValueError, OverflowError, RecursionError):
        return False


def _fault(code: int, run: ProgramRun, given: str, expected: str) -> JSON:
    output: Any = run.stdout if run.value is None else run.value
    return {
        "error_code": code,
        "error_message": _MESSAGES[code],
        "inputs": _shortened(given),
        "expected": _shortened(expected),
        "output": _shortened(output),
        "error": _shortened(run.stderr.strip().rpartition("\n")[2]) or None,
    }


def _shortened(text: str) -> str:
    half = _SHOWN // 2
    return text if len(text) <= _SHOWN else f"{text[:half]}...(truncated)...{text[-half:]}"
