"""Values of fields that come from elsewhere: of any type, size and depth."""

from __future__ import annotations

import json
import math
import reprlib
from typing import Any

from gym_serve.types.errors import BadRequest

__all__ = ["json_text", "seconds", "shown"]

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 200


def json_text(value: Any, where: str) -> str:
    """``value`` as JSON text, spaced as models write it themselves; integers may be of any size.

    Raises:
        BadRequest: it has no JSON form, or is nested too deeply.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"{where}: this cannot be written as JSON: {error}") from None


def seconds(value: Any) -> float | None:
    """A moment as a finite number; None for anything else."""
    try:
        moment = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return None
    return moment if math.isfinite(moment) else None


def shown(value: Any) -> str:
    """A value as an error shows it: however large or deep it is, in a line or two."""
    return _REPR.repr(value)
