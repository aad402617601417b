r"""Finds answers in boxes, compares answers as texts, and spells them as math-verify expects them.

Pure functions that take time linear in the text, which comes from a model and may be hostile.
"""

from __future__ import annotations

import re
import unicodedata

_BOX = r"\boxed{"
_TEXT = r"\text{"
_BRACE = re.compile(r"[{}]")
_BOX_TOKEN = re.compile(r"\\boxed\{|[{}]")
_DELIMITERS = (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$"))
_DIGIT = re.compile(r"[^\D0-9]")
_SPACE = r"(?:[ \u00a0\u2009\u202f]|\\[ ,]|~)"
_BOXED_NUMERAL = re.compile(
    rf"\\boxed\{{\s{{0,9}}([+-]?)([0-9]{{1,3}}(?:{_SPACE}[0-9]{{3}})+|[0-9]+)(?:\.([0-9]*))?\s{{0,9}}\}}"
)


def replace_surrogates(text: str) -> str:
    """``text`` with "?" for lone surrogates: JSON encoders and SQLite refuse them."""
    return text.encode("utf-8", "replace").decode("utf-8")


def last_box(text: str) -> str | None:
    r"""The content of the last ``\boxed{}``; None if there is none, or if it is empty or not closed."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    start += len(_BOX)
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[start : brace.start()].strip() or None
    return None


def last_closed_box(text: str) -> str | None:
    r"""The content of the last ``\boxed{}`` that is closed, without ``\text{}`` around it; None without one.

    One pass with a stack of open braces: a search from every ``\boxed{`` would take quadratic time.
    """
    starts: list[int | None] = []
    found: tuple[int, int] | None = None
    for match in _BOX_TOKEN.finditer(text):
        if match[0] == "{":
            starts.append(None)
        elif match[0] != "}":
            starts.append(match.end())
        elif starts:
            start = starts.pop()
            if start is not None and (found is None or start > found[0]):
                found = start, match.start()
    return None if found is None else _unwrapped(text[found[0] : found[1]])


def same_text(expected: str, answer: str) -> bool:
    """Whether two answers are the same except for white space and math delimiters around them."""
    return bool(_bare(expected)) and _bare(expected) == _bare(answer)


def boxed_gold(expected_answer: str) -> str:
    r"""``expected_answer`` as math-verify expects it: without math delimiters around it, in ``\boxed{}``."""
    gold = expected_answer.strip()
    for left, right in _DELIMITERS:
        if len(gold) > len(left + right) and gold.startswith(left) and gold.endswith(right):
            inner = gold[len(left) : -len(right)]
            if left not in inner:  # else several formulas: "$1$ and $2$"
                gold = inner.strip()
                break
    return plain_numerals(f"{_BOX}{gold}}}")


def plain_numerals(text: str) -> str:
    r"""``text`` with its numerals spelled as math-verify reads them; values do not change.

    - Decimal digits of any script become 0 to 9.
    - In a box that holds a numeral and nothing else, spaces between groups of three digits are removed, and
      so is a full stop at its end: ``\boxed{1 000 000}``, ``\boxed{32.}``.
    """
    if not text.isascii():
        text = _DIGIT.sub(lambda digit: str(unicodedata.decimal(digit.group())), text)
    return _BOXED_NUMERAL.sub(_plain, text)


def _plain(numeral: re.Match[str]) -> str:
    sign, whole, fraction = numeral.groups()
    digits = re.sub("[^0-9]", "", whole)
    return f"{_BOX}{sign}{digits}{'.' + fraction if fraction else ''}}}"


def _bare(text: str) -> str:
    text = " ".join(text.split())
    for left, right in (*_DELIMITERS, (_TEXT, "}")):
        if len(text) > len(left + right) and text.startswith(left) and text.endswith(right):
            inner = text[len(left) : -len(right)]
            # Else these are several formulas: "$1$ and $2$".
            if _is_balanced(inner) if right == "}" else left not in inner and right not in inner:
                text = inner.strip()
    return text


def _is_balanced(text: str) -> bool:
    depth = 0
    for brace in _BRACE.finditer(text):
        depth += 1 if brace.group() == "{" else -1
        if depth < 0:
            return False
    return depth == 0


def _unwrapped(content: str) -> str:
    r"""``content`` without ``\text{}`` around all of it, however often."""
    ends: dict[int, int] = {}
    opened: list[int] = []
    for match in _BRACE.finditer(content):
        if match[0] == "{":
            opened.append(match.start())
        elif opened:
            ends[opened.pop()] = match.start()
    start, end = _trimmed(content, 0, len(content))
    while content.startswith(_TEXT, start) and ends.get(start + len(_TEXT) - 1) == end - 1:
        start, end = _trimmed(content, start + len(_TEXT), end - 1)
    return content[start:end]


def _trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    while start < end and text[start].isspace():
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    return start, end
