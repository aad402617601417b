"""The messages of an Anthropic Messages body as items of a Responses input.

Thinking blocks become reasoning items, with their signature as ``encrypted_content``. A tool's result that is
an error becomes an output of status ``incomplete``. The arguments of a call that came from `tool_input` are
again what the model wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gym_serve.types.errors import BadRequest
from gym_serve.types.protocols.fields import json_text, shown
from gym_serve.types.protocols.items import message_item
from gym_serve.types.protocols.to_message import INVALID_JSON, tool_input
from gym_serve.types.requests import JSON

__all__ = ["blocks_of", "list_of", "message_items", "text_of"]


def message_items(message: Any, where: str) -> list[JSON]:
    """The items of a message.

    Args:
        message: of a body of ``POST /v1/messages``.
        where: its place there, for errors.

    Raises:
        BadRequest: it is none, or has a block that Responses has no form for.
    """
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise BadRequest(f"{where}: a message of role {shown(role)} has no Responses form")
    content = message.get("content")
    if isinstance(content, str):
        said = message_item(content) if role == "assistant" else {"role": role, "content": content}
        return [{**said, "type": "message"}]
    items: list[JSON] = []
    for i, block in enumerate(blocks_of(content, f"{where}.content")):
        at = f"{where}.content[{i}]"
        made = _assistant_item(block, at) if role == "assistant" else _tool_output(block, at)
        if made is not None:
            if _goes_on(items, made):
                items[-1]["summary"] += made["summary"]
            else:
                items.append(made)
            continue
        part = _part(block, at)
        # Parts in a row are one message.
        if items and items[-1].get("role") == role:
            items[-1]["content"].append(part)
        else:
            items.append({"type": "message", "role": role, "content": [part]})
    return items


def _assistant_item(block: JSON, where: str) -> JSON:
    kind = block.get("type")
    if kind == "text":
        return message_item(text_of(block, "text", where))
    if kind == "thinking":
        summary = [{"type": "summary_text", "text": text_of(block, "thinking", where)}]
        signed = {"encrypted_content": text_of(block, "signature", where)} if block.get("signature") else {}
        return {"type": "reasoning", "id": f"rs_{where}", "summary": summary, **signed}
    if kind == "redacted_thinking":
        data = text_of(block, "data", where)
        return {"type": "reasoning", "id": f"rs_{where}", "summary": [], "encrypted_content": data}
    if kind == "tool_use":
        arguments = _arguments(block.get("input"), where)
        call_id = text_of(block, "id", where)
        made = {"type": "function_call", "id": call_id, "call_id": call_id, "status": "completed"}
        return {**made, "name": text_of(block, "name", where), "arguments": arguments}
    raise BadRequest(f"{where}: an assistant's block of type {shown(kind)} has no Responses form")


def _goes_on(items: list[JSON], made: JSON) -> bool:
    """Whether a thinking block is a further part of the item before it: a signature is of a whole item."""
    signature = made.get("encrypted_content")
    if not (signature and made["summary"] and items and items[-1].get("summary")):
        return False
    return bool(items[-1].get("encrypted_content") == signature)


def _arguments(given: Any, where: str) -> str:
    """The arguments of a call: `tool_input` backwards."""
    if given is None:
        return "{}"
    if not isinstance(given, dict):
        raise BadRequest(f"{where}.input: an object is expected")
    raw = given.get(INVALID_JSON)
    if given.keys() == {INVALID_JSON} and isinstance(raw, str) and tool_input(raw) == given:
        return raw
    return json_text(given, f"{where}.input")


def _tool_output(block: JSON, where: str) -> JSON | None:
    if block.get("type") != "tool_result":
        return None
    output = block.get("content") or ""
    if not isinstance(output, str):
        blocks = blocks_of(output, f"{where}.content")
        output = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(blocks)]
        if all(part["type"] == "input_text" for part in output):
            output = "".join(part["text"] for part in output)
    call_id = text_of(block, "tool_use_id", where)
    status = "incomplete" if block.get("is_error") else "completed"
    return {"type": "function_call_output", "call_id": call_id, "output": output, "status": status}


def _part(block: JSON, where: str) -> JSON:
    kind = block.get("type")
    if kind == "text":
        return {"type": "input_text", "text": text_of(block, "text", where)}
    if kind == "image":
        return {"type": "input_image", "image_url": _image_url(block.get("source"), where), "detail": "auto"}
    raise BadRequest(f"{where}: a block of type {shown(kind)} has no Responses form")


def _image_url(source: Any, where: str) -> str:
    source = source if isinstance(source, dict) else {}
    url, kind, data = source.get("url"), source.get("media_type"), source.get("data")
    if source.get("type") == "base64" and isinstance(kind, str) and isinstance(data, str):
        return f"data:{kind};base64,{data}"
    if source.get("type") == "url" and isinstance(url, str):
        return url
    raise BadRequest(f"{where}: an image needs a source of the type url or base64")


def blocks_of(content: Any, where: str) -> list[JSON]:
    """A list of blocks, which are objects."""
    blocks = list_of(content, where)
    for i, block in enumerate(blocks):
        if not isinstance(block, dict):
            raise BadRequest(f"{where}[{i}]: a block is an object, not {type(block).__name__}")
    return blocks


def list_of(value: Any, where: str) -> list[Any]:
    """A list of anything."""
    if not isinstance(value, list):
        raise BadRequest(f"{where}: a list is expected, not {type(value).__name__}")
    return value


def text_of(block: Mapping[str, Any], key: str, where: str) -> str:
    """The text that a block has to have."""
    value = block.get(key)
    if not isinstance(value, str):
        raise BadRequest(f"{where}: a block of type {shown(block.get('type'))} without a {key!r} string")
    return value
