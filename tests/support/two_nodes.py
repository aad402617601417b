"""A cluster of two nodes with Serve on it, and the scenarios that need one, one after the other on the same.

    python -m support.two_nodes FOLDER

Prints one JSON object: by the name of the scenario, what came of it. The files of `losses` are in the folder.
"""

from __future__ import annotations

import os
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

from gym_serve.cluster.starting import free_port

__all__ = ["BOXES", "TwoNodes", "two_nodes"]

BOXES = 16
"""How many the second node has room for."""


class TwoNodes:
    """The cluster. Each node has a ``gpu_share``; the second one, which can be lost, has ``second`` and
    ``boxes`` as well."""

    def __init__(self) -> None:
        # No dashboard: it is eleven processes.
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 4, "include_dashboard": False, "resources": {"gpu_share": 1}},
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
        self._second: Any = self._cluster.add_node(
            num_cpus=4, resources={"second": 1, "gpu_share": 1, "boxes": BOXES}
        )


@contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    """The cluster, joined by this process and with Serve, until the block ends.

    Its Ray folder is its own, as it would otherwise write its address where any Ray program looks for one.
    """
    with TemporaryDirectory(prefix="gs", dir="/tmp", ignore_cleanup_errors=True) as folder:
        os.environ["RAY_TMPDIR"] = folder
        os.environ["RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S"] = "1"  # as `losses.QUICK`, of the proxy
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
    from support import boxes_on_nodes, changes, losses
    from support.sandboxes import AVAILABLE

    found: dict[str, Any] = {}
    with two_nodes() as cluster:
        if AVAILABLE == "bubblewrap":
            found["boxes"] = boxes_on_nodes.run(cluster)
        found["changes"] = changes.run(cluster, sessions=60, pause=0.6, calls=3, seed=1)
        found["losses"] = losses.run(cluster, folder)
    print(orjson.dumps(found).decode(), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
