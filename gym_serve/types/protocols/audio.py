"""Audio of a row: OpenAI's Responses input has no audio, so rows carry it in ``metadata.audio_data``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gym_serve.types.errors import BadRequest
from gym_serve.types.requests import JSON

__all__ = ["inline_audio"]


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
        raise BadRequest("metadata.audio_data: a data: URL is expected")
    audio = {"type": "audio_url", "audio_url": {"url": url}}
    messages = chat.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise BadRequest("messages: a list of objects is expected")
    messages = [*messages]
    last = next((i for i in reversed(range(len(messages))) if messages[i].get("role") == "user"), None)
    if last is None:
        messages.append({"role": "user", "content": [audio]})
    else:
        content = messages[last].get("content") or []
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, list):
            raise BadRequest(f"messages[{last}].content: a string or a list of parts is expected")
        messages[last] = {**messages[last], "content": [audio, *parts]}
    rest = {key: value for key, value in metadata.items() if key != "audio_data"}
    body = {key: value for key, value in chat.items() if key != "metadata"}
    return {**body, "messages": messages, **({"metadata": rest} if rest else {})}
