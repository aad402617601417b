r"""Finds answers in texts, in the spellings that models use, and cleans them.

The last answer counts; a box that is empty or only names what belongs into it (``\boxed{answer}``) is no
answer, as long as there is another one. Everything takes time linear in the text, which may be hostile.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NamedTuple

EXCERPT_CHARS = 80  # characters of an excerpt
_LISTED = 5  # values that are shown of a list
_EDGE = 4  # how many times as much is looked at, as white space is taken together


def excerpt(value: Any, limit: int = EXCERPT_CHARS) -> str:
    """A value (JSON, unless it is a text) in quotes and in one line; of more than ``limit`` characters, its
    beginning and its end. Control characters, directions and half surrogate pairs become spaces.
    """
    text = value if isinstance(value, str) else _json(value)
    edge = _EDGE * limit
    if len(text) <= 2 * edge:
        line = _line(text)
        if len(line) <= limit:
            return f"'{line}'"
        first = last = line
    else:
        first, last = _line(text[:edge]), _line(text[-edge:])
    half = limit // 2
    return f"'{first[:half]} … {last[-half:]}'"


def ending(text: str) -> str:
    """How a text ends, as a part of a sentence: "the text ends 'C: Shakespeare'", or that it is empty."""
    if not text.strip():
        return "the response has no text"
    edge = _EDGE * EXCERPT_CHARS
    line = _line(text[-edge:])
    whole = len(line) <= EXCERPT_CHARS and len(text) <= edge
    return f"the text ends '{line if whole else '…' + line[1 - EXCERPT_CHARS :]}'"


def not_in_the_box(expected: str, boxed: str | None, text: str) -> str:
    """Why a text without the expected answer in its box is wrong."""
    got = f"none; {ending(text)}" if boxed is None else excerpt(boxed)
    return f"expected {excerpt(expected)} in a box, got {got}"


def listed(values: Any) -> str:
    """The first values of a list as excerpts, and how many more there are; ``none`` for an empty one."""
    values = list(values)
    more = f" and {len(values) - _LISTED} more" if len(values) > _LISTED else ""
    return ", ".join(excerpt(value, 40) for value in values[:_LISTED]) + more or "none"


def listed_calls(calls: list[dict[str, Any]]) -> str:
    """``function_call`` items as `listed` ones, ``name(arguments)``."""
    return listed(f"{call.get('name')}({call.get('arguments')})" for call in calls)


def _line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} that is too deep to show"


_BRACE = re.compile(r"\\\\(?=[{}])|\\[{}]|[{}]")
"""Braces; escaped ones are matched with their backslash, and a line break (two of them) by itself."""

_BOX = re.compile(r"\\(?:boxed|fbox|framebox|bbox)(?![A-Za-z])\s*(?:\[[^\]\n{}]{0,80}\]\s*)?")
_BARE_NUMBER = re.compile(r"[+-]?\d{1,30}(?:,\d{3}(?!\d)){0,9}(?:\.\d{1,30})?")
_BARE_LETTER = re.compile(r"[A-Za-z](?=\s*(?:$|[$.,;:!)\\\n]))")
_COMMAND = re.compile(r"\\[A-Za-z]+\*?")
_PLACEHOLDER = re.compile(
    r"[<\[(\s]*(?:(?:your|the|final|my)\s+){0,3}(?:answer|result|solution|letter|option|choice)(?:\s+here)?[>\])\s]*"
    r"|\s*(?:\.{2,}|…|\\[lc]?dots)\s*",
    re.IGNORECASE,
)
_MAX_PLACEHOLDER = 60

_FONT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal|up|md|sc)?|math(?:rm|bf|it|sf|tt|normal)|emph|mbox|hbox|boldsymbol|bm"
    r"|underline|operatorname)\s*(?=\{)"
)
_SWITCH = re.compile(
    r"\\(?:(?:display|text|script)style|tiny|small|normalsize|[lL]arge|LARGE|[hH]uge|bf(?:series)?|rm|it|sf|tt"
    r"|bfseries|[bB]igg?[lr]?|limits|nolimits|[,;:! ])(?![A-Za-z])\s*"
)
_SPACE, _ESCAPED = re.compile(r"\\ |(?<=\w)~(?=\w)"), re.compile(r"\\([%$&#_])")
LATEX_SPACE = re.compile(r"\\(?:q?quad(?![A-Za-z])|[,;:! ])|(?<=[\w}).,])~")
COLOR = re.compile(r"\\(?:text)?color\s?\{[^{}]{0,40}\}")

_DELIMITERS = (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$"))
_TEXT = re.compile(r"\\text\s*(?=\{)")
_OBJECT = re.compile(r"\{\s*[\"'}]")  # how an object of JSON begins, and no group of LaTeX

_LIST_GAP = re.compile(
    r"\}?[\s$*]*(?:\\[()\[\], ])?[\s$*]*(?:[,;(]?\s*(?:and|or)(?:\s+(?:maybe|perhaps|possibly|also|even))?"
    r"|[,;&/|])[\s$*]*(?:\\[()\[\]])?[\s$*]*"
)

_LIST_WORD = re.compile(r"\\(?:text|mathrm|mbox)\s*\{\s*(and|or)\s*\}")

_WORDS = "answer|antwort|réponse|respuesta|risposta|resposta|ответ|答案|答え|回答|정답|답"
"""What languages call an answer."""
_LABEL = re.compile(
    rf"(?:{_WORDS})[*_`]{{0,4}}(?:\s{{1,9}}is|是|为)?\s{{0,99}}[:：][*_`]{{0,4}}|(?:答案|回答)[是为](?![否不])",
    re.IGNORECASE,
)
_HEADING = re.compile(
    r"^[ \t]{0,9}(?:#{1,6}[ \t]{1,9}[*_]{0,3}|[*_]{2,3})(?:(?:the|my|final|correct)[ \t]{1,9}){0,2}answer"
    r"[*_]{0,3}[ \t]{0,99}$",
    re.IGNORECASE | re.MULTILINE,
)
_LOOK_AHEAD = 4  # lines after a label in which its answer may begin: blank ones, a code fence
LINE_MARK = re.compile(r"^(?:>+\s*|[#•*]+\s+|-\s+(?![\s\d]))+")
"""Of a quotation, a heading or a list; a minus before a number is its sign."""
_BLOCK = re.compile(r"\s*(`{3,9}|~{3,9})[\w+-]*\n(.*)\1\s*", re.DOTALL)
_EMPHASIS = re.compile(r"(?<![\w*])\*\*(?=\S)([^*\n]{1,200})(?<=\S)\*\*(?![\w*])")
_NUMERAL = re.compile(r"[+-]?(?:0|[1-9][0-9]{0,99}|[1-9][0-9]{0,2}(?:,[0-9]{3}){1,33})(?:\.[0-9]{1,99})?")
_MAX_WRAPPERS = 9
_OPENING = re.compile(
    r"[ \t>]*(?:(?:[-*+]|\d{1,3}[.)])[ \t]*)?(`{3,}|~{3,})(?=[^`]*$)[ \t{.]*([\w+#-]*).*"
    r"|.*[^`](```)([\w+#-]*)\s*",
    re.DOTALL,
)  # the line of a fence that opens a code block: its mark and its language, before or behind words
_MAX_LABELS, _MAX_LINE = 16, 20_000
"""Labels that are looked at from the end of a text, and characters of an answer behind one."""
_INVISIBLE = dict.fromkeys(
    (0xAD, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x206A), 0xFEFF)
)  # characters that are not seen: spaces without width, joiners, marks of direction
_DENIED = re.compile(
    r"(?:\b(?:not|never|\w{2,6}n['’]t|instead of|rather than|other than|except|anything but|neither|nor)"
    r"|\\neq?|\\not\s?=|≠|!=)(?:\s{1,9}(?:be|equal to|the|is))?[\s$*_(\[\\]{0,9}(?:boxed\s?\{)?$",
    re.IGNORECASE,
)
_QUOTES = {'"': '"', "'": "'", "`": "`", "“": "”", "”": "”", "„": "“", "‘": "’", "«": "»", "*": "*", "_": "_"}


class Span(NamedTuple):
    """A part of a text; ``outer`` is the first character of the command that it belongs to."""

    start: int
    end: int
    outer: int


def replace_surrogates(text: str) -> str:
    """``text`` with "?" for lone surrogates: JSON encoders and SQLite refuse them."""
    return text.encode("utf-8", "replace").decode("utf-8")


def visible(text: str) -> str:
    """``text`` without characters that are not seen."""
    return text if text.isascii() else text.translate(_INVISIBLE)


def is_denied(text: str, start: int) -> bool:
    """Whether what begins at ``start`` is denied by the words before it: "not 5", "instead of $5$"."""
    return _DENIED.search(text[max(0, start - 40) : start]) is not None


def stated(expected: str) -> str:
    """A row's right answer; for pydantic's `AfterValidator`. Raises ValueError: it is blank. Such a row would
    score 0 whatever the model says.
    """
    if not expected.strip():
        raise ValueError("the right answer is missing: this text is empty")
    return expected


def boxes(text: str) -> list[Span]:
    r"""The contents of the boxes in a text, in the order in which they begin.

    A box is ``\boxed{}``, ``\fbox{}``, ``\framebox{}`` or ``\bbox{}``, with space or line breaks before its
    brace, or without a brace: ``\boxed C``, ``\boxed 23``, ``\boxed\frac{1}{2}``. One that is not closed, is
    empty, or is denied ("not \boxed{5}"), is none.
    """
    closing = _closing_braces(text)
    spans = []
    for box in _BOX.finditer(text):
        start = box.end()
        if text.startswith("{", start):
            start, end = start + 1, closing.get(start, -1)
        else:
            end = _bare_end(text, start, closing)
        blank = start >= end or _trimmed(text, start, end) == (end, end)
        if not blank and not is_denied(text, box.start()):
            spans.append(Span(start, end, box.start()))
    return spans


def last_box(text: str) -> str | None:
    r"""The content of the last box, without space around it; None without one. Of several side by side, as in
    ``\boxed{1} or \boxed{2}``, all that differ: "1, 2".

    A box that only names its content (``\boxed{answer}``) counts if there is no other.
    """
    return ", ".join(dict.fromkeys(last_boxes(text))) or None


def last_box_text(text: str) -> str | None:
    r"""The content of the last box as `last_box` finds it, without ``\text{}`` around it."""
    box = last_box(text)
    return None if box is None else _unwrapped(box, _TEXT)


def last_box_span(text: str) -> Span | None:
    """Where `last_box` finds it."""
    return next(reversed(_answers(text, boxes(text))), None)


def _answers(text: str, spans: list[Span]) -> list[Span]:
    """Boxes without those that only name their content, unless there are no others."""
    return [span for span in spans if not _is_placeholder(text, span)] or spans


def last_boxes(text: str) -> list[str]:
    r"""The last boxes' contents, if only commas, "and" or "or" separate them: ``\boxed{1} and \boxed{2}``."""
    text = visible(text)
    spans = _answers(text, boxes(text))
    chain = spans[-1:]
    for span in reversed(spans):
        if span.end >= chain[-1].outer:
            continue
        gap = text[span.end : chain[-1].outer]
        if len(gap) >= 40 or not _LIST_GAP.fullmatch(LATEX_SPACE.sub(" ", _LIST_WORD.sub(r" \1 ", gap))):
            break
        chain.append(span)
    return [text[span.start : span.end].strip() for span in reversed(chain)]


