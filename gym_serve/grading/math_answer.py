"""The answer that a text states: in its box, or in the words that people and models use.

A text that hedges between several answers states none.
"""

from __future__ import annotations

import re
import unicodedata

from gym_serve.grading.answers import LINE_MARK, answer_lines, is_denied, last_boxes, undecorated
from gym_serve.grading.math_units import UNITS

BOX = r"\boxed{"
_DELIMITERS = (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$"))
_DIGIT = re.compile(r"[^\D0-9]")
_SPACE = r"(?:[ \u00a0\u2009\u202f]|\{?\\[ ,;:]\}?|~)"
_BOXED_NUMERAL = re.compile(
    rf"\\boxed\{{\s{{0,9}}([+-]?)([0-9]{{1,3}}(?:{_SPACE}[0-9]{{3}})+|[0-9]+)(?:\.([0-9]*))?\s{{0,9}}\}}"
)


def boxed_gold(expected_answer: str) -> str:
    r"""``expected_answer`` as math-verify expects it: without math delimiters around it, in ``\boxed{}``."""
    gold = expected_answer.strip()
    for left, right in _DELIMITERS:
        if len(gold) > len(left + right) and gold.startswith(left) and gold.endswith(right):
            inner = gold[len(left) : -len(right)]
            if left not in inner:  # else several formulas: "$1$ and $2$"
                gold = inner.strip()
                break
    return plain_numerals(f"{BOX}{gold}}}")


def plain_numerals(text: str) -> str:
    r"""``text`` with its numerals spelled as math-verify reads them: decimal digits of any script become 0 to
    9, and in ``\boxed{1 000 000}``, ``\boxed{32.}`` the spaces and the full stop are removed.
    """
    if not text.isascii():
        text = _DIGIT.sub(lambda digit: str(unicodedata.decimal(digit.group())), text)
    return _BOXED_NUMERAL.sub(_plain, text)


def _plain(numeral: re.Match[str]) -> str:
    sign, whole, fraction = numeral.groups()
    digits = re.sub("[^0-9]", "", whole)
    return f"{BOX}{sign}{digits}{'.' + fraction if fraction else ''}}}"


_FORMULA = re.compile(
    r"\$\$(?P<a>[^$]{1,500})\$\$|\\\[(?P<b>(?:[^\\]|\\(?!\])){1,500})\\\]"
    r"|\\\((?P<c>(?:[^\\\n]|\\(?!\))){1,500})\\\)|(?<![\\\d$])\$(?P<d>[^$\n]{1,500})\$"
)
_EXPLICIT = re.compile(r"final answer is:?\s{0,9}\$([^$\n]{1,300})\$\.?\s?I hope", re.IGNORECASE)
_ANSWER_WORD = re.compile(r"answer", re.IGNORECASE)
_IS_A_NUMBER = re.compile(r"[^.$\n]{0,60}\b(?:is|are|equals)\s+[-+$\\({]{0,4}\d")
_PROSE = re.compile(r"\b(?:it|is|we)\b", re.IGNORECASE)
_NEAR = 100
_MAX_FORMULA = 300


def written_answer(text: str) -> str | None:
    r"""The answer of a text as it is written, or None if no part of it is clearly the answer.

    That is: what stands in "The final answer is $4$. I hope it is correct.", which some prompts ask for;
    else the content of the last box (of several with nothing but commas, "and" or "or" between them, all);
    else what stands after the last ``Answer:``, or the whole text, if it is a formula; else the formula after
    the last "answer", or the last formula if no number follows.
    """
    if explicit := _EXPLICIT.findall(text):
        return str(explicit[-1]).strip()
    if boxes := last_boxes(text):
        return ", ".join(boxes)
    line = next(answer_lines(text), None)
    for candidate, longest_word in ((line, 2), (_stated(text), 2), (LINE_MARK.sub("", undecorated(text)), 1)):
        if candidate is not None and _is_formula(candidate, longest_word):
            return candidate.strip()
    formulas = list(_FORMULA.finditer(text))
    if not formulas:
        return None
    answers = [match.end() for match in _ANSWER_WORD.finditer(text)]
    if answers:
        following = (f for f in formulas if answers[-1] <= f.start() <= answers[-1] + _NEAR)
        chosen = next(following, None)
        if chosen is not None and (
            re.search(r"\d", text[answers[-1] : chosen.start()])
            or (not re.search(r"\d", chosen[0]) and _IS_A_NUMBER.match(text, chosen.end()))
        ):
            chosen = None
    else:
        chosen = None if re.search(r"\d", text[formulas[-1].end() :]) else formulas[-1]
    if chosen is None or _connected(text, chosen) or is_denied(text, chosen.start()):
        return None
    written = next(group for group in chosen.groups() if group is not None).strip()
    return None if BOX in written else written  # a box that is denied


_STATEMENT = re.compile(
    r"\banswer\b(?:[ \t]{1,9}\w{1,15}){0,4}?[ \t]{1,9}"
    r"(?:is|equals|(?:would|must|will|could|may|might|can|should) be)\b:?"
    r"(?:[ \t]equal[ \t]to)?[ \t]*([^\n]{1,300})",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?][*_]{0,3}(?:\s|$)")
_BOUND = re.compile(
    r"(?:\b(?:at (?:least|most)|(?:less|more|greater|fewer|smaller|larger|lower|higher|bigger) than|up to"
    r"|between|below|above|under|over|either)\b|[<>≤≥≠±]|\\(?:[lg]eq?|[lg]t|pm)(?![A-Za-z]))"
    r"(?:\W{1,4}\w{1,12}){0,3}\W{0,4}$",
    re.IGNORECASE,
)
_ALTERNATIVE = re.compile(
    r"(?:[^\w.]*\sto|(?:\s?[A-Za-z]{1,12})?[^\w.]*\s(?:or|maybe|perhaps|possibly))\b[\w\s,]{0,30}[^\w]{0,4}(?=\d)",
    re.IGNORECASE,
)
_RANGE = re.compile(r"\bbetween\s\S{1,40}\s{1,9}and\s{1,9}\W{0,4}$", re.IGNORECASE)
_REFUSED = re.compile(r"[^\w.]*\sis(?:n['’]t| not| wrong| false| incorrect)\b", re.IGNORECASE)
_NUMERAL = re.compile(r"\d[\d.,/]*")


def _stated(text: str) -> str | None:
    """What the last "the answer is" of a text says, up to the end of the sentence."""
    statements = _STATEMENT.findall(text)
    return undecorated(_SENTENCE_END.split(statements[-1], maxsplit=1)[0]) if statements else None


def is_hedged(text: str) -> bool:
    """Whether the number that prose ends with, or states as the answer, is denied or not the only one."""
    stated = next(answer_lines(text), None) or _stated(text)
    lines = [line for line in text.splitlines() if _NUMERAL.search(line)]
    clause = stated or (lines[-1][-1000:] if lines else "")
    numerals = list(_NUMERAL.finditer(clause))
    if not numerals:
        return False
    if stated:
        first = numerals[0]
        if is_denied(clause, first.start()) or _BOUND.search(clause[: first.start()]):
            return True
    else:
        first = numerals[-1]
        before = clause[: first.start()]
        bound = _BOUND.search(before)
        if is_denied(clause, first.start()) or _RANGE.search(before):
            return True
        if bound and re.search(r"\b[A-Za-z]\W{0,2}\s(?:is|are)\s$", before[: bound.start()]):
            return True  # "so x is at most"
        between = _ALTERNATIVE.match(clause, numerals[-2].end()) if len(numerals) > 1 else None
        if between and between.end() == first.start():
            return True
    return bool(_ALTERNATIVE.match(clause, first.end()) or _REFUSED.match(clause, first.end()))


def _is_formula(text: str, longest_word: int) -> bool:
    """Whether a line is an answer without prose around it: it has no long words but units."""
    if not 0 < len(text.strip()) <= _MAX_FORMULA or "\n" in text.strip() or BOX in text:
        return False
    bare = re.sub(r"\\[A-Za-z]+", " ", TEXT_COMMAND.sub(" ", text))
    words = re.findall(rf"[A-Za-z]{{{longest_word + 1},}}", bare)
    are_known = (word in UNITS or word.lower() in UNITS or word in ("and", "or", "pi") for word in words)
    return not _PROSE.search(bare) and all(are_known)


def _connected(text: str, formula: re.Match[str]) -> bool:
    """Whether the formula is one of a list: "$1$, $2$ and $3$". math-verify reads those."""
    before = text[max(0, formula.start() - 8) : formula.start()]
    after = text[formula.end() : formula.end() + 8]
    gap = r"\s*(?:,?\s*and|,?\s*or|,)\s*"
    return bool(re.search(rf"(?:\$|\\[)\]]){gap}$", before) or re.match(rf"{gap}(?:\$|\\[(\[])", after))


TEXT_COMMAND = re.compile(
    r"\\(text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt|normal)|mbox|hbox|emph|operatorname\*?|boldsymbol|bm)"
    r"\s*\{((?:[^{}\\]|\^\{[-\d]{1,3}\}|\\[^A-Za-z]|\\(?:pi|circ|frac|sqrt|cdot|times)(?![A-Za-z]))*)\}"
)
