"""`StringMatch`: short answers in free text, compared with ``expected_answer`` as strings.

Finds the answer in a text, and compares it: exactly, after normalization, or nearly as numbers.

Only the expected answer is trusted: every function takes any string, and time linear in its length.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal, InvalidOperation
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator

from gym_serve.grading import answer_lines, ending, excerpt, last_box_text, plain_answer, stated, undecorated
from gym_serve.metrics import MetricSpec, Score
from gym_serve.servers import ResourcesServer, Response, Verdict, VerifyRequest

ExtractionMode = Literal["boxed", "final_answer", "last_line", "full_response"]

_EMPTY_BOX = re.compile(r"\\boxed\s*\{\s*\}")


def extract(text: str, mode: ExtractionMode) -> str | None:
    r"""The answer that ``text`` gives, or None.

    Args:
        mode: ``boxed``: content of the last box; ``final_answer``: what follows the last ``Answer:``,
            else the box; ``last_line``: the last line that is not blank; ``full_response``: all of it.
    """
    text = text.strip()
    if mode == "boxed":
        return _boxed(text)
    if mode == "final_answer":
        return next(answer_lines(text), None) or _boxed(text)
    if mode == "last_line":
        return text.splitlines()[-1].strip() if text else None
    return text or None


def without_commands(text: str, token: re.Pattern[str]) -> str:
    r"""``text`` without some LaTeX commands and their braces; what is inside them stays. ``token`` matches
    the commands with their opening brace (``\\text\{``), and single braces.
    """
    pieces: list[str] = []
    commands: list[bool] = []  # of every open brace: whether a command opened it
    end = 0
    for match in token.finditer(text):
        brace = match[0]
        if brace == "}":
            drop = bool(commands) and commands.pop()
        else:
            drop = brace != "{"
            commands.append(drop)
        if drop:
            pieces.append(text[end : match.start()])
            end = match.end()
    return "".join(pieces) + text[end:]


def _boxed(text: str) -> str | None:
    box = last_box_text(text)
    return "" if box is None and _EMPTY_BOX.search(text) else box


def same_letters(expected: str, answer: str) -> bool:
    """Whether two answers are the same letter by letter, but for emphasis, fonts and quotes around."""
    return any(form(expected) == form(answer) for form in (str.strip, plain_answer))


NEAR = 0.98  # score of a number that is nearly the expected one, and the least closeness that earns it

_MAX_NUMBER = 1000  # characters; what is longer is compared as text only
_MAX_FACTOR, _MAX_MORE = 10, 10_000
_COMMAND = re.compile(r"\\(?:boxed|text(?:bf|it|tt)?|math(?:rm|bf|it|sf|bb|cal)|emph|url)\{|[{}]")
_DELIMITER = re.compile(r"\\[()\[\]]|\$")
_SPACE = re.compile(r"\\(?:[,;:! ]|q?quad(?![A-Za-z]))")
_MONEY_OR_PERCENT = re.compile(r"\\?[%$£€]")
_GROUP_SEPARATOR = re.compile(r"(\d),(\d{3})(?!\d)")
_LATEX_SEPARATOR = re.compile(r"(?<=\d)(?:\{,\}|\\,)(?=\d)")  # 1{,}234 and 1\,234
_LIST_SEPARATOR = re.compile(r"[,;]|\b(?:and|or)\b")
_RAISED = re.compile("(?<=[0-9)])(?=[⁰¹²³⁴⁵⁶⁷⁸⁹⁻ⁿ])")
_VULGAR = re.compile("(?<=[0-9])(?=[¼½¾⅐-⅞])")
_DASHES = str.maketrans("−‐‒–’ʼ⁄", "----''/")  # what stands for a hyphen or minus, apostrophe, slash
_SYMBOLS = str.maketrans({"°": "^\\circ", "√": "\\sqrt", "π": "\\pi"})
_UNIT = re.compile(r"(\^?\{?\\circ\}?|(?<![a-z])(?:cm|mm|km|kg|m))$")

_STATE_CODES = """
alabama al, alaska ak, arizona az, arkansas ar, california ca, colorado co, connecticut ct, delaware de,
district of columbia dc, florida fl, georgia ga, hawaii hi, idaho id, illinois il, indiana in, iowa ia,
kansas ks, kentucky ky, louisiana la, maine me, maryland md, massachusetts ma, michigan mi, minnesota mn,
mississippi ms, missouri mo, montana mt, nebraska ne, nevada nv, new hampshire nh, new jersey nj,
new mexico nm, new york ny, north carolina nc, north dakota nd, ohio oh, oklahoma ok, oregon or,
pennsylvania pa, rhode island ri, south carolina sc, south dakota sd, tennessee tn, texas tx, utah ut,
vermont vt, virginia va, washington wa, west virginia wv, wisconsin wi, wyoming wy
"""
_STATES = dict(re.findall(r"([a-z][a-z ]*) ([a-z]{2})\b", _STATE_CODES.replace("\n", " ")))
_STATE = re.compile(rf"\b(?:{'|'.join(sorted(_STATES, key=len, reverse=True))})\b")


class _Measured(NamedTuple):
    text: str  # what is measured, without its unit
    unit: str  # the unit, with the signs of money and percent; empty if there is none


def similarity(expected: str, answer: str) -> float:
    """1.0 for the same answer, `NEAR` for a number that is nearly the same, else 0.0."""
    if len(answer) > _MAX_FACTOR * len(expected) + _MAX_MORE:
        return 0.0
    expected, answer = _base(expected), _base(answer)
    if expected == answer:
        return 1.0
    first, second = _number(expected), _number(answer)
    if first is not None and first == second:
        return 1.0
    if any(form(expected) == form(answer) for form in (_ungrouped, _plain, _listed, _with_states)):
        return 1.0
    # Near as they stand, the same without LaTeX, near without LaTeX: a number is no neighbour of itself.
    if _near(_measured(expected), _measured(answer)):
        return NEAR
    wanted, candidate = _measured(expected, plain=True), _measured(answer, plain=True)
    if wanted.text == candidate.text and _compatible(wanted, candidate):
        return 1.0
    return NEAR if _near(wanted, candidate) else 0.0


def _base(text: str) -> str:
    # NFKC alone would make 102 of 10², and 31/2 of 3½.
    text = unicodedata.normalize("NFKC", _RAISED.sub("^", _VULGAR.sub(" ", text)))
    text = (undecorated(text) or text).translate(_DASHES).lower()
    return text.rstrip(".!?") or text


def _number(text: str) -> Decimal | None:
    text = text.replace("\\%", "").replace("\\$", "").replace("$", "").strip()
    if len(text) > _MAX_NUMBER:
        return None
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    return None if number.is_nan() else number


def _ungrouped(text: str) -> str:
    text = _LATEX_SEPARATOR.sub(",", text)
    return _GROUP_SEPARATOR.sub(r"\1\2", text).replace("\\%", "%")


def _plain(text: str) -> str:
    text = _SPACE.sub(" ", _DELIMITER.sub("", without_commands(text, _COMMAND)))
    return " ".join(text.split())


def _listed(text: str) -> str:
    separated = _LIST_SEPARATOR.sub(" ", text)
    # Where separators are more than a tenth of the text, it is hardly a list.
    return text if len(separated) < 0.9 * len(text) else " ".join(separated.split())


def _with_states(text: str) -> str:
    return _listed(_STATE.sub(lambda name: _STATES[name[0]].upper(), text)).lower()


def _split_unit(text: str) -> tuple[str, str]:
    """``text`` without the unit at its end, and the unit; no unit where nothing is measured."""
    match = _UNIT.search(text)
    if match is None:
        return text, ""
    base = text[: match.start()].rstrip()
    if not re.search(r"[\d\\]", base[-_MAX_NUMBER:]):
        return text, ""
    return base, "degree" if "circ" in match[1] else match[1]


def _measured(text: str, *, plain: bool = False) -> _Measured:
    base, unit = _split_unit((_plain(text) if plain else text).translate(_SYMBOLS))
    signs = _MONEY_OR_PERCENT.findall(text)
    names = {sign.lstrip("\\") for sign in signs}
    if "\\$" not in signs and signs.count("$") % 2 == 0:
        names.discard("$")  # pairs of it stand around a formula
    return _Measured(base, unit + "".join(sorted(names)))


def _near(expected: _Measured, answer: _Measured) -> bool:
    first, second = _amount(expected), _amount(answer)
    if first is None or second is None or not _compatible(expected, answer):
        return False
    try:
        error = abs(float(second / first) - 1.0)
    except ArithmeticError:  # zero and infinity have no neighbours
        return False
    return max(0.0, 1.0 - error) ** 2 > NEAR


def _amount(measured: _Measured) -> Decimal | None:
    return _number(re.sub(r",(?=\d\d)", "", _MONEY_OR_PERCENT.sub("", measured.text)))


def _compatible(first: _Measured, second: _Measured) -> bool:
    return not first.unit or not second.unit or first.unit == second.unit


class StringMatchRequest(VerifyRequest):
    """A row with the response to it."""

    expected_answer: Annotated[str, AfterValidator(stated)]
    extraction_mode: ExtractionMode = "final_answer"  # where the answer stands in the text
    case_sensitive: bool = False  # compare letter by letter, without any tolerance


class StringMatchVerdict(Verdict):
    """The reward and what it was given for."""

    extracted_answer: str | None  # the answer that was compared; None if the text gives none
    expected_answer: str


class StringMatch(ResourcesServer):
    """Short answers: reward 1.0 for the expected string, 0.98 for a number next to it, else 0.0."""

    reverify_mode: ClassVar[Literal["stateless"]] = "stateless"
    metrics: ClassVar[MetricSpec] = MetricSpec(scores=(Score("accuracy"),), answer="extracted_answer")

    # Not a coroutine: it then runs in a thread, so a long text does not block the event loop.
    def verify(self, request: StringMatchRequest) -> StringMatchVerdict:
        expected, mode = request.expected_answer, request.extraction_mode
        text = _text(request.response)
        answer = extract(text, mode)
        reward, reason = 0.0, None
        if answer is None:
            reason = f"expected {excerpt(expected)}, but {_MISSING[mode]}: {ending(text)}"
        else:
            same = same_letters if request.case_sensitive else similarity
            reward = float(same(expected, answer))
            near = ", a number near to it" if reward else ""
            reason = None if reward == 1.0 else f"expected {excerpt(expected)}, got {excerpt(answer)}{near}"
        return StringMatchVerdict(
            reward=reward, extracted_answer=answer, expected_answer=expected, reason=reason
        )


_MISSING: dict[ExtractionMode, str] = {
    "boxed": "no closed \\boxed{} found",
    "final_answer": "no line 'Answer: X' and no box found",
    "last_line": "no line of text found",
    "full_response": "no text found",
}


def _text(response: Response) -> str:
    """The text parts of all assistant messages, one below the other: each has lines of its own."""
    texts: list[str] = []
    for message in response.messages:
        content = message.get("content")
        if isinstance(content, str):
            texts.append(content)
        elif isinstance(content, list):
            parts = (part.get("text") for part in content if isinstance(part, dict))
            texts += [part for part in parts if isinstance(part, str)]
    return "\n".join(texts)
