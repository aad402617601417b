"""`NodeLogs`: reads the logs of servers on all machines of the connected cluster.

Each machine reads its own files, by a task of Ray; that of this process needs none. No dashboard is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gym_serve.cluster.serve_compat import live_nodes, logs_directory, node_address
from gym_serve.observe.logs import Level, Record, read_log


class NodeLogs:
    """The logs of some servers; each `read` goes on where the last one ended."""

    def __init__(
        self, servers: list[tuple[str, str]], *, level: Level = "debug", rollout: str | None = None
    ) -> None:
        self.found = False
        self._servers = servers
        self._only: dict[str, Any] = {"level": level, "rollout": rollout}
        self._positions: dict[str, dict[str, int]] = {}

    def read(self, last: int | None = None) -> list[Record]:
        here = node_address()
        requests: dict[str, Any] = {}
        answers: dict[str, tuple[list[Record], dict[str, int]]] = {}
        for address, node in {n["NodeManagerAddress"]: n["NodeID"] for n in live_nodes()}.items():
            arguments = (self._servers, self._positions.get(address, {}), {**self._only, "last": last})
            if address == here:
                answers[address] = _read(*arguments)
            else:
                there = NodeAffinitySchedulingStrategy(node, soft=False)
                task = ray.remote(num_cpus=0)(_read).options(scheduling_strategy=there)
                requests[address] = task.remote(*arguments)
        for address, answer in requests.items():
            try:
                answers[address] = ray.get(answer)
            except ray.exceptions.RayError:  # a node that is going takes its files along
                continue
        records_found: list[Record] = []
        for address, (records, positions) in answers.items():
            self._positions[address] = positions
            self.found = self.found or bool(positions)
            records_found += records
        return sorted(records_found, key=lambda record: record.time)


def _read(
    servers: list[tuple[str, str]], positions: Mapping[str, int], only: Mapping[str, Any]
) -> tuple[list[Record], dict[str, int]]:
    return read_log(logs_directory() / "serve", servers, positions, **only)
