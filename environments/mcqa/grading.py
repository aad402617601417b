r"""Finds the chosen letter in a text: by a grading mode, or by a row's ``template_metadata.output_regex``.

Everything but a row's own pattern takes time linear in the text.

The pattern comes from the author of the data and may be invalid or careless; the text comes from a model,
which may push a careless pattern into exponential backtracking. So the pattern's size is limited before it is
compiled, only the end of the text is searched (the last match counts anyway), and the search runs in the
`regex` package, which has a time limit and lets other threads run; `re` has neither. A pattern that is
refused or runs out of time finds nothing and is logged. The grading mode then decides, so a model gains
nothing by provoking it.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from string import ascii_uppercase
from typing import Literal

import regex

from gym_serve.grading import last_box

GradingMode = Literal[
    "strict_single_letter_boxed", "lenient_boxed", "lenient_answer_colon", "lenient_answer_colon_md"
]

Choices = Sequence[tuple[str, str]]
"""The options that can be chosen: pairs of upper-case letter and option text."""

_WRAPPER = r"\text{"
_LONE_LETTER = re.compile(r"[^A-Za-z]*([A-Z])[^A-Za-z]*")  # E, (E), [E], $E$
_LABEL = re.compile(r"([A-Z])\s*[:).\-]")  # "E: ...", "E) ...", "E. ...", "E - ..."

_ANSWER = re.compile(r"answer\s*:", re.IGNORECASE)
_MARKDOWN_ANSWER = re.compile(r"[*_]{0,2}answer[*_]{0,2}\s*:[*_\s]{0,2}(.+)", re.IGNORECASE)

_FULL_WIDTH = {ord(letter) + 0xFEE0: f" {letter}" for letter in ascii_uppercase}
_ARABIC_BENGALI = zip("أبجدঅবডঢ", "ABCDABCD", strict=True)
_LATIN = _FULL_WIDTH | {ord(letter): f" {latin}" for letter, latin in _ARABIC_BENGALI}
_ANSWER_DECORATION = "*_` \t\n\r.,;:"
_LONE_CHOICE = re.compile(r"(?<![A-Za-z])[A-Za-z](?![A-Za-z])")
_LIST_SEPARATOR = re.compile(r"\s*[/|&,;]\s*|\s+(?:or|and)\s+|\s+", re.IGNORECASE)
_LEADING_LETTER = re.compile(r"[A-Za-z](?![A-Za-z0-9])")
_CAPITAL = re.compile(r"\b[A-Z]\b")


def choices_of(options: Sequence[Mapping[str, str | None]]) -> Choices:
    """The choices of a row's ``options``: letter keys whose text is not None, in order."""
    return [
        (key.upper(), text)
        for entry in options
        for key, text in entry.items()
        if text is not None and len(key) == 1 and key.isalpha()
    ]


def match_letter(text: str, choices: Choices, mode: GradingMode) -> str | None:
    r"""The letter of the option that ``text`` answers.

    Args:
        text: the assistant's text.
        choices: what may be chosen; a letter outside them does not count.
        mode: where the answer stands and what it may look like:

            - ``strict_single_letter_boxed``: a capital in the last ``\boxed{}``, alone or as the
              label of an option (``E: ...``);
            - ``lenient_boxed``: the same, else the one option whose text the last box contains;
            - ``lenient_answer_colon``: after the first ``Answer:``, the letter or option text that
              is all the rest of the line;
            - ``lenient_answer_colon_md``: after the last ``Answer:`` (Markdown emphasis allowed)
              that is followed by a single letter, also within a sentence.

    Returns:
        an upper-case letter of ``choices``, or None.
    """
    letters = {letter for letter, _ in choices}
    if mode == "strict_single_letter_boxed":
        return _boxed_letter(text, letters)
    if mode == "lenient_boxed":
        return _boxed_letter(text, letters) or _boxed_option(text, choices)
    if mode == "lenient_answer_colon":
        return _answer_line(text, choices, letters)
    return _answer_payload(text, letters)


def letter_of_option(answer: str, choices: Choices) -> str | None:
    """The letter of the first option whose text is ``answer``, up to case and white space."""
    wanted = _fold(answer)
    # An empty text is not an answer, also if options have no text (because they are images).
    return next((letter for letter, option in choices if wanted and _fold(option) == wanted), None)


def latin_letters(text: str) -> str:
    """``text`` with full-width, Arabic and Bengali option letters turned into Latin ones."""
    return text.translate(_LATIN)


def _fold(text: str) -> str:
    return " ".join(text.lower().split())


def _unwrap(text: str) -> str:
    # By indices: a slice per wrapper would take quadratic time on a deep nest of them.
    start, end = 0, len(text)
    while end - start > len(_WRAPPER) and text.startswith(_WRAPPER, start) and text[end - 1] == "}":
        start, end = start + len(_WRAPPER), end - 1
        while start < end and text[start].isspace():
            start += 1
        while start < end and text[end - 1].isspace():
            end -= 1
    return text[start:end]


