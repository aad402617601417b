"""Text of a generation while it comes: always the beginning of what it is in the end."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_serve.deployments.batched.streams import TextStream
from gym_serve.deployments.tokenizing import CALL_OPENING, split_calls

_CALL = '<tool_call>{"name": "look"}</tool_call>'
_PIECES = [_CALL, "<tool_call>", "</tool_call>", "<tool", " ", "\n", "STOP", "ST", "é🌦", "\ufffd", "a"]
_PIECE = st.sampled_from([piece.encode() for piece in _PIECES]) | st.binary(max_size=3)


def _decode(tokens: list[int]) -> str:
    """Of a vocabulary of bytes."""
    return bytes(tokens).decode("utf-8", "replace")


def _streamed(tokens: bytes, sizes: Sequence[int], ends: Sequence[str], *, strip: bool) -> str:
    stream = TextStream(_decode, ends, strip=strip)
    told, at = "", 0
    for size in [*sizes, *[1] * len(tokens)]:
        told += stream.add(list(tokens[at : at + size]))
        at += size
    return told


@given(
    pieces=st.lists(_PIECE, max_size=12),
    sizes=st.lists(st.integers(1, 20), max_size=6),
    calls=st.booleans(),
    stops=st.lists(st.sampled_from(["STOP", "a", "\n\n"]), max_size=2),
)
def test_it_is_the_beginning_of_the_answer(
    pieces: list[bytes], sizes: list[int], calls: bool, stops: list[str]
) -> None:
    tokens = b"".join(pieces)
    answer = _decode(list(tokens))
    for stop in stops:
        answer = answer.partition(stop)[0]
    if calls:
        answer = split_calls(answer)[0]
    ends = [*stops, *([CALL_OPENING] if calls else [])]
    assert answer.startswith(_streamed(tokens, sizes, ends, strip=calls))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("two words", "two words"),
        ("é🌦", "é🌦"),
        ("1 < 2 <to", "1 < 2"),
        ("1 < 2 <tower", "1 < 2 <tower"),
        ("look: \n" + _CALL, "look:"),
        ("that STOP is it", "that"),
        ("that ST", "that"),
    ],
)
def test_what_waits(text: str, told: str) -> None:
    assert _streamed(text.encode(), (), [CALL_OPENING, "STOP"], strip=True) == told
