r"""Pairs the formulas of two answers that say the same in two forms, before math-verify compares them.

math-verify folds the case of letters and computes what stands between numerals: to it ``2024-05-03`` is
2016, and ``x=1, y=2`` the set of 1 and 2. Here such forms are read from both answers together.
"""

from __future__ import annotations

import re

_JOINED = re.compile(r"(\d{1,20})\s?([-:/.])\s?\d{1,20}(?:\s?\2\s?\d{1,20})*")
_CLOCK = re.compile(r"\d{1,2}:\d\d")
_NAME = r"(?:\\?[A-Za-z]{1,8}|[A-Za-z])(?:_\s?(?:\w|\{\w{1,9}\}))?"
_ASSIGNMENT = re.compile(rf"\s*({_NAME})\s*=\s*([^=<>]+)")
_TUPLE_OF_NAMES = re.compile(rf"\(\s*({_NAME}(?:\s*,\s*{_NAME})+)\s*\)\s*=\s*\((.+)\)")
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_LABEL = re.compile(
    r"\s*([A-Za-z]'{0,3}(?:_\{?\w{1,9}\}?)?(?:\([^()=<>]{1,40}\))?|\\[a-z]{2,8}|\\frac\{d\w?\}\{d\w\}[A-Za-z]?)\s*=\s*"
)
_PLAIN_LABEL = re.compile(r"(?!y)[A-Za-z](?:_\{?\w{1,9}\}?)?")  # math-verify takes it for a variable
_INEQUALITY = re.compile(r"([^<>,=]{1,80}?)\s*([<>]|\\[lg]e(?:q|qslant)?(?![A-Za-z]))\s*([^<>,=]{1,80})")
_TURNED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
_CHAIN = re.compile(r"[^<>=,]{1,80}(?:<|\\le(?![A-Za-z]))[^<>=,]{1,80}(?:<|\\le(?![A-Za-z]))[^<>=,]{1,80}")
_COLUMN = re.compile(r"\\begin\{([pb]?matrix)\}([^&]{1,400})\\end\{\1\}")
_ROW_END = re.compile(r"\\\\(?:\[[^\]]{0,9}\])?")
_SYMBOL = re.compile(r"\\?[A-Za-z]+")
_OPENING_LETTERS = re.compile(r"[A-E]")


def pairs_of(gold: str, answer: str) -> list[tuple[str, str]] | None:
    """The formulas that have to be equal for two formulas to be; None if nothing can make them."""
    if _is_joined(gold):
        return [] if _same_numerals(gold, answer) else None
    named = _by_name(gold, answer)
    if named is not None:
        return named
    labels = [_LABEL.match(text) for text in (gold, answer)]
    rest = [
        text[label.end() :] if label else text for text, label in zip((gold, answer), labels, strict=True)
    ]
    if not any("," in text or re.search(r"[=<>]|\\[lg]e(?![A-Za-z])", text) for text in rest):
        kinds = {_kind(label[1]) for label in labels if label}
        is_plain = all(label is None or _PLAIN_LABEL.fullmatch(label[1]) for label in labels)
        if len(kinds) == 1:
            gold, answer = rest
        elif len(kinds) == 2 and not is_plain:
            return None
    gold, answer = _as_sets(gold, answer)
    if _OPENING_LETTERS.fullmatch(gold) and len(answer) == 1:
        answer = answer.upper()
    if gold != answer and _SYMBOL.fullmatch(gold) and gold.lower() == answer.lower():
        return None
    return [(gold, _constant_like(gold, answer))]


def _is_joined(text: str) -> bool:
    """Whether numerals with marks between them are no arithmetic: a date, a range, a ratio of three."""
    joined = _JOINED.fullmatch(text)
    if joined is None:
        return False
    first, *others = re.findall(r"\d+", text)
    mark = joined[2]
    if len(others) > 1 or (mark == ":" and _CLOCK.fullmatch(text)):
        return True
    return mark == "-" and (int(first) < int(others[0]) or others[0].startswith("0"))


def _same_numerals(gold: str, answer: str) -> bool:
    forms = [(re.findall(r"\d+", text), re.sub(r"[\d\s]", "", text)) for text in (gold, answer)]
    (first, marks), (second, others) = forms
    if marks != others or not _JOINED.fullmatch(answer):
        return False
    numbers, actual = ([int(numeral) for numeral in numerals] for numerals in (first, second))
    is_ratio = set(marks) == {":"} and len(marks) > 1 and not any(n.startswith("0") for n in first + second)
    if is_ratio and len(numbers) == len(actual):
        return all(a * actual[0] == b * numbers[0] for a, b in zip(numbers, actual, strict=True))
    return numbers == actual


def _split(text: str) -> list[str]:
    """A list at its commas and semicolons, without those in brackets."""
    items, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter in ",;" and depth == 0:
            items.append("")
        else:
            items[-1] += letter
    return [item.strip() for item in items]


