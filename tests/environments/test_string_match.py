"""Fixtures, examples, each rule of comparison on its own, and texts of any kind."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.environments import Bench, examples, said

from gym_serve.environments.string_match import NEAR, ExtractionMode, StringMatch, extract, similarity

MODES: tuple[ExtractionMode, ...] = ("boxed", "final_answer", "last_line", "full_response")


@pytest.mark.parametrize("row", examples(StringMatch), ids=lambda row: row["expected_answer"])
async def test_example_row(row: dict[str, Any]) -> None:
    answer = row["expected_answer"]
    texts = {
        "boxed": f"So \\boxed{{{answer}}}",
        "final_answer": f"Final answer: {answer}",
        "last_line": f"These:\n{answer}\n",
        "full_response": answer,
    }
    output = said(texts[row.get("extraction_mode", "final_answer")])
    assert (await Bench(StringMatch()).verify(row, output))["reward"] == 1.0
    assert (await Bench(StringMatch()).verify(row, said("Answer: \\boxed{none of it}")))["reward"] == 0.0


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        ("Oslo", "oslo"),
        ("Oslo", "OSLO!"),
        ("7", "7.00"),
        ("7", "$7"),
        ("1e3", "1000"),
        ("12,500", "12500"),
        ("1234", "1{,}234"),
        ("1234", "1\\,234"),
        ("don't", "Don’t"),
        ("1/2", "½"),
        ("10^2", "10²"),
        ("m2", "m²"),
        ("x", "\\mathbf{x}"),
        ("two", "\\(\\text{two}\\)"),
        ("a, b, c and d are here now", "a, b, c, d are here now"),
        ("Boise, Idaho", "boise, id"),
        ("west virginia", "WV"),
        ("π m", "\\pi"),
        ("3π", "3\\pi"),
        ("ﬁve", "five"),
        ("inf", "infinity"),
        ("0", "-0"),
        ("-5", "−5"),
        ("-5", "\\boxed{−5}"),
        ("−0.5", "-.5"),
        ("x − y", "x - y"),
        ("1990-2000", "1990–2000"),
        ("-40 km", "−40 km"),
        ("8", "8\\mathrm{mm}"),
        ("23", "\\,23"),
        ("23", "23\\;"),
        ("two words", "\\text{two}\\ \\text{words}"),
    ],
)
def test_the_same_answer(expected: str, answer: str) -> None:
    assert similarity(expected, answer) == 1.0


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        ("100", "99.5"),
        ("60%", "60"),
        ("12 kg", "12"),
        ("£1,250", "1250"),
        ("1000000", "1,000,000"),
        ("8 km", "$8$"),
    ],
)
def test_a_number_next_to_the_expected_one(expected: str, answer: str) -> None:
    assert similarity(expected, answer) == NEAR


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        ("Oslo", "Oslo, Norway"),
        ("100", "102"),
        ("3,4", "34"),
        ("5 cm", "5 km"),
        ("$5", "£5"),
        ("60%", "$60"),
        ("$60", "60 km"),
        ("-3", "3"),
        ("0", "0.001"),
        ("Kansas", "AR"),
        ("10000000000000000001x", "10000000000000000002x"),
        ("item", "ite"),
        ("inf", "-inf"),
        ("1e999", "1e998"),
        ("1e-12", "1e-13"),
        ("1e-20", "-1e-20"),
        ("1e-400", "1e-401"),
        ("1e-11", "0"),
        ("0", "1e-12"),
        ("102", "10²"),
        ("31/2", "3½"),
        ("one and two", "one two"),
    ],
)
def test_different_answers(expected: str, answer: str) -> None:
    assert similarity(expected, answer) == 0.0


@pytest.mark.parametrize(
    ("mode", "text", "answer"),
    [
        ("boxed", "\\boxed{1} \\boxed{2}", "2"),
        ("boxed", "\\boxed{1} \\boxed{2", "1"),
        ("boxed", "\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("boxed", "\\boxed{ \\text{ \\text{a b} } }", "a b"),
        ("boxed", "\\boxed{\\text{a} and \\text{b}}", "\\text{a} and \\text{b}"),
        ("boxed", "} \\boxed{1}", "1"),
        ("boxed", "Answer: 5", None),
        ("final_answer", "Answer: 1\nanswer : 2.\nDone", "2"),
        ("final_answer", "\\boxed{3}", "3"),
        ("final_answer", "**Answer:** 18", "18"),
        ("final_answer", "**Answer: 18**", "18"),
        ("final_answer", "Answer: **Paris**", "Paris"),
        ("final_answer", "Answer: `Paris`", "Paris"),
        ("final_answer", "Answer: “Paris”", "Paris"),
        ("final_answer", "### Answer:\n\n**Paris**", "Paris"),
        ("final_answer", "### Final answer\n\nParis", "Paris"),
        ("final_answer", "Answer:\n```\nParis\n```", "Paris"),
        ("final_answer", "Answer: \\boxed{Paris}", "Paris"),
        ("final_answer", "Answer:\n> Paris", "Paris"),
        ("final_answer", "Answer:\n- Paris", "Paris"),
        ("final_answer", "Answer: - 18", "- 18"),
        ("final_answer", "Réponse : Paris", "Paris"),
        ("final_answer", "\u200fAnswer: \u200bParis", "Paris"),
        ("boxed", "not \\boxed{5}", None),
        ("boxed", "\\boxed{6} and not \\boxed{5}", "6"),
        ("boxed", "\\boxed {23}", "23"),
        ("boxed", "\\fbox{23}", "23"),
        ("boxed", "\\boxed{23}, in \\boxed{} as asked", "23"),
        ("boxed", "in \\boxed{answer}: \\boxed{5}", "5"),
        ("final_answer", "Answer:", None),
        ("last_line", " a \n b \n\n ", "b"),
        ("last_line", " \n ", None),
        ("full_response", " a\nb ", "a\nb"),
        ("full_response", "", None),
    ],
)
def test_extraction(mode: ExtractionMode, text: str, answer: str | None) -> None:
    assert extract(text, mode) == answer


async def test_messages_stand_on_lines_of_their_own() -> None:
    row = {"expected_answer": "4", "extraction_mode": "last_line"}
    assert (await Bench(StringMatch()).verify(row, said("2 + 2 =", "4")))["reward"] == 1.0


@given(st.text(), st.text(), st.sampled_from(MODES))
def test_any_text_is_compared(expected: str, text: str, mode: ExtractionMode) -> None:
    answer = extract(text, mode)
    assert similarity(expected, answer or "") in (0.0, NEAR, 1.0)
    assert similarity(text, text) == 1.0


@given(st.text("\\boxedtx{} "))
def test_a_box_is_a_part_of_the_text(text: str) -> None:
    answer = extract(text, "boxed")
    assert answer is None or answer in text


@pytest.mark.parametrize(
    "piece", ["\\boxed{", "{", "}", "answer ", "1", "1,000", "\\text{", " ", "and ", "cm"]
)
def test_a_long_text_is_no_burden(piece: str) -> None:
    text = piece * 100_000  # quadratic work would run into the time limit of the test
    for mode in MODES:
        extract(text, mode)
    assert similarity("x", text) == 0.0


async def test_reasons() -> None:
    row = {"expected_answer": "Paris"}
    bench = Bench(StringMatch())
    assert (await bench.verify(row, said("C: William Shakespeare")))["reason"] == (
        "expected 'Paris', but no line 'Answer: X' and no box found: the text ends 'C: William Shakespeare'"
    )
    assert (await bench.verify(row, said("Answer: Rome")))["reason"] == "expected 'Paris', got 'Rome'"
    assert "reason" not in await bench.verify(row, said("Answer: *Paris*"))
