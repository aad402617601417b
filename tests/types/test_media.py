"""Pictures in the answers of tools: what the model is shown as a picture, and what stays text."""

from typing import Any

import orjson
import pytest

from gym_serve.environments.shapes.drawing import drawn
from gym_serve.types.media import data_url, picture, pictures_in, shown_parts

PNG = picture(drawn([]))
TEXT = {"type": "input_text", "text": "Look:"}


@pytest.mark.parametrize(
    ("data", "kind"),
    [(b"\x89PNG...", "image/png"), (b"\xff\xd8\xff...", "image/jpeg"), (b"GIF89a", "image/gif"),
     (b"RIFF....WEBP", "image/webp"), (b"?", "application/octet-stream")],
)  # fmt: skip
def test_the_first_bytes_tell_the_kind(data: bytes, kind: str) -> None:
    assert data_url(data).startswith(f"data:{kind};base64,")


@pytest.mark.parametrize("parts", [[PNG], [TEXT, PNG], [PNG, TEXT, PNG]])
def test_parts_with_a_picture_are_shown(parts: list[dict[str, Any]]) -> None:
    assert shown_parts(orjson.dumps(parts)) == parts
    assert list(pictures_in(parts)) == [PNG["image_url"]] * parts.count(PNG)


@pytest.mark.parametrize(
    "answer",
    [
        [TEXT],
        PNG,
        "input_image",
        [PNG, "text"],
        [PNG, {"type": "output_text", "text": "x"}],
        [{**PNG, "image_url": "http://169.254.169.254/latest/meta-data"}],
        [{**PNG, "image_url": "file:///etc/passwd"}],
        [{**PNG, "image_url": "data:text/html;base64,PGI+"}],
        [{**PNG, "image_url": {"url": PNG["image_url"]}}],
        [{**PNG, "file_id": "file-1"}],
        [{"type": ["input_image"]}, PNG],
        [{"type": "input_text", "text": 1}, PNG],
    ],
)
def test_anything_else_is_text(answer: Any) -> None:
    """It may repeat what a model wrote, and an endpoint would fetch an address."""
    assert shown_parts(orjson.dumps(answer)) is None


def test_what_is_no_json_is_text() -> None:
    assert shown_parts(b'[{"type": "input_image"') is None


def test_pictures_in_the_form_of_a_chat() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}, {"type": "text"}]
    assert list(pictures_in(parts)) == ["data:image/png;base64,AA=="]
    assert list(pictures_in("text")) == []
