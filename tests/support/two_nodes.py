"""A cluster of two nodes with Serve on it, and the scenarios that need one, one after the other on the same.

    python -m support.two_nodes FOLDER

Prints one JSON object: by the name of the scenario, what came of it. The files of `losses` are in the folder.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
import ray
from ray import serve
from ray.cluster_utils import Cluster

from gym_serve.routing.starting import free_port

__all__ = ["TwoNodes", "two_nodes"]


class TwoNodes:
    """The cluster. Its second node alone has the resource ``second``, and can be lost."""

    def __init__(self) -> None:
        # No dashboard: it is eleven processes.
        self._cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False}
        )
        self._add_second()

    @property
    def address(self) -> str:
        """Of its GCS."""
        return str(self._cluster.address)

    def replace_second(self) -> None:
        """Kill the second node with everything on it, and start another one."""
        self._cluster.remove_node(self._second, allow_graceful=False)
        self._add_second()

    def shutdown(self) -> None:
        """End all of it."""
        self._cluster.shutdown()

    def _add_second(self) -> None:
        self._second: Any = self._cluster.add_node(num_cpus=4, resources={"second": 1})


@contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    """The cluster, joined by this process and with Serve, until the block ends.

    Its Ray folder is its own, as it would otherwise write its address where any Ray program looks for one.
    """
    with TemporaryDirectory(prefix="gs", dir="/tmp", ignore_cleanup_errors=True) as folder:
        os.environ["RAY_TMPDIR"] = folder
        yield from _joined()


def _joined() -> Iterator[TwoNodes]:
    cluster = TwoNodes()
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": free_port()})
        yield cluster
        serve.shutdown()
        ray.shutdown()
    finally:
        cluster.shutdown()


def main(folder: Path) -> None:
    from support import changes, chaos, losses

    found: dict[str, Any] = {}
    with two_nodes() as cluster:
        found["changes"] = changes.run(cluster, sessions=120, pause=1.0, calls=3, seed=1)
        found["losses"] = losses.run(cluster, folder)
        # `make chaos` takes another one each time. With this one the node is killed first: while another one
        # starts, so many rollouts may end on a slow machine that none are left for the last kills.
        generator = random.Random(6)
        found["chaos"] = chaos.run(cluster, generator, rollouts=600, kills=7, minutes=8.0)
    print(orjson.dumps(found).decode(), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
