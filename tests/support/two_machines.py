"""Two Ray nodes that share no /tmp, as on two machines, and what `gym-serve logs` finds on both.

    python -m support.two_machines FOLDER

FOLDER becomes the /tmp of the second node, in a mount namespace. Prints one JSON object: the rollout's id,
the logs of the policy on this node, and the lines that ``--rollout`` and ``--follow`` have printed.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from gym_serve import Gym
from gym_serve.cluster.serve_compat import logs_directory
from gym_serve.cluster.starting import free_port

BIN = Path(sys.executable).parent
ROWS = "environments/simple_weather/data/example.jsonl"
HERE, THERE = {"ray_resources": {"here": 0.1}}, {"ray_resources": {"there": 0.1}}
GRAPH: dict[str, Any] = {
    "logs": {"access": True},
    "models": {"policy": {"type": "scripted_model", **THERE}},
    "resources": {"weather": {"type": "simple_weather", **HERE}},
    "agents": {"weather_agent": {"type": "simple_agent", "model": "policy", "resources": "weather", **HERE}},
}


@contextmanager
def two_machines(folder: str, hidden: str | None = None, client_port: int = 10001) -> Iterator[str]:
    """The address of their cluster.

    Args:
        folder: becomes the /tmp of the second one.
        client_port: where the first one listens for Ray Client.
        hidden: a folder of this machine that the first one does not see either; it finds ``folder`` there.
    """
    address = f"127.0.0.1:{free_port()}"
    common = [str(BIN / "ray"), "start", "--block", "--num-cpus=4"]
    head = ["--head", f"--port={address.partition(':')[2]}", "--include-dashboard=false"]
    head.append(f"--ray-client-server-port={client_port}")
    nodes = [
        [*common, *head, "--node-ip-address=127.0.0.1", '--resources={"here": 1}'],
        [*common, f"--address={address}", "--node-ip-address=127.0.0.2", '--resources={"there": 1}'],
    ]
    if hidden is not None:
        nodes[0] = [
            "unshare",
            "-m",
            "bash",
            "-c",
            'mount --bind "$0" "$1"; exec "${@:2}"',
            folder,
            hidden,
            *nodes[0],
        ]
    nodes[1] = ["unshare", "-m", "bash", "-c", 'mount --bind "$0" /tmp; exec "$@"', folder, *nodes[1]]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for node in nodes:
            started.append(subprocess.Popen(node, stdout=sys.stderr))
            _join(address, len(started))
        yield address
    finally:
        ray.shutdown()
        for process in reversed(started):
            process.terminate()
            process.wait()


def _join(address: str, nodes: int) -> None:
    """Join the cluster, and wait until it has so many nodes."""
    ends = time.monotonic() + 120
    while True:
        try:
            ray.init(address, log_to_driver=False, ignore_reinit_error=True)
            if sum(node["Alive"] for node in ray.nodes()) == nodes:
                return
        except (ConnectionError, RuntimeError):
            if time.monotonic() > ends:
                raise
        if time.monotonic() > ends:
            raise TimeoutError(f"the cluster has not got {nodes} nodes")
        time.sleep(0.5)


def main() -> None:
    with two_machines(sys.argv[1]) as address, Gym.from_graph(GRAPH, name="apart") as gym:
        logs = [str(BIN / "gym-serve"), "logs", "--address", address]
        with subprocess.Popen([*logs, "--follow"], stdout=subprocess.PIPE, text=True) as following:
            assert following.stdout is not None
            [rollout] = gym.run(ROWS, limit=1)
            followed = []
            for line in following.stdout:
                followed.append(line)
                if " policy v1/responses" in "".join(followed) and " weather_agent run" in "".join(followed):
                    break
            following.send_signal(signal.SIGINT)
        id = str(rollout["_ng_rollout_id"])
        found = subprocess.run([*logs, "--rollout", id], capture_output=True, text=True, check=True)
        print(
            json.dumps(
                {
                    "rollout": id,
                    "here": [file.name for file in logs_directory().glob("serve/replica_apart_policy_*")],
                    "found": found.stdout.splitlines(),
                    "followed": followed,
                }
            )
        )


if __name__ == "__main__":
    main()
