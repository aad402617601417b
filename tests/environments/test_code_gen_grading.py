"""Extraction, comparison, tests of a row, and the prelude, each on its own."""

import base64
import builtins
import json
import zlib
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tables import each

from gym_serve.environments.code_gen.running import (
    PRELUDE,
    UnitTests,
    decode,
    extract_code,
    same_output,
    same_value,
)
from gym_serve.types.errors import InvalidRequest


@pytest.mark.parametrize(
    ("text", "code"),
    [
        *each(None, "", "print(1)", "```\n```", "```print(1)```", "```\n\n\n```"),
        ("```\nprint(1)", "print(1)"),  # nothing closes it
        *each("x", "```\nx\n```", "a ```py\n  x\n  ``` b", "~~~Python3\nx\n~~~"),
        *each("x", "- ```{.python}\n  x\n  ```", "```python\nx\n```\nIt prints:\n```\n4\n```"),
        *each("x", "```\nx\n``` It prints:\n4", "I use ``` as you asked.\n```python\nx\n```\nUse `y`."),
        ("```python\nx\ny\n```\nDone.", "x\ny"),
        *each("y", "```\nx\n```\n```\ny\n```", "```python\nx\n```\nNo:\n```python\ny\n```"),
        *each("y", "```python\nx\n\nBetter:\n```python\ny\n```"),
        ("````python\n```\nx\n````", "```\nx"),
        ("1. So:\n\n   ```python\n   if x:\n       y\n   ```\n2. Done.", "if x:\n    y"),
        ("```python\nx = y.split('```')\nprint(x)```", "x = y.split('```')\nprint(x)"),
        ("```py\r\nx\r\n```\r\n", "x\r"),
    ],
)
def test_extraction(text: str, code: str | None) -> None:
    assert extract_code(text) == code


@pytest.mark.parametrize(
    ("expected", "output"),
    [
        ("3\n", "3"),
        ("3", "\n 3 \n\n"),
        ("1 2\n3\n", "1 2 \n 3\n"),
        ("1.0", "1.00"),
        ("100", "1e2"),
        ("1 2", "1  2.0"),
        ("", "\n"),
        ("é", "é"),
    ],
)
def test_the_same_output(expected: str, output: str) -> None:
    assert same_output(expected, output)


@pytest.mark.parametrize(
    ("expected", "output"),
    [
        ("3", ""),
        ("3", "4"),
        ("1\n2", "1 2"),
        ("1 2", "1\n2"),
        ("1 2", "1 2 3"),
        ("a 1", "a 1.0"),
        ("Yes", "YES"),
        ("0.3333333", "0.3333334"),
        ("nan", "NaN "),
        ("1", "1e9999999999"),
        ("50000000000000000", "50000000000000001"),
        ("1\n\n2", "1\n2"),
    ],
)
def test_another_output(expected: str, output: str) -> None:
    assert not same_output(expected, output)


@pytest.mark.parametrize(
    ("expected", "output", "same"),
    [
        ("0.333333", "0.33333333", True),
        ("1000000.5", "1000001", True),
        ("1000000", "1000001", False),
        ("3", "3.0000001", True),
        ("0.5", "0.6", False),
        ("inf", "1.5", False),
        ("1.5", "1e999999999", False),
    ],
)
def test_output_within_a_tolerance(expected: str, output: str, same: bool) -> None:
    assert same_output(expected, output, 1e-6) is same


@pytest.mark.parametrize(
    ("expected", "value"),
    [
        (1, 1),
        (1, True),
        (1, 1.0),
        (0.2, 0.20000000000000004),
        (3, "3.0"),
        ([1, [2, "x"]], [1, [2, "x"]]),
        ({"a": 1, "b": [2]}, {"b": [2], "a": 1}),
        (None, None),
        (float("nan"), float("nan")),
        (100000.0, 100000.5),
        (10**17 + 1, 1e17),
        (10**12, 10**12 + 1e-4),
        ("0.5", 0.5),
        (0.5, "0.500001"),
        (5, " 5 "),
    ],
)
def test_the_same_value(expected: Any, value: Any) -> None:
    assert same_value(expected, value)


