"""Values and content parts of messages, between Chat Completions and Responses, in both directions.

Values may be of any type, size and depth. A part without a form in the other protocol is an error that names
it: without the part, the model would see another task than the row's.

Reasoning inside text is written ``<think>...</think>``, or ``<thinking>``, in any case. What precedes a
``</think>`` that nothing opened is reasoning as well, back to the last block: many chat templates open the
tag themselves. So is what begins with its line and is never closed. Any other such tag stays text.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import regex

from gym_serve.types.errors import BadRequest
from gym_serve.types.requests import JSON

_T = TypeVar("_T")
_NAMES: dict[type, str] = {str: "a string", list: "a list", dict: "an object"}
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 200


def json_text(value: Any, where: str) -> str:
    """``value`` as JSON text, spaced as models write it themselves; integers may be of any size. Raises
    `BadRequest` if it has no JSON form, or is nested too deeply."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"{where}: this cannot be written as JSON: {error}") from None


def seconds(value: Any) -> float | None:
    """A moment as a finite number; None for anything else."""
    try:
        moment = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return None
    return moment if math.isfinite(moment) else None


def shown(value: Any) -> str:
    """A value as an error shows it: however large or deep it is, in a line or two."""
    return _REPR.repr(value)


def checked(value: Any, kind: type[_T], where: str) -> _T:
    """``value``, if it is a string, a list or an object as it should be; or raises `BadRequest`."""
    if not isinstance(value, kind):
        raise BadRequest(f"`{where}` must be {_NAMES[kind]}, got {shown(value)}")
    return value


_CHAT_KINDS = frozenset({"text", "image_url", "video_url", "file"})
_RESPONSES_KINDS = frozenset({"input_text", "input_image", "input_video", "input_file"})
_FILE_KEYS = ("file_data", "file_id", "filename")


def content_text(content: Any) -> str:
    """All the text of a message's content: a string, a list of parts of any kind, or null."""
    return content if isinstance(content, str) else _joined(content, "text")


def content_refusal(content: Any) -> str:
    """What a message's content says to refuse; empty for one that refuses nothing."""
    return _joined(content, "refusal")


def reasoning_texts(item: Mapping[str, Any]) -> list[str]:
    """The blocks of a reasoning item: its summary, or its content if it has no summary."""
    for key in ("summary", "content"):
        parts = item.get(key)
        texts = [content_text([part]) for part in parts] if isinstance(parts, list) else []
        if any(texts):
            return texts
    return []


def chat_content(content: Any, where: str) -> Any:
    """Content of a Responses message or output, as Chat Completions has it; or raises `BadRequest`."""
    if isinstance(content, list):
        return [_chat_part(part, f"{where}[{i}]") for i, part in enumerate(content)]
    if isinstance(content, str):
        return content
    raise BadRequest(f"`{where}` must be a string or a list of parts, got {shown(content)}")


def responses_content(content: Any, where: str) -> Any:
    """Content of a chat message as Responses input has it; null becomes an empty string.

    Parts that are written as in Responses already stay as they are. Raises `BadRequest`.
    """
    if isinstance(content, list):
        return [_responses_part(part, f"{where}[{i}]") for i, part in enumerate(content)]
    if content is None or isinstance(content, str):
        return content or ""
    raise BadRequest(f"`{where}` must be a string or a list of parts, got {shown(content)}")


def with_chat_parts(content: list[Any], where: str) -> list[Any]:
    """Content of a Responses message whose parts may be written as in chat; others stay as they are."""
    return [
        _responses_part(part, f"{where}[{i}]") if _kind(part) in _CHAT_KINDS else part
        for i, part in enumerate(content)
    ]


