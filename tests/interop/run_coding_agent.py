"""A coding agent in boxes learns from a folder of tasks: steps of TRL's own GRPOTrainer.

Run by `test_coding_agents.py` in the venv of `make interop`: ``python run_coding_agent.py TASKS FOLDER``; the
tasks are in Harbor's format. It prints JSON. mini-swe-agent works in boxes of bubblewrap. Its model is the
tiny engine with the trainer's weights: of two rollouts, one is bent to solve the task.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from acceptance import Asked, Policy
from run_trl import engine_of, settings

from gym_serve import Gym
from gym_serve.environments.workspace.rows import HarborRows
from gym_serve.training.trl import dataset, rollout_func, rollout_reward

COMMANDS = ("sort names.txt > sorted.txt", "cat names.txt > sorted.txt")
LAST = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class Coder(Policy):
    """Says a command of `COMMANDS` in turn, and then that it is done."""

    def __init__(self, folder: Path) -> None:
        import tiny

        self._engine = tiny.Engine(folder / "model", self._said)
        self._engine.bend = 30.0
        self.tokenizer = self._engine.tokenizer
        self.asked: list[Asked] = []
        self.begun = 0
        self.updates = 0

    def _said(self, text: str) -> str:
        command = LAST
        if "<|im_start|>assistant\n<tool_call>" not in text:
            command, self.begun = COMMANDS[self.begun % 2], self.begun + 1
        return f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>"

    def load(self, weights: Mapping[str, Any]) -> None:
        super().load(weights)
        self.updates += 1

    async def sample(
        self, prompt: list[int], sampling: Mapping[str, Any]
    ) -> tuple[list[int], list[float], str]:
        seed = zlib.crc32(json.dumps(prompt).encode())
        ids, logprobs = self._engine.generate(prompt, 200, sampling.get("temperature", 1.0), seed)
        self.asked.append(Asked(prompt, ids, logprobs, 0, 0))
        return ids, logprobs, "stop"


def main(tasks: Path, folder: Path) -> dict[str, Any]:
    import tiny
    import torch
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    tiny.prepare(folder, {})
    coder = Coder(folder)
    engine = {"type": engine_of(coder), "tokenizer": "its own", "weight_updates": True}
    overrides = {"models.policy": engine, "resources.workspace.network": "model"}
    with Gym.from_graph("workspace", overrides=overrides, ray=False) as gym:
        trainer = GRPOTrainer(
            model=str(folder / "model"),
            processing_class=coder.tokenizer,
            args=GRPOConfig(**settings(folder, 2, 2, max_completion_length=8192, max_steps=2)),
            train_dataset=dataset(list(HarborRows().rows(tasks))),
            rollout_func=rollout_func(gym, agent="mini_swe_agent", attempts=1),
            reward_funcs=rollout_reward,
        )
        own, batches = trainer._generate_and_score_completions, []

        def scored(inputs: list[Any]) -> Any:
            batches.append((own(inputs), list(trainer._logs["rewards"]["rollout_reward"])[-2:]))
            return batches[-1][0]

        trainer._generate_and_score_completions = scored
        before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        trainer.train()
        changed = any(
            not torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items()
        )
    samples = []
    for batch, rewards in batches:
        for i, reward in enumerate(rewards):
            there = batch["completion_mask"][i].bool()
            trained = batch["tool_mask"][i][there].bool()
            samples.append(
                {
                    "reward": reward,
                    "advantage": batch["advantages"][i].item(),
                    "prompt": batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist(),
                    "response": batch["completion_ids"][i][there].tolist(),
                    "trained": batch["completion_ids"][i][there][trained].tolist(),
                    "logprobs": batch["sampling_per_token_logps"][i][there][trained].tolist(),
                }
            )
    asked = [
        {"prompt": each.prompt, "ids": each.generation, "logprobs": each.logprobs} for each in coder.asked
    ]
    return {
        "samples": samples,
        "asked": asked,
        "steps": trainer.state.global_step,
        "updates": coder.updates,
        "changed": changed,
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]))))
