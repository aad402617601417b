"""`shapes`: the pictures show what the scene says, and the tool answers with a picture."""

import base64
import io
from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageColor

from gym_serve import Gym
from gym_serve.environments.shapes import Shapes
from gym_serve.environments.shapes.drawing import SIZE, Shape, drawn
from gym_serve.environments.shapes.rows import rows
from gym_serve.testing import TestClient

ROWS = list(rows("train", size=60))
SCENES = st.sampled_from([[Shape.model_validate(shape) for shape in row["scene"]] for row in ROWS])


def pixels(png: bytes) -> Image.Image:
    return Image.open(io.BytesIO(png)).convert("RGB")


@given(SCENES, st.integers(2, SIZE - 3), st.integers(2, SIZE - 3))
def test_the_picture_shows_what_the_verifier_measures(scene: list[Shape], x: int, y: int) -> None:
    around = [(x + dx, y + dy) for dx in (-2, 0, 2) for dy in (-2, 0, 2)]  # edges are a pixel wide
    covering = [[shape for shape in scene if shape.covers(*point)] for point in around]
    if any(shapes != covering[0] for shapes in covering):
        return
    assert len(covering[0]) <= 1
    colour = covering[0][0].colour if covering[0] else "white"
    assert pixels(drawn(scene)).getpixel((x, y)) == ImageColor.getrgb(colour)


def test_the_rows_are_the_same_again_and_have_all_tasks() -> None:
    assert list(rows("train", size=60)) == ROWS
    assert Counter(row["task"] for row in ROWS) == {"count": 20, "compare": 20, "locate": 20}
    scenes = {str(row["scene"]) for row in ROWS}
    assert not scenes & {str(row["scene"]) for row in rows("test", size=60)}


def test_a_click_is_answered_by_a_picture_with_a_mark() -> None:
    row = next(row for row in ROWS if row["task"] == "locate")
    target = row["scene"][row["target"]]
    with TestClient(Shapes()) as client, client.episode(row) as episode:
        text, shown = episode.call("click", x=target["x"], y=target["y"])
        assert text["text"] == f"Clicked at ({target['x']}, {target['y']})."
        picture = pixels(base64.b64decode(shown["image_url"].partition(",")[2]))
        assert picture.getpixel((target["x"], target["y"])) == ImageColor.getrgb("magenta")
        assert episode.verify().reward == 1.0


def test_an_agent_shows_the_model_the_picture() -> None:
    graph: dict[str, Any] = {
        "models": {"policy": {"type": "scripted_model", "script": [
            [{"type": "function_call", "call_id": "c1", "name": "click", "arguments": '{"x": 3, "y": 4}'}],
            [{"type": "message", "role": "assistant",
              "content": [{"type": "output_text", "text": "Done.", "annotations": []}]}],
        ]}},
        "resources": {"shapes": {"type": "shapes"}},
        "agents": {"shapes_agent": {"type": "simple_agent", "model": "policy", "resources": "shapes"}},
    }  # fmt: skip
    with Gym.from_graph(graph, ray=False) as gym:
        (rollout,) = gym.run(ROWS[2:3])
    (output,) = [i for i in rollout["response"]["output"] if i["type"] == "function_call_output"]
    assert [part["type"] for part in output["output"]] == ["input_text", "input_image"]
    assert (rollout.reward, rollout["reason"]) == (0.0, "the last click is on nothing")
