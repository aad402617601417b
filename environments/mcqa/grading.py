r"""Finds the chosen letter in a text: by a grading mode, or by a row's ``template_metadata.output_regex``.

Everything but a row's own pattern takes time linear in the text. A model may push a careless pattern into
exponential backtracking: so its size is limited, only the end of the text is searched, and it runs in the
`regex` package, which has a time limit and lets other threads run. A pattern that is refused or runs out of
time finds nothing; the grading mode then decides, so a model gains nothing by provoking it.
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

from gym_serve.grading import answer_lines, bare_answer, last_box
from gym_serve.grading.answers import COLOR, LATEX_SPACE

GradingMode = Literal[
    "strict_single_letter_boxed", "lenient_boxed", "lenient_answer_colon", "lenient_answer_colon_md"
]

Choices = Sequence[tuple[str, str]]
"""The options that can be chosen: pairs of upper-case letter and option text."""

_LONE_LETTER = re.compile(r"[^A-Za-z]*([A-Z])[^A-Za-z]*")  # E, (E), [E], $E$
_LABEL = re.compile(r"\**[(\[]?([A-Z])\s*[\]:).\-–—=]")  # "E: ...", "E) ...", "E. ...", "E - ..."

_FULL_WIDTH = {ord(letter) + 0xFEE0: f" {letter}" for letter in ascii_uppercase}
_ARABIC_BENGALI = zip("أبجدঅবডঢ", "ABCDABCD", strict=True)
_LATIN = _FULL_WIDTH | {ord(letter): f" {latin}" for letter, latin in _ARABIC_BENGALI}
_LONE_CHOICE = re.compile(r"(?<![A-Za-z])[A-Za-z](?![A-Za-z])")
_LIST_SEPARATOR = re.compile(
    r"(?:[\s/|&,;.()\[\]{}*?\"'’>→+~-]|\\(?:text|to|lor|rightarrow)\b|\b(?:or|and|to|then|vs|versus|plus"
    r"|alternatively|maybe|perhaps|possibly|also|either|both|even|else|could|be)\b)+",
    re.IGNORECASE,
)
_NO_PRONOUN = re.compile(
    r"\s*(?:$|[^\sA-Za-z'’]|(?:because|since|as|is|and|or|but|for|due|if|unless|when|otherwise|instead)\b"
    r"|(?<=A\s)(?:also|too|can|could|may|might|would)\b)"
)
"""What follows a letter I or A that is an option, and no pronoun or article."""
_DENIED = re.compile(
    r"(?i:\b(?:neither|nor|except|(?:any|every)thing but|all but|than|instead of|over|rul(?:ed?|es|ing) out"
    r"|(?:exclud|eliminat|reject|discard)[a-z]{0,3}|(?:opposite|reverse) of|against|no(?:\sto)?)\s+"
    r"|(?:\b(?:not|cannot|never)|n['’]t)\s+(?:(?!(?:and|but|or|so|because|since|whereas|while|then|thus"
    r"|therefore|only|just|sure|certain|doubt)\b)[\w'’]{2,20}\s+){0,6}?"  # "not", and up to six words
    r"|(?:\\neq?|≠|!=)\s*|(?:[¬!]|(?<!\w)~)(?=[(*A-Z]))(?:(?:the|an?|option|answer|choice)\s+){0,3}"
    r"[(*]{0,3}[A-Z](?![A-Za-z])(?:[)*]{0,3},?\s+(?:and|n?or)\s+[(*]{0,3}[A-Z](?![A-Za-z])){0,9}"
    r"|(?<![A-Za-z'’])[A-Z][)*]{0,3}\s?\?\s*(?i:no|nope)\b"
)
_WRONG = re.compile(
    r"(?<![A-Za-z'’])[(*]{0,3}(?:[A-Z][)*]{0,3}\s+(?:is|was|seems)|[A-Z](?:[)*]{0,3}(?:,|,?\s+(?:and|or))\s+[(*]{0,3}[A-Z]){1,9}"
    r"[)*]{0,3}\s+are)(?:\s+(?:not|wrong|false|incorrect|excluded|tempting)|n['’]t)\b(?:\s+(?:right|correct|true|it))?"
    r"|(?<![A-Za-z'’])[(*]{0,3}[A-Z][)*]{0,3}\s+(?:(?:can|could|may|might|must|should|has to)"
    r"\s+be\s+(?:ruled out|wrong|false|incorrect|excluded"
    r"|eliminated|rejected)|(?:does|do|did|can|could|would|will)(?:n['’]t|\s+not|not)|fails?"
    r"|(?:is|was)\s+(?:my|the|a)\s[\w\s]{1,30}\sbut\s(?:it\s)?(?:is\s|was\s)?(?:wrong|false|incorrect|not))\b"
)
_BESIDE = re.compile(
    r"(?:[^\w\s][\s(*]*|\b(?:or|and|be|then|though|although|while|maybe|possibly|perhaps|also|either|well as"
    r"|likely|option|choice|letter|answer|but|if|unless|with|plus|otherwise|alternatively|actually|rather)[\s(*]+)\Z",
    re.IGNORECASE,
)  # what stands before a further option, and not before one that a remark mentions: "unlike D", "over D"
_REMARK = re.compile(
    r"[.!?]\s+(?:(?:option|choice|answer)s?\s+)?(?!I\s(?:am|think|guess|would|could|might)\b)[(*]{0,3}[A-Z][)*]{0,3}"
    r"(?:(?:,\s*(?:and\s+)?|\s+(?:and|or)\s+)[A-Z]){0,9}"
    r"\s+(?!(?:or|and|if|when|too|also|could|may|might|works|fits|(?:is|are|seems?|would be)\s+(?:also"
    r"|possible|equally|likely|another|plausible|right|correct|fine|the|an?))\b)(?-i:[a-z])",
    re.IGNORECASE,
)  # the beginning of a sentence about an option, behind the answer: "C. D would be too far"
_REASON = re.compile(
    r"\b(?:because|since|(?<!well )as(?! well)|due to|given|whereas|while|rather than|instead of)\b",
    re.IGNORECASE,
)
_NEGATION = re.compile(
    r"\b(?:not?|non|none|neither|nor|never|except|besides?|without|but|or|other than|wrong|false|incorrect"
    r"|excluded)\b|n['’]t\b|\\(?:n|l|g)eq?(?![a-z])|[≠<>≤≥?]",
    re.IGNORECASE,
)
_NUMBER_OF_MORE = re.compile(
    r"(?<![A-Za-z_^{])\d|(?:[-−–±](?:\s?\\?[$£€])?|\w\(|[\^_]\s?\{?|~|\\(?:log|ln|lg|sin|cos|tan|exp)\b\s?\(?)\s?\0"
    r"|\b(?:minus|least|most|than|over|under|above|below|between|up to|half|twice|double)\b|\0\s?(?:\\pi\b|‰)"
    r"|\0[^\w\0]{0,3}(?:\\text\s?\{\s*)?(?:hundred|thousand|[mbtr]+illions?|bn|dozen|percent|squared|less|or|to)\b",
    re.IGNORECASE,
)
"""Beside a number, what makes another one of it: "between 1 and \\0", "\\0 million", ``\\log \\0``."""
_FORMULA_OF_MORE = re.compile(
    r"\\(?:frac|sqrt|cdot|times|pm|[dt]frac|binom)(?![a-z])|\d\s?[\^/!+*:]|[\^/+*]\s?\d|\d\s?\\?%"
)


def choices_of(options: Sequence[Mapping[str, str | None]]) -> Choices:
    """The choices of a row's ``options``: letter keys whose text is not None, in order."""
    return [
        (key.upper(), text)
        for entry in options
        for key, text in entry.items()
        if text is not None and len(key) == 1 and key.isalpha()
    ]


