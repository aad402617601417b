"""JSON as it is meant: integers of any size, and halves of surrogate pairs."""

import json
from typing import Any

import orjson
import pytest

from gym_serve.servers.transport import Reply, encode
from gym_serve.types.exact import exact_bytes, exact_json, foreign_json, lenient_json, mended


@pytest.mark.parametrize(
    "number", [18446744073709551617, 2**70, -(2**200), 10**400, 2**63, 1234567890123456789]
)
def test_integers_keep_their_digits(number: int) -> None:
    for text in (json.dumps({"n": number}).encode(), json.dumps({"n": number})):
        assert exact_json(text) == {"n": number}
    assert Reply(200, encode({"n": [number]})).json() == {"n": [number]}


@pytest.mark.parametrize(
    "value",
    [{"id": "1" * 40}, {"logprob": -0.12345678901234567e-7, "n": [2**70]}, 10**25, [-(10**25)]],
)
def test_long_digits_of_texts_and_numbers_are_told_apart(value: Any) -> None:
    assert exact_json(json.dumps(value)) == value
    assert exact_json(json.dumps(value, indent=1).encode()) == value


@pytest.mark.parametrize(
    ("text", "lenient", "whole"),
    [
        (rb'"\ud83d"', "\ud83d", "\ufffd"),
        (rb'"a\ude00b"', "a\ude00b", "a\ufffdb"),
        (b'"a\xed\xa0\xbd"', "a\ufffd\ufffd\ufffd", "a\ufffd\ufffd\ufffd"),
        (b'["\xff\xfe", 1]', ["\ufffd\ufffd", 1], ["\ufffd\ufffd", 1]),
        (rb'"\ud83d\ude00"', "\U0001f600", "\U0001f600"),
        (
            rb'{"\ud83d": ["\ud83d", 1, null]}',
            {"\ud83d": ["\ud83d", 1, None]},
            {"\ufffd": ["\ufffd", 1, None]},
        ),
    ],
)
def test_half_of_a_pair(text: bytes, lenient: Any, whole: Any) -> None:
    assert lenient_json(text) == lenient
    assert foreign_json(text) == whole
    assert mended(lenient) == whole
    assert exact_json(encode(lenient)) == whole


def test_halves_that_meet_are_their_character() -> None:
    """A stream may cut a pair between two chunks."""
    halves = [lenient_json(rb'"a\ud83d"'), lenient_json(rb'"\ude00b"')]
    assert mended("".join(halves)) == "a\U0001f600b"


@pytest.mark.parametrize(
    "text",
    [rb'"\ud83d', rb'["\ud83d", NaN]', rb'["\ud83d", 1e999]', b"", b"{", rb'"\u12"', b"\xff", b'"\xff'],
)
def test_what_is_no_json_stays_so(text: bytes) -> None:
    for read in (lenient_json, foreign_json, exact_json):
        with pytest.raises(ValueError, match=r"."):
            read(text)


def test_what_orjson_cannot_write_is_written() -> None:
    value = {"b": [1 << 80], "a": "\ud83d", "c": {1}}
    option = orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    written = exact_bytes(value, option, list)
    assert exact_json(written) == {"a": "\ufffd", "b": [1 << 80], "c": [1]}
    assert (written[:7], written[-2:]) == (b'{\n  "a"', b"}\n")  # as orjson does it
    deep: Any = []
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(TypeError, match="nests too deeply"):
        exact_bytes(deep)
