"""Train SmolLM2-135M from its real weights with TRL's GRPO: two tasks, three seeds each.

    python examples/train_real.py [--output results/train-real]
    python examples/train_real.py --task swap --seed 0 [--steps 24]  # one training

The tasks are in `real_tasks.py`; no held-out row is trained on. Each training runs in a process of its own,
and has a folder, such as `swap-0`: `metrics.jsonl` (a line per step), `training.png`, `before.jsonl` and
`after.jsonl` (what the model said to the held-out rows) and `result.json`. Without `--task`, a training whose
result is there is not repeated, and beside the folders lie a picture of each task, and `result.json` with the
table that is printed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # TRL calls rollout_func experimental

import orjson
import torch
from real_tasks import ON_TWO_CORES, TASKS, rows
from report import Report, draw_seeds, read_metrics
from smollm2 import NAME, make_smollm2
from train_grpo import Steps
from transformers import PrinterCallback
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, GRPOTrainer

from gym_serve import Gym
from gym_serve.training.trl import dataset, rollout_func, rollout_reward
from gym_serve.training.weights import encoded

SEEDS = (0, 1, 2)
HELD_OUT, REPEATS = 128, 2
"""Held-out rows, and answers to each."""
TRAINED = 1024
"""Rows to train on."""
ON_GPU = torch.cuda.is_available()
STEPS = 60 if ON_GPU else 24
LAYERS = 10
"""Of the 30 layers, the last ones, which a processor trains: a step through all takes it twice as long."""
BATCH: dict[str, Any] = (
    {
        "per_device_train_batch_size": 128,
        "num_generations": 16,
        "steps_per_generation": 4,
        "learning_rate": 1e-5,
    }
    if ON_GPU
    else {
        "per_device_train_batch_size": 32,
        "num_generations": 8,
        "steps_per_generation": 1,
        "learning_rate": 5e-5,
    }
)
"""Rollouts of an optimizer step and of a question, and for how many steps the engine generates at a time."""


def graph_of(task: str, model: Path) -> dict[str, Any]:
    """The graph: the engine that is trained, on half of the GPU, and the verifier of the answers."""
    policy = {"type": "hf_engine", "model": str(model), "weight_updates": True, "max_ongoing_requests": 1024}
    policy |= {"device": "cuda", "num_gpus": 0.5, "max_batch": 512} if ON_GPU else {"dtype": "bfloat16"}
    agent = {"type": "single_turn_agent", "model": "policy", "resources": task, "inline": [task]}
    return {
        "models": {"policy": policy},
        "resources": {task: TASKS[task].resources},
        "agents": {"agent": {**agent, "max_ongoing_requests": 1024}},
    }


def held_out_reward(gym: Gym, held_out: list[dict[str, Any]], tokens: int, output: Path) -> float:
    """The mean reward, sampled as in the training; the rollouts are written to ``output``.

    Raises:
        RuntimeError: a rollout failed.
    """
    params = {"temperature": 1.0, "max_output_tokens": tokens}
    gym.collect(held_out, output, repeats=REPEATS, concurrency=512, params=params)
    rewards = [orjson.loads(line)["reward"] for line in output.read_bytes().splitlines()]
    if len(rewards) != HELD_OUT * REPEATS:
        raise RuntimeError(f"{HELD_OUT * REPEATS - len(rewards)} rollouts failed: see {output.parent}")
    return fmean(rewards)


def train(
    output: Path, model: Path, *, task: str, steps: int, seed: int, ray: bool = ON_GPU
) -> dict[str, Any]:
    """Train the model.

    Args:
        output: folder of everything that is written.
        model: folder of the model.
        task: of `TASKS`.
        steps: optimizer steps in all.
        seed: of the rows and of the training.
        ray: run the graph on a Ray; else in this process.

    Returns:
        what stands in `result.json`: ``before`` and ``after`` are mean rewards of the held-out rows;
        ``seconds`` and ``cpu_seconds`` (of this process) leave out the start of the graph.

    Raises:
        RuntimeError: a rollout of a held-out row failed.
    """
    every = rows(task, HELD_OUT + TRAINED, seed)
    held_out, trained = every[:HELD_OUT], every[HELD_OUT:]
    tokens = TASKS[task].tokens
    config = GRPOConfig(
        output_dir=str(output / "checkpoints"),
        max_steps=steps,
        lr_scheduler_type="constant",
        gradient_accumulation_steps=1,
        max_completion_length=tokens,
        beta=0.0,
        seed=seed,
        model_init_kwargs={"dtype": "float32"},
        use_cpu=not ON_GPU,
        bf16=not ON_GPU,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        **BATCH,
    )
    graph = graph_of(task, model)
    with Gym.from_graph(graph, name="train-real", ray=ray) as gym, Report(output) as report:
        begun, cpu_begun = time.monotonic(), time.process_time()
        before = held_out_reward(gym, held_out, tokens, output / "before.jsonl")
        trainer = GRPOTrainer(
            model=str(model),
            args=config,
            train_dataset=dataset(trained),
            rollout_func=rollout_func(gym, model="policy", concurrency=1024),
            reward_funcs=rollout_reward,
            callbacks=[Steps(report)],
        )
        trainer.remove_callback(PrinterCallback)
        if not ON_GPU:
            trainer.model.requires_grad_(False)
            trainer.model.model.layers[-LAYERS:].requires_grad_(True)
        trainer.train()
        state = trainer.accelerator.unwrap_model(trainer.model).state_dict()
        gym.policy.update_weights("policy", "trained", tensors=encoded(state.items()))
        after = held_out_reward(gym, held_out, tokens, output / "after.jsonl")
        seconds, cpu_seconds = time.monotonic() - begun, time.process_time() - cpu_begun
    result = {"model": NAME, "task": task, "seed": seed, "before": before, "after": after, "steps": steps}
    result |= {"seconds": seconds, "cpu_seconds": cpu_seconds}
    (output / "result.json").write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))
    return result


def train_all(output: Path, steps: int) -> list[dict[str, Any]]:
    """Train every task with every seed, each in a process of its own; the results."""
    results = []
    for task, seed in product(ON_TWO_CORES, SEEDS):
        folder = output / f"{task}-{seed}"
        if not (folder / "result.json").exists():
            words = ["--task", task, "--seed", str(seed), "--steps", str(steps)]
            subprocess.run([sys.executable, __file__, *words, "--output", str(output)], check=True)
        results.append(orjson.loads((folder / "result.json").read_bytes()))
    for task in ON_TWO_CORES:
        runs = [result for result in results if result["task"] == task]
        made = [read_metrics(output / f"{task}-{run['seed']}" / "metrics.jsonl") for run in runs]
        draw_seeds(runs, made, output / f"{task}.png")
    (output / "result.json").write_bytes(orjson.dumps(results, option=orjson.OPT_INDENT_2))
    return results


def show(results: list[dict[str, Any]]) -> None:
    """Print a table of trainings."""
    print("task     seed  before  after  of what was missing  steps  seconds  CPU seconds")
    for run in results:
        gained = (run["after"] - run["before"]) / (1 - run["before"]) if run["before"] < 1 else 0.0
        print(
            f"{run['task']:8} {run['seed']:4}  {run['before']:6.2f}  {run['after']:5.2f}  {gained:19.0%}  "
            f"{run['steps']:5}  {run['seconds']:7.0f}  {run['cpu_seconds']:11.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--task", choices=TASKS, help="train this one alone, with one seed")
    parser.add_argument("--seed", type=int, default=0, help="of the rows and of that training")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of a training")
    parser.add_argument(
        "--output", type=Path, default=Path("results/train-real"), help="folder of what is written"
    )
    given = parser.parse_args()
    disable_progress_bar()  # it would disturb the table
    model = make_smollm2(given.output / "model")
    if given.task is None:
        show(train_all(given.output, given.steps))
        return
    folder = given.output / f"{given.task}-{given.seed}"
    shutil.rmtree(folder, ignore_errors=True)  # of a training that was stopped
    folder.mkdir(parents=True)
    show([train(folder, model, task=given.task, steps=given.steps, seed=given.seed)])


if __name__ == "__main__":
    main()
