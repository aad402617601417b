"""Train a small model on `boxes.py` with TRL's GRPO: on two cores, without a GPU, in two minutes.

Where torch finds a GPU, the trainer and the engine share it.

    python examples/train_grpo.py [--seed 0] [--steps 50] [--resume] [--no-ray] [--output results/train]

The policy is an engine of the graph, which gets the trainer's weights before every step. The folder gets
`metrics.jsonl` (a line per step), `training.png`, and a checkpoint from which `--resume` goes on.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a core for the trainer, and one for the engine
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # TRL calls rollout_func experimental

import torch
from boxes import ROWS, make_policy
from report import Report
from transformers import PrinterCallback, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, GRPOTrainer

from gym_serve import Gym
from gym_serve.training.trl import dataset, rollout_func, rollout_reward


def graph_of(model: Path) -> dict[str, Any]:
    """The graph: the engine that is trained, the boxes, and the agent between them."""
    agent = {
        "type": "simple_agent",
        "model": "policy",
        "resources": "boxes",
        "inline": ["boxes"],
        "max_steps": 4,
    }
    policy = {"type": "hf_engine", "model": str(model), "weight_updates": True}
    if torch.cuda.is_available():
        policy |= {"device": "cuda", "num_gpus": 0.5}
    return {
        "models": {"policy": policy},
        "resources": {"boxes": {"type": "boxes:Boxes"}},
        "agents": {"agent": agent},
    }


def train(
    output: Path, *, seed: int = 0, steps: int = 50, resume: bool = False, ray: bool = True
) -> list[float]:
    """Train a model.

    Args:
        output: folder of everything that is written.
        seed: of the model and of the training.
        steps: optimizer steps in all.
        resume: go on from the last checkpoint in ``output``.
        ray: run the graph on a Ray; else in this process.

    Returns:
        the mean reward of each step.
    """
    model, checkpoints = output / "model", output / "checkpoints"
    last = get_last_checkpoint(str(checkpoints)) if resume and checkpoints.exists() else None
    if last is None:
        make_policy(model, seed=seed)
    config = GRPOConfig(
        output_dir=str(checkpoints),
        max_steps=steps,
        learning_rate=1e-3,
        num_generations=16,
        per_device_train_batch_size=64,  # rollouts per step: 16 of each of the four questions
        gradient_accumulation_steps=1,
        max_completion_length=16,
        beta=0.001,  # so that the distance from the first policy is known
        seed=seed,
        model_init_kwargs={"dtype": "float32"},
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        gradient_checkpointing=False,
        save_steps=10,
        save_total_limit=1,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )
    after = int(last.rpartition("-")[2]) if last else 0
    with Gym.from_graph(graph_of(model), name="train", ray=ray) as gym, Report(output, after) as report:
        trainer = GRPOTrainer(
            model=str(model),
            args=config,
            train_dataset=dataset(ROWS),
            rollout_func=rollout_func(gym, model="policy"),
            reward_funcs=rollout_reward,
            callbacks=[Steps(report)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=last)
        trainer.save_model(str(output / "trained"))
    return [step["reward"] for step in report.steps]


class Steps(TrainerCallback):
    """Passes what TRL logs on to a report."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **rest: Any) -> None:
        if "reward" not in logs:
            return  # the summary of the whole training
        rollouts, weights = logs["rollouts/seconds"], logs["rollouts/weights_seconds"]
        self._report.add(
            {
                "step": state.global_step,
                "reward": logs["reward"],
                "reward_error": 1.96 * logs["reward_std"] / args.per_device_train_batch_size**0.5,
                "length": logs["completions/mean_length"],
                "kl": logs.get("kl", float("nan")),
                "entropy": logs["entropy"],
                "failures": logs["rollouts/failed"],
                "staleness": logs["rollouts/staleness"],
                "seconds": {
                    "rollouts": rollouts,
                    "training": logs["step_time"] - rollouts - weights,
                    "weights": weights,
                },
            }
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the model and of the training")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps in all")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--no-ray", action="store_true", help="run the graph in this process")
    parser.add_argument(
        "--output", type=Path, default=Path("results/train"), help="folder of what is written"
    )
    given = parser.parse_args()
    disable_progress_bar()  # of the few tensors that are saved: it would disturb the table
    given.output.mkdir(parents=True, exist_ok=True)
    rewards = train(
        given.output, seed=given.seed, steps=given.steps, resume=given.resume, ray=not given.no_ray
    )
    print(f"mean reward {rewards[0]:.2f} -> {rewards[-1]:.2f}; {given.output}/metrics.jsonl, training.png")


if __name__ == "__main__":
    main()
