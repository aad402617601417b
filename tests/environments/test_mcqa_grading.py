from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tables import each

from gym_serve.environments.mcqa.grading import GradingMode, choices_of, latin_letters, match_letter

STRICT, BOXED, COLON, MARKDOWN = get_args(GradingMode)
PLANETS = choices_of([{"A": "Mars"}, {"B": "Venus"}, {"C": "Saturn"}, {"D": "Moon of Mars"}])


pieces = st.sampled_from(
    [
        r"\boxed{",
        r"\text{",
        "}",
        "{",
        "Answer",
        "answer",
        ":",
        "**",
        "A",
        "b",
        "C",
        "Z",
        "Venus",
        "or",
        ",",
        "\n",
        " ",
    ]
)
texts = st.lists(pieces, max_size=20).map("".join) | st.text()


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        *each("B", r"\boxed{B}", r"\boxed{ [B] }", r"\boxed{$B$}", r"\boxed{3B}", r"\boxed{B: Venus}"),
        *each("B", r"\boxed{B - Venus}", r"\boxed{\text{B. Venus}}", r"\boxed{\text{ \text{B} }}"),
        *each("B", r"\boxed{\boxed{B}}", r"\boxed{A} no, \boxed{B}", r"\boxed{B}}} and so on"),
        *each("B", r"\boxed{\mathbf{B}}", r"\boxed{B} \boxed{B", r"\boxed {B}", "\\boxed\n{B}", r"\fbox{B}"),
        *each("B", r"$\boxed B$", r"\boxed{\textbf{(B)}}", r"\boxed{\mathrm{B}}", r"\boxed{\Large B}"),
        *each("B", r"\boxed{\textbf{B: Venus}}", r"\boxed{B}. I put it in \boxed{} as asked."),
        *each("B", r"\boxed{B}, in \boxed{answer} as asked.", r"\boxed{(B) Venus}"),
        *each("B", r"\boxed{\text{(B)}~\text{Venus}}", r"\boxed{\textbf{(B)}\ \text{Venus}}"),
        *each("B", r"\boxed{\text{Option B}}", r"\boxed{The answer is B}", r"\boxed{B – Venus}"),
        *each("B", r"\boxed{(\text{B})}", r"\boxed{\textcolor{blue}{B}}", "\\boxed{\u200eＢ\u200f}"),
        *each("B", r"\boxed{B\text{ (Venus)}}", r"\boxed{B}, not \boxed{C}"),
        *each(None, r"\boxed{b}", r"\boxed{BC}", r"\boxed{Venus}", r"\boxed{B Venus}", r"\boxed{E}"),
        *each(None, r"\boxed{}", r"\boxed{B (Saturn)}", r"\boxed{B (C)}", r"not \boxed{B}", r"\boxed{B-C}"),
        *each(None, r"\boxed{B: C}", r"\boxed{B. Or C.}", r"\boxed{B) Venus C) Saturn}"),
        *each(None, r"\boxed{B: Venus or C: Saturn}", "B", ""),
        *each(
            None,
            r"\boxed{A} or \boxed{B}",
            r"$\boxed{A}$, $\boxed{B}$",
            r"\boxed{A}\quad\text{or}\quad\boxed{B}",
        ),
        *each(None, r"\boxed{B: Mars}", r"\boxed{B) Saturn}", r"\boxed{~~B~~}"),
    ],
)
def test_strict_takes_a_capital_from_the_last_box(text: str, letter: str | None) -> None:
    assert match_letter(text, PLANETS, STRICT) == letter


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        *each("C", r"\boxed{C}", r"\boxed{\text{Saturn}}"),
        *each("B", r"\boxed{venus}", r"\boxed{the planet  VENUS, of course}"),
        (r"\boxed{Mars}", "A"),
        (r"\boxed{Moon of Mars}", "D"),  # an exact text wins
        (r"\boxed{the Moon of Mars}", "D"),
        *each(None, r"\boxed{Marsupial}", r"\boxed{not Venus}", r"\boxed{anything but Venus}"),
        *each(
            None,
            r"\boxed{no Venus}",
            r"\boxed{Venus is wrong}",
            r"\boxed{without Venus}",
            r"\boxed{non-Venus}",
        ),
        *each(None, r"\boxed{Venus?}", r"\boxed{Venus or something else}", r"\boxed{anything besides Venus}"),
        *each(None, r"\boxed{Mars} or \boxed{Venus}", r"\boxed{B: Mars}"),
        *each(None, r"\boxed{It isn't Venus}", r"\boxed{\neq Venus}", r"\boxed{Venus or Saturn}"),
        *each(None, r"\boxed{Venus} \boxed{Pluto}", "Venus", r"\boxed{}"),
    ],
)
def test_lenient_boxed_takes_an_option_text_too(text: str, letter: str | None) -> None:
    assert match_letter(text, PLANETS, BOXED) == letter


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        *each("B", "Answer: B", "so the ANSWER :b", "Answer:\n\n  B\nBecause", "Answer: \\text{B}"),
        *each("B", "Answer: B.", "Answer: (B)", "**Answer:** B", "### Answer\n\n**Venus**"),
        *each("B", "Answer: $\\text{Venus}$", "答案：B", "Antwort: B", "\u200fAnswer: \u200bB"),
        *each("B", "Answer: B (not A or C)", "Answer: B, A is wrong", "Answer: B. A, C and D are wrong."),
        *each("B", "Answer: A is wrong, so B"),
        ("Answer:  moon  OF mars  \n", "D"),
        ("Answer: B\nAnswer: C", "C"),
        *each(None, "Answer: Venus, I think", "Answer: B isn't right", "Answer: B is not correct"),
        *each(None, "Answer: Not (B)", "Answer: B) Venus or C) Saturn", "Answer: B: Venus, C: Saturn"),
        *each(None, "Answer: B vs C", "Answer: B→C", "Answer: B, alternatively C", "Answer: E", "Answer:"),
        *each(None, "answer B"),
        pytest.param("Answer: " + "(" * 20_000, None, marks=pytest.mark.timeout(5)),
        pytest.param("Answer: " + "B or C or " * 3_000, None, marks=pytest.mark.timeout(5)),
    ],
)
def test_answer_colon_takes_a_letter_or_an_option(text: str, letter: str | None) -> None:
    assert match_letter(text, PLANETS, COLON) == letter


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        *each("B", "Answer: B", "**Answer:** B", "**Answer: B**", "__Answer__: `b`.", "Answer:\nB"),
        *each("B", "Answer: (B)", "Answer: B because A is too small", "Answer: Option B"),
        *each("B", "Answer: it was A, no: it is B", "Answer: B\nAnswer: unclear", "Answer: A\nAnswer: B"),
        *each("B", "Answer: I say B", "Answer: not A but B"),
        *each("B", "Answer: The answer is B because A is too small", r"Answer: \boxed{B}"),
        *each("B", r"**Answer: $\textbf{B}$**"),
        *each(None, "Answer: A or B", "Answer: A/B", "Answer: both A and b", "Answer: E", "Answer: not A"),
        *each(None, "Answer: B (or A)", "Answer: B, maybe A", "Answer: Venus", "Answer: option b"),
        *each(None, "Answer: B2", r"\boxed{B}", ""),
        ("Answer: A, A", "A"),
    ],
)
def test_markdown_takes_a_single_letter_after_the_last_answer(text: str, letter: str | None) -> None:
    assert match_letter(text, PLANETS, MARKDOWN) == letter


