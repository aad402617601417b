from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_serve.types.protocols import split_think, wrap_think

split_thought = partial(split_think, is_answer=True)
PIECES = st.lists(st.sampled_from(["<think>", "</think>", "a", "b\n", " "]), max_size=12).map("".join)


def test_every_block_is_taken_out_in_order():
    text = "<think>first</think>so<think>second\nline</think> 42"
    assert split_think(text) == (["first", "second\nline"], "so 42")


def test_a_tag_that_is_never_closed_stays_in_the_text():
    for text in ("<think>cut off", "a < b", ""):
        assert split_think(text) == ([], text)
    assert split_thought("Use <think> for it.") == ([], "Use <think> for it.")


def test_what_an_answer_begins_with_and_does_not_close_is_reasoning():
    assert split_thought(r"<think>I guess \boxed{A}, but") == ([r"I guess \boxed{A}, but"], "")
    assert split_thought("\n<think>a<think>b") == (["a<think>b"], "\n")
    assert split_thought("<think>a</think>\n<think>b") == (["a", "b"], "\n")
    assert split_thought("<think>a</think>b<think>c") == (["a"], "b<think>c")
    assert split_thought("Let me see.\n <think>c") == (["c"], "Let me see.\n ")


def test_tags_are_read_as_models_write_them():
    for begin in ("<think>", "<THINK>", "<thinking>", "<Think >", ""):
        for end in ("</think>", "</THINK>", "</think >", "</thinking>", "</Thinking\n>"):
            assert split_thought(f"{begin}a{end}b") == (["a"], "b")
            assert split_think(f"{begin}a{end}b") == ((["a"], "b") if begin else ([], f"a{end}b"))
    for text in ("<thinker>a</thinker>", "<think a>", "< think>", "</thinks>"):
        assert split_thought(text) == ([], text)


def test_what_precedes_a_lone_end_is_reasoning():
    assert split_thought(r"I thought \boxed{A}.</think> hard to say") == (
        [r"I thought \boxed{A}."],
        " hard to say",
    )
    assert split_thought("a</think>b<think>c</think>d") == (["a", "c"], "bd")
    assert split_thought("a</think>b</think>c") == (["a", "b"], "c")
    assert split_thought("<think>a</think>b RIGHT</think>c") == (["a", "b RIGHT"], "c")
    assert split_thought("a<think>b</think>c</think>d") == (["b", "c"], "ad")


def test_an_opening_tag_inside_a_block_belongs_to_it():
    assert split_think("<think>a<think>b</think>c</think>d") == (["a<think>b"], "c</think>d")


def test_an_empty_block_counts_but_is_not_written():
    assert split_think("<think></think>x") == ([""], "x")
    assert wrap_think(["", "a"]) == "<think>a</think>"


@pytest.mark.timeout(10)
def test_many_tags_are_no_work():
    for text in ("<think></think>" * 200_000, "a</think>" * 200_000, "a<think>" * 200_000):
        split_thought(text)


def test_many_unclosed_tags_are_no_work():
    text = "</think>" + "<think>" * 300_000
    assert split_thought(text) == (["", "<think>" * 299_999], "")


@given(st.lists(st.text().filter(lambda t: t and "<" not in t)), st.text().filter(lambda t: "<" not in t))
def test_wrapped_blocks_come_back(blocks, text):
    assert split_think(wrap_think(blocks) + text) == (blocks, text)


@given(PIECES)
def test_only_tags_are_lost(text):
    blocks, rest = split_thought(text)
    assert len(rest) + sum(map(len, blocks)) <= len(text)
    assert "".join([rest, *blocks]).count("a") == text.count("a")
