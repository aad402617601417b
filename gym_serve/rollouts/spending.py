"""What a run uses and costs, and `Budget`, its limit.

Every attempt counts, failed ones and those of an earlier process of the same run included; of one that is
cancelled (a straggler of a group) nothing is known. When a budget is spent nothing more is started, and what
runs may end: so a run can cost a little more than its budget, by at most what was in flight. It can be
resumed with a higher one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gym_serve.servers.usage import USAGE_FIELD, Prices, UsageMeter
from gym_serve.types.errors import InvalidRequest
from gym_serve.types.requests import JSON

__all__ = ["Budget", "Spending", "Spent", "prices_of"]

_UNKNOWN = "-"
"""The model server of rollouts that do not tell theirs: of agents that are no `AgentServer`."""


@dataclass(frozen=True)
class Budget:
    """The limits of a run; None for no limit.

    Attributes:
        max_cost: in the currency of the models' ``prices``.
        max_tokens: of prompts and generations together, those of judges included.
    """

    max_cost: float | None = None
    max_tokens: int | None = None

    def check(self, prices: Mapping[str, Prices]) -> None:
        """Check that the limits can be kept.

        Raises:
            InvalidRequest: a limit is no positive number, or no model of the graph has prices.
        """
        if any(limit is not None and not limit > 0 for limit in (self.max_cost, self.max_tokens)):
            raise InvalidRequest("`max_cost` and `max_tokens` must be positive numbers")
        if self.max_cost is not None and not prices:
            raise InvalidRequest("max_cost: no model of the graph has prices; set models.<name>.prices")


@dataclass(frozen=True)
class Spent:
    """What a run has used so far.

    Attributes:
        usage: counts by stage and model server; see `gym_serve.servers.usage`.
        tokens: of prompts and generations together.
        cost: of the models that have prices; None if none has.
        costs: the same, by stage and model server.
    """

    usage: JSON
    tokens: int = 0
    cost: float | None = None
    costs: Mapping[tuple[str, str], float] | None = None

    def rows(self) -> Iterator[tuple[str, str, Mapping[str, int], float | None]]:
        """Stage, model server, counts and cost of each."""
        for stage, servers in self.usage.items():
            for server, counts in servers.items():
                yield stage, server, counts, (self.costs or {}).get((stage, server))


class Spending:
    """Counts what a run uses.

    Args:
        prices: by model server.
        budget: its limit.
    """

    def __init__(self, prices: Mapping[str, Prices] | None = None, budget: Budget | None = None) -> None:
        self._prices = prices or {}
        self._budget = budget or Budget()
        self._meter = UsageMeter()
        self._tokens = 0
        self._cost = 0.0

    def add(self, record: JSON) -> None:
        """Count an attempt: a rollout, or anything else that tells its ``model_usage``."""
        attempt = UsageMeter()
        attempt.merge(record.get(USAGE_FIELD))
        response = record.get("response")
        if USAGE_FIELD not in record and isinstance(response, dict) and response.get("usage"):
            attempt.record("model", _UNKNOWN, response["usage"])
        for _, server, counts in attempt:
            self._tokens += counts["input_tokens"] + counts["output_tokens"]
            if server in self._prices:
                self._cost += self._prices[server].cost(counts)
        self._meter.merge(attempt.to_json())

    @property
    def exhausted(self) -> str | None:
        """Which limit is reached, in words; None as long as none is."""
        budget = self._budget
        if budget.max_cost is not None and self._cost >= budget.max_cost:
            return f"it has cost {self._cost:.4f} of at most {budget.max_cost:g}"
        if budget.max_tokens is not None and self._tokens >= budget.max_tokens:
            return f"it has used {self._tokens:,} of at most {budget.max_tokens:,} tokens"
        return None

    def spent(self) -> Spent:
        """What was used so far."""
        costs = {
            (stage, server): self._prices[server].cost(counts)
            for stage, server, counts in self._meter
            if server in self._prices
        }
        return Spent(self._meter.to_json(), self._tokens, self._cost if self._prices else None, costs)


def prices_of(graph: Mapping[str, Any]) -> dict[str, Prices]:
    """The prices of a graph's models, by server.

    Args:
        graph: the graph as ``/graph`` shows it.
    """
    models = graph.get("models") or {}
    return {name: Prices(**model["prices"]) for name, model in models.items() if model.get("prices")}