def answer_lines(text: str) -> Iterator[str]:
    """The answers after ``Answer:``, the last one first: the rest of the label's line, or the first line
    after it that is not blank, without emphasis, quotation marks, a box and a full stop around it.
    """
    text = visible(text)
    labels = [match.end() for pattern in (_LABEL, _HEADING) for match in pattern.finditer(text)]
    for start in sorted(labels, reverse=True)[:_MAX_LABELS]:
        if answer := _answer_at(text, start):
            yield answer


class Block(NamedTuple):
    """A code block: the language behind its opening fence, and its lines without their common indentation."""

    language: str
    content: str


def code_blocks(text: str) -> list[Block]:
    """The blocks between fences of three or more backticks or tildes, without those that are blank.

    A fence opens a block if its line begins or ends with it (and a language), also in a list. The next one
    ends it, at the beginning or the end of a line; so do a fence with a language, which opens another
    block, and the end of the text.
    """
    lines = text.split("\n")
    blocks: list[Block] = []
    mark, language, start = "", "", len(lines)

    def close(content: list[str]) -> None:
        if bare := textwrap.dedent("\n".join(content)).strip("\n"):
            blocks.append(Block(language.lower(), bare))

    for number, line in enumerate(lines):
        if "```" not in line and "~~~" not in line:
            continue
        fence = _OPENING.fullmatch(line)
        if not mark:
            opens = fence is not None and (fence[1] is not None or line.count(fence[3]) % 2 == 1)
        else:
            opens = fence is not None and bool(fence[2]) and fence[1] == mark and len(line.split()) == 1
            if opens or line.lstrip(" \t>").startswith(mark):
                close(lines[start:number])
            elif line.rstrip().endswith(mark):
                close([*lines[start:number], line.rstrip().rstrip(mark[0])])
            else:
                continue
        if fence and opens:
            mark, language, start = fence[1] or fence[3], fence[2] or fence[4] or "", number + 1
        else:
            mark = ""
    if mark:
        close(lines[start:])
    return blocks