def _boxed_letter(text: str, letters: set[str]) -> str | None:
    box = last_box(text)
    if box is None:
        return None
    content = _unwrap(box)
    match = _LONE_LETTER.fullmatch(content) or _LABEL.match(content)
    return match[1] if match and match[1] in letters else None


def _boxed_option(text: str, choices: Choices) -> str | None:
    content = _fold(last_box(text) or "")
    found = {letter for letter, option in choices if option.strip() and _fold(option) in content}
    return found.pop() if len(found) == 1 else None


def _answer_line(text: str, choices: Choices, letters: set[str]) -> str | None:
    text = text.strip()
    match = _ANSWER.search(text)
    if match is None:
        return None
    line, _, _ = text[match.end() :].lstrip().partition("\n")
    if not line:
        return None
    answer = _unwrap(line).strip()
    if len(answer) == 1 and answer.upper() in letters:
        return answer.upper()
    return letter_of_option(answer, choices)


def _answer_payload(text: str, letters: set[str]) -> str | None:
    for payload in reversed(_MARKDOWN_ANSWER.findall(text)):
        if letter := _named_letter(payload, letters):
            return letter
    return None


def _named_letter(payload: str, letters: set[str]) -> str | None:
    answer = latin_letters(payload).strip().strip(_ANSWER_DECORATION)
    if _lists_letters(answer, letters):
        return None
    if len(answer) == 1:
        letter = answer
    elif leading := _LEADING_LETTER.match(answer):  # "B because A is wrong"
        letter = leading[0]
    else:  # "Option B", "the third one, C"
        capitals = _CAPITAL.findall(answer)
        letter = capitals[-1] if capitals else ""
    return letter.upper() if letter.upper() in letters else None


def _lists_letters(answer: str, letters: set[str]) -> bool:
    """Whether two different options stand side by side: "A, B", "A or B"."""
    found = [match for match in _LONE_CHOICE.finditer(answer) if match[0].upper() in letters]
    return any(
        left[0].upper() != right[0].upper()
        and _LIST_SEPARATOR.fullmatch(answer, left.end(), right.start()) is not None
        for left, right in pairwise(found)
    )


SEARCH_SECONDS = 1.0
"""Time for all patterns of a row together, on one text."""

_TEXT_TAIL = 100_000
_PATTERN_LENGTH = 1_000
_PATTERN_COPIES = 50_000
_REPEAT = re.compile(r"\)\+|\{(\d{1,9})")

logger = logging.getLogger(__name__)


def match_output_regex(text: str, choices: Choices, patterns: Sequence[str]) -> str | None:
    """The letter that the first successful pattern finds.

    A pattern ignores letter case. Of its last match, the first group that is not empty (or all of
    it, without groups) is taken: as the answer if it is a letter, also one outside ``choices``, else
    as an option's text. When `SEARCH_SECONDS` are over, no further pattern is tried.

    Args:
        text: the assistant's text.
        choices: the options.
        patterns: tried in this order, in the syntax of the `regex` package (that of `re`, and more).

    Returns:
        an upper-case letter, or None.
    """
    tail = text.strip()[-_TEXT_TAIL:]
    deadline = time.monotonic() + SEARCH_SECONDS
    for source in patterns:
        pattern = _compile(source)
        if pattern is None:
            continue
        try:
            found = pattern.findall(tail, timeout=max(deadline - time.monotonic(), 0.001), concurrent=True)
        except TimeoutError:
            logger.warning("output_regex %.200r was stopped, %s s are over", source, SEARCH_SECONDS)
            return None
        if found and (letter := _letter_of(found[-1], choices)):
            return letter
    return None


def _letter_of(found: str | tuple[str, ...], choices: Choices) -> str | None:
    groups = (found,) if isinstance(found, str) else found
    answer = latin_letters(next(filter(None, groups), "")).strip().upper()
    if len(answer) == 1 and answer.isalpha():
        return answer
    return letter_of_option(answer, choices)


@lru_cache(maxsize=1024)
def _compile(source: str) -> regex.Pattern[str] | None:
    # `regex` writes a repeated group out: the product of the counts is the size of the program.
    copies = math.prod(int(count or 1) + 1 for count in _REPEAT.findall(source))
    if len(source) > _PATTERN_LENGTH or copies > _PATTERN_COPIES:
        logger.warning("output_regex %.200r is too large", source)
        return None
    try:
        return regex.compile(source, regex.IGNORECASE)
    except (regex.error, RecursionError) as error:
        logger.warning("output_regex %.200r is invalid: %s", source, error)
        return None
