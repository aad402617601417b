"""Token counts. A count that a backend did not report is null, never zero: zero is a measurement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from gym_serve.types.requests import JSON

__all__ = ["chat_usage", "responses_usage", "usage_sum"]


def responses_usage(usage: Any) -> JSON | None:
    """Usage of a chat completion in Responses form; None without one."""
    if not isinstance(usage, dict) or not usage:
        return None
    prompt, completion = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    total = _count(usage.get("total_tokens"))
    cached = _detail(
        usage, "prompt_tokens_details", "cached_tokens", "cached_input_tokens", "cache_read_input_tokens"
    )
    reasoning = _detail(usage, "completion_tokens_details", "reasoning_tokens", "reasoning_output_tokens")
    return {
        "input_tokens": prompt or 0,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": completion or 0,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        # A provider's total may be accounted otherwise than by the sum.
        "total_tokens": (prompt or 0) + (completion or 0) if total is None else total,
    }


def chat_usage(usage: Any) -> JSON | None:
    """Usage of a Response in chat form; None without one."""
    if not isinstance(usage, dict) or not usage:
        return None
    return {
        "prompt_tokens": usage.get("input_tokens"),
        "completion_tokens": usage.get("output_tokens"),
        "total_tokens": usage.get("total_tokens"),
        "prompt_tokens_details": usage.get("input_tokens_details"),
        "completion_tokens_details": usage.get("output_tokens_details"),
    }


def usage_sum(usages: Iterable[Mapping[str, Any] | None]) -> JSON | None:
    """The sum of the Responses usages of several calls; None where none of them has one.

    A nested detail that is unknown (null or absent) in one of the summed usages is null in the sum.
    """
    known = [usage for usage in usages if usage]
    total: JSON = {}
    nested: JSON = {}
    for usage in known:
        for key, value in usage.items():
            if isinstance(value, dict):
                total[key] = nested[key] = None
            elif key not in nested:
                total[key] = total.get(key, 0) + (_count(value) or 0)
    for key in nested:
        details = [usage.get(key) for usage in known]
        total[key] = _sum_details([detail if isinstance(detail, dict) else {} for detail in details])
    return total if known else None


def _sum_details(details: list[JSON]) -> JSON:
    total: JSON = dict.fromkeys(chain.from_iterable(details), 0)
    for detail in details:
        for key, sum_so_far in total.items():
            count = _count(detail.get(key))
            total[key] = None if count is None or sum_so_far is None else sum_so_far + count
    return total


def _detail(usage: Mapping[str, Any], group: str, name: str, *aliases: str) -> int | None:
    """A nested count, or one of the names under which other backends send it at the top."""
    details = usage.get(group)
    nested = _count(details.get(name)) if isinstance(details, dict) else None
    if nested is not None:
        return nested
    for alias in (name, *aliases):
        if (count := _count(usage.get(alias))) is not None:
            return count
    return None


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None