def undecorated(text: str) -> str:
    """``text`` without Markdown emphasis, code and check marks, quotation marks, a full stop around it."""
    for _ in range(_MAX_WRAPPERS):
        bare = text.strip().rstrip(" ✅✔☑\ufe0f")
        bare = bare if bare.endswith("..") else bare.rstrip(". ")
        for mark in ("**", "__", "```"):
            marks = bare.count(mark)
            if marks % 2 or (marks == 2 and bare.startswith(mark) and bare.endswith(mark)):
                bare = bare.lstrip(mark[0]) if bare.startswith(mark) else bare
                bare = bare.rstrip(mark[0]) if bare.endswith(mark) else bare
        bare = bare.strip()
        if len(bare) > 2 and _QUOTES.get(bare[0]) == bare[-1] and bare[0] not in bare[1:-1]:
            bare = bare[1:-1].strip()
        if bare == text:
            break
        text = bare
    return text


def bare_answer(text: str) -> str:
    r"""``text`` without space, math delimiters, fonts, sizes and braces around: ``$\textbf{(C)}$`` is
    ``(C)``.
    """
    return _unwrapped(text, _FONT, everything=True)


def plain_answer(text: str) -> str:
    r"""``text`` without all that Markdown and LaTeX may put around all of it: ``**$\boxed{5}$**``."""
    for _ in range(_MAX_WRAPPERS):
        block = _BLOCK.fullmatch(text)
        bare = undecorated(bare_answer(_EMPHASIS.sub(r"\1", block[2] if block else text)))
        box = last_box_span(bare)
        if box is not None and box.outer == 0 and bare[box.end :] in ("", "}"):
            bare = bare[box.start : box.end].strip()
        if bare == text:
            break
        text = bare
    return text


