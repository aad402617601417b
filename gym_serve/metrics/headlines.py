"""Choosing the headline ("key") metrics of an environment out of all its metrics."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["select_key_metrics"]

_SPREAD_SUFFIXES = ("std_dev_across_runs", "std_err_across_runs", "avg_sample_std_dev")


def select_key_metrics(agent_metrics: Mapping[str, Any], patterns: Iterable[str]) -> dict[str, Any]:
    """The metrics whose keys match a pattern, in the order of the patterns.

    Args:
        agent_metrics: all metrics by key.
        patterns: keys in which ``*`` stands for any text and ``{k}`` for a number. Of the keys
            that match a pattern with ``{k}``, those with the highest k count: for each subset by
            itself where the pattern starts with ``*/``. Such a pattern never takes the spread of
            a figure, so ``pass@1[avg-of-{k}]/*`` is one figure for each score.
    """
    selected: dict[str, Any] = {}
    for pattern in patterns:
        expression = _compiled(pattern)
        matches = [match for key in agent_metrics if (match := expression.fullmatch(key))]
        if "{k}" in pattern:
            matches = _highest_k(match for match in matches if not match.string.endswith(_SPREAD_SUFFIXES))
        selected.update((match.string, agent_metrics[match.string]) for match in matches)
    return selected


def _compiled(pattern: str) -> re.Pattern[str]:
    expression = re.escape(pattern).replace(r"\{k\}", r"(?P<k>\d{1,9})")
    if expression.startswith(r"\*/"):
        expression = expression.replace(r"\*", r"(?P<subset>.+)", 1)
    return re.compile(expression.replace(r"\*", ".+"), re.DOTALL)


def _highest_k(matches: Iterable[re.Match[str]]) -> list[re.Match[str]]:
    highest: dict[str | None, list[re.Match[str]]] = {}
    for match in matches:
        best = highest.setdefault(match.groupdict().get("subset"), [])
        if best and int(match["k"]) > int(best[0]["k"]):
            best.clear()
        if not best or int(match["k"]) == int(best[0]["k"]):
            best.append(match)
    return [match for best in highest.values() for match in best]
