"""Runs the unit tests of a row on a program in a sandbox, up to the first test that fails.

`UnitTests` are the tests, in the format of LiveCodeBench. The sandbox gets the program and its input only.
The expected output stays outside, and outputs are compared outside, so a program that takes over its sandbox
gains nothing. The server reads no more output than a right answer can have, so a long output costs it
nothing.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import zlib
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import Self

from gym_serve.environments.code_gen.grading import same_output, same_value
from gym_serve.sandbox import ProgramRun, SandboxedPython
from gym_serve.types.errors import VerifierFailed
from gym_serve.types.requests import JSON

MAX_INPUT = 32 << 20
"""Characters that the input of one test may have."""

_LONG_INTEGER = 4_000  # digits; Python's own limit is a little higher


class UnitTests(BaseModel):
    """What a program is run with, and what it has to answer."""

    model_config = ConfigDict(extra="allow")

    inputs: list[str] = Field(min_length=1)
    """Standard input of each test; for a function its arguments, a line of JSON each."""
    outputs: list[str]
    """Standard output of each test; for a function the value that it returns, as JSON."""
    fn_name: str | None = None
    """The function to call, which may be a method of a class ``Solution``; None for a whole program."""

    @model_validator(mode="before")
    @classmethod
    def _unpacked(cls, value: Any) -> Any:
        # Large sets of tests come as Base64 of compressed JSON.
        if not (isinstance(value, dict) and isinstance(value.get("packed"), str)):
            return value
        try:
            tests = json.loads(zlib.decompress(base64.b64decode(value["packed"], validate=True)))
        except (binascii.Error, zlib.error, ValueError) as error:
            raise ValueError(f"`packed` must be Base64 of compressed JSON: {error}") from None
        if not isinstance(tests, dict):
            raise ValueError("`packed` must hold an object with inputs and outputs")
        return {"fn_name": value.get("fn_name"), **tests}

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.inputs) != len(self.outputs):
            lengths = f"{len(self.inputs)} and {len(self.outputs)}"
            raise ValueError(f"`inputs` and `outputs` must be of equal length, got {lengths}")
        if max(map(len, self.inputs)) > MAX_INPUT:
            raise ValueError(f"an input has more than {MAX_INPUT} characters")
        if self.fn_name is not None:
            for number in range(len(self.inputs)):
                self.arguments(number)
                decode(self.outputs[number])
        return self

    def arguments(self, number: int) -> list[Any]:
        """What the function is called with in a test.

        Raises:
            ValueError: a line is no JSON.
        """
        return [json.loads(line) for line in self.inputs[number].split("\n") if line.strip()]


def decode(text: str) -> Any:
    """A value of JSON; integers that are too long for `int` are decimals.

    Raises:
        ValueError: it is no JSON.
    """
    return json.loads(text, parse_int=_integer)


def _integer(digits: str) -> int | Decimal:
    return int(digits) if len(digits) < _LONG_INTEGER else Decimal(digits)


# In this order: of two modules with one name (`math.pow`, `operator.pow`) the later one's counts, and
# the builtins come after all that would hide them.
_STARRED = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing"),
)
_NAMED = tuple(name for name in _STARRED if name not in ("builtins", "typing"))

PRELUDE = "\n".join(
    (
        *(f"from {name} import *" for name in _STARRED),
        *(f"import {name}" for name in _NAMED),
        "sys.setrecursionlimit(50_000)",
        "getattr(sys, 'set_int_max_str_digits', int)(50_000)",
    )
)
"""Python code."""


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
    """The results of the tests.

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