def same_text(expected: str, answer: str) -> bool:
    """Whether two answers are the same but for white space, escapes, and what `plain_answer` removes."""
    first, second = (
        " ".join(_ESCAPED.sub(r"\1", _SPACE.sub(" ", plain_answer(text))).replace("’", "'").split())
        for text in (expected, answer)
    )
    return bool(first) and (first == second or same_number(first, second))


def same_number(expected: str, answer: str) -> bool:
    """Whether two texts are the same number: ``1,234`` and ``1234``, ``5.0`` and ``5``; ``007`` is none."""
    texts = [text.replace("{,}", ",").replace("\N{MINUS SIGN}", "-") for text in (expected, answer)]
    if not all(map(_NUMERAL.fullmatch, texts)):
        return False
    first, second = (Decimal(text.replace(",", "")) for text in texts)
    return first == second


def _closing_braces(text: str) -> dict[int, int]:
    """Of each opening brace that is closed: where. Escaped braces are none, unless nothing else would fit."""
    opened: list[int] = []
    closing = {}
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            closing[opened.pop()] = match.start()
    return closing


def _bare_end(text: str, start: int, closing: dict[int, int]) -> int:
    """The end of the first token at ``start``: what a box without a brace holds."""
    for pattern in (_BARE_NUMBER, _BARE_LETTER):
        if token := pattern.match(text, start):
            return token.end()
    command = _COMMAND.match(text, start)
    if command is None:
        return -1
    end = command.end()
    while text.startswith("{", end) and end in closing:
        end = closing[end] + 1
    return end


def _is_placeholder(text: str, span: Span) -> bool:
    if span.end - span.start > _MAX_PLACEHOLDER:
        return False
    return _PLACEHOLDER.fullmatch(bare_answer(text[span.start : span.end])) is not None


def _answer_at(text: str, start: int) -> str:
    for _ in range(_LOOK_AHEAD):
        end = text.find("\n", start)
        line = LINE_MARK.sub("", text[start : len(text) if end < 0 else end].strip()[:_MAX_LINE])
        box = _BOX.match(undecorated(line).lstrip("$ "))
        answer = (last_box(line) if box else None) or undecorated(line)
        if answer.strip("*_`~#-= \t>") and not line.startswith("```"):  # else it is a fence or a rule
            return answer
        if end < 0:
            break
        start = end + 1
    return ""


def _unwrapped(content: str, font: re.Pattern[str], *, everything: bool = False) -> str:
    """``content`` without ``font{}`` around all of it, however often."""
    closing = _closing_braces(content)
    start, end = _trimmed(content, 0, len(content))
    while start < end:
        inner = start, end
        command = font.match(content, start, end)
        is_group = everything and not _OBJECT.match(content, start)
        brace = command.end() if command else start if is_group else -1
        if brace >= 0 and content.startswith("{", brace) and closing.get(brace) == end - 1:
            inner = brace + 1, end - 1
        elif everything and (switch := _SWITCH.match(content, start, end)):
            inner = switch.end(), end
        elif everything:
            inner = _without_delimiters(content, start, end)
        if inner == (start, end):
            break
        start, end = _trimmed(content, *inner)
    return content[start:end]


def _without_delimiters(text: str, start: int, end: int) -> tuple[int, int]:
    for left, right in _DELIMITERS:
        is_long = end - start > len(left + right)
        if is_long and text.startswith(left, start) and text.endswith(right, start, end):
            inner = start + len(left), end - len(right)
            if text.find(left, *inner) < 0 and text.find(right, *inner) < 0:  # else several: "$1$ and $2$"
                return inner
    return start, end


def _trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    while start < end and text[start].isspace():
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    return start, end
