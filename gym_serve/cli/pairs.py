"""Options that are given as ``KEY=VALUE``, with values in YAML."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import typer

from gym_serve.graph.documents import parse_yaml
from gym_serve.types.errors import GraphError

__all__ = ["parse_pairs"]


def parse_pairs(pairs: Iterable[str], example: str) -> dict[str, Any]:
    """The values by key.

    Args:
        pairs: as given.
        example: a right one, e.g. ``--param temperature=0.7``.

    Raises:
        typer.BadParameter: one is no pair, or its value no YAML.
    """
    values = {}
    for pair in pairs:
        key, given, text = pair.partition("=")
        if not given or not key.strip():
            raise typer.BadParameter(f"write {example}, got {pair!r}")
        try:
            values[key.strip()] = parse_yaml(text)
        except GraphError:
            raise typer.BadParameter(f"{pair!r}: the value is no valid YAML; quote it") from None
    return values
