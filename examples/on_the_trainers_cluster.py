"""The environments run on the Ray cluster of the trainer, beside its actors.

    export RAY_AUTH_MODE=token; ray get-auth-token --generate
    ray start --head --resources '{"gpu_share": 2}'    # or: on every machine of the cluster
    python examples/on_the_trainers_cluster.py [ADDRESS]

One `gpu_share` stands for one GPU that can be shared. The trainer's actors and the graph's servers take
fractions of it, and Ray places all of them. With real GPUs, write `num_gpus` in both places.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean

import ray

from gym_serve import AsyncGym, Gym

NAME = "mcqa_beside_the_trainer"
ROWS = str(Path(__file__).parents[1] / "environments" / "mcqa" / "data" / "example.jsonl")
GRAPH = {
    "models": {
        "policy": {
            "type": "scripted_model",
            "environments": ["mcqa"],
            "num_replicas": 2,
            "ray_resources": {"gpu_share": 0.25},
        }
    },
    "resources": {"mcqa": {"type": "mcqa"}},
    "agents": {"mcqa_agent": {"type": "simple_agent", "model": "policy", "resources": "mcqa"}},
}


@ray.remote(num_cpus=0, resources={"gpu_share": 0.5}, max_restarts=-1, max_task_retries=-1)
class Trainer:
    """An asynchronous actor. When Ray restarts it, it takes over the graph of its run."""

    def __init__(self) -> None:
        self.gym = Gym.from_graph(GRAPH, name=NAME, owner="run-17", lease_s=600)

    async def step(self, number: int) -> float:
        groups = [group async for group in self.gym.groups(ROWS, size=4, limit=4, seed=number)]
        return mean(rollout.reward for group in groups for rollout in group.rollouts)

    async def stop(self) -> None:
        await AsyncGym.of(self.gym).shutdown()


@ray.remote(num_cpus=0)
class Evaluator:
    """A synchronous actor, which joins the graph and leaves it to its owner."""

    def __init__(self) -> None:
        self.gym = Gym.attach(NAME)

    def evaluate(self) -> float:
        return mean(rollout.reward for rollout in self.gym.run(ROWS))


@ray.remote(num_cpus=0)
def count(gym: Gym) -> int:
    """A task: a `Gym` may be an argument."""
    return len(gym.run(ROWS, limit=3))


def main() -> None:
    address = sys.argv[1] if len(sys.argv) > 1 else "auto"
    try:
        ray.init(address=address, log_to_driver=False)
    except ConnectionError:
        sys.exit(f"There is no Ray cluster at {address!r}. Start one as the first lines of this file say.")
    before = ray.available_resources().get("gpu_share", 0.0)
    if before < 1:
        sys.exit("The cluster has no `gpu_share`. Start it as the first lines of this file say.")
    trainer = Trainer.remote()
    for number in range(2):
        print(f"step {number}: mean reward {ray.get(trainer.step.remote(number)):.2f}")
    print(f"evaluation: mean reward {ray.get(Evaluator.remote().evaluate.remote()):.2f}")
    print(f"{ray.get(count.remote(Gym.attach(NAME)))} rollouts in a task")
    print(f"in use: {before - ray.available_resources()['gpu_share']:g} gpu_share")
    ray.get(trainer.stop.remote())


if __name__ == "__main__":
    main()