def _named(text: str) -> dict[str, str] | None:
    """The values of several variables: ``x=1, y=2``, ``(x,y)=(1,2)``."""
    together = _TUPLE_OF_NAMES.fullmatch(text)
    if together:
        names, values = _split(together[1]), _split(together[2])
    else:
        assignments = [_ASSIGNMENT.fullmatch(item) for item in _split(text)]
        if None in assignments:
            return None
        names = [item[1] for item in assignments if item]
        values = [item[2].strip() for item in assignments if item]
    is_each = len(names) == len(values) > 1 and len({*names}) == len(names)
    return dict(zip(names, values, strict=True)) if is_each else None


def _by_name(gold: str, answer: str) -> list[tuple[str, str]] | None:
    """Pairs of values that belong together; None if the answers do not name several values."""
    wanted, actual = _named(gold), _named(answer)
    if wanted is None and actual is None:
        return None
    if wanted is not None and actual is not None:
        if wanted.keys() != actual.keys():
            return None
        return [(value, actual[name]) for name, value in wanted.items()]
    named, plain = (wanted, answer) if actual is None else (actual, gold)
    assert named is not None
    is_indexed = len({name[0] for name in named if not name.startswith("\\")}) == 1
    if is_indexed:  # x_1 = 2, x_2 = 3: their order is nobody's
        values = ", ".join(named.values())
        return [(values, answer)] if actual is None else [(gold, values)]
    is_tuple = plain[:1] in _BRACKETS and plain.endswith(_BRACKETS[plain[:1]])
    is_set = plain.startswith(r"\{") and plain.endswith(r"\}")
    items = _split(plain[1:-1] if is_tuple else plain[2:-2] if is_set else plain)
    if len(items) != len(named):
        return None
    ordered = sorted(named) if _is_a_row(named) else list(named)
    pairs = [(named[name], item) for name, item in zip(ordered, items, strict=True)]
    return pairs if actual is None else [(item, value) for value, item in pairs]


def _is_a_row(names: dict[str, str]) -> bool:
    """Whether variables have an order of their own: x and y, or a, b and c."""
    codes = sorted(map(ord, names)) if all(len(name) == 1 for name in names) else []
    return bool(codes) and codes[-1] - codes[0] == len(codes) - 1


def _kind(label: str) -> str:
    """A label without the names that nobody chooses between: ``y'`` is ``f'(x)``."""
    if label.startswith(r"\frac"):
        return "f'"
    function = re.fullmatch(r"(?:y|f)('{0,3})(?:\([a-z]\))?", label)
    return f"f{function[1]}" if function else "".join(label.split())


def _as_sets(gold: str, answer: str) -> tuple[str, str]:
    """Two inequalities as a union or a chain, a column as a tuple, if the other answer is one."""
    texts = [gold, answer]
    for at, other in ((0, answer), (1, gold)):
        text = texts[at]
        if bounds := _bounds(text):
            texts[at] = _joined_bounds(*bounds, other) or text
        elif (column := _COLUMN.fullmatch(text)) and other.startswith("("):
            texts[at] = f"({','.join(_ROW_END.split(column[2].strip()))})"
    return texts[0], texts[1]


def _bounds(text: str) -> tuple[str, tuple[str, str], tuple[str, str]] | None:
    """Of ``x < 1, 2 < x``: the variable, what it is greater than, and what it is less than."""
    items = _split(text)
    relations = [_INEQUALITY.fullmatch(item) for item in items]
    if len(items) != 2 or None in relations:
        return None
    sides: dict[bool, tuple[str, str]] = {}
    names = set()
    for item in filter(None, relations):
        left, relation, right = item[1], re.sub("q.*", "", item[2]), item[3].strip()
        if not re.fullmatch("[A-Za-z]", left):
            left, relation, right = right, _TURNED[relation], left
        names.add(left)
        sides[relation in (">", r"\ge")] = relation, right
    is_one = len(names) == 1 and len(sides) == 2 and re.fullmatch("[A-Za-z]", next(iter(names)))
    return (names.pop(), sides[True], sides[False]) if is_one else None


def _joined_bounds(name: str, lower: tuple[str, str], upper: tuple[str, str], other: str) -> str | None:
    """``x < 1, x > 2`` as the union or the chain that the other answer is."""
    (greater, low), (less, high) = lower, upper
    if r"\cup" in other:
        left, right = "]" if less == r"\le" else ")", "[" if greater == r"\ge" else "("
        return rf"(-\infty,{high}{left}\cup{right}{low},\infty)"
    if _CHAIN.fullmatch(other) or other[:1] in ("(", "["):
        return rf"{low} {'<' if greater == '>' else chr(92) + 'le'} {name} {less} {high}"
    return None


def _constant_like(gold: str, answer: str) -> str:
    """``answer`` with its constant ``c`` in the case that the gold's has: ``x^2+c`` for ``x^2+C``."""
    letters = [set(re.sub(r"\\[A-Za-z]+", "", text)) & {"c", "C"} for text in (gold, answer)]
    if len(letters[0]) != 1 or len(letters[1]) != 1 or letters[0] == letters[1]:
        return answer
    wanted, actual = letters[0].pop(), letters[1].pop()
    return re.sub(rf"(\\[A-Za-z]+)|{actual}", lambda m: m[1] or wanted, answer)
