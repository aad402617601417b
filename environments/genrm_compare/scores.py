"""What a generative reward model says about two responses, read from its text."""

from __future__ import annotations

import math
from typing import NamedTuple

from gym_serve.judging import json_objects
from gym_serve.types.requests import JSON

__all__ = ["RANKING_MIDPOINT", "Scores", "parse_scores"]

RANKING_MIDPOINT = 3.5
"""Below it the first response is better, above it the second one."""


class Scores(NamedTuple):
    """The scores of a pair.

    Attributes:
        first, second: helpfulness of each response, 1 to 5; higher is better.
        ranking: 1 (the first is much better) to 6 (the second is much better).
    """

    first: float
    second: float
    ranking: float


def parse_scores(text: str, default: Scores) -> Scores | None:
    """The scores in ``text``: a JSON object with ``score_1``, ``score_2`` or ``ranking``.

    It may stand among prose, and within an object under ``overall``. The first one in a ``json`` code fence
    counts, else the last one.

    Args:
        text: the model's text.
        default: values of keys that are missing.

    Returns:
        the scores; None if there are none, or one is no finite number.
    """
    found = (_scores(value, default) for value in json_objects(text))
    return next((scores for scores in found if scores is not None), None)


def _scores(value: JSON, default: Scores) -> Scores | None:
    overall = value.get("overall")
    value = overall if isinstance(overall, dict) else value
    keys = ("score_1", "score_2", "ranking")
    if not any(key in value for key in keys):
        return None
    try:
        numbers = [float(value.get(key, missing)) for key, missing in zip(keys, default, strict=True)]
    except (TypeError, ValueError, OverflowError):
        return None
    return Scores(*numbers) if all(map(math.isfinite, numbers)) else None
