"""Run TRL's own trainers on rollouts of a graph whose model is a tiny engine that takes their weights.

Run by `test_acceptance.py` in the venv of `make interop`: ``python run_trl.py FOLDER``; prints JSON.
AsyncGRPOTrainer asks for a GPU's speed and for FlashAttention's kernel: both are stood in for.
"""

from __future__ import annotations

import asyncio
import math
import queue
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import acceptance
import torch
from acceptance import ABANDONED, CASES, LONGEST_RESPONSE, Case, Policy, Ran, Sample, case_of
from safetensors.torch import load
from support.packed_attention import varlen_attention

from gym_serve import Gym
from gym_serve.deployments.token_model import EngineModel
from gym_serve.deployments.tokenizing import Generation, TokenizingModel
from gym_serve.training.trl import RolloutWorker, dataset, rollout_func, rollout_reward


def engine_of(policy: Policy) -> type[EngineModel]:
    """A model server with the tiny engine inside."""

    class Engine(TokenizingModel, EngineModel):
        """Samples from the tiny model, with the weights that it was given last."""

        requires: ClassVar[Mapping[str, str]] = {}

        class Config(TokenizingModel.Config, EngineModel.Config):
            """Settings of both."""

        running = 0

        def load_tokenizer(self) -> Any:
            return policy.tokenizer

        async def generate(self, prompt: list[int], sampling: dict[str, Any], pictures: Any) -> Generation:
            return Generation(*await policy.sample(prompt, sampling))

        async def load(self, weights: Any) -> None:
            policy.load(load(weights))

        async def pause(self, mode: Any) -> None:
            """A generation runs in one piece."""

        async def resume(self) -> None:
            """See `pause`."""

    return Engine


def settings(folder: Path, size: int, batch: int, **more: Any) -> dict[str, Any]:
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    plain = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    sizes = {"num_generations": size, "per_device_train_batch_size": batch, "gradient_accumulation_steps": 1}
    return {"output_dir": str(folder / "trained"), **quiet, **plain, **sizes, **more}


def synchronous(folder: Path, gym: Gym, tokenizer: Any, cases: Sequence[Case]) -> list[Sample]:
    """A step of GRPOTrainer on groups of one size, which it has one of."""
    from trl import GRPOConfig, GRPOTrainer

    size = cases[0].size
    limits = {"max_completion_length": LONGEST_RESPONSE, "max_steps": 1, "scale_rewards": "none"}
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        processing_class=tokenizer,
        args=GRPOConfig(**settings(folder, size, size * len(cases), **limits)),
        train_dataset=dataset([case.row for case in cases]),
        rollout_func=rollout_func(gym, attempts=1),
        reward_funcs=rollout_reward,
    )
    own, found = trainer._generate_and_score_completions, []

    def scored(inputs: list[Any]) -> Any:
        """TRL's batch; and once more of the same rollouts, with its default of advantages."""
        ask, batches = trainer.rollout_func, []
        trainer.rollout_func = lambda *given: batches.append(ask(*given)) or batches[0]
        plain = own([dict(each) for each in inputs])
        trainer.rollout_func = lambda *given: batches[0]
        trainer.scale_rewards = "group"
        found.extend(told(trainer, inputs, plain, own(inputs)))
        return plain

    trainer._generate_and_score_completions = scored
    trainer.train()
    assert trainer.state.global_step == 1
    return found


def told(trainer: Any, inputs: list[Any], plain: Any, normalized: Any) -> list[Sample]:
    rewards = trainer._logs["rewards"]["rollout_reward"]
    found = []
    for i, example in enumerate(inputs):
        own = plain["completion_mask"][i].bool()
        reward = rewards[i]
        failed = reward is None or math.isnan(reward)
        found.append(
            Sample(
                case_of(example["row"]).name,
                prompt=plain["prompt_ids"][i][plain["prompt_mask"][i].bool()].tolist(),
                response=plain["completion_ids"][i][own].tolist(),
                mask=plain["tool_mask"][i][own].tolist(),
                logprobs=plain["sampling_per_token_logps"][i][own].tolist(),
                reward=None if failed else reward,
                failed=failed,
                advantage=plain["advantages"][i].item(),
                normalized=normalized["advantages"][i].item(),
            )
        )
    return found


class Recorded(queue.Queue[Any]):
    """A queue that keeps what was taken."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[Any] = []

    def get(self, *given: Any, **named: Any) -> Any:
        item = super().get(*given, **named)
        self.taken.append(item)
        return item


def asynchronous(folder: Path, gym: Gym, tokenizer: Any, cases: Sequence[Case]) -> list[Sample]:
    """Steps of AsyncGRPOTrainer, until it has taken the groups of all cases."""
    from trl.experimental import async_grpo
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    async_grpo_trainer.get_peak_flops_per_device = lambda accelerator, dtype: None
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    rows = [case.row for case in cases]
    # Few at a time and never too old, so that the groups of the first pass come first.
    worker = RolloutWorker(gym, rows, size=cases[0].size, max_staleness=100, concurrency=8, attempts=1)
    worker.rollout_buffer = taken = Recorded()
    steps = {"token_budget": 0, "max_staleness": 100, "dtype": "float32", "max_steps": 2 * len(cases)}
    trainer = async_grpo.AsyncGRPOTrainer(
        model=str(folder / "model"),
        processing_class=tokenizer,
        args=async_grpo.AsyncGRPOConfig(**settings(folder, cases[0].size, cases[0].size, **steps)),
        train_dataset=dataset(rows),
        rollout_worker=worker,
        weight_transfer=worker,
    )
    trainer.train()
    assert trainer.state.global_step == 2 * len(cases)
    found = []
    for sample in taken.taken:
        if sample.group_id >= len(cases):  # the rows are drawn again and again
            continue
        start = sample.completion_mask.tolist().index(1)
        found.append(
            Sample(
                cases[sample.group_id].name,
                prompt=sample.input_ids[:start].tolist(),
                response=sample.input_ids[start:].tolist(),
                mask=sample.completion_mask[start:].tolist(),
                logprobs=sample.old_log_probs[start:].tolist(),
                reward=sample.metrics["reward"],
                normalized=sample.advantage,
            )
        )
    return found


def stopped(folder: Path, policy: Policy, gym: Gym) -> dict[str, int]:
    """What becomes of rollouts that run when the trainer stops its worker."""
    size = ABANDONED.size
    worker = RolloutWorker(gym, [ABANDONED.row], size=size, max_staleness=0, concurrency=size, attempts=1)
    worker.start()

    async def run() -> dict[str, int]:
        return await acceptance.abandoned(folder, policy, [], lambda: asyncio.to_thread(worker.stop))

    found = asyncio.run(run())
    assert worker.rollout_buffer.empty()
    return found


def main(folder: Path) -> list[Ran]:
    torch.set_num_threads(1)
    found = []
    for name, train in (("TRL", synchronous), ("TRL, asynchronous", asynchronous)):
        policy = Policy(folder)
        engine = {"type": engine_of(policy), "tokenizer": "its own", "weight_updates": True}
        ran = Ran(name, version("trl"))
        with Gym.from_graph(acceptance.graph(folder), overrides={"models.policy": engine}, ray=False) as gym:
            for size in (2, 3):
                cases = [case for case in CASES if case.size == size]
                ran.samples += train(folder, gym, policy.tokenizer, cases)
            ran.asked = list(policy.asked)
            if train is asynchronous:
                ran.extra["abandoned"] = stopped(folder, policy, gym)
        found.append(ran)
    return found


if __name__ == "__main__":
    acceptance.script(main)