def match_letter(text: str, choices: Choices, mode: GradingMode) -> str | None:
    r"""The letter of the option that ``text`` answers. Returns an upper-case letter of ``choices``, or None.

    Args:
        text: the assistant's text.
        choices: what may be chosen; a letter outside them does not count.
        mode: where the answer stands and what it may look like:

            - ``strict_single_letter_boxed``: a capital in the last ``\boxed{}``, alone or as the
              label of an option (``E: ...``), or with its text in brackets;
            - ``lenient_boxed``: the same, else the one option whose text the last box contains;
            - ``lenient_answer_colon``: after the last ``Answer:`` that names one, the letter
              of an option, also within a sentence, or the text of an option;
            - ``lenient_answer_colon_md``: the same, but letters only.
    """
    if mode == "strict_single_letter_boxed":
        return _boxed_letter(text, choices)
    if mode == "lenient_boxed":
        return _boxed_letter(text, choices) or _boxed_option(text, choices)
    if mode == "lenient_answer_colon":
        return _answer_line(text, choices, texts=True)
    return _answer_line(text, choices, texts=False)


def letter_of_option(answer: str, choices: Choices) -> str | None:
    """The letter of the first option whose text is ``answer``, up to case and white space."""
    wanted = _fold(answer)
    # An empty text is not an answer, also if options have no text (because they are images).
    return next((letter for letter, option in choices if wanted and _fold(option) == wanted), None)


def latin_letters(text: str) -> str:
    """``text`` with full-width, Arabic and Bengali option letters turned into Latin ones."""
    return text.translate(_LATIN)


