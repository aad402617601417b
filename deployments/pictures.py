"""What a model with eyes is given: a conversation with a place for each picture, and the pictures.

A processor of ``transformers`` knows how many tokens a picture takes in the place of its mark. A text that
spells this mark would shift the pictures, so it is written with a space in it.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterable, Sequence
from typing import Any

from gym_serve.types.errors import BadRequest
from gym_serve.types.media import pictures_in
from gym_serve.types.requests import JSON

_MOST_PIXELS = 64_000_000  # of a picture: more is a file that is made to fill the memory


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


def tokens_with_pictures(processor: Any, text: str, urls: Sequence[str]) -> list[int]:
    """The tokens of a rendered conversation; a picture's are in the place of its mark. Raises BadRequest: a
    picture cannot be read; ValueError: the template has not one mark for each picture."""
    images = [opened(url) for url in urls]
    ids: list[list[int]] = processor(text=[text], images=images, add_special_tokens=False)["input_ids"]
    return list(ids[0])


def marked(content: Any, mark: str, where: str) -> list[JSON]:
    """The content of a chat message as templates of models with eyes want it: texts, and marks of pictures.
    Raises BadRequest: it has media of another kind."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    made: list[JSON] = []
    for part in parts:
        text = part.get("text") or part.get("refusal")
        if isinstance(text, str):
            made.append({"type": "text", "text": text.replace(mark, f"{mark[:1]} {mark[1:]}")})
        elif part.get("type") == "image_url":
            made.append({"type": "image"})
        elif text is not None or part.get("type") not in ("text", "refusal", "input_text", "output_text"):
            raise BadRequest(
                f"{where}: this model reads text and pictures, got a part of type {str(part.get('type'))[:40]!r}"
            )
    return made
