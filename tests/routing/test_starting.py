"""Ray's own failures to start get a second try, and are then told with the next step."""

from __future__ import annotations

import pytest

from gym_serve.routing.starting import try_twice
from gym_serve.types.errors import Unavailable

SLOW = RuntimeError("The current node timed out during startup.\nSome of the raylet failed.")


class Starting:
    """Fails with each of the errors in turn, then starts."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.done: list[str] = []

    def start(self) -> str:
        self.done.append("start")
        if self.errors:
            raise self.errors.pop(0)
        return "started"

    def run(self) -> str:
        return try_twice(
            "Ray", self.start, lambda: self.done.append("undo"), lambda error: isinstance(error, RuntimeError)
        )


def test_the_second_try_succeeds() -> None:
    starting = Starting(SLOW)
    assert starting.run() == "started"
    assert starting.done == ["start", "undo", "start"]


def test_two_failures_are_unavailable() -> None:
    starting = Starting(SLOW, SLOW)
    with pytest.raises(Unavailable) as caught:
        starting.run()
    assert caught.value.message.startswith(
        "Ray did not start, in two tries: RuntimeError: The current node timed out during startup. Some of "
        "the raylet failed. The machine may be too busy. Try again later"
    )
    assert starting.done == ["start", "undo", "start", "undo"]


def test_what_is_no_failure_of_ray_is_not_tried_again() -> None:
    starting = Starting(ValueError("no such option"))
    with pytest.raises(ValueError, match="no such option"):
        starting.run()
    assert starting.done == ["start"]