_SPELLING = re.compile(r"\\(?=[%$])|(?<=\d)\{?,\}?(?=\d{3}(?!\d))")
"""What does not change a number: ``10\\%``, ``1,000``."""
_FRACTION = re.compile(r"\\[dtc]?frac\s?(?:(\d)\s?(\d))?")


def _fold(text: str) -> str:
    if "\\" in text or "$" in text:
        text = _FRACTION.sub(lambda m: rf"\frac{{{m[1]}}}{{{m[2]}}}" if m[1] else r"\frac", bare_answer(text))
    return " ".join(_SPELLING.sub("", text.lower()).split())


def _boxed_letter(text: str, choices: Choices) -> str | None:
    letters = {letter for letter, _ in choices}
    content = _IN_FRONT.sub("", _without_fonts(bare_answer(latin_letters(last_box(text) or "")))).strip()
    for letter, option in choices:
        label = re.match(rf"\(?{letter}(?:\s?[\])):.,\-–—=]{{1,2}}\s?|\s(?=\())", content)
        if label and _fold(content[label.end() :]) in (_fold(option), f"({_fold(option)})"):
            return letter
        if label and letter_of_option(content[label.end() :].strip(" ()"), choices):
            return None  # the letter of one, the text of another
    match = _LONE_LETTER.fullmatch(content) or _LABEL.match(content)
    if match is None or match[1] not in letters or _labels_another(content, match, letters):
        return None
    return None if _DENIED_IN_BOX.search(content) else match[1]


def _labels_another(content: str, label: re.Match[str], letters: set[str]) -> bool:
    """Whether other options are named behind a label: "C-D", "C) Mars or D) Neptune"."""
    others = _OTHER_LABEL.finditer(content, label.end() - 1)
    return any((match[1] or match[2] or match[3]) in letters - {label[1]} for match in others)


_DENIED_IN_BOX = re.compile(
    r"^[¬!~-]+\(?[A-Z]|^\(?[A-Z]\)?['′]"
    r"|^\W*[A-Z]\W+(?:is\s|was\s)?(?:not|no|wrong|false|incorrect|excluded|ruled out)\b",
    re.IGNORECASE,
)
"""The complement of an option, or what is said against it: "¬B", "B'", "B - wrong"."""


def _without_fonts(content: str) -> str:
    r"""``content`` without fonts and colours: ``\textbf{C}: \text{Saturn}`` is ``C: Saturn``."""
    return " ".join(LATEX_SPACE.sub(" ", _FONT.sub(r"\1", COLOR.sub("", content))).split())


_FONT = re.compile(r"(?:\\(?:text|math)[a-z]{0,6}\s*)?\{([^{}\\]*)\}")
_IN_FRONT = re.compile(
    r"(?:(?:the\s)?(?:(?:correct|right|final)\s)?(?:option|choice|answer)(?:\sis)?\s?:?\s){1,4}(?=[(\[*]*[A-Z](?![a-z]))",
    re.IGNORECASE,
)
_OTHER_LABEL = re.compile(
    r"(?:^|[^\w'’])\(?([A-Z])\s?[:).](?!\w)|(?:\bor|[,;/])\s+([A-Z])\s[-–—=]\s"
    r"|[:).\-–—]\s*(?:or\s|and\s)?\(?([A-Z])\)?\W*$",
    re.IGNORECASE,
)


def _boxed_option(text: str, choices: Choices) -> str | None:
    """The one option whose text the box is, or else contains as whole words or numbers."""
    box = " ".join(bare_answer(last_box(text) or "").split())
    content = _fold(box)
    if exact := letter_of_option(content, choices):
        return exact
    if _FORMULA_OF_MORE.search(content):
        return None
    options, number = set(), False
    # The longest first, each taken out, so that "Moon of Mars" does not name "Mars" as well.
    for letter, option in sorted(choices, key=lambda choice: -len(choice[1])):
        if wanted := _fold(option):
            content, count = _whole(wanted).subn("\0", content)
            if count:
                options.add(letter)
                number = number or wanted[0].isdigit()
                box = _whole(wanted).sub("", box)
    if _NEGATION.search(content) or (number and _NUMBER_OF_MORE.search(content.rpartition("=")[2])):
        return None
    named = _named_letter(box, {letter for letter, _ in choices})
    return options.pop() if len(options) == 1 and (named is None or named in options) else None


def _whole(text: str) -> re.Pattern[str]:
    """A text that is no part of a longer word or number: "1" is neither in "21" nor in "1.5"."""
    return re.compile(
        rf"(?<![\w.,\-]){re.escape(text)}(?![\w%]|[.,]\d)"
        if text[0].isdigit()
        else rf"(?<!\w){re.escape(text)}(?!\w)",
        re.IGNORECASE,
    )


