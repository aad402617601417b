import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_serve.environments.mcqa import grading
from gym_serve.environments.mcqa.grading import choices_of, match_output_regex

PLANETS = choices_of([{"A": "Mars"}, {"B": "Venus"}])
EXPONENTIAL = "(a|aa)+$"
ENDLESS = "a" * 200 + "!"


@pytest.mark.parametrize(
    ("text", "pattern", "letter"),
    [
        ("Pick: B", r"pick:\s*([A-Z])", "B"),
        ("pick: b", r"Pick:\s*([A-Z])", "B"),
        ("Pick: A. Pick: B", r"Pick: (.)", "B"),
        ("  Pick: B \n", r"Pick: (.)$", "B"),
        ("it is B", "b$", "B"),
        ("Pick: venus ", r"Pick:(.*)", "B"),
        ("Pick: ＢB", r"Pick: (.)", "B"),
        ("Pick: B", r"Pick: (A)|Pick: (B)", "B"),
        ("Pick: Z", r"Pick: (.)", "Z"),
        ("Pick: B", r"Take: (.)", None),
        ("Pick: Pluto", r"Pick: (.*)", None),
        ("Pick: 7", r"Pick: (.)", None),
        ("Pick: B", "", None),
        ("", ".*", None),
    ],
)
def test_the_last_match_names_a_letter_or_an_option(text: str, pattern: str, letter: str | None) -> None:
    assert match_output_regex(text, PLANETS, [pattern]) == letter


def test_patterns_are_tried_in_order() -> None:
    assert match_output_regex("x: Pluto, y: B, z: A", PLANETS, [r"x: (\w+)", r"y: (\w+)", r"z: (\w+)"]) == "B"
    assert match_output_regex("x: B", PLANETS, []) is None


@pytest.mark.parametrize("pattern", ["([", "a{2,1}", "(?P<x>", "(" * 900])
def test_an_invalid_pattern_is_logged_and_passed_over(pattern: str, caplog: pytest.LogCaptureFixture) -> None:
    grading._compile.cache_clear()
    assert match_output_regex("pick b", PLANETS, [pattern, "pick (.)"]) == "B"
    assert "is invalid" in caplog.text


@pytest.mark.parametrize("pattern", ["((a{1000}){1000}){1000}", "(?:" * 20 + "a" + ")+" * 20, "a" * 1001])
def test_a_pattern_that_would_fill_the_memory_is_refused(
    pattern: str, caplog: pytest.LogCaptureFixture
) -> None:
    grading._compile.cache_clear()
    assert match_output_regex("pick b", PLANETS, [pattern, "pick (.)"]) == "B"
    assert "is too large" in caplog.text


def test_an_exponential_search_is_stopped_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert match_output_regex(ENDLESS, PLANETS, [EXPONENTIAL]) is None
    assert "was stopped" in caplog.text
    assert ENDLESS not in caplog.text


def test_all_patterns_share_one_time_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(grading, "SEARCH_SECONDS", 0.05)
    with caplog.at_level(logging.CRITICAL):
        assert match_output_regex(ENDLESS, PLANETS, [EXPONENTIAL] * 2000) is None


def test_only_the_end_of_a_long_text_is_searched() -> None:
    assert match_output_regex("pick a" + " " * 200_000 + "pick b", PLANETS, [r"pick (.)"]) == "B"
    assert match_output_regex("pick a" + "-" * 200_000, PLANETS, [r"pick (.)"]) is None


@given(st.text(), st.text(max_size=30))
def test_any_pattern_on_any_text_gives_one_letter_or_nothing(text: str, pattern: str) -> None:
    letter = match_output_regex(text, PLANETS, [pattern])
    assert letter is None or (len(letter) == 1 and letter.isalpha())
