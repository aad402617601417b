"""A processor for `Letters`, with what is used of one of ``transformers``, and a bell that is seen."""

from __future__ import annotations

from typing import Any

from gym_serve import tool
from gym_serve.environments.shapes.drawing import Colour, Shape, drawn
from gym_serve.types.media import picture
from support.bells import Bell, bell_graph
from support.letters import Letters

MARK, SEEN = "<picture>", 8  # what stands for a picture in a text; the token that stands for a part of one
_PATCH = 56  # pixels of a picture's side that make one token's


def _circle(colour: Colour) -> dict[str, Any]:
    return picture(drawn([Shape(form="circle", colour=colour, x=50, y=60, radius=20)]))


PROMPT, SHOWN = _circle("red"), _circle("blue")
"""Pictures of the prompt and of the tool; they have the same size."""
WIDTH = (224 // _PATCH) ** 2
"""Tokens of each."""


class Eyes:
    """A processor. The tokens of a picture stand in the place of its mark."""

    image_token = MARK

    def apply_chat_template(self, conversation: list[Any], **arguments: Any) -> str:
        plain = [{**m, "content": "".join(map(_marked, m["content"]))} for m in conversation]
        return Letters().apply_chat_template(plain, **arguments)

    def __call__(self, text: list[str], images: list[Any], add_special_tokens: bool = True) -> dict[str, Any]:
        one = "\x01"
        mark, ids = Letters.ids(one)[0], list[int]()
        left = list(images)
        for token in Letters()(text[0].replace(MARK, one))["input_ids"]:
            ids += _seen(left.pop(0)) if token == mark and left else [token]
        if left or ids.count(mark):
            raise ValueError(f"{ids.count(mark)} marks and {len(left)} pictures are left")
        return {"input_ids": [ids]}

    def image_processor(self, images: list[Any], return_tensors: str) -> dict[str, Any]:
        grid = [[1, image.height // _PATCH, image.width // _PATCH] for image in images]
        return {"pixel_values": [image.getpixel((50, 60)) for image in images], "image_grid_thw": grid}


def _marked(part: dict[str, Any]) -> str:
    return MARK if part["type"] == "image" else str(part["text"])


def _seen(image: Any) -> list[int]:
    return [SEEN] * ((image.width // _PATCH) * (image.height // _PATCH))


class SeenBell(Bell):
    """A bell that is shown when it rings."""

    @tool
    async def ring(self, times: int) -> list[dict[str, Any]]:
        """Ring.

        Args:
            times: how often.
        """
        return [{"type": "input_text", "text": "ding " * times}, SHOWN]


def seen_graph() -> dict[str, Any]:
    return {**bell_graph(), "resources": {"bell": {"type": SeenBell}}}


def seen_row(text: str = "ring", *more: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": [PROMPT, {"type": "input_text", "text": text}, *more]}]}
