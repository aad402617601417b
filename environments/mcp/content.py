"""What a model reads of a tool's result: text. Of anything else it is told that it is there."""

from __future__ import annotations

from typing import Any

import orjson
from mcp.types import (
    AudioContent,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    TextContent,
    TextResourceContents,
)

from gym_serve.servers.transport import encode

__all__ = ["body_of", "text_of"]


def text_of(result: CallToolResult, max_chars: int) -> str:
    """The text of a result, its blocks one below the other; the end of a longer one is cut off."""
    text = "\n".join(map(_block, result.content))
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}... [{len(text) - max_chars} more characters]"


def body_of(text: str) -> bytes:
    """``text`` as the JSON body of a reply: as it is, if it is JSON already, else as a string."""
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return encode(text)
    return text.encode()


def _block(block: Any) -> str:
    if isinstance(block, TextContent):
        return block.text
    if isinstance(block, ImageContent | AudioContent):
        return f"[{block.type}, {block.mime_type}]"
    if isinstance(block, EmbeddedResource):
        inner = block.resource
        return inner.text if isinstance(inner, TextResourceContents) else f"[resource {inner.uri}]"
    return f"[resource {getattr(block, 'uri', 'of an unknown kind')}]"
