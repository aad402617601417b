"""Score the rollouts that come with NeMo Gym in a graph on Ray, and print the rewards as JSON.

Run by `test_nemo_gym_servers.py` in a venv with NeMo Gym: ``python host_nemo_gym_on_ray.py SERVER...``.
``speed_bench`` asks NeMo Gym's HTTP client, which reads NeMo Gym's config and has no service here: that is a
failure of each verdict, and the replica lives on.
"""

import json
import sys

from nemo_gym_servers import cases

from gym_serve import Gym
from gym_serve.types.errors import GymError


def main(names):
    servers = {name: {"type": "nemo_gym", "server": f"resources_servers.{name}.app"} for name in names}
    servers["speed_bench"] = {
        "type": "nemo_gym",
        "server": "resources_servers.speed_bench.app",
        "config": {"vllm_metrics_url": "no-url"},
    }
    rewards = {name: [] for name in names}
    with Gym.from_graph({"resources": servers}) as gym:
        for name in names:
            for _, row, response, then, _ in cases(name):
                if then is not None:
                    verdict = gym.call(name, "verify", {**row, "response": response})
                    rewards[name].append([then, verdict["reward"]])
        failures = []
        for _, row, response, _, _ in cases("speed_bench"):
            try:
                gym.call("speed_bench", "verify", {**row, "response": response})
            except GymError as error:
                failures.append([type(error).__name__, error.message])
        states = {name: health["state"] for name, health in gym.health().items()}
    print(json.dumps({"rewards": rewards, "failures": failures, "states": states}))


if __name__ == "__main__":
    main(sys.argv[1:])
