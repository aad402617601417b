"""Train SmolLM2-135M from its real weights with TRL's GRPO, on a GPU, in some minutes.

    python examples/train_real.py [--steps 160] [--seed 0] [--engine hf_engine] [--output results/train-real]

The task is one that the model begins to solve: which of two numbers is larger? Two examples in the prompt
show the form of an answer, and only the number itself is right. The rows of the training and the held-out
rows have no pair of numbers in common. The folder gets `metrics.jsonl` (a line per step), `training.png`, the
trained model, and `result.json`: the mean reward of the held-out rows before and after.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # TRL calls rollout_func experimental

import orjson
import torch
from report import Report
from smollm2 import NAME, make_smollm2
from train_grpo import Steps
from transformers import PrinterCallback
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, GRPOTrainer

from gym_serve import Gym
from gym_serve.training.trl import dataset, rollout_func, rollout_reward
from gym_serve.training.weights import encoded

HELD_OUT, REPEATS = 128, 4
"""Held-out rows, and answers to each."""
ANSWER = 8
"""Most tokens of an answer."""
_SHOWN = (("305", "411"), ("87", "9"))


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows with different pairs of numbers; the same seed gives the same rows."""
    draw = random.Random(seed)
    pairs: set[frozenset[str]] = {frozenset(pair) for pair in _SHOWN}
    made = []
    while len(made) < count:
        pair = (str(draw.randint(1, 999)), str(draw.randint(1, 999)))
        if len(set(pair)) == 2 and frozenset(pair) not in pairs:
            pairs.add(frozenset(pair))
            made.append(_row(pair))
    return made


def _row(pair: tuple[str, str]) -> dict[str, Any]:
    shown = [message for example in _SHOWN for message in (_question(example), _answer(example))]
    return {
        "responses_create_params": {"input": [*shown, _question(pair)]},
        "expected_answer": max(pair, key=int),
        "extraction_mode": "full_response",
        "case_sensitive": True,  # to the letter: a number next to the right one is wrong
    }


def _question(pair: tuple[str, str]) -> dict[str, str]:
    return {"role": "user", "content": f"Which number is larger, {pair[0]} or {pair[1]}?"}


def _answer(pair: tuple[str, str]) -> dict[str, str]:
    return {"role": "assistant", "content": max(pair, key=int)}


def graph_of(model: Path, engine: str) -> dict[str, Any]:
    """The graph: the engine that is trained, on half of the GPU, and the verifier of the answers."""
    policy = {"type": engine, "model": str(model), "weight_updates": True, "max_ongoing_requests": 1024}
    if torch.cuda.is_available():
        policy["num_gpus"] = 0.5
    if engine == "hf_engine":
        policy |= {"device": "cuda" if torch.cuda.is_available() else "cpu", "max_batch": 512}
    else:
        policy["engine_args"] = {"max_model_len": 1024, "gpu_memory_utilization": 0.3, "dtype": "float32"}
    agent = {"type": "single_turn_agent", "model": "policy", "resources": "numbers", "inline": ["numbers"]}
    return {
        "models": {"policy": policy},
        "resources": {"numbers": {"type": "string_match"}},
        "agents": {"agent": {**agent, "max_ongoing_requests": 1024}},
    }


def held_out_reward(gym: Gym, held_out: list[dict[str, Any]]) -> float:
    """The mean reward, sampled as in the training.

    Raises:
        RuntimeError: a rollout failed.
    """
    params = {"temperature": 1.0, "max_output_tokens": ANSWER}
    rollouts = gym.run(held_out, repeats=REPEATS, concurrency=512, params=params)
    failed = [rollout.failure for rollout in rollouts if rollout.failure is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} rollouts failed; the first: {failed[0]}")
    return fmean(rollout.reward or 0.0 for rollout in rollouts)


def train(
    output: Path, *, steps: int, seed: int = 0, engine: str = "hf_engine", batch: int = 128, ray: bool = True
) -> dict[str, Any]:
    """Train the model.

    Args:
        output: folder of everything that is written.
        steps: optimizer steps in all; the engine generates for four of them at a time.
        seed: of the rows and of the training.
        engine: ``hf_engine`` or ``vllm_engine``.
        batch: rollouts of an optimizer step, 16 of each question.
        ray: run the graph on a Ray; else in this process.

    Returns:
        ``before`` and ``after`` (mean rewards of the held-out rows), ``steps``, and ``seconds`` (without the
        start of the graph).
    """
    every = rows(HELD_OUT + 4096, seed)
    held_out, trained = every[:HELD_OUT], every[HELD_OUT:]
    model = make_smollm2(output / "model")
    on_gpu = torch.cuda.is_available()
    config = GRPOConfig(
        output_dir=str(output / "checkpoints"),
        max_steps=steps,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        num_generations=16,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=1,
        steps_per_generation=4,
        max_completion_length=ANSWER,
        beta=0.001,  # so that the distance from the first policy is known
        seed=seed,
        model_init_kwargs={"dtype": "float32"},
        use_cpu=not on_gpu,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )
    with Gym.from_graph(graph_of(model, engine), name="train-real", ray=ray) as gym, Report(output) as report:
        begun = time.monotonic()
        before = held_out_reward(gym, held_out)
        trainer = GRPOTrainer(
            model=str(model),
            args=config,
            train_dataset=dataset(trained),
            rollout_func=rollout_func(gym, model="policy", concurrency=1024),
            reward_funcs=rollout_reward,
            callbacks=[Steps(report)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        state = trainer.accelerator.unwrap_model(trainer.model).state_dict()
        gym.policy.update_weights("policy", "trained", tensors=encoded(state.items()))
        after = held_out_reward(gym, held_out)
        seconds = time.monotonic() - begun
        trainer.save_model(str(output / "trained"))
    result = {"model": NAME, "before": before, "after": after, "steps": steps, "seconds": seconds}
    (output / "result.json").write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=160, help="optimizer steps in all")
    parser.add_argument("--seed", type=int, default=0, help="of the rows and of the training")
    parser.add_argument("--engine", default="hf_engine", choices=("hf_engine", "vllm_engine"))
    parser.add_argument(
        "--output", type=Path, default=Path("results/train-real"), help="folder of what is written"
    )
    given = parser.parse_args()
    disable_progress_bar()  # it would disturb the table
    given.output.mkdir(parents=True, exist_ok=True)
    result = train(given.output, steps=given.steps, seed=given.seed, engine=given.engine)
    print(
        f"mean reward of {HELD_OUT} held-out rows {result['before']:.2f} -> {result['after']:.2f} "
        f"in {result['seconds']:.0f} s; {given.output}/metrics.jsonl, training.png"
    )


if __name__ == "__main__":
    main()
