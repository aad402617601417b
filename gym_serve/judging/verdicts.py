"""What a judge's reply says: pure functions on a text that a model wrote.

A reply without a verdict says nothing (None). One that broke off before its verdict, or is empty, is no
reply: `VerifierFailed`, so that nobody is scored by it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from gym_serve.types.errors import VerifierFailed
from gym_serve.types.requests import JSON, Response

__all__ = ["final_text", "first_label", "json_objects", "label_of", "whole_text"]

_TAIL = 20_000  # characters: verdicts stand at the end, and a search for JSON takes quadratic time at worst
_FENCED = re.compile(r"```json(.*?)```", re.DOTALL | re.IGNORECASE)
_DECODER = json.JSONDecoder()


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
