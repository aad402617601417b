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

_WORD = re.compile(r"[^\W\d_]+")
_PIECES = re.compile(r"\w+|[^\w\s]+")
_INSTRUCTION = 8
"""Minimum number of words in a prompt that gives its judge instructions."""

_TAIL = 20_000  # characters; verdicts are at the end, and the search for JSON can take quadratic time
_FENCED = re.compile(r"```json(.*?)```", re.DOTALL | re.IGNORECASE)
_DECODER = json.JSONDecoder()


def check_fields(template: str, required: Collection[str], optional: Collection[str] = ()) -> str:
    """Check that a template has the ``required`` fields, and none but these and ``optional`` ones; return it.

    Raises:
        ValueError: it has other fields, or a brace that is not doubled.
    """
    fields = {field for _, field, _, _ in string.Formatter().parse(template) if field is not None}
    if not set(required) <= fields <= {*required, *optional}:
        raise ValueError(
            f"the fields of a judge prompt must be {sorted({*required, *optional})}, got {sorted(fields)}; "
            "double other braces: {{ }}"
        )
    return template


def check_labels(labels: Collection[str], template: str, system_message: str | None = None) -> None:
    """Check that the prompt tells a judge the labels of its verdict.

    A judge that is asked for other labels never writes these, and every answer would get 0. A prompt may
    describe a label in pieces: ``Judgement: answer 'yes' if ...`` for the label ``Judgement: yes``, or
    ``[[rating]]`` and "a rating of 2" for ``[[2]]``. A prompt of hardly more than its fields is for a judge
    that was trained to its labels, and is not checked.

    Args:
        labels: the allowed labels.
        template: the prompt, for `str.format`.
        system_message: message before each prompt, or None.

    Raises:
        ValueError: the prompt gives instructions and does not mention a label.
    """
    parts = string.Formatter().parse(template)  # a doubled brace ends a part, too
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
    """Whether a text contains a piece of a label: a whole word, or symbols."""
    if not piece[0].isalnum():
        return piece in text
    return re.search(rf"(?<!\w){re.escape(piece)}(?!\w)", text) is not None


def escape_labels(text: str, labels: Iterable[str], max_chars: int) -> str:
    """The end of a policy's text, with a space between the characters of each label.

    So a judge that quotes the text does not give a verdict by that.

    Args:
        text: the text.
        labels: the labels of the judge.
        max_chars: number of characters that are kept, at the end of the text.
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
    """The text of all assistant messages of a Response.

    Raises:
        VerifierFailed: it is not a Response.
    """
    return _checked(response).output_text


def final_text(response: JSON) -> str:
    """The last part of the message that ends a Response; empty if another item ends it.

    Raises:
        VerifierFailed: it is not a Response.
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
    """The first label in ``text``, or None."""
    places = [(text.find(label), -len(label), label) for label in labels]  # the longer of two at one place
    found = [place for place in places if place[0] >= 0]
    return min(found)[2] if found else None


def label_of(response: JSON, text: str, labels: Sequence[str]) -> str | None:
    """The label of a reply; None if the reply is complete and has none.

    Args:
        response: the reply.
        text: the part of it to search: `whole_text` or `final_text`.
        labels: the labels of the judge.

    Raises:
        VerifierFailed: the reply is empty, or broke off before its verdict.
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
        raise VerifierFailed(f"the judge's reply is not a Response: {where}: {problem['msg']}") from None


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