@pytest.mark.parametrize(
    ("expected", "value"),
    [
        (1, 2),
        (1, None),
        (1000000, 1000001),
        (1, [1]),
        ([1, 2], [2, 1]),
        ([1], {"0": 1}),
        ([0.3], [0.30000000000000004]),
        ({"a": 1}, {"a": 1, "b": 2}),
        ("a", "A"),
        (10**400, 10**400 + 1),
        (1.5, 10**400),
        ("1000000", "1000001"),
        ("123456789123456789", "123456789123456788"),
        (123456789123456789, "123456789123456788"),
        ("123456789123456789", 123456789123456788),
        (10**12, 10**12 + 500.0),
        (True, "1"),
        ("1.0", "1.00"),
    ],
)
def test_another_value(expected: Any, value: Any) -> None:
    assert not same_value(expected, value)


def test_values_within_a_tolerance() -> None:
    assert same_value([0.3, {"x": [1.0]}], [0.30000000000000004, {"x": [1]}], 1e-9)
    assert not same_value([1000000], [1000001], 1e-3)
    assert not same_value([1.5], [10**400], 1e-3)
    assert not same_value(10**400, 1.5, 1e-3)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(json_values)
def test_every_value_is_its_own(value: Any) -> None:
    assert same_value(decode(json.dumps(value)), decode(json.dumps(value)))


@given(st.text(), st.text())
def test_any_output_is_compared(expected: str, output: str) -> None:
    assert same_output(expected, expected)
    assert same_output(expected, output) in (True, False)


def test_long_integers() -> None:
    assert same_value(decode("9" * 5000), decode("9" * 5000))
    assert not same_value(decode("9" * 5000), decode("9" * 4999 + "8"))


def packed(value: Any) -> str:
    return base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()


def test_packed_tests() -> None:
    tests = UnitTests.model_validate({"packed": packed({"inputs": ["1"], "outputs": ["2"]}), "fn_name": "f"})
    assert (tests.inputs, tests.outputs, tests.fn_name) == (["1"], ["2"], "f")


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ({"inputs": [], "outputs": []}, "at least 1 item"),
        ({"inputs": ["1"], "outputs": []}, "must be of equal length, got 1 and 0"),
        ({"inputs": "1", "outputs": ["1"]}, "valid list"),
        ({"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}, "Expecting value"),
        ({"inputs": ["1"], "outputs": ["x"], "fn_name": "f"}, "Expecting value"),
        ({"packed": "*"}, "`packed` must be Base64"),
        ({"packed": packed([1])}, "`packed` must hold an object"),
        ({"packed": base64.b64encode(b"x").decode()}, "`packed` must be Base64"),
        ({"inputs": ["x" * (33 << 20)], "outputs": ["1"]}, "an input has more than"),
    ],
)
def test_tests_that_are_none(tests: dict[str, Any], message: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=message):
        UnitTests.model_validate(tests)


def test_arguments() -> None:
    tests = UnitTests(inputs=['[1, 2]\n"x"\n'], outputs=["3"], fn_name="f")
    assert tests.arguments(0) == [[1, 2], "x"]


def test_prelude_hides_no_builtin() -> None:
    names: dict[str, Any] = {}
    lines = [line for line in PRELUDE.splitlines() if "import" in line]
    exec("\n".join(lines), names)
    for name in ("open", "pow", "print", "input", "abs", "sum", "min"):
        assert names[name] is getattr(builtins, name)
    assert {"List", "Counter", "deque", "heappush", "gcd", "inf", "accumulate", "lru_cache"} <= names.keys()


@pytest.mark.parametrize(
    ("expected", "value", "same"),
    [(123457000, 123456789.4, False), (2, 1.9999, False), (3, 3.0, True), (0.333333, 1 / 3, True)],
)
def test_an_integer_is_answered_by_a_fraction_only_within_rounding(
    expected: float, value: float, same: bool
) -> None:
    assert same_value(expected, value) is same


def test_packed_tests_have_limits() -> None:
    bomb = base64.b64encode(zlib.compress(b'{"inputs": ["' + b"0" * (80 << 20) + b'"]}', 9)).decode()
    with pytest.raises(InvalidRequest, match="must not hold more than"):
        UnitTests(packed=bomb).unpacked()