def _chat_part(part: Any, where: str) -> JSON:
    kind = _kind(part)
    if kind == "input_text":
        return {"type": "text", "text": checked(part.get("text"), str, f"{where}.text")}
    if kind == "input_image":
        url = _url(part.get("image_url"))
        if not url:
            raise BadRequest(f"{where}: input_image needs image_url (a URL or a data: URL)")
        return {"type": "image_url", "image_url": {"url": url, "detail": part.get("detail") or "auto"}}
    if kind == "input_audio":
        audio = checked(part.get("input_audio"), dict, f"{where}.input_audio")
        return {"type": "input_audio", "input_audio": audio}
    if kind == "input_video":
        url = _url(part.get("video_url") or part.get("video"))
        if not url:
            raise BadRequest(f"{where}: input_video needs video_url")
        return {"type": "video_url", "video_url": {"url": url}}
    if kind == "input_file":
        file = {key: part[key] for key in _FILE_KEYS if part.get(key)}
        if not file.keys() & {"file_data", "file_id"}:
            raise BadRequest(f"{where}: input_file needs file_data or file_id; chat has no file_url")
        return {"type": "file", "file": file}
    raise BadRequest(f"{where}: a part of type {shown(kind)} has no chat form")


def _responses_part(part: Any, where: str) -> JSON:
    kind = _kind(part)
    if kind in _RESPONSES_KINDS:
        return dict(part)
    if kind == "text":
        return {"type": "input_text", "text": checked(part.get("text"), str, f"{where}.text")}
    if kind == "image_url":
        image = part.get("image_url")
        detail = image.get("detail") if isinstance(image, dict) else None
        return {"type": "input_image", "image_url": _url(image), "detail": detail or "auto"}
    if kind == "input_audio":
        audio = checked(part.get("input_audio"), dict, f"{where}.input_audio")
        return {"type": "input_audio", "input_audio": audio}
    if kind == "video_url":
        return {"type": "input_video", "video_url": _url(part.get("video_url"))}
    if kind == "file":
        file = checked(part.get("file"), dict, f"{where}.file")
        return {"type": "input_file", **{key: file[key] for key in _FILE_KEYS if file.get(key)}}
    raise BadRequest(f"{where}: a part of type {shown(kind)} has no Responses form")


def _kind(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) else None


def _url(value: Any) -> str:
    url = value.get("url") if isinstance(value, dict) else value
    return url if isinstance(url, str) else ""


def _joined(content: Any, key: str) -> str:
    parts = content if isinstance(content, list) else ()
    texts = (part.get(key) for part in parts if isinstance(part, dict))
    return "".join(text for text in texts if isinstance(text, str))


_OPEN, _CLOSE = "<think>", "</think>"
_TAG = re.compile(r"<(/?)think(?:ing)?\s{0,8}>", re.IGNORECASE)
_BEGUN_TAG = regex.compile(_TAG.pattern, regex.IGNORECASE)  # which can match the beginning of a tag
_LONGEST = len("</thinking>") + 8


def split_think(text: str, *, is_answer: bool = False) -> tuple[list[str], str]:
    """The reasoning blocks of ``text``, in order, and what is left of it without them.

    ``is_answer``: it is as the model wrote it, so that a chat template may have opened the first block, and
    the last may have no end. A text that was split before has such a tag only if it is meant.
    """
    if is_answer:
        splitter = ThinkSplitter()
        pieces = [*splitter.add(text), splitter.end()]
        blocks = [piece for is_reasoning, piece in pieces if is_reasoning]
        return blocks, "".join(piece for is_reasoning, piece in pieces if not is_reasoning)
    blocks, rest, at, begin = [], "", 0, None
    for tag in _TAG.finditer(text):
        if not tag[1]:
            begin = begin or tag
        elif begin is not None:
            blocks.append(text[begin.end() : tag.start()])
            rest += text[at : begin.start()]
            at, begin = tag.end(), None
    return blocks, rest + text[at:]


def wrap_think(blocks: Iterable[str]) -> str:
    """The blocks as tagged text; an empty block leaves no tags."""
    return "".join(f"{_OPEN}{block}{_CLOSE}" for block in blocks if block)


