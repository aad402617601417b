"""The table of endings: every way in which an episode can end, and what follows from it."""

from typing import Any

import pytest

from gym_serve.types import errors
from gym_serve.types.endings import (
    DEADLINES,
    FAILURES,
    Cause,
    Ending,
    ending,
    ending_of,
    failure_class,
    is_failure,
)
from gym_serve.types.errors import GymError, PolicyDeadline
from gym_serve.types.rows import failed_rollout

ROW: dict[str, Any] = {"responses_create_params": {"input": "?"}}
CLASSES = [
    cls
    for name in errors.__all__
    if isinstance(cls := getattr(errors, name), type) and cls.__module__ == errors.__name__
]


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("stage", [None, "seed", "model", "tool", "harness", "verify", "close", "episode"])
def test_who_ends_an_episode_and_who_reads_its_rollout_agree(cls: type[GymError], stage: str | None) -> None:
    error = cls("why", stage=stage) if cls is not errors.GraphError else errors.GraphError("why")
    error.stage = stage
    said = ending(error, "mask")
    read = ending_of(failed_rollout(ROW, error))
    assert read == said
    assert read.masked
    assert read.failed
    assert read.retried == error.retryable


@pytest.mark.parametrize(
    ("stage", "on_deadline", "counts", "graded"),
    [
        ("tool", "grade", "reward", True),
        ("tool", "zero", "zero", False),
        ("tool", "mask", "nothing", False),
        ("harness", "grade", "reward", True),
        ("episode", "grade", "reward", True),
        ("verify", "grade", "zero", False),  # there is nothing that could be graded
        ("verify", "mask", "nothing", False),
    ],
)
def test_a_policy_that_used_up_its_time(stage: str, on_deadline: Any, counts: str, graded: bool) -> None:
    found = ending(PolicyDeadline("late", stage=stage), on_deadline)
    assert (found.cause, found.counts, found.graded) == (Cause.DEADLINE, counts, graded)
    assert not found.retried
    assert found.stops_after is None


@pytest.mark.parametrize(
    ("keys", "cause", "kind"),
    [
        ({"reward": 1.0}, Cause.FINISHED, None),
        ({"reward": 0.0, "stopped_by": "tool_deadline"}, Cause.FINISHED, None),
        ({"reward": 1.0, "mask_sample": True}, Cause.WITHHELD, "masked"),
        ({"reward": 1.0, "instance_config": {"mask_sample": True}}, Cause.WITHHELD, "masked"),
        ({"_ng_failure_class": "judge_failed"}, Cause.MACHINE, "judge_failed"),  # NeMo Gym's
        ({"_ng_failure_class": "judge_failed", "_ng_failure_terminal": True}, Cause.ROW, "judge_failed"),
        ({"_ng_failure_class": "tool_timeout"}, Cause.MACHINE, "tool_timeout"),
        (
            {"_ng_failure_class": "tool_deadline", "_ng_failure_terminal": True},
            Cause.DEADLINE,
            "tool_deadline",
        ),
        ({"failure": {"kind": "unavailable"}}, Cause.MACHINE, "unavailable"),
        ({"failure": {}}, Cause.FINISHED, None),
        ({"_ng_failure_class": ["?"]}, Cause.MACHINE, "unknown"),
        ({"failure": "a text of the data set"}, Cause.FINISHED, None),
    ],
)
def test_the_rollouts_of_files_and_of_others(keys: dict[str, Any], cause: Cause, kind: str | None) -> None:
    assert ending_of(keys).cause is cause
    assert failure_class(keys) == kind
    assert is_failure(keys) == (kind not in (None, "masked"))


def test_nothing_that_is_the_policys_is_masked_or_retried_by_default() -> None:
    table: list[Ending] = [*FAILURES.values(), *DEADLINES.values()]
    own = [each for each in table if each.cause in (Cause.FINISHED, Cause.DEADLINE)]
    assert not any(each.retried for each in own)
    assert not DEADLINES["grade"].masked
    assert all(each.masked for each in FAILURES.values())
