"""Families that are not left to the package's verifiers, with the reasons.

`SCORED_HERE`: their verifier runs the answer (`eval`, SymPy's ``parse_expr``), or finds every answer right.
`LITERALS`: it reads a list in the answer with `eval`; in the scoring process that is a reader of literals.
`REFUTED`: it gives the full score to some wrong answers, which score 0 here.

tests/environments/test_reasoning_gym.py fails where a family's module names an evaluator and is in none of
these tables.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from typing import Any

from gym_serve.environments.reasoning_gym.expressions import (
    NotAnExpression,
    arithmetic,
    expanded,
    is_antiderivative,
)
from gym_serve.grading import plain_answer, same_number

Item = Mapping[str, Any]  # an item of the package: ``question``, ``answer``, ``metadata``

WITHOUT_ANSWER = frozenset({"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"})
"""Families whose items have no answer of their own."""

LITERALS = frozenset({"binary_matrix", "n_queens", "number_sorting", "spiral_matrix", "string_insertion"})
"""Families that read a list of literals: in the answer, or (number_sorting) in the item."""

_WRONG = 0.01  # what the package gives to a wrong answer of these games


class Unsolved(Exception):
    """The answer is wrong; ``score`` is what the package gives to such a one."""

    def __init__(self, reason: str, score: float = 0.0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.score = score


def score_here(family: str, answer: str, item: Item) -> tuple[float, str | None]:
    """The score of an answer, and why it is below 1. Raises KeyError, TypeError, ValueError: the item lacks
    something, or cannot be read.
    """
    try:
        SCORED_HERE[family](answer, item)
    except Unsolved as unsolved:
        return unsolved.score, unsolved.reason
    return 1.0, None


def _game(answer: str, item: Item, *, close: float, target: int | None = None) -> None:
    """All the numbers, each once, make the target exactly; ``close`` is for an expression that does not."""
    numbers = item["metadata"]["numbers"]
    target = item["metadata"]["target"] if target is None else target
    wanted = sorted(map(Fraction, numbers))
    try:
        expression = arithmetic(answer)
    except NotAnExpression as error:
        raise Unsolved(f"it is no expression of numbers: {error}", _WRONG) from None
    if sorted(expression.numbers) != wanted:
        used, allowed = (" ".join(map(str, some)) for some in (expression.numbers, numbers))
        raise Unsolved(f"it uses the numbers {used[:100]}, and these are given: {allowed}", close)
    if expression.value != target:
        raise Unsolved(f"it makes {str(expression.value)[:40]}, and not {target}", close)


def _bitwise_arithmetic(answer: str, item: Item) -> None:
    try:
        value = int(answer, 0)
    except ValueError:
        raise Unsolved("it is no integer") from None
    if value != int(item["answer"], 0):
        raise Unsolved("it is another number")


def _polynomial_multiplication(answer: str, item: Item) -> None:
    variables = item["metadata"]["variables"]
    wanted = expanded(item["answer"], variables)
    try:
        if expanded(answer, variables) != wanted:
            raise Unsolved("it is another polynomial")
    except NotAnExpression as error:
        raise Unsolved(f"it is no sum of terms: {error}") from None


def _integration(answer: str, item: Item) -> None:
    metadata = item["metadata"]
    try:
        right = is_antiderivative(answer, metadata["integrand"], metadata["variable"])
    except NotAnExpression as error:
        raise Unsolved(f"it is no expression that can be derived: {error}") from None
    if not right:
        raise Unsolved("its derivative is not the integrand")


def _value(text: str) -> float:
    text = text.replace(",", "").strip()
    return float(Fraction(text)) if "/" in text else float(text)


def _game_of_life_halting(answer: str, item: Item) -> None:
    # The package compares bool(answer) with bool(item["answer"]): two texts that are not empty.
    if answer.strip().lower() != item["answer"].lower():
        raise Unsolved("it is another answer than True or False as in the item")


SCORED_HERE: Mapping[str, Callable[[str, Item], None]] = {
    "bitwise_arithmetic": _bitwise_arithmetic,
    "countdown": partial(_game, close=0.05),
    "game_of_life_halting": _game_of_life_halting,
    "intermediate_integration": _integration,
    "polynomial_multiplication": _polynomial_multiplication,
    "puzzle24": partial(_game, close=_WRONG, target=24),
    "simple_integration": _integration,
}  # what scores an answer of a family; raises `Unsolved` for a wrong one


# Full scores that are refuted

_STRANGE = re.compile(r"(?<![a-z])[+-]?(?:s?nan\d*|inf(?:inity)?)[ij]?(?![a-z])", re.IGNORECASE)


def strange_number(answer: str, item: Item) -> bool:
    """Whether an answer has a number that is none, unless the item has: ``nan`` is near to every number."""
    texts = f"{item.get('question')} {item.get('answer')}"
    return bool(_STRANGE.search(answer)) and not _STRANGE.search(texts)


def as_spelled(gold: str | None, answer: str) -> str:
    """An answer without what stands around it; ``gold`` if that is the same but for its spelling: the package
    compares texts.
    """
    bare = answer.strip()
    bold = bare.startswith("**") and bare.endswith("**")  # also around powers: **x**2**
    plain = plain_answer(bare[2:-2] if bold else answer)
    if not gold or gold[0] in "\"'":  # a literal: 5 is not "5"
        return plain
    same = plain_answer(gold) == plain or same_number(gold, plain)
    return gold if same else plain


def _words(text: str) -> list[str]:
    return text.strip().lower().split()


_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_DAYS = re.compile(r"[+-]?\d+(?:\s+days?)?", re.IGNORECASE)


def _other_number(answer: str, item: Item) -> str | None:
    numbers = {float(number.replace(",", "")) for number in _NUMBER.findall(answer)}
    alone = numbers == {float(item["answer"])}
    return _denied(answer, item) if alone else "it has another number, or several"


def _other_words(answer: str, item: Item) -> str | None:
    return None if _words(answer) == _words(item["answer"]) else "it has other words"


def _other_letters(answer: str, item: Item) -> str | None:
    same = "".join(_words(answer)) == "".join(_words(item["answer"]))
    return None if same else "it has other letters"


def _other_integer(answer: str, item: Item) -> str | None:
    gold = item["answer"].strip()
    if re.fullmatch(r"-?\d+", gold) and int(answer) != int(gold):
        return "it is another number"
    return None


def _other_value(answer: str, item: Item) -> str | None:
    same = math.isclose(_value(answer), _value(item["answer"]), rel_tol=1e-3)
    return None if same else "it is another number"


def _other_candidate(answer: str, item: Item) -> str | None:
    candidates, solution = item["metadata"]["candidates"], item["metadata"]["solution"]
    value = float(answer.replace(",", ""))
    nearest = min(candidates, key=lambda one: abs(one - value))
    return None if nearest == solution else "it is another candidate"


def _other_board(answer: str, item: Item) -> str | None:
    return None if json.loads(answer) == json.loads(item["answer"]) else "it is another board"


def _other_numbers(answer: str, item: Item) -> str | None:
    values, gold = (json.loads(text.replace("'", '"')) for text in (answer, item["answer"]))
    same = list(map(float, values)) == list(map(float, gold))
    return None if same else "it has other numbers than those that were to be sorted"


def _other_list(answer: str, item: Item) -> str | None:
    words = re.split(r",\s*", answer.strip())
    return None if words == item["metadata"]["sorted_words"] else "it has other words"


def _several_intervals(answer: str, item: Item) -> str | None:
    if item["metadata"]["task_type"] == "date" and not _DAYS.fullmatch(answer.strip()):
        return "it is more than a number of days"
    return "it is more than one interval" if answer.count(",") > item["answer"].count(",") else None


def _only_a_premise(answer: str, item: Item) -> str | None:
    def plain(text: str) -> str:
        text = "".join(text.split())
        while text.startswith("(") and text.endswith(")"):
            text = text[1:-1]
        return text

    premises = map(plain, item["metadata"]["premises"])
    return "it repeats a premise, and concludes nothing" if plain(answer) in premises else None


_DENIAL = re.compile(r"\b(?:not|or|never|neither|either|nor|but|except|neq|ne)\b|n't\b|≠", re.IGNORECASE)
_TAG = re.compile(r"</?\w+>")
_MINUS = ("-", "\N{MINUS SIGN}", "\N{EN DASH}")
_OTHERS = re.compile(r"\d|[,;/|?()\[\]{}\\\n]|\band\b", re.IGNORECASE)


def _denied(answer: str, item: Item) -> str | None:
    return "it denies itself, or is one of several answers" if _DENIAL.search(answer) else None


_FRACTION = re.compile(
    r"\$?\s*(?:\\[dt]?frac\s*\{[^{}]*\}\s*\{[^{}]*\}|[+-]?\d+\s*/\s*[+-]?\d+)\s*\$?", re.IGNORECASE
)


def _several_fractions(answer: str, item: Item) -> str | None:
    return None if _FRACTION.fullmatch(answer.strip()) else "it is more than one fraction"


def hedged(answer: str, item: Item) -> bool:
    """Whether an answer holds the right one beside others, or denies it.

    The package gives such an answer a share of the score. That is for words around it ("It is 42.").
    """
    right = item.get("answer") or ""
    if not right or right not in answer:
        return False
    if right[0].isdigit() and answer.partition(right)[0].endswith(_MINUS):
        return True  # another number
    rest = _TAG.sub(" ", answer.replace(right, " ", 1))
    return bool(_DENIAL.search(rest) or _OTHERS.search(rest))


REFUTED: Mapping[str, Callable[[str, Item], str | None]] = {
    "calendar_arithmetic": _other_integer,  # where -1 is right, wrong numbers score above 1
    "coin_flip": _other_value,  # "0" is the beginning of "0.0001220703125"
    "decimal_arithmetic": _other_value,  # it may be wrong by 0.001, so that "0" is 0.0004
    "figlet_fonts": _other_letters,  # ten equal letters are enough
    "fraction_simplification": _several_fractions,  # text after the first one is not looked at
    "game_of_life": _other_board,  # rows and cells beyond the board are not looked at
    "gsm_symbolic": _other_number,  # the first number counts, without its sign
    "kakurasu": _denied,  # everything but 0 and 1 is skipped
    "knights_knaves": _denied,  # words that are no names or roles are skipped
    "letter_jumble": _other_words,  # words after the right ones are not looked at
    "number_format": _other_candidate,  # it may be wrong by 0.01, and candidates may be nearer than that
    "number_sorting": _other_numbers,  # each number may differ by 1
    "propositional_logic": _only_a_premise,  # every premise follows from the premises
    "quantum_lock": _denied,  # everything but A, B and C is skipped
    "sokoban": _denied,  # everything but moves is skipped
    "spell_backward": _other_letters,  # letters after the right ones are not looked at
    "survo": _denied,  # everything but numbers is skipped
    "time_intervals": _several_intervals,  # text after the first interval is not looked at
    "word_sorting": _other_list,  # words after the right ones are not looked at
}  # why a full score of the package is wrong; None if it is right
