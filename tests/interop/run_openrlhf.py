"""Run the executors of the OpenRLHF that is installed, with gym_serve's graph and a tiny engine.

Run by `test_acceptance.py` in the venv of `make interop`: ``python run_openrlhf.py FOLDER``; prints JSON.
OpenRLHF imports vLLM, FlashAttention and DeepSpeed, which need a GPU: empty modules and `SamplingParams`
stand in for them.
Everything else, from the loading of the agent's file to `Experience` and its advantages, is OpenRLHF's own.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import acceptance
import torch
from acceptance import (
    ABANDONED,
    CASES,
    LONGEST_PROMPT,
    LONGEST_RESPONSE,
    SEEN,
    Case,
    Policy,
    Ran,
    Sample,
    StandIns,
)

from gym_serve import InvalidRequest

LONGEST = LONGEST_PROMPT + LONGEST_RESPONSE
PARAMS = {"temperature": 1.0, "max_tokens": LONGEST_RESPONSE}


@dataclass
class SamplingParams:
    """vLLM's, as far as OpenRLHF sets it."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int | None = None
    min_tokens: int = 1
    skip_special_tokens: bool = False
    logprobs: int | None = 1


def stand_in_for_vllm() -> None:
    sys.meta_path.insert(0, StandIns("vllm", "flash_attn", "deepspeed"))
    import vllm

    vllm.SamplingParams = SamplingParams


class Engine:
    """``llm_engine``: samples from the tiny model, and answers as vLLM does."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    async def generate(self, prompt: list[int], params: SamplingParams, multi_modal_data: Any = None) -> Any:
        asked, stop = await self.policy.agenerate(prompt, params.max_tokens, params.temperature)
        told = [
            {token: SimpleNamespace(logprob=logprob)}
            for token, logprob in zip(asked.generation, asked.logprobs, strict=True)
        ]
        output = SimpleNamespace(
            token_ids=asked.generation,
            text=self.policy.tokenizer.decode(asked.generation),
            logprobs=told if params.logprobs is not None else None,
            finish_reason=stop,
        )
        return SimpleNamespace(outputs=[output])


async def group(executor: Any, policy: Policy, case: Case) -> list[Any]:
    """As ``generate_responses`` of OpenRLHF's rollout actor: all samples of a prompt at once."""
    from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

    given = {"prompt": case.name, "label": json.dumps(case.row), "sampling_params": SamplingParams(**PARAMS)}
    engines = {"hf_tokenizer": policy.tokenizer, "llm_engine": Engine(policy), "max_length": LONGEST}
    responses = await asyncio.gather(*(executor.execute(**given, **engines) for _ in range(case.size)))
    process = SamplesGenerator._process_response_into_experience
    return [process(None, response, max_len=LONGEST) for response in responses]


def told(case: Case, experience: Any) -> Sample:
    sequence, mask = experience.sequences[0].tolist(), [0, *experience.action_mask[0].int().tolist()]
    start = mask.index(1)
    return Sample(
        case.name,
        prompt=sequence[:start],
        response=sequence[start:],
        mask=mask[start:],
        logprobs=[0.0, *experience.rollout_log_probs[0].tolist()][start:],
        reward=experience.rewards.flatten()[0].item(),
        failed=bool(experience.info["failed"][0]),
        truncated=bool(experience.truncated[0]),
    )


def advantages(experiences: Sequence[Any], size: int, estimator: str) -> list[float]:
    """Advantages of groups of one size, which OpenRLHF has one of."""
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

    args = SimpleNamespace(
        rollout=SimpleNamespace(n_samples_per_prompt=size),
        reward=SimpleNamespace(clip_range=None),
        algo=SimpleNamespace(advantage=SimpleNamespace(estimator=estimator, gamma=1.0, no_std_norm=True)),
    )
    maker = SimpleNamespace(
        strategy=SimpleNamespace(args=args), kl_ctl=SimpleNamespace(value=0.0), advantage_estimator=estimator
    )
    maker.get_cumulative_returns = lambda *given: RemoteExperienceMaker.get_cumulative_returns(maker, *given)
    for at, experience in enumerate(experiences):
        experience.index = [at]
        experience.kl = torch.zeros_like(experience.action_mask, dtype=torch.float)
    made = RemoteExperienceMaker.compute_advantages_and_returns(maker, list(experiences))
    return [each.advantages[each.action_mask.bool()][-1].item() for each in made]


async def samples_of(executor: Any, policy: Policy) -> list[Sample]:
    found = []
    for size in (2, 3):
        cases = [case for case in CASES if case.size == size]
        experiences = [(case, each) for case in cases for each in await group(executor, policy, case)]
        samples = [told(*each) for each in experiences]
        for name, estimator in (("advantage", "dr_grpo"), ("normalized", "group_norm")):
            values = advantages([each for _, each in experiences], size, estimator)
            for sample, value in zip(samples, values, strict=True):
                setattr(sample, name, value)
        found += samples
    return found


def main(folder: Path) -> list[Ran]:
    stand_in_for_vllm()
    from openrlhf.trainer.ray.vllm_engine import _load_agent_executor

    agent = f"""\
from gym_serve.training.openrlhf import executor

AgentExecutor = executor({str(folder / "graph.yaml")!r}, attempts=1)
"""
    (folder / "agent.py").write_text(agent)
    policy = Policy(folder)

    async def run() -> Ran:
        executor = _load_agent_executor(str(folder / "agent.py"))
        samples = await samples_of(executor, policy)
        ran = Ran("OpenRLHF", version("openrlhf"), samples, list(policy.asked))
        work = asyncio.ensure_future(group(executor, policy, ABANDONED))
        ran.extra["abandoned"] = await acceptance.abandoned(folder, policy, [work], work.cancel)
        try:
            await group(executor, policy, SEEN)
        except InvalidRequest as error:
            ran.extra["pictures"] = {"refused": str(error)}
        return ran

    torch.set_num_threads(1)
    return [asyncio.run(run())]


if __name__ == "__main__":
    acceptance.script(main)
