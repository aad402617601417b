"""Rows of a table for `pytest.mark.parametrize`: what several of them share stands once."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["each"]

A = TypeVar("A")
B = TypeVar("B")


def each(outcome: B, *given: A) -> list[tuple[A, B]]:
    """A row for each of the given values, with the same outcome: ``*each(None, "", "no")``."""
    return [(one, outcome) for one in given]
