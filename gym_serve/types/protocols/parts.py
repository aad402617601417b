"""Content parts of messages: text, images, audio, video and files, in both directions.

A part that the other protocol cannot say is an error that names it; dropping it would show the
model another task than the row's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gym_serve.types.errors import BadRequest
from gym_serve.types.protocols.fields import shown
from gym_serve.types.requests import JSON

__all__ = ["chat_content", "content_refusal", "content_text", "responses_content", "with_chat_parts"]

_CHAT_KINDS = frozenset({"text", "image_url", "video_url", "file"})
_RESPONSES_KINDS = frozenset({"input_text", "input_image", "input_video", "input_file"})
_FILE_KEYS = ("file_data", "file_id", "filename")


def content_text(content: Any) -> str:
    """All the text of a message's content: a string, a list of parts of any kind, or null."""
    return content if isinstance(content, str) else _joined(content, "text")


def content_refusal(content: Any) -> str:
    """What a message's content says to refuse; empty for one that refuses nothing."""
    return _joined(content, "refusal")


def chat_content(content: Any, where: str) -> Any:
    """Content of a Responses message or output, as Chat Completions has it.

    Raises:
        BadRequest: it is neither a string nor a list of parts, or a part has no chat form.
    """
    if isinstance(content, list):
        return [_chat_part(part, f"{where}[{i}]") for i, part in enumerate(content)]
    if isinstance(content, str):
        return content
    raise BadRequest(f"{where}: a string or a list of parts is expected, not {type(content).__name__}")


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
    raise BadRequest(f"{where}: a string or a list of parts is expected, not {type(content).__name__}")


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
        return {"type": "text", "text": _required(part, "text", str, where)}
    if kind == "input_image":
        url = _url(part.get("image_url"))
        if not url:
            raise BadRequest(f"{where}: input_image needs image_url (a URL or a data: URL)")
        return {"type": "image_url", "image_url": {"url": url, "detail": part.get("detail") or "auto"}}
    if kind == "input_audio":
        return {"type": "input_audio", "input_audio": _required(part, "input_audio", Mapping, where)}
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
        return {"type": "input_text", "text": _required(part, "text", str, where)}
    if kind == "image_url":
        image = part.get("image_url")
        detail = image.get("detail") if isinstance(image, dict) else None
        return {"type": "input_image", "image_url": _url(image), "detail": detail or "auto"}
    if kind == "input_audio":
        return {"type": "input_audio", "input_audio": _required(part, "input_audio", Mapping, where)}
    if kind == "video_url":
        return {"type": "input_video", "video_url": _url(part.get("video_url"))}
    if kind == "file":
        file = _required(part, "file", Mapping, where)
        return {"type": "input_file", **{key: file[key] for key in _FILE_KEYS if file.get(key)}}
    raise BadRequest(f"{where}: a part of type {shown(kind)} has no Responses form")


def _kind(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) else None


def _url(value: Any) -> str:
    url = value.get("url") if isinstance(value, dict) else value
    return url if isinstance(url, str) else ""


def _required(part: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    if not isinstance(part.get(key), kind):
        wanted = "a string" if kind is str else "an object"
        raise BadRequest(f"{where}: a part of type {part['type']!r} without {key!r}, {wanted}")
    return part[key]


def _joined(content: Any, key: str) -> str:
    parts = content if isinstance(content, list) else ()
    texts = (part.get(key) for part in parts if isinstance(part, dict))
    return "".join(text for text in texts if isinstance(text, str))