def _answer_line(text: str, choices: Choices, *, texts: bool) -> str | None:
    letters = {letter for letter, _ in choices}
    for line in answer_lines(text):
        answer = latin_letters(line).strip()
        if texts and (option := letter_of_option(bare_answer(answer), choices)):
            return option
        answer = _undenied(answer)
        remark = _REMARK.search(answer)
        if remark is not None and (letter := _named_letter(answer[: remark.start() + 1], letters)):
            answer = answer[: remark.start() + 1]
        else:
            letter = _named_letter(answer, letters)
        if _hedges(_before_reason(answer), letter, choices):
            return None
        if letter:
            return letter
    return None


def _named_letter(answer: str, letters: set[str]) -> str | None:
    """The option that a sentence names: "C", "(C) Saturn", "I think C", "Option B because A is wrong"."""
    answer = _undenied(bare_answer(answer))
    if len(answer) == 1:
        return answer.upper() if answer.upper() in letters else None
    for part in (_before_reason(answer), answer):
        first = re.search(r"\w", part)
        start = first.start() if first else 0
        named = [match for match in _LONE_CHOICE.finditer(part) if _is_option(match, letters, start)]
        if named:
            return named[0 if named[0].start() == start else -1][0].upper()
    return None


def _undenied(answer: str) -> str:
    """``answer`` without the options that it denies: "not A", "A and B are wrong"."""
    return _WRONG.sub(" ", _DENIED.sub(" ", answer))


def _is_option(match: re.Match[str], letters: set[str], start: int) -> bool:
    """Whether a lone letter stands for an option: a capital one, or the first word, at ``start``."""
    letter, text = match[0], match.string
    if letter.upper() not in letters or (match.end() < len(text) and text[match.end()].isdigit()):
        return False
    if _is_pronoun(match):
        return False
    return letter.isupper() or match.start() == start


def _is_pronoun(match: re.Match[str]) -> bool:
    """Whether a lone letter is the word "I" or "a": "I think", "A planet"."""
    return match[0] in "IAa" and not _NO_PRONOUN.match(match.string, match.end())


def _before_reason(answer: str) -> str:
    reason = _REASON.search(answer)
    return answer if reason is None else answer[: reason.start()]


def _hedges(answer: str, letter: str | None, choices: Choices) -> bool:
    """Whether two options stand side by side: "A, B", "A) x or B) y", "A if x, B if y", "A or y"."""
    own = next((text for named, text in choices if named == letter and text), None)
    if own is not None:
        answer = answer.replace(own, " ", 1)  # which may name others: "both A and B"
    for other, text in choices:
        if (
            other != letter
            and _fold(text)
            and re.search(rf"(?:\bor\s|/)\s?{re.escape(_fold(text))}(?!\w)", _fold(answer))
        ):
            return True
    return _lists_letters(answer, {named for named, _ in choices})


def _lists_letters(answer: str, letters: set[str]) -> bool:
    matches = [
        match
        for match in _LONE_CHOICE.finditer(answer)
        if match[0].upper() in letters and not _is_pronoun(match)
    ]
    return any(
        left[0].upper() != right[0].upper()
        and (
            _LIST_SEPARATOR.fullmatch(answer, left.end(), right.start()) is not None
            or (
                right[0].isupper()
                and _BESIDE.search(answer, max(left.end(), right.start() - 40), right.start())
            )
        )
        for left, right in pairwise(matches)
    )


SEARCH_SECONDS = 1.0  # time for all patterns of a row together, on one text

_TEXT_TAIL = 100_000
_PATTERN_LENGTH = 1_000
_PATTERN_COPIES = 50_000
_REPEAT = re.compile(r"\)\+|\{(\d{1,9})")

logger = logging.getLogger(__name__)


def match_output_regex(text: str, choices: Choices, patterns: Sequence[str]) -> str | None:
    """The upper-case letter that the first successful pattern (of the `regex` package, without case) finds.

    Of its last match, the first group that is not empty (or all of it, without groups) is taken: as the
    answer if it is a letter, also one outside ``choices``, else as an option's text. When `SEARCH_SECONDS`
    are over, no further pattern is tried.
    """
    tail = text.strip()[-_TEXT_TAIL:]
    deadline = time.monotonic() + SEARCH_SECONDS
    for source in patterns:
        pattern = _compile(source)
        if pattern is None:
            continue
        try:
            matches = pattern.findall(tail, timeout=max(deadline - time.monotonic(), 0.001), concurrent=True)
        except TimeoutError:
            logger.warning("output_regex %.200r was stopped, %s s are over", source, SEARCH_SECONDS)
            return None
        if matches and (letter := _letter_of(matches[-1], choices)):
            return letter
    return None


def _letter_of(match: str | tuple[str, ...], choices: Choices) -> str | None:
    groups = (match,) if isinstance(match, str) else match
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