@pytest.mark.parametrize(("native", "letter"), list(zip("أبجدঅবডঢＡＢＣＤ", "ABCD" * 3, strict=True)))
def test_letters_of_other_scripts(native: str, letter: str) -> None:
    assert match_letter(f"Answer: {native}", PLANETS, MARKDOWN) == letter
    assert match_letter(f"Answer: {native} ({native})", PLANETS, MARKDOWN) == letter


def test_options_may_share_an_object_or_lack_a_text() -> None:
    assert choices_of([{"A": "x", "b": "y"}, {"C": None}, {"1": "z"}, {"DD": "w"}, {}]) == [
        ("A", "x"),
        ("B", "y"),
    ]


def test_no_options_no_answer() -> None:
    assert {match_letter(r"Answer: A \boxed{A}", [], mode) for mode in get_args(GradingMode)} == {None}


def test_an_option_without_text_is_not_answered_by_saying_nothing() -> None:
    images = choices_of([{"A": ""}, {"B": " "}])
    assert match_letter(r"Answer: \text{}", images, COLON) is None
    assert match_letter(r"\boxed{}", images, BOXED) is None


@given(texts, st.sampled_from(get_args(GradingMode)))
def test_any_text_gives_an_option_or_nothing(text: str, mode: GradingMode) -> None:
    assert match_letter(text, PLANETS, mode) in {*"ABCD", None}


