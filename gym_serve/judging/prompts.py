"""What a judge is asked, and what its reply says: pure functions on text.

The text of a policy may try to address the judge, so it is never shown raw (`escape_labels`). A reply
without a verdict is None. A reply that is empty, or that broke off before its verdict, raises
`VerifierFailed`, so that nobody is scored by it.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from gym_serve.types.errors import VerifierFailed
from gym_serve.types.requests import JSON, Response

__all__ = [
    "check_fields",
    "check_labels",
    "escape_labels",
    "final_text",
    "first_label",
    "json_objects",
    "judge_messages",
    "label_of",
    "whole_text",
]

_WORD = re.compile(r"[^\W\d_]+")
_PIECES = re.compile(r"\w+|[^\w\s]+")
_INSTRUCTION = 8
"""Words that a prompt has at least if it tells its judge what to do."""

_TAIL = 20_000  # characters: verdicts stand at the end, and a search for JSON takes quadratic time at worst
_FENCED = re.compile(r"```json(.*?)```", re.DOTALL | re.IGNORECASE)
_DECODER = json.JSONDecoder()


def check_fields(template: str, required: Collection[str], optional: Collection[str] = ()) -> str:
    """``template``, if its ``{fields}`` are the ``required`` ones, and maybe ``optional`` ones.

    Raises:
        ValueError: they are not, or a brace is not doubled.
    """
    fields = {field for _, field, _, _ in string.Formatter().parse(template) if field is not None}
    if not set(required) <= fields <= {*required, *optional}:
        raise ValueError(
            f"the fields of a judge prompt are {sorted({*required, *optional})}, not {sorted(fields)}; "
            "other braces are doubled: {{ }}"
        )
    return template


def check_labels(labels: Collection[str], template: str, system_message: str | None = None) -> None:
    """Check that a judge is told the labels of its verdict.

    A judge that is asked for other labels never says these, and every answer would get 0. A prompt may
    describe a label in pieces: ``Judgement: answer 'yes' if ...`` for the label ``Judgement: yes``, or
    ``[[rating]]`` and "a rating of 2" for ``[[2]]``. A prompt that only lays out its fields, with hardly a
    word between them, is for a judge that was trained to its labels.

    Args:
        labels: what the judge may answer with.
        template: the prompt, for `str.format`.
        system_message: message before each prompt, or None.

    Raises:
        ValueError: the prompt tells the judge what to do, and does not mention a label.
    """
    parts = string.Formatter().parse(template)  # which ends a part at each doubled brace, too
    said = "".join(literal + "\n" * (field is not None) for literal, field, _, _ in parts)
    told = f"{system_message or ''}\n{said}"
    missing, rest = [], told
    for label in sorted(labels, key=len, reverse=True):  # INCORRECT does not mention CORRECT
        if label not in rest and not all(_says(told, piece) for piece in _PIECES.findall(label)):
            missing.append(label)
        rest = rest.replace(label, "\0")
    if missing and len(_WORD.findall(told)) >= _INSTRUCTION:
        raise ValueError(
            f"the judge's prompt never mentions {' and '.join(map(repr, sorted(missing)))}, so the judge "
            "cannot answer with that; set the labels that the prompt asks for, or ask for these labels in it"
        )


def _says(text: str, piece: str) -> bool:
    """Whether a text has a word, as a whole one, or the symbols of a label."""
    if not piece[0].isalnum():
        return piece in text
    return re.search(rf"(?<!\w){re.escape(piece)}(?!\w)", text) is not None


def escape_labels(text: str, labels: Iterable[str], max_chars: int) -> str:
    """The end of a policy's text, with the labels of the verdict spaced out.

    A judge that quotes it says nothing by that.

    Args:
        text: the text.
        labels: what the judge may answer with.
        max_chars: of a longer text only this many characters at its end are kept.
    """
    text = text[-max_chars:]
    for label in labels:
        text = text.replace(label, " ".join(label))
    return text


def judge_messages(prompt: str, system_message: str | None = None) -> list[JSON]:
    """The ``input`` of a judge's call."""
    system = [{"role": "system", "content": system_message}] if system_message else []
    return [*system, {"role": "user", "content": prompt}]


def whole_text(response: JSON) -> str:
    """All text of all assistant messages of a Response.

    Raises:
        VerifierFailed: it is none.
    """
    return _checked(response).output_text


def final_text(response: JSON) -> str:
    """The last part of the message that a Response ends with; empty if it ends with anything else.

    Raises:
        VerifierFailed: it is none.
    """
    reply = _checked(response)
    messages = reply.messages
    if not messages or messages[-1] is not reply.output[-1]:
        return ""
    content: Any = messages[-1].get("content")
    if isinstance(content, list):
        part = content[-1] if content else None
        content = part.get("text") if isinstance(part, dict) else None
    return content if isinstance(content, str) else ""


def first_label(text: str, labels: Sequence[str]) -> str | None:
    """The label that stands first in ``text``; None if there is none."""
    places = [(text.find(label), -len(label), label) for label in labels]  # of two at one place, the longer
    found = [place for place in places if place[0] >= 0]
    return min(found)[2] if found else None


def label_of(response: JSON, text: str, labels: Sequence[str]) -> str | None:
    """The label that a reply gives; None if it is complete and gives none.

    Args:
        response: the reply.
        text: the part of it that counts: `whole_text` or `final_text`.
        labels: what it may answer with.

    Raises:
        VerifierFailed: it broke off before its verdict, or is empty.
    """
    label = first_label(text, labels)
    if label is None:
        if reason := response.get("incomplete_details"):
            raise VerifierFailed(f"the judge's reply broke off before its verdict: {reason}")
        if not response.get("output"):
            raise VerifierFailed("the judge's reply is empty")
    return label


def _checked(response: JSON) -> Response:
    try:
        return Response.model_validate(response)
    except ValidationError as error:
        problem = error.errors(include_input=False)[0]
        where = ".".join(map(str, problem["loc"]))
        raise VerifierFailed(f"the judge's reply is no Response: {where}: {problem['msg']}") from None


def json_objects(text: str) -> Iterator[JSON]:
    """The JSON objects at the end of ``text``, the most likely verdict first.

    Those in ``json`` code fences come first, in their order; then all others, the last one first.
    """
    text = text[-_TAIL:]
    for fence in _FENCED.finditer(text):
        yield from _found(fence[1])
    yield from reversed(list(_found(text)))


def _found(text: str) -> Iterator[JSON]:
    place = text.find("{")
    while place >= 0:
        try:
            value, place = _DECODER.raw_decode(text, place)
        except (ValueError, RecursionError):
            place += 1
        else:
            yield value
        place = text.find("{", place)
