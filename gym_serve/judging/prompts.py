"""What a judge is shown. The policy's text may try to speak to the judge, so it is never shown raw."""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Iterable

from gym_serve.types.requests import JSON

__all__ = ["check_fields", "check_labels", "defused", "judge_messages"]

_WORD = re.compile(r"[^\W\d_]+")
_PIECES = re.compile(r"\w+|[^\w\s]+")
_INSTRUCTION = 8
"""Words that a prompt has at least if it tells its judge what to do."""


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


def defused(text: str, labels: Iterable[str], max_chars: int) -> str:
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