@given(texts, st.sampled_from("ABCD"))
def test_a_last_box_decides(text: str, letter: str) -> None:
    assert match_letter(rf"{text} \boxed{{{letter}}}", PLANETS, STRICT) == letter
    assert match_letter(rf"{text} \boxed{{{letter}}}", PLANETS, BOXED) == letter


@given(texts, st.sampled_from("ABCD"))
def test_a_last_answer_line_decides(text: str, letter: str) -> None:
    assert match_letter(f"{text}\nAnswer: {letter}", PLANETS, MARKDOWN) == letter


@given(texts)
def test_strict_implies_lenient(text: str) -> None:
    strict = match_letter(text, PLANETS, STRICT)
    assert strict is None or match_letter(text, PLANETS, BOXED) == strict


@pytest.mark.timeout(60)  # quadratic time would be hours
@pytest.mark.parametrize(
    ("text", "letters"),
    [
        (r"\boxed{" + r"\text{" * 200_000 + "B" + "}" * 200_001, {STRICT: "B", BOXED: "B"}),
        (r"\boxed{" * 200_000, {}),
        (r"\boxed{" + "{" * 1_000_000, {}),
        (r"\boxed{" + " " * 1_000_000 + "b}", {}),
        (r"\boxed{" + "Answer: " * 100_000 + "}", {}),
        ("answer" + " " * 1_000_000, {}),
        ("answer" * 200_000, {}),
        ("Answer: " + "I x " * 250_000, {}),
        ("Answer: " + "A" + " " * 1_000_000 + "x A", {COLON: "A", MARKDOWN: "A"}),
        ("Answer:\n" * 100_000, {}),
        ("Answer: A" + "(" * 20_000 + "x B", {COLON: "A", MARKDOWN: "A"}),
        ("*_" * 500_000, {}),
    ],
    ids=lambda value: value[:12] if isinstance(value, str) else "",
)
def test_long_hostile_texts_take_linear_time(text: str, letters: dict[GradingMode, str]) -> None:
    for mode in get_args(GradingMode):
        assert match_letter(text, PLANETS, mode) == letters.get(mode)


def test_latin_letters_keep_everything_else() -> None:
    assert latin_letters("Ü\N{ARABIC LETTER ALEF}z") == "Ü\N{ARABIC LETTER ALEF}z"


TEN = choices_of([{letter: f"option {letter}"} for letter in "ABCDEFGHIJ"])
NUMBERS = choices_of([{"A": "1"}, {"B": "10"}, {"C": "100"}, {"D": "7"}])


@pytest.mark.parametrize("mode", [COLON, MARKDOWN])
@pytest.mark.parametrize(
    ("text", "letter"),
    [
        *each("C", "Answer: I think C", "Answer: The answer is C because I computed"),
        *each("C", "Answer: A planet like C", "Answer: C. I am sure."),
        ("Answer: I would pick B - a safe choice.", "B"),
        ("Answer: not A", None),
        *each("I", "Answer: I", "Answer: I, because A to H are wrong"),
        ("Answer: A", "A"),
    ],
)
def test_pronouns_and_articles_are_no_options(text: str, letter: str | None, mode: GradingMode) -> None:
    assert match_letter(text, TEN, mode) == letter


@pytest.mark.parametrize(
    ("text", "letter"),
    [(r"\boxed{21}", None), (r"\boxed{10}", "B"), (r"\boxed{1.5}", None), (r"\boxed{it is 7}", "D")],
)
def test_numbers_of_options_end_where_numbers_end(text: str, letter: str | None) -> None:
    assert match_letter(text, NUMBERS, BOXED) == letter


@pytest.mark.parametrize(
    ("box", "letter"),
    [
        *each("B", "10", "10.", "x = 10", "10\\text{ cm}"),
        *each("D", "1,000", "x = 1{,}000"),
        *each(
            None, "1,00", "20\\%", "-10", "- 10", "minus 10", "at least 10", "over 10", "10 to 20", "10-20"
        ),
        *each(
            None, "between 10 and 20", "10 million", "10 thousand", "10 000", "\\log 10", "\\sin(10)", "f(10)"
        ),
        *each(None, "x^{10}", "2(10)", "10\\text{ or more}"),
        *each("B", "the answer is (10)", "\\approx 10", "10 cm", "\\$10", "f(2) = 10"),
        *each(None, "twice 10", "10 percent", "\\le 10", "-\\$10", "10\\pi"),
        ("10\\%", "E"),
        *(
            (box, None)
            for box in ("10^2", "10/3", "10!", "\\sqrt{10}", "\\frac{1}{3}", "10+3", ">10", "\\ne 10")
        ),
    ],
)
def test_a_number_within_a_formula_is_no_option(box: str, letter: str | None) -> None:
    numbers = choices_of([{"A": "1"}, {"B": "10"}, {"C": "100"}, {"D": "1000"}, {"E": "10%"}])
    assert match_letter(f"\\boxed{{{box}}}", numbers, BOXED) == letter