class ThinkSplitter:
    """`split_think` for an answer that comes in parts. A text that may be a tag, or reasoning without its end
    yet, is kept back; with ``is_open``, behind a chat template that opens the tag, until the tag is closed.
    """

    def __init__(self, *, is_open: bool = False) -> None:
        self._kept = ""
        self._opening: str | None = "" if is_open else None  # as the model wrote it, if it did
        self._seen = 0  # of what is kept: where the search for a tag goes on
        self._begins_line = True  # since the last tag
        # Whether the last part ended a reasoning that nothing had opened: all that was told as text since the
        # last reasoning was reasoning, too.
        self.retracts = False

    def add(self, part: str) -> list[tuple[bool, str]]:
        """What is known after another part: texts in order, and of each whether it is reasoning."""
        text, begin, at = self._kept + part, 0, self._seen
        self.retracts = False
        parts: list[tuple[bool, str]] = []
        for tag in _TAG.finditer(text, at):
            at = tag.end()
            if self._opening is not None and not tag[1]:
                continue
            before = text[begin : tag.start()]
            if tag[1]:
                retracted = self._retracted(parts) if self._opening is None else ""
                parts.append((True, retracted + before))
                self._opening, self._begins_line = None, True
            else:
                self._tell(parts, before)
                self._opening = tag[0]
            begin = at
        start = text.rfind("<", max(at, len(text) - _LONGEST))
        is_tag = start >= 0 and _BEGUN_TAG.fullmatch(text, start, partial=True)
        at = start if is_tag else len(text)
        if self._opening is None:
            self._tell(parts, text[begin:at])
            begin = at
        self._kept, self._seen = text[begin:], at - begin
        return parts

    def end(self) -> tuple[bool, str]:
        """Whether what was kept back is reasoning, with no end and at the beginning of a line; and what."""
        kept, opening, self._kept, self._opening, self._seen = self._kept, self._opening, "", None, 0
        if opening and self._begins_line:
            return True, kept
        return False, (opening or "") + kept

    def _tell(self, pieces: list[tuple[bool, str]], text: str) -> None:
        if text:
            pieces.append((False, text))
            *lines, last = text.split("\n")
            self._begins_line = (self._begins_line or bool(lines)) and not last.strip()

    def _retracted(self, pieces: list[tuple[bool, str]]) -> str:
        """The text since the last reasoning, taken out of ``pieces``."""
        text = ""
        while pieces and not (pieces[-1][0] and pieces[-1][1]):
            text = pieces.pop()[1] + text
        self.retracts = self.retracts or not pieces
        return text


def inline_audio(chat: Mapping[str, Any]) -> JSON:
    """``chat`` with the ``data:`` URL of ``metadata.audio_data``, if there is one, moved into the last user
    message, before the text, as audio models expect. Raises `BadRequest`."""
    metadata = chat.get("metadata")
    url = metadata.get("audio_data") if isinstance(metadata, dict) else None
    if not url or not isinstance(metadata, dict):
        return dict(chat)
    if not isinstance(url, str):
        raise BadRequest(f"`metadata.audio_data` must be a data: URL, got {shown(url)}")
    audio = {"type": "audio_url", "audio_url": {"url": url}}
    messages = chat.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise BadRequest("`messages` must be a list of objects")
    messages = [*messages]
    last = next((i for i in reversed(range(len(messages))) if messages[i].get("role") == "user"), None)
    if last is None:
        messages.append({"role": "user", "content": [audio]})
    else:
        content = messages[last].get("content") or []
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, list):
            raise BadRequest(f"`messages[{last}].content` must be a string or a list of parts")
        messages[last] = {**messages[last], "content": [audio, *parts]}
    rest = {key: value for key, value in metadata.items() if key != "audio_data"}
    body = {key: value for key, value in chat.items() if key != "metadata"}
    return {**body, "messages": messages, **({"metadata": rest} if rest else {})}
