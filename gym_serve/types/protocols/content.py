"""Values and content parts of messages, between Chat Completions and Responses, in both directions.

Values of fields come from elsewhere and may be of any type, size and depth. Parts are text, images, audio,
video and files. A part without a form in the other protocol is an error that names it: without the part,
the model would see another task than the row's.

Reasoning inside text is written ``<think>...</think>``. What precedes a ``</think>`` that nothing opened is
reasoning as well: many chat templates open the tag themselves. So is what an answer begins with and does not
close, as its tokens ran out. Any other tag that is never closed stays text.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from gym_serve.types.errors import BadRequest
from gym_serve.types.requests import JSON

_T = TypeVar("_T")
_NAMES: dict[type, str] = {str: "a string", list: "a list", dict: "an object"}
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 200


def json_text(value: Any, where: str) -> str:
    """``value`` as JSON text, spaced as models write it themselves; integers may be of any size.

    Raises:
        BadRequest: it has no JSON form, or is nested too deeply.
    """
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
    """``value``, if it is a string, a list or an object as it should be.

    Raises:
        BadRequest: it is not; names the place.
    """
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
    """Content of a Responses message or output, as Chat Completions has it.

    Raises:
        BadRequest: it is neither a string nor a list of parts, or a part has no chat form.
    """
    if isinstance(content, list):
        return [_chat_part(part, f"{where}[{i}]") for i, part in enumerate(content)]
    if isinstance(content, str):
        return content
    raise BadRequest(f"`{where}` must be a string or a list of parts, got {shown(content)}")


def responses_content(content: Any, where: str) -> Any:
    """Content of a chat message as Responses input has it; null becomes an empty string.

    Parts that are written as in Responses already stay as they are.

    Raises:
        BadRequest: as `chat_content`.
    """
    if isinstance(content, list):
        return [_responses_part(part, f"{where}[{i}]") for i, part in enumerate(content)]
    if content is None or isinstance(content, str):
        return content or ""
    raise BadRequest(f"`{where}` must be a string or a list of parts, got {shown(content)}")


def with_chat_parts(content: list[Any], where: str) -> list[Any]:
    """Content of a Responses message whose parts may be written as in chat; others stay as they are.

    Raises:
        BadRequest: a part of chat that is malformed.
    """
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
        return {
            "type": "input_audio",
            "input_audio": checked(part.get("input_audio"), dict, f"{where}.input_audio"),
        }
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
        return {
            "type": "input_audio",
            "input_audio": checked(part.get("input_audio"), dict, f"{where}.input_audio"),
        }
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


def split_think(text: str, *, is_answer: bool = False) -> tuple[list[str], str]:
    """The reasoning blocks of ``text``, in order, and what is left of it without them.

    Args:
        text: of an assistant.
        is_answer: whether it is as the model wrote it, so that a chat template may have opened the first
            block, and the end of its tokens may have cut it off. A text that was split before has such a tag
            only if it is meant.
    """
    blocks: list[str] = []
    rest: list[str] = []
    at = 0
    if is_answer and (end := text.find(_CLOSE)) >= 0 and not 0 <= text.find(_OPEN) < end:
        blocks.append(text[:end])
        at = end + len(_CLOSE)
    while (start := text.find(_OPEN, at)) >= 0:
        end = text.find(_CLOSE, start + len(_OPEN))
        if end < 0:
            if is_answer and not ("".join(rest) + text[at:start]).strip():
                blocks.append(text[start + len(_OPEN) :])
                text = text[:start]
            break
        rest.append(text[at:start])
        blocks.append(text[start + len(_OPEN) : end])
        at = end + len(_CLOSE)
    rest.append(text[at:])
    return blocks, "".join(rest)


def wrap_think(blocks: Iterable[str]) -> str:
    """The blocks as tagged text; an empty block leaves no tags."""
    return "".join(f"{_OPEN}{block}{_CLOSE}" for block in blocks if block)


class ThinkSplitter:
    """`split_think` for a text that comes in parts.

    A text that may be a tag, or reasoning without its end yet, is kept back.

    Args:
        is_open: whether the text begins within reasoning, as behind a chat template that opens the tag. What
            comes is kept back then until the tag is closed.

    Attributes:
        retracts: whether the last part had the end of a reasoning that nothing had opened: all text before
            it, which was told as text, was reasoning.
    """

    def __init__(self, *, is_open: bool = False) -> None:
        self._kept = ""
        self._given = _OPEN if is_open else ""  # a tag that the model did not write
        self._seen = 0  # of what is kept: where the search for the end goes on
        self._begins = True  # nothing was reasoning yet
        self._said = False  # whether a text that is not blank was told
        self.retracts = False
        if is_open:
            self._kept = _OPEN

    def add(self, part: str) -> list[tuple[bool, str]]:
        """What is known after another part: texts in order, and of each whether it is reasoning."""
        self._kept += part
        self.retracts = False
        found: list[tuple[bool, str]] = []
        while True:
            if self._begins and not self._kept.startswith(_OPEN):
                end, start = self._kept.find(_CLOSE), self._kept.find(_OPEN)
                if end >= 0 and not 0 <= start < end:
                    self.retracts, self._begins, self._said = True, False, False
                    found = [(True, "".join(text for _, text in found) + self._kept[:end])]
                    self._kept, self._seen = self._kept[end + len(_CLOSE) :], 0
                    continue
            if self._kept.startswith(_OPEN):
                end = self._kept.find(_CLOSE, max(len(_OPEN), self._seen))
                if end < 0:
                    self._seen = len(self._kept) - len(_CLOSE) + 1
                    return found
                self._begins = False
                found.append((True, self._kept[len(_OPEN) : end]))
                self._kept, self._seen = self._kept[end + len(_CLOSE) :], 0
                continue
            start = self._kept.find(_OPEN)
            if start < 0:
                start = len(self._kept) - max(_overlap(self._kept, _OPEN), _overlap(self._kept, _CLOSE))
            if start:
                found.append((False, self._kept[:start]))
                self._said = self._said or not self._kept[:start].isspace()
                self._kept = self._kept[start:]
            if not self._kept.startswith(_OPEN):
                return found

    def end(self) -> tuple[bool, str]:
        """Whether what was kept back is reasoning, with no end and no text before it; and what it is."""
        kept, self._kept, self._seen = self._kept, "", 0
        if self._given and self._begins:
            return False, kept.removeprefix(_OPEN)
        if kept.startswith(_OPEN) and not self._said:
            return True, kept.removeprefix(_OPEN)
        return False, kept


def _overlap(text: str, tag: str) -> int:
    """How many characters at the end of ``text`` may begin a tag."""
    return next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)


def inline_audio(chat: Mapping[str, Any]) -> JSON:
    """``chat`` with the ``data:`` URL of ``metadata.audio_data`` moved into the last user message.

    It stands before the text there, as audio models expect. Without one, ``chat`` as it is.

    Args:
        chat: a body of ``POST /v1/chat/completions``.

    Raises:
        BadRequest: the audio is no URL, or the message has no form in which it can be added.
    """
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