@pytest.mark.parametrize("mode", [COLON, MARKDOWN])
@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        *(
            (hedge, None)
            for hedge in (
                "C (Saturn) or D (Moon of Mars)",
                "C if it has rings, D if not",
                "C, though D is possible",
                "C. Saturn / D. Moon of Mars",
                "C with 60% and D with 40%",
                "C (first choice), D (second choice)",
                "C or Moon of Mars",
                "C as well as D",
                "either C (Saturn) or D",
                "C. D is also right.",
                "C if it is far, A if not",
                "C, I guess; A otherwise",
                "C. But A could also be right",
                "C. Actually A.",
                "C~A",
                "C? I am not sure, could be A",
            )
        ),
        *(
            (right, "C")
            for right in (
                "C, unlike D",
                "C, which rules out D",
                "C (vitamin D)",
                "C. D would be too far.",
                "C - Saturn. A and B are too hot, D is too small.",
                "The answer is C. D would be too far.",
                "C (Saturn), as D (Moon of Mars) has no rings",
                "I choose C over D",
                "D is tempting but C is right",
                "Definitely C; I rule out D",
                "C, having eliminated A, excluding B and rejecting D",
                "D isn't right and C is",
                "It cannot be D, so C",
                "I am not sure but C",
                "I'm not entirely certain it is C",
                "D? No, C",
                "~~D~~ C",
                "Surprise! C",
                "After ruling out A and B, C",
            )
        ),
        *(
            (denied, None)
            for denied in (
                "I would not pick C",
                "it can't be C",
                "it can’t possibly be option C",
                "I would never go with (C)",
                "~C",
                "¬C",
                "C? No",
                "C is tempting",
                "not only C but D",
                "C can be ruled out",
                "C must be false",
                "C doesn't fit",
                "C fails",
                "C was my first guess but wrong",
                "the opposite of C",
                "no to C",
                "no C",
                "C unless D",
            )
        ),
    ],
)
def test_an_answer_that_names_two_options(answer: str, letter: str | None, mode: GradingMode) -> None:
    assert match_letter(f"Answer: {answer}", PLANETS, mode) == letter


@pytest.mark.parametrize("mode", [COLON, MARKDOWN])
def test_the_text_of_an_option_may_name_others(mode: GradingMode) -> None:
    options = choices_of([{"A": "tea"}, {"B": "milk"}, {"C": "both A and B"}])
    assert match_letter("Answer: C) both A and B", options, mode) == "C"


@pytest.mark.parametrize(
    "box", ["C - Saturn or D - Moon of Mars", "C or Moon of Mars", "C = Saturn; D = Moon of Mars"]
)
def test_a_box_that_names_two_options(box: str) -> None:
    assert match_letter(f"\\boxed{{{box}}}", PLANETS, STRICT) is None
    assert match_letter(f"\\boxed{{{box}}}", PLANETS, BOXED) is None


FORMULAS = choices_of([{"A": "$\\frac{1}{2}$"}, {"B": "$-\\frac12$"}, {"C": "B"}, {"D": "$x^2$"}])


@pytest.mark.parametrize(
    ("box", "letter"),
    [
        *each("A", "\\frac{1}{2}", "\\dfrac12", "$\\frac12$", "A: \\frac{1}{2}"),
        *each("B", "-\\frac{1}{2}", "B", "B. -\\tfrac12"),
        *each("C", "C: B", "C) B", "C, B"),
        *each("D", "x^2", "D = $x^2$"),
        *each(
            None,
            "2\\frac{1}{2}",
            "\\frac{1}{2}+x^2",
            "C: A",
            "¬C",
            "!C",
            "C'",
            "-C",
            "C - wrong",
            "C is false",
        ),
    ],
)
def test_options_that_are_formulas_or_letters(box: str, letter: str | None) -> None:
    assert match_letter(f"\\boxed{{{box}}}", FORMULAS, BOXED) == letter
