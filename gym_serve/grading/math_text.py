r"""Reads mathematical answers in the spellings of people and models, before math-verify does.

math-verify drops what it takes for a unit, and all that follows: ``2 \text{ hours } 30 \text{ minutes}`` is 2
to it. Here an answer is taken apart first: a relation in front, parts of formulas and words, a unit at the
end. Two answers are equal if all their parts are, so that what is not read whole is equal to nothing but
itself. Everything takes time linear in the text, which may be hostile.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import NamedTuple

from gym_serve.grading.answers import plain_answer, visible
from gym_serve.grading.math_answer import BOX, TEXT_COMMAND, is_hedged, plain_numerals, written_answer
from gym_serve.grading.math_pairs import pairs_of
from gym_serve.grading.math_spelling import (
    MIXED,
    NAMED,
    SCIENTIFIC,
    SIGNS,
    SYMBOL,
    code_of,
    decimal,
    improper,
    spelled,
)
from gym_serve.grading.math_units import OPERATORS, UNITS, folded, without_unit

MAX_ANSWER = 10_000  # characters of an answer that are read; a longer one is equal to nothing


class Question(NamedTuple):
    """What there is to compare: pairs of a formula of the gold and a text that has to be equal to it; the
    answer as it is ``written``, if that is clear; a ``difference`` that decides whatever the formulas are.
    """

    pairs: list[tuple[str, str]]
    written: str | None
    difference: str | None


class Reading(NamedTuple):
    """An answer taken apart."""

    relation: str  # in front: ``\\ne``, ``\\le``, ...; empty for none and for "="
    parts: tuple[str, ...]  # formulas in LaTeX and words in turn; words are in lower case behind a ``"``
    unit: str  # at the end, in its canonical spelling; empty if there is none


_SWITCHED = re.compile(r"\{\s*\\(rm|bf|it|sf|tt)(?![A-Za-z])\s*([^{}\\]*)\}")
_FONT_OF_VARIABLES = frozenset(("mathbf", "mathit", "mathsf", "boldsymbol", "bm", "mathnormal"))
_WORD = re.compile("\0(\\d+)\0")
_FORMULA_AND_UNIT = re.compile(r"\$(\S|\S[^$]*\S)\$(\s+[A-Za-z][A-Za-z /^0-9]*\.?)")
_ANGLE = re.compile(r"(\d+(?:\.\d+)?)\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_LIST_WORDS = re.compile(r"\s*,?\s+(?:and|or)\s+(?=[-+\\(\[$\d])|\s*,(?:\s*,)+")
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])\s*")
_GROUPS = re.compile(
    r"(?<![\w.,(\[{])(?:\d{1,3}(?:\.\d{3}){2,}|\d{1,3}(?:['’_]\d{3})+|\d{1,2}(?:,\d{2})+,\d{3})(?![\w.(]|,\d{3})"
)
_COMMA = re.compile(
    r"(?<![\w.,(\[{])(\d+)(?:,|\{[,.]\})(\d{1,2}|\d{4,}|(?<=^0,)\d+|(?<=^0\{,\})\d+)(?![\w.,)\]])"
)
_RELATION = re.compile(
    r"(\\(?:neq?|le|leq|leqslant|ge|geq|geqslant|lt|gt|not\s?=|approx|sim|simeq|equiv|gtrsim|lesssim)(?![A-Za-z])|!=|[<>]=?|=)\s*"
)
_RELATIONS = {
    r"\neq": r"\ne", "!=": r"\ne", r"\not=": r"\ne", r"\not =": r"\ne", r"\leq": r"\le", r"\leqslant": r"\le",
    "<=": r"\le", r"\geq": r"\ge", r"\geqslant": r"\ge", ">=": r"\ge", r"\lt": "<", r"\gt": ">", "=": "",
    r"\approx": "", r"\sim": "", r"\simeq": "",
}  # fmt: skip
_RESIDUE = re.compile(r"^[A-Za-z]\\equiv(?=-?\d+\\pmod)")
_UNREAD = re.compile(
    r"\\(?:not(?!\s?=)|neg|lnot|notin|n(?:less|gtr|[lg]eq(?:q|slant)?|cong|sim|prec|succ|mid|parallel|sub|sup)[a-z]*"
    r"|[lg]neqq?|[lg]nsim|ll|gg|lll|ggg|(?:prec|succ)[a-z]*|(?:sub|sup)set[a-z]*|propto|perp|cong|mod"
    r"|(?:over|under|stack)(?:set|rel))(?![A-Za-z])|^\\(?:in|ni)(?![A-Za-z])|[≪≫∉∝≺≻≮≯≰≱≢]"
    r"|^\\(?:min|max|sup|inf|lim|arg|dim|deg)\s?\d|'$|^-?\d+\s?\\[lc]?dots$|^-?[\d.]+\s?=\s?-?[\d.]+$|\\pmod(?![A-Za-z])|(?<![\w^.])\d+\)?\s?_"
)  # what math-verify drops, though it changes the answer
_SIZES = """
s 1 min 60 h 3600 day 86400 week 604800; mm 1 cm 10 dm 100 m 1000 km 1000000; in 1 ft 12 yd 36 mi 63360;
mg 1 g 1000 kg 1000000; oz 1 lb 16; ml 1 l 1000; cent 1 $ 100; j 1 kj 1000; w 1 kw 1000
"""
_SCALES = {
    unit: (group.split()[0], int(size))
    for group in _SIZES.split(";")
    for unit, size in re.findall(r"(\S+) (\d+)", group)
}  # of a unit: the smallest one of its kind, and how many of those it is
_AMOUNT = r"\d{1,20}(?:\.\d{1,20})?\s?[A-Za-z]{1,12}\b"
_COMPOUND = re.compile(rf"{_AMOUNT}(?:,?\s(?:and\s)?{_AMOUNT}){{1,4}}")
_QUANTITY = re.compile(
    rf"(?<![^\s(*])(?<![-+*/^]\s)-?(?:{_COMPOUND.pattern}|\d{{1,20}}(?:\.\d{{1,20}})?\s?[A-Za-z]{{3,12}}\b"
    r"|\d{1,2}(?::\d\d)?\s?[AaPp]\.?\s?[Mm]\b)(?!\s?[/^]|\s(?:per|squared|cubed|an?|each|every)\b)"
)
_WORDS_ONLY = re.compile(r"[A-Za-z][A-Za-z'’\-]*(?:[ ,]+[A-Za-z'’\-]+)*[.!]?")
_LABEL_END = re.compile(r"(?:\b(?:is|are|equals|be|answer|result|solution)|[:=])$")
_LABEL_IN_FRONT = re.compile(
    r"(?:(?:the|final|my)\s)*(?:answer|result|solution)(?:\sis)?\s?[:=]\s?", re.IGNORECASE
)
_IS_WORD = re.compile("[A-Za-z]{4}|^(?:yes|no|odd|dne|all|any)$", re.IGNORECASE)


def read(content: str, *, single: bool = False) -> Reading:
    r"""An answer taken apart, its formulas spelled as math-verify reads them.

    Args:
        content: the answer alone, without ``\boxed{}``; at most `MAX_ANSWER` characters are sensible.
        single: no list is expected, so that a comma may stand in a number: ``12,5`` and ``1.234.567``.
    """
    content = plain_answer(visible(content).replace("\0", ""))
    if one := _FORMULA_AND_UNIT.fullmatch(content):
        content = one[1] + one[2]
    if single:
        content = _COMMA.sub(r"\1.\2", _GROUPS.sub(lambda m: re.sub(r"\D", "", m[0]), content))
    text = spelled(plain_numerals(_boxed(content))[len(BOX) : -1])
    flat = " ".join(TEXT_COMMAND.sub(r" \2 ", text).split())
    if total := _total(flat):
        return total
    bare = re.sub(r",|\band ", "", flat)
    if _COMPOUND.fullmatch(flat) and all(unit in UNITS for unit in re.findall("[A-Za-z]+", bare)):
        text = re.sub("([A-Za-z]+)", r"\\text{\1}", bare)
    text, words = _marked(text)
    text = _LIST_WORDS.sub(", ", " ".join(text.split())).rstrip("\\ ")
    text = text[label.end() :] if (label := _LABEL_IN_FRONT.match(text)) else text
    relation = ""
    while not _UNREAD.match(text) and (match := _RELATION.match(text)):
        relation += _RELATIONS.get(match[1], match[1])
        text = text[match.end() :]
    text = _WHOLE_SETS.get(re.sub(r"\0(\d+)\0", lambda m: words[int(m[1])], text).lower().strip(" ."), text)
    if _WORDS_ONLY.fullmatch(text) and _IS_WORD.search(text) and text.lower() not in NAMED:
        return Reading(relation, ('"' + folded(text),), "")
    if _UNREAD.search(text):
        whole = _WORD.sub(lambda m: f" {words[int(m[1])]} ", text)
        whole = _RESIDUE.sub("", re.sub(r"(?<!\\)\{(\w+)\}", r"\1", "".join(whole.split())))
        return Reading(relation, (f'"{code_of(whole)}',), "")
    text, unit = without_unit(text, words)
    if unit in ("am", "pm"):
        text = re.sub(r"^\s*(\d{1,2})\s*$", r"\1:00", text)
    if _TRIGONOMETRY.search(text):
        text = _ANGLE.sub(r"(\\frac{\1\\pi}{180})", text)
    if _PLUS_MINUS.match(text):
        text = ", ".join(map(_both_signs, text.split(",")))
    text = _both_values(text)
    return Reading(relation, _parts(text, words), unit)


def _total(text: str) -> Reading | None:
    """Amounts in ever smaller units of one kind as one amount: 2 hours 30 minutes."""
    amounts = re.findall(r"([\d.]+)\s?([A-Za-z]+)", text) if _COMPOUND.fullmatch(text) else []
    scales = [_SCALES.get(UNITS.get(unit, ""), ("", 0)) for _, unit in amounts]
    kinds, sizes = {kind for kind, _ in scales}, [size for _, size in scales]
    if len(kinds) != 1 or "" in kinds or sizes != sorted(set(sizes), reverse=True):
        return None
    total = sum(Decimal(number) * size for (number, _), size in zip(amounts, sizes, strict=True))
    return Reading("", (format(total, "f"),), scales[0][0])


def _in_one_unit(gold: Reading, answer: Reading) -> tuple[Reading, Reading]:
    """Two amounts in the smallest unit of their kind, if they are in two units of it."""
    (kind, size), (other, scale) = (_SCALES.get(reading.unit, ("", 1)) for reading in (gold, answer))
    parts = "".join(gold.parts + answer.parts)
    if gold.unit == "degree" and _is_in_radians(answer):
        return _in_radians(gold), answer._replace(unit="")
    if answer.unit == "degree" and _is_in_radians(gold):
        return gold._replace(unit=""), _in_radians(answer)
    if size == scale or kind != other or re.search(r"[,;=<>&\"]", parts):
        return gold, answer
    return tuple(  # type: ignore[return-value]
        reading._replace(parts=(rf"({''.join(reading.parts)}) \cdot {factor}",), unit=kind)
        for reading, factor in ((gold, size), (answer, scale))
    )


def _is_in_radians(angle: Reading) -> bool:
    return angle.unit in ("", "radian") and r"\pi" in "".join(angle.parts)


def _in_radians(angle: Reading) -> Reading:
    *before, value = angle.parts or ("",)
    label, equals, number = value.rpartition("=")
    return angle._replace(parts=(*before, rf"{label}{equals}\frac{{({number})\pi}}{{180}}"), unit="")


def _both_signs(term: str) -> str:
    r"""``\pm 2`` as ``2, -(2)``."""
    positive = _PLUS_MINUS.sub("", term.strip(), count=1)
    return f"{positive}, -({positive})" if _PLUS_MINUS.match(term.strip()) else term


def ask(gold: str, answer: str) -> Question:
    r"""What there is to compare, of the right answer in ``\boxed{}`` and a text with the answer in it."""
    wanted = read(written_answer(gold) or "")
    written = written_answer(answer)
    if written is None:
        if wanted.relation or len(wanted.parts) != 1 or wanted.parts[0].startswith('"'):
            return Question([], None, "no box, no line 'Answer: X' and no formula found")
        if is_hedged(_COMPOUND.sub(lambda m: "0" if _total(m[0]) else m[0], answer)):
            return Question([], None, "it is denied, a bound, or one of several")
        prose = MIXED.sub(improper, plain_numerals(answer).translate(SIGNS))
        prose = SCIENTIFIC.sub(decimal, prose)
        written = _last_quantity(prose)
        if written is None:
            return Question([(_boxed(wanted.parts[0]), prose)], None, None)
    if len(written) > MAX_ANSWER:
        return Question([], written, f"it is longer than {MAX_ANSWER} characters")
    single = not re.search("[,;]", "".join(wanted.parts))
    wanted, given = _in_one_unit(wanted, read(written, single=single))
    different = _difference(wanted, given)
    formulas: list[tuple[str, str]] = []
    for first, second in () if different else zip(wanted.parts, given.parts, strict=True):
        pairs = [] if '"' in (first[:1], second[:1]) else pairs_of(*_alike(first, second))
        if pairs is None:
            return Question([], written, "they are written alike and differ")
        formulas += [(_boxed(a), _boxed(b)) for a, b in pairs]
    return Question(formulas, written, different)


def _last_quantity(prose: str) -> str | None:
    """The number that prose ends with, if it is an amount in units that are read, or a time of day."""
    last = next(reversed(list(_QUANTITY.finditer(prose))), None)
    if last is None or re.search(r"\d", prose[last.end() :]):
        return None
    reading = read(last[0])
    is_unit = reading.unit in ("am", "pm") or reading.unit in _SCALES
    return last[0] if is_unit and len(reading.parts) == 1 else None


def _alike(gold: str, answer: str) -> tuple[str, str]:
    r"""Two formulas, without ``\%`` where only one of them has it and their numerals are the same."""
    first, second = (re.sub(r"\s*\\?%\s*$", "", text) for text in (gold, answer))
    both = first != gold and second != answer
    is_same = not both and first == second and re.fullmatch(r"-?[\d.]+", first)
    return (first, second) if is_same else (gold, answer)


def _boxed(formula: str) -> str:
    return f"{BOX}{formula}}}"


def _difference(gold: Reading, answer: Reading) -> str | None:
    """Why two answers differ whatever their formulas are; None if only the formulas decide."""
    if gold.relation != answer.relation:
        return f"one is a relation: '{gold.relation or '='}' is expected, not '{answer.relation or '='}'"
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return f"the units differ: {gold.unit} is expected, not {answer.unit}"
    if {gold.unit, answer.unit} & {"am", "pm"} and _clock(gold) != _clock(answer):
        return "the times differ"
    if not gold.parts or len(gold.parts) != len(answer.parts):
        return "they have different parts"
    for first, second in zip(gold.parts, answer.parts, strict=True):
        if '"' in (first[:1], second[:1]) and folded(first) != folded(second):
            return "the words differ"
    return None


def _clock(reading: Reading) -> str:
    return re.sub(r"\s|(?:^|(?<=:))0(?=\d)", "", "".join(reading.parts))


_WHOLE_SETS = {
    "all real numbers": r"\mathbb{R}", "all reals": r"\mathbb{R}", "real numbers": r"\mathbb{R}",
    "empty set": r"\emptyset", "the empty set": r"\emptyset", "does not exist": "dne",
}  # fmt: skip
_ONE_SIGN = re.compile(r"\\[pm][pm](?![A-Za-z])")


def _both_values(text: str) -> str:
    r"""``\frac{1 \pm a}{2}`` as two values, of signs that change together."""
    if not _ONE_SIGN.search(text) or "," in text:
        return text
    value = text.rpartition("=")[2]
    both = [value.replace(r"\pm", first).replace(r"\mp", second).strip() for first, second in ("+-", "-+")]
    return ", ".join(re.sub(r"(^|[({,])\s?\+", r"\1", value) for value in both)


def _marked(text: str) -> tuple[str, list[str]]:
    r"""``text`` with marks in place of the words in ``\text{}`` and the like, and these words."""
    words: list[str] = []

    def mark(match: re.Match[str]) -> str:
        command, inner = match[1], match[2].strip()
        name = inner.lower().strip(" .")
        if name in ("and", "or", "and/or"):
            return ", "
        if name in NAMED:
            return f" {NAMED[name]} "
        if name in OPERATORS and command not in ("rm", "text"):
            return rf"\{name} " if inner.islower() else match[0]
        if not inner or not re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", inner)):
            return f" {inner} "
        if inner in ("i", "e") or command in _FONT_OF_VARIABLES:
            return f" {inner} "
        if len(inner) == 1 and not _follows_number(match):
            return f" {inner} "
        words.append(inner)
        return f"\0{len(words) - 1}\0"

    text = TEXT_COMMAND.sub(mark, text)
    return _SWITCHED.sub(mark, text), words


def _follows_number(match: re.Match[str]) -> bool:
    before = match.string[max(0, match.start() - 40) : match.start()].rstrip()
    return bool(before) and before[-1] in "0123456789})" and not re.search(r"_\s?(?:\d|\{\w{1,9}\})$", before)


def _parts(text: str, words: list[str]) -> tuple[str, ...]:
    """Formulas and words in turn. Words within braces, or before a "=", become symbols of formulas."""
    parts: list[str] = [""]
    depth, end = 0, 0
    for mark in _WORD.finditer(text):
        between = text[end : mark.start()]
        depth += between.count("{") - between.count("}")
        parts[-1] += between
        end = mark.end()
        word = folded(words[int(mark[1])])
        if depth > 0 or text[end : end + 9].lstrip().startswith(("=", "_", "^")):
            parts[-1] += SYMBOL.format(code_of(word))
        else:
            parts += ['"' + word, ""]
    parts[-1] += text[end:]
    texts = [part.strip(" ,.;") if part[:1] != '"' else part for part in parts]
    texts = [part for part in texts if part]
    if len(texts) == 2 and texts[0][0] == '"' and _LABEL_END.search(texts[0]):
        del texts[0]  # "the area is", 5
    return tuple(texts)
