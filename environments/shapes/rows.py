"""Rows, the same for the same seed: ``python -m gym_serve.environments.shapes.rows > rows.jsonl``."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

import typer

from gym_serve.environments.shapes.drawing import SIZE, Colour, Form, Shape, drawn
from gym_serve.types.media import picture

Task = Literal["count", "compare", "locate"]
_FORMS, _COLOURS, _TASKS = get_args(Form), get_args(Colour), get_args(Task)
_RADII = (10, 32)  # pixels
_GAP = 4  # pixels between shapes at least
_BOXED = "Put your final answer, and nothing else, in \\boxed{}."


def rows(split: str = "test", *, size: int = 300, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Rows of all tasks in turn; those of ``train`` have other scenes than those of ``test``."""
    draw = random.Random(f"{split} {seed}")
    for number in range(size):
        task: Task = _TASKS[number % len(_TASKS)]
        asked = None
        while asked is None:
            scene = _scene(draw, draw.randint(3, 9))
            asked = _asked(task, scene, draw)
        question, goal = asked
        content = [picture(drawn(scene)), {"type": "input_text", "text": question}]
        yield {
            "responses_create_params": {"input": [{"role": "user", "content": content}]},
            "task": task,
            "scene": [shape.model_dump() for shape in scene],
            **goal,
            "agent_ref": {"type": "responses_api_agents", "name": "shapes_agent"},
        }


def _asked(task: Task, scene: list[Shape], draw: random.Random) -> tuple[str, dict[str, Any]] | None:
    """A question about a scene, and what its row says of the answer; None if there is no such question."""
    if task == "count":
        what = draw.choice([*(shape.form for shape in scene), *(shape.name for shape in scene), "red circle"])
        right = sum(what in (shape.form, shape.name) for shape in scene)
        return f"How many {what}s are in the picture? {_BOXED}", {"expected_answer": str(right)}
    single = [shape for shape in scene if sum(other.name == shape.name for other in scene) == 1]
    if task == "locate":
        if not single:
            return None
        target = draw.choice(single)
        question = f"Click on the {target.name}. The picture is {SIZE} pixels wide and high."
        return question, {"target": scene.index(target)}
    pairs = [  # of one form, so that there is one meaning of "larger"; and not too close to tell
        (one, other)
        for one in single
        for other in single
        if one.form == other.form and abs(one.radius - other.radius) >= _GAP
    ]
    if not pairs:
        return None
    one, other = draw.choice(pairs)
    larger = max(one, other, key=lambda shape: shape.radius)
    question = f"Which is larger, the {one.name} or the {other.name}? {_BOXED}"
    return question, {"expected_answer": larger.name}


def _scene(draw: random.Random, count: int) -> list[Shape]:
    scene: list[Shape] = []
    while len(scene) < count:
        radius = draw.randint(*_RADII)
        x, y = (draw.randint(radius, SIZE - 1 - radius) for _ in range(2))
        if all(math.hypot(x - s.x, y - s.y) >= radius + s.radius + _GAP for s in scene):
            form, colour = draw.choice(_FORMS), draw.choice(_COLOURS)
            scene.append(Shape(form=form, colour=colour, x=x, y=y, radius=radius))
    return scene


def _main(
    size: Annotated[int, typer.Option(min=1, help="Number of rows.")] = 300,
    seed: Annotated[int, typer.Option(help="Changes all rows.")] = 0,
    split: Annotated[str, typer.Option(help="train or test.")] = "train",
) -> None:
    """Write rows to the standard output."""
    for row in rows(split, size=size, seed=seed):
        typer.echo(json.dumps(row))


if __name__ == "__main__":
    typer.run(_main)
