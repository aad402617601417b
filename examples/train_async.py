"""Train the same model while its rollouts run, and compare: GRPO in a loop of one's own, with `gym.stream`.

    python examples/train_async.py [--seed 0] [--steps 40] [--output results/train_async]

It trains twice from the same model: with ``max_staleness=0``, where the trainer waits for the rollouts of
its newest weights, and with ``max_staleness=2``, where they run meanwhile. A look into a box takes 0.3 s on
average here, exponentially distributed, so a few slow episodes hold up a batch: that is what it saves.
"""

from __future__ import annotations

import argparse
import os
import time
from itertools import chain, repeat
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a core for the trainer, and one for the engine

import torch
from boxes import ROWS, make_policy
from report import Report
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from gym_serve import Gym
from gym_serve.training import TrainingSample, collate, samples
from gym_serve.training.weights import encoded

GROUPS, SIZE = 4, 16
"""A batch: groups, and the rollouts of each."""


def train(output: Path, *, max_staleness: int, seed: int = 0, steps: int = 40, delay: float = 0.3) -> Report:
    """Train a model.

    Args:
        output: folder of what is written; it has the model.
        max_staleness: how many updates of the weights old a group may be.
        seed: of the training.
        steps: updates of the weights.
        delay: mean seconds that a look into a box takes.
    """
    torch.manual_seed(seed)
    start = output.parent / "model"
    policy, first = (AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32) for _ in range(2))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)
    rows = chain.from_iterable(repeat(ROWS))
    options: dict[str, Any] = {"params": {"temperature": 1.0, "max_output_tokens": 16}}
    options["concurrency"] = (max_staleness + 1) * GROUPS * SIZE
    output.mkdir(parents=True, exist_ok=True)
    with (
        Gym.from_graph(_graph(start, delay), ray=False) as gym,
        Report(output) as report,
        gym.stream(rows, size=SIZE, max_staleness=max_staleness, batch=GROUPS, **options) as stream,
    ):
        for step in range(1, steps + 1):
            begun = time.monotonic()
            taken = []
            while sum(group.usable for group in taken) < GROUPS:
                taken.append(next(stream))
            usable = [group for group in taken if group.usable]
            made = time.monotonic()
            batch = [sample for group in usable for rollout in group.rollouts for sample in samples(rollout)]
            kl, entropy = _learn(policy, first, optimizer, batch)
            learned = time.monotonic()
            gym.policy.update_weights("policy", str(step), tensors=encoded(policy.state_dict().items()))
            rewards = [float(rollout["reward"]) for group in usable for rollout in group.rollouts]
            report.add(
                {
                    "step": step,
                    "reward": fmean(rewards),
                    "reward_error": 1.96 * stdev(rewards) / len(rewards) ** 0.5,
                    "length": fmean(sum(sample.loss_mask) for sample in batch),
                    "kl": kl,
                    "entropy": entropy,
                    "failures": sum(len(group.failures) for group in taken),
                    "staleness": fmean(group.staleness or 0 for group in usable),
                    "seconds": {
                        "rollouts": made - begun,
                        "training": learned - made,
                        "weights": time.monotonic() - learned,
                    },
                }
            )
    return report


def _graph(model: Path, delay: float) -> dict[str, Any]:
    agent = {"type": "simple_agent", "model": "policy", "resources": "boxes", "max_steps": 4}
    return {
        "models": {"policy": {"type": "hf_engine", "model": str(model), "weight_updates": True}},
        "resources": {"boxes": {"type": "boxes:Boxes", "delay": delay}},
        "agents": {"agent": agent},
    }


def _learn(policy: Any, first: Any, optimizer: Any, batch: list[TrainingSample]) -> tuple[float, float]:
    """A step of GRPO, whose ratio is to the policy that wrote each token: that is what allows staleness.

    Returns:
        KL divergence to the first policy, and entropy: nats per token.
    """
    arrays = collate(batch)
    mask = arrays["loss_mask"]

    def logprobs(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        positions = (arrays["attention_mask"].cumsum(1) - 1).clamp(min=0)
        given = {"attention_mask": arrays["attention_mask"], "position_ids": positions}
        logits = model(arrays["input_ids"], **given).logits[:, -mask.shape[1] - 1 : -1]
        every = logits.log_softmax(-1)
        entropy = -(every.exp() * every).sum(-1)
        return every.gather(2, arrays["response_ids"][..., None])[..., 0], entropy

    def mean(values: torch.Tensor) -> torch.Tensor:
        return (values * mask).sum() / mask.sum()

    now, entropy = logprobs(policy)
    ratio = (now - arrays["logprobs"]).exp()
    advantages = arrays["advantages"][:, None]
    loss = -mean(torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        apart = logprobs(first)[0] - now
        return float(mean(apart.exp() - apart - 1)), float(mean(entropy))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the model and of the training")
    parser.add_argument("--steps", type=int, default=40, help="updates of the weights")
    parser.add_argument(
        "--output", type=Path, default=Path("results/train_async"), help="folder of what is written"
    )
    given = parser.parse_args()
    disable_progress_bar()  # of the few tensors that are loaded: it would disturb the table
    make_policy(given.output / "model", seed=given.seed)
    seconds = {}
    for k, name in ((0, "synchronous"), (2, "asynchronous")):
        report = train(given.output / name, max_staleness=k, seed=given.seed, steps=given.steps)
        seconds[name] = sum(sum(step["seconds"].values()) for step in report.steps)
        last = report.steps[-5:]
        print(
            f"{name}, max_staleness={k}: {seconds[name]:.0f} s for {given.steps} steps, "
            f"mean reward {report.steps[0]['reward']:.2f} -> {fmean(step['reward'] for step in last):.2f}, "
            f"staleness {fmean(step['staleness'] for step in report.steps):.1f}, {_until(report, 0.8)}"
        )
    times = seconds["synchronous"] / seconds["asynchronous"]
    print(f"steps of the asynchronous training are {times:.1f} times as fast")


def _until(report: Report, reward: float) -> str:
    """When the mean of three steps reached a reward: a step on older rollouts may teach less."""
    passed = 0.0
    for at, step in enumerate(report.steps):
        passed += sum(step["seconds"].values())
        if at >= 2 and fmean(last["reward"] for last in report.steps[at - 2 : at + 1]) >= reward:
            return f"{reward} after {passed:.0f} s"
    return f"{reward} not reached"


if __name__ == "__main__":
    main()
