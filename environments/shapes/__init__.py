"""`Shapes`: questions about pictures that are drawn by rule. A model has to see to answer them.

A row has the scene as data, so the verifier needs no eyes: it counts, and it knows where each shape is. The
tool draws a mark where the model clicks, and shows the new picture.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator
from typing_extensions import Self

from gym_serve.environments.shapes.drawing import SIZE, Shape, drawn
from gym_serve.grading import last_box, not_in_the_box, plain_answer, replace_surrogates, same_text
from gym_serve.servers import ResourcesServer, Response, Verdict, tool
from gym_serve.types.media import picture

Pixels = Annotated[int, Field(ge=0, lt=SIZE)]
_MOST_CLICKS = 20


class ShapesVerdict(Verdict):
    """The reward, and what it was given for."""

    answer: str | None
    """What the model wrote in its last box; None for a row that wants a click, or if there is no box."""
    clicks: list[tuple[int, int]]
    """Where it clicked, in pixels from the left and from the top."""


class Shapes(ResourcesServer):
    """Pictures of coloured shapes: reward 1.0 for the right answer, or a last click on the right shape."""

    reverify_mode: ClassVar[Literal["unsupported"]] = "unsupported"
    requires: ClassVar[dict[str, str]] = {"PIL": "gym-serve[pictures]"}

    class Row(BaseModel):
        scene: list[Shape]
        """What the picture shows, from the back to the front; no shape covers another."""
        expected_answer: str | None = None
        """The right answer to a question: a number, or a colour and a shape."""
        target: int | None = Field(None, ge=0)
        """Number of the shape to click on, in ``scene``."""

        @model_validator(mode="after")
        def _has_one_goal(self) -> Self:
            if (self.expected_answer is None) == (self.target is None):
                raise ValueError("a row must have either `expected_answer` or `target`")
            if self.target is not None and self.target >= len(self.scene):
                raise ValueError(f"`target` must be below {len(self.scene)}, the number of shapes")
            return self

    class Session(BaseModel):
        clicks: list[tuple[int, int]] = []

    @tool
    async def click(self, x: Pixels, y: Pixels, row: Row, session: Session) -> list[dict[str, Any]]:
        """Click on the picture. The answer is the picture with a mark at each click; the last click counts.

        Args:
            x: Pixels from the left, 0 to 223.
            y: Pixels from the top, 0 to 223.
        """
        if len(session.clicks) >= _MOST_CLICKS:
            return [{"type": "input_text", "text": f"The click does not count: {_MOST_CLICKS} were made."}]
        session.clicks.append((x, y))
        return [
            {"type": "input_text", "text": f"Clicked at ({x}, {y})."},
            picture(drawn(row.scene, session.clicks)),
        ]

    async def verify(self, row: Row, response: Response, session: Session) -> ShapesVerdict:
        """Compare the last box with the answer, or look what is under the last click."""
        if row.target is not None:
            hits = [shape for shape in row.scene for click in session.clicks[-1:] if shape.covers(*click)]
            hit = hits[0] if hits else None
            right = hit == row.scene[row.target]
            what = "nothing" if hit is None else f"the {hit.name}"
            why = f"the last click is on {what}" if session.clicks else "there was no click"
            return ShapesVerdict(
                reward=float(right), reason=None if right else why, answer=None, clicks=session.clicks
            )
        assert row.expected_answer is not None
        text = response.last_text
        answer = last_box(text)
        right = answer is not None and same_text(
            row.expected_answer.casefold(), plain_answer(answer).casefold().removeprefix("the ")
        )
        shown = None if answer is None else replace_surrogates(answer)
        reason = None if right else not_in_the_box(row.expected_answer, shown, text)
        return ShapesVerdict(reward=float(right), reason=reason, answer=shown, clicks=session.clicks)
