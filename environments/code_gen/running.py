"""Runs the unit tests of a row on a program in a sandbox, up to the first test that fails.

The sandbox gets the program and its input only; outputs are compared outside, so a program that takes over
its sandbox gains nothing. No more output is read than a right answer can have.

Finds the program in a response and compares its outputs. Pure functions; all input may be hostile.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal, DecimalException
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import Self

from gym_serve.grading import code_blocks
from gym_serve.sandbox import ProgramRun, SandboxedPython
from gym_serve.servers import Response
from gym_serve.types.errors import InvalidRequest, VerifierFailed
from gym_serve.types.requests import JSON

_PYTHON = ("python", "python3", "py", "py3", "pypy", "pypy3")
_TAGS = ("<think>", "</think>")


def extract_code(text: str) -> str | None:
    """The last code block that is marked as Python, else the last one; None if there is none."""
    blocks = code_blocks(text)
    programs = [block for block in blocks if block.language in _PYTHON] or blocks
    return programs[-1].content if programs else None


def breaks_reasoning_format(response: Response) -> bool:
    """Whether thinking stands in the answer, or was begun or ended twice."""
    if any(tag in response.output_text for tag in _TAGS):
        return True
    thoughts = "".join(map(_thought, response.output))
    return any(thoughts.count(tag) > 1 for tag in _TAGS)


def _thought(item: dict[str, object]) -> str:
    summary = item.get("summary")
    if item.get("type") != "reasoning" or not isinstance(summary, list):
        return ""
    texts = (part.get("text") for part in summary if isinstance(part, dict))
    return "".join(text for text in texts if isinstance(text, str))


_RELATIVE, _ROUNDING, _ABSOLUTE = 1e-5, 1e-9, 1e-8


def same_output(expected: str, output: str, tolerance: float = 0.0) -> bool:
    """Compare what a program printed, line by line.

    Space around does not count. Lines that differ are the same if all their words are numbers, of equal value
    each, or within ``tolerance`` (absolutely or relatively) if one is not an integer.
    """
    wanted, output = _lines(expected), output.strip()
    if output.count("\n") + 1 != len(wanted):
        return False
    return all(
        want == line or _same_numbers(want.split(), line, tolerance)
        for want, line in zip(wanted, _lines(output), strict=True)
    )


def same_value(expected: Any, value: Any, tolerance: float = 0.0) -> bool:
    """Compare what a function returned; both are decoded JSON.

    A fraction may differ by 1e-5 (relatively) if it is the whole value, and by ``tolerance`` within lists and
    objects. An integer is answered by a fraction only if that is an error of rounding (1e-9, and rounded the
    same). A text and a number are the same if the text spells it; two texts if they are equal.
    """
    if _equal(expected, value, tolerance) or _close(expected, value):
        return True
    return json.dumps(expected, default=str) == json.dumps(value, default=str)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _same_numbers(expected: list[str], line: str, tolerance: float) -> bool:
    words = line.split(maxsplit=len(expected))
    return len(expected) == len(words) and all(
        _same_number(want, word, tolerance) for want, word in zip(expected, words, strict=True)
    )


def _same_number(expected: str, word: str, tolerance: float) -> bool:
    try:
        want, number = Decimal(expected), Decimal(word)
        if want == number:
            return True
        is_fraction = any("." in text or "e" in text.lower() for text in (expected, word))
        if not tolerance or not is_fraction or not (want.is_finite() and number.is_finite()):
            return False
        return abs(want - number) <= Decimal(tolerance) * max(abs(want), Decimal(1))
    except DecimalException:  # no number, or one whose exponent is out of range
        return False


def _equal(expected: Any, value: Any, tolerance: float) -> bool:
    if isinstance(expected, list) and isinstance(value, list):
        return len(expected) == len(value) and all(
            _equal(want, item, tolerance) for want, item in zip(expected, value, strict=True)
        )
    if isinstance(expected, dict) and isinstance(value, dict):
        same_keys = expected.keys() == value.keys()
        return same_keys and all(_equal(want, value[key], tolerance) for key, want in expected.items())
    numbers = isinstance(expected, float | int) and isinstance(value, float | int)
    if tolerance and numbers and not (isinstance(expected, int) and isinstance(value, int)):
        try:
            return math.isclose(expected, value, rel_tol=tolerance, abs_tol=tolerance)
        except OverflowError:  # an integer that no float holds
            return False
    return bool(expected == value)


def _close(expected: Any, value: Any) -> bool:
    if isinstance(expected, int) and isinstance(value, int):
        return False  # NumPy's rule, meant for fractions, would forgive the last digits of large integers
    if isinstance(expected, str) or (isinstance(value, str) and not isinstance(expected, float)):
        is_one_text = isinstance(expected, str) is not isinstance(value, str)
        return is_one_text and _same_number(str(expected), str(value), 0.0)
    try:
        want, number = float(expected), float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    if not (math.isfinite(want) and math.isfinite(number)):
        return False
    if isinstance(expected, int):
        return round(number) == round(want) and abs(want - number) <= _ABSOLUTE + _ROUNDING * abs(want)
    return abs(want - number) <= _ABSOLUTE + _RELATIVE * abs(want)


MAX_INPUT = 32 << 20  # characters that the input of one test may have

MAX_PACKED, MAX_UNPACKED = 32 << 20, 64 << 20  # characters of ``packed``, and bytes of the JSON in it

_SMALL, _SMALL_TESTS = 1 << 16, 1 << 20  # the same for tests that are unpacked when a row is read

_LONG_INTEGER = 4_000  # digits; Python's own limit is a little higher


class UnitTests(BaseModel):
    """What a program is run with, and what it has to answer."""

    model_config = ConfigDict(extra="allow")

    inputs: list[str] = []  # standard input of each test; for a function its arguments, a line of JSON each
    outputs: list[str] = []  # standard output of each test; for a function the value that it returns, as JSON
    fn_name: str | None = None
    """The function to call, which may be a method of a class ``Solution``; None for a whole program."""
    packed: str | None = Field(None, max_length=MAX_PACKED)
    """Base64 of a compressed object with ``inputs`` and ``outputs``, instead of these; see `unpacked`."""

    @model_validator(mode="before")
    @classmethod
    def _small_ones_unpacked(cls, value: Any) -> Any:
        packed = value.get("packed") if isinstance(value, dict) else None
        if not isinstance(packed, str) or len(packed) > MAX_PACKED:
            return value
        # Large ones take too long here; of them only the beginning is read, so that no other data gets by.
        is_small = len(packed) <= _SMALL
        tests, is_whole = _unpack(packed if is_small else packed[:_SMALL], _SMALL_TESTS, is_part=not is_small)
        return {"fn_name": value.get("fn_name"), **tests} if is_whole else value

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.packed is not None:
            return self
        if not self.inputs:
            raise ValueError("`inputs` must have at least 1 item")
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

    def unpacked(self) -> UnitTests:
        """The tests that are `packed`, or these themselves. It takes seconds for large ones. Raises
        InvalidRequest: they are no Base64 of a compressed JSON object with tests, or too large.
        """
        if self.packed is None:
            return self
        try:
            tests, is_whole = _unpack(self.packed, MAX_UNPACKED)
            if not is_whole:
                raise ValueError(f"`packed` must not hold more than {MAX_UNPACKED} bytes")
            return UnitTests.model_validate({"fn_name": self.fn_name, **tests, "packed": None})
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"invalid request: {error}") from None

    def arguments(self, number: int) -> list[Any]:
        """What the function is called with in a test. Raises ValueError: a line is no JSON."""
        return [json.loads(line) for line in self.inputs[number].split("\n") if line.strip()]


def _unpack(packed: str, limit: int, *, is_part: bool = False) -> tuple[JSON, bool]:
    """The JSON object in ``packed``, and whether that is all of it; empty if ``limit`` bytes do not hold
    it.
    """
    unpacking = zlib.decompressobj()
    try:
        text = unpacking.decompress(base64.b64decode(packed, validate=True), limit)
        is_whole = unpacking.eof
        tests = json.loads(text) if is_whole else None
    except (binascii.Error, zlib.error, ValueError, RecursionError) as error:
        raise ValueError(f"`packed` must be Base64 of compressed JSON: {error}") from None
    if not is_whole and not is_part and not unpacking.unconsumed_tail:
        raise ValueError("`packed` must be Base64 of compressed JSON: its end is missing")
    if not (isinstance(tests, dict) if is_whole else text.lstrip().startswith(b"{")):
        raise ValueError("`packed` must hold an object with inputs and outputs")
    return (tests, True) if isinstance(tests, dict) else ({}, False)


def decode(text: str) -> Any:
    """A value of JSON; integers too long for `int` are decimals. Raises ValueError: it is no JSON."""
    return json.loads(text, parse_int=lambda n: int(n) if len(n) < _LONG_INTEGER else Decimal(n))


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


KILLED, WRONG_ANSWER, TIMED_OUT, RUNTIME_ERROR = -1, -2, -3, -4  # codes of a test that was not passed

_MESSAGES = {KILLED: "Killed", WRONG_ANSWER: "Wrong Answer", TIMED_OUT: "Time Limit Exceeded"}
_MESSAGES |= {RUNTIME_ERROR: "Runtime Error"}
_SHOWN = 300
_LEAST_OUTPUT, _OUTPUT_RATIO = 1 << 16, 16  # a number may have many more digits than the expected one
_LONG = 1 << 16  # bytes that take longer to compare than another thread to be called


@dataclass
class TestReport:
    """The results of the tests so far: ``fault`` is the test that was not passed, ``seconds`` what the
    program took in all, and ``is_long`` says that the next test needs more than `TURN_SECONDS`.
    """

    __test__ = False  # no test case of pytest's, whatever its name

    result: list[bool | int] = field(default_factory=list)
    fault: JSON | None = None
    seconds: float = 0.0
    is_long: bool = False
    done: bool = False


@dataclass(frozen=True)
class TestLimits:
    """How programs are tested: seconds for each test, and for all together; see `same_output` for
    ``tolerance``.
    """

    __test__ = False

    timeout: float
    budget: float
    tolerance: float
    debug: bool = False


TURN_SECONDS = 2.0  # what a program may use, while others wait, before it is their turn


async def run_tests(
    python: SandboxedPython,
    code: str,
    tests: UnitTests,
    report: TestReport,
    *,
    limits: TestLimits,
    others_wait: Callable[[], bool],
) -> None:
    """Run tests, and update the report, until one is not passed, or until others wait and this program has
    had its turn. Raises SandboxDied: the sandbox did not survive; VerifierFailed: the machine is too busy.
    """
    before, over_budget = report.seconds, f"the tests took more than {limits.budget:g} s together"
    for number in range(len(report.result), len(tests.outputs)):
        left = limits.budget - report.seconds
        if number and left <= 0:
            report.fault = _fault(TIMED_OUT, tests, number, "", over_budget)
            break
        longest = min(limits.timeout, max(left, 0.1))
        seconds = min(longest, TURN_SECONDS) if others_wait() and not report.is_long else longest
        run = await _run(python, code, tests, number, seconds)
        report.seconds += min(run.seconds, seconds) if not run.timed_out else seconds
        if run.timed_out and seconds < longest:
            report.is_long = True
            return
        report.is_long = False
        if run.timed_out and seconds < limits.timeout:
            report.fault = _fault(TIMED_OUT, tests, number, "", over_budget)
            break
        expected = tests.outputs[number]
        checked = (run, expected, tests.fn_name is not None, limits.tolerance)
        is_large = len(run.stdout) + len(run.value or "") > _LONG
        error = await asyncio.to_thread(_code, *checked) if is_large else _code(*checked)
        if error is not None:
            output = run.stdout if run.value is None else run.value
            report.fault = _fault(error, tests, number, output, run.stderr.strip().rpartition("\n")[2])
            if limits.debug:
                report.fault["stderr"] = run.stderr
            break
        report.result.append(True)
        if others_wait() and report.seconds - before >= TURN_SECONDS and number + 1 < len(tests.outputs):
            return
    if report.fault is not None:
        report.result.append(report.fault["error_code"])
    report.done = True


async def _run(
    python: SandboxedPython, code: str, tests: UnitTests, number: int, seconds: float
) -> ProgramRun:
    run = await python.run(
        code,
        timeout=seconds,
        output_limit=min(MAX_INPUT, _LEAST_OUTPUT + _OUTPUT_RATIO * len(tests.outputs[number])),
        stdin="" if tests.fn_name else tests.inputs[number],
        function=tests.fn_name,
        arguments=tests.arguments(number) if tests.fn_name else None,
    )
    if run.starved:
        raise VerifierFailed("the machine is overloaded: a test got less than a tenth of a processor")
    return run


def give_up(report: TestReport, tests: UnitTests) -> None:
    """End the tests of a program that has had its turn, and for which there is no more time."""
    why = f"after {report.seconds:.1f} s there was no time for more tests"
    report.fault = _fault(TIMED_OUT, tests, len(report.result), "", why)
    report.result.append(TIMED_OUT)
    report.done = True


def _code(run: ProgramRun, expected: str, is_function: bool, tolerance: float) -> int | None:
    if run.timed_out:
        return TIMED_OUT
    if run.status < 0:
        return KILLED
    if run.status == 1:
        return RUNTIME_ERROR
    output = run.value if is_function else run.stdout
    right = _returned if is_function else same_output
    return None if not run.cut and output is not None and right(expected, output, tolerance) else WRONG_ANSWER


def _returned(expected: str, value: str, tolerance: float) -> bool:
    try:
        return same_value(decode(expected), decode(value), tolerance)
    except (ValueError, OverflowError, RecursionError):
        return False


def _fault(code: int, tests: UnitTests, number: int, output: str, error: str) -> JSON:
    texts = {"inputs": tests.inputs[number], "expected": tests.outputs[number], "output": output}
    return {
        "error_code": code,
        "error_message": _MESSAGES[code],
        **{name: _shortened(text) for name, text in texts.items()},
        "error": _shortened(error) or None,
    }


def _shortened(text: str) -> str:
    half = _SHOWN // 2
    return text if len(text) <= _SHOWN else f"{text[:half]}...(truncated)...{text[-half:]}"
