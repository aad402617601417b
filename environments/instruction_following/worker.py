"""What a worker of instruction_following does: check the instructions of a row on a text.

It runs in a process with a limit of CPU time, as some of lm-eval's patterns take quadratic time, and hold the
interpreter's lock meanwhile.
"""

from __future__ import annotations

from typing import Any, TypedDict

from gym_serve.environments.instruction_following.registry import follows, instruction_ids
from gym_serve.types.errors import InvalidRequest

__all__ = ["Checked", "warm_up", "work"]


class Checked(TypedDict):
    """What came of it."""

    followed: list[bool]
    """Whether the text follows each instruction."""
    invalid: str | None
    """Why no text could follow them; None if one could."""


def warm_up() -> None:
    """Import lm-eval, which takes some seconds."""
    instruction_ids()


def work(request: tuple[list[str], list[dict[str, Any] | None], str]) -> Checked:
    """Check instructions, with the arguments of each, on a text."""
    names, kwargs, text = request
    try:
        followed = [
            follows(name, arguments or {}, text) for name, arguments in zip(names, kwargs, strict=True)
        ]
    except InvalidRequest as error:
        return {"followed": [], "invalid": error.message}
    return {"followed": followed, "invalid": None}
