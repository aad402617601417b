from hypothesis import given
from hypothesis import strategies as st

from gym_serve.types.protocols import split_think, wrap_think

PIECES = st.lists(st.sampled_from(["<think>", "</think>", "a", "b\n", " "]), max_size=12).map("".join)


def test_every_block_is_taken_out_in_order():
    text = "<think>first</think>so<think>second\nline</think> 42"
    assert split_think(text) == (["first", "second\nline"], "so 42")


def test_a_lone_tag_stays_in_the_text():
    for text in ("<think>cut off", "no opening</think>answer", "a < b", ""):
        assert split_think(text) == ([], text)


def test_an_opening_tag_inside_a_block_belongs_to_it():
    assert split_think("<think>a<think>b</think>c</think>d") == (["a<think>b"], "c</think>d")


def test_an_empty_block_counts_but_is_not_written():
    assert split_think("<think></think>x") == ([""], "x")
    assert wrap_think(["", "a"]) == "<think>a</think>"


def test_many_unclosed_tags_are_no_work():
    text = "</think>" + "<think>" * 300_000
    assert split_think(text) == ([], text)


@given(st.lists(st.text().filter(lambda t: t and "<" not in t)), st.text().filter(lambda t: "<" not in t))
def test_wrapped_blocks_come_back(blocks, text):
    assert split_think(wrap_think(blocks) + text) == (blocks, text)


@given(PIECES)
def test_only_tags_are_lost(text):
    blocks, rest = split_think(text)
    assert len(rest) + sum(map(len, blocks)) + len(blocks) * len("<think></think>") == len(text)
