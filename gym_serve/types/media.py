"""Pictures and other media in content parts, as data URLs: no model server follows an address for them.

A tool shows the model pictures by an answer that is a list of parts with a picture among them (`picture`);
any other list is JSON, which the model is shown as text.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from gym_serve.types.errors import BadRequest
from gym_serve.types.requests import JSON

_MAGIC = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif", b"RIFF": "image/webp"}
_PICTURE = re.compile(r"data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/]+={0,2}")
_MOST_PIXELS = 64_000_000  # of a picture: more is a file that is made to fill the memory
_KEYS = {"input_text": {"type", "text"}, "input_image": {"type", "image_url", "detail"}}


def data_url(data: bytes) -> str:
    """The bytes of a file as a URL; its kind is told by its first bytes."""
    kind = next((k for magic, k in _MAGIC.items() if data.startswith(magic)), "application/octet-stream")
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def picture(data: bytes) -> JSON:
    """The content part of a picture, for a prompt or the answer of a tool: the bytes of a PNG, JPEG, GIF or
    WebP file."""
    return {"type": "input_image", "image_url": data_url(data), "detail": "auto"}


def shown_parts(answer: bytes) -> list[JSON] | None:
    """The parts of a tool's answer with pictures; None for any other answer.

    What a tool repeats may come from a model, so a picture is nothing but a data URL of a picture.
    """
    if not answer.startswith(b"[") or b'"input_image"' not in answer:
        return None
    try:
        parts = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return None
    return parts if all(map(_is_shown, parts)) else None


def pictures_in(content: Any) -> Iterator[str]:
    """The URLs of the pictures in a content, of either protocol, in their order."""
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and part.get("type") in ("input_image", "image_url"):
            url = part.get("image_url")
            yield str(url.get("url") if isinstance(url, dict) else url)


def pictures_of(messages: Iterable[JSON]) -> list[str]:
    """The URLs of all pictures of chat messages, in their order."""
    return [url for message in messages for url in pictures_in(message.get("content"))]


def opened(url: str) -> Any:
    """A picture as an RGB image of Pillow. Raises BadRequest: the URL holds no picture, or a huge one."""
    from PIL import Image

    head, mark, data = url.partition(";base64,")
    if not mark or not head.startswith("data:image/"):
        raise BadRequest(f"this model reads pictures in data: URLs alone, got {url[:60]!r}")
    try:
        image = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
        if image.width * image.height > _MOST_PIXELS:
            raise BadRequest(f"a picture must have at most {_MOST_PIXELS:,} pixels, got {image.size}")
        return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, binascii.Error, Image.DecompressionBombError) as error:
        raise BadRequest(f"a picture cannot be read: {error}") from None


def _is_shown(part: Any) -> bool:
    if not isinstance(part, dict) or not part.keys() <= _KEYS.get(str(part.get("type")), set()):
        return False
    if part["type"] == "input_text":
        return isinstance(part.get("text"), str)
    url = part.get("image_url")
    return isinstance(url, str) and _PICTURE.fullmatch(url) is not None
