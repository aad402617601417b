"""Scenes of shapes, and their pictures."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

SIZE = 224
"""Width and height of a picture, in pixels."""

Colour = Literal["red", "green", "blue", "orange", "purple", "black"]
Form = Literal["circle", "square", "triangle"]
_MARK = 6  # pixels from the middle of a mark to its ends


class Shape(BaseModel):
    """One shape. ``x``, ``y``: its middle, in pixels from the left and from the top; ``radius``: from there
    to the farthest point, in pixels."""

    model_config = ConfigDict(frozen=True)

    form: Form
    colour: Colour
    x: int = Field(ge=0, lt=SIZE)
    y: int = Field(ge=0, lt=SIZE)
    radius: int = Field(ge=1, lt=SIZE)

    @property
    def name(self) -> str:
        return f"{self.colour} {self.form}"

    @property
    def corners(self) -> list[tuple[float, float]]:
        """The corners of a square or a triangle, clockwise in the picture; none of a circle."""
        begin, count = {"circle": (0, 0), "square": (-135, 4), "triangle": (-90, 3)}[self.form]
        angles = (math.radians(begin + 360 * corner / count) for corner in range(count))
        return [(self.x + self.radius * math.cos(a), self.y + self.radius * math.sin(a)) for a in angles]

    def covers(self, x: float, y: float) -> bool:
        """Whether a point is in the shape."""
        corners = self.corners
        if not corners:
            return math.hypot(x - self.x, y - self.y) <= self.radius
        edges = zip(corners, corners[1:] + corners[:1], strict=True)
        return all((bx - ax) * (y - ay) - (by - ay) * (x - ax) >= 0 for (ax, ay), (bx, by) in edges)


def drawn(scene: Sequence[Shape], clicks: Iterable[tuple[int, int]] = ()) -> bytes:
    """The picture as a PNG file of `SIZE` x `SIZE` pixels, with a cross at each click."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIZE, SIZE), "white")
    draw = ImageDraw.Draw(image)
    for shape in scene:
        if shape.corners:
            draw.polygon(shape.corners, fill=shape.colour)
        else:
            draw.circle((shape.x, shape.y), shape.radius, fill=shape.colour)
    for x, y in clicks:
        for slope in (1, -1):
            ends = (x - _MARK, y - slope * _MARK, x + _MARK, y + slope * _MARK)
            draw.line(ends, fill="white", width=4)
            draw.line(ends, fill="magenta", width=2)
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()
