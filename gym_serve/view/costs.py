"""What the rollouts of a run have cost, where prices are known.

`collect` writes the prices of the graph's models into the header of a run; ``gym-serve view --price`` has
those of other models, or others. A model without a price has no cost, which is said and never shown as zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from pydantic import ValidationError

from gym_serve.rollouts.journal import Outputs
from gym_serve.servers.usage import Prices
from gym_serve.types.errors import InvalidRequest
from gym_serve.view.facts import Usage
from gym_serve.view.runs import Reading
from gym_serve.view.sources import RunFiles, open_regular
from gym_serve.view.tables import MOST_MODELS, usage_columns

_LARGEST_HEADER = 16 << 20  # bytes


def parse_price(text: str) -> tuple[str, Prices]:
    """A model server and its prices per million tokens, of ``MODEL=INPUT/OUTPUT[/CACHED]``. Raises
    InvalidRequest: it is something else."""
    name, _, price = text.rpartition("=")
    try:
        numbers = [float(part) for part in price.split("/")]
        output, *cached = numbers[1:]
        if not name or len(cached) > 1:
            raise ValueError
        prices = Prices(input=numbers[0], output=output, cached_input=cached[0] if cached else None)
    except ValueError:  # pydantic's, too
        raise InvalidRequest(
            f"a price must be MODEL=INPUT/OUTPUT or MODEL=INPUT/OUTPUT/CACHED, per million tokens,"
            f" got {text!r}"
        ) from None
    return name, prices


def recorded_prices(files: RunFiles) -> dict[str, Prices]:
    """The prices in the header of a run; none if there is no header, or no price in it."""
    path = Outputs.of(files.main).header
    try:
        if path.resolve().parent != files.main.parent or path.stat().st_size > _LARGEST_HEADER:
            return {}
        with open(open_regular(path.resolve()), "rb") as file:
            found = orjson.loads(file.read())["prices"]
        return {str(name): Prices.model_validate(prices) for name, prices in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ValidationError):
        return {}


def costs_of(reading: Reading, where: str, prices: Mapping[str, Prices]) -> dict[str, Any] | None:
    """What rollouts have cost, judges included; None if no price of a model that they used is known."""
    models = reading.models
    if not models or len(models) >= MOST_MODELS or not prices:
        return None
    sums = ", ".join(f"total({name})" for number in models.values() for name in usage_columns(number))
    rows = reading.sql(f"SELECT {sums} FROM rollouts WHERE {where}")
    counts = iter(rows[0] if rows else ())
    used = {name: {key: int(next(counts)) for key in Usage._fields} for name in models}
    used = {name: usage for name, usage in used.items() if any(usage.values())}
    costs = {name: prices[name].cost(usage) for name, usage in used.items() if name in prices}
    if not costs:
        return None
    return {
        "total": sum(costs.values()),
        "models": costs,
        "unpriced": [name for name in used if name not in prices],
        "unreported": sum(usage["unreported"] for usage in used.values()),
    }
