"""Finds the program in a response and compares its outputs. Pure functions; all input may be hostile."""

from __future__ import annotations

import json
import math
from decimal import Decimal, DecimalException
from typing import Any

from gym_serve.grading import code_blocks
from gym_serve.servers import Response

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
    objects. An integer is answered by a fraction only if that is an error of rounding (1e-9).
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
    try:
        want, number = float(expected), float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    relative = _ROUNDING if isinstance(expected, int) else _RELATIVE
    return math.isfinite(want) and abs(want - number) <= _ABSOLUTE + relative * abs(want)
