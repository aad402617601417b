"""Run NeMo RL's own rollout code on gym_serve: its actor, post-processing, groups and accounting of failures.

Run by `test_acceptance.py` in the venv of `make interop`: ``python run_nemo_rl.py FOLDER``; prints JSON.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import acceptance
import ray
import tiny
import torch
from acceptance import ABANDONED, CASES, LONGEST_RESPONSE, SEEN, Case, Policy, Ran, Sample
from support.endpoint import endpoint

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": None, "max_new_tokens": LONGEST_RESPONSE}
GENERATION = {**SAMPLING, "stop_strings": None, "stop_token_ids": None}


def spin_up(folder: Path, url: str, tokenizer: Any, **settings: Any) -> Any:
    from nemo_rl.environments.nemo_gym import spinup_nemo_gym_actor

    ours = {"graph": str(folder / "graph.yaml"), "ray": False, "attempts": 1, **settings}
    return spinup_nemo_gym_actor(
        {"nemo_gym": {"gym_serve": ours}},
        [url],
        str(folder / "model"),
        tokenizer=tokenizer,
        enable_router_replay=False,
        routed_experts_dtype="int16",
        use_fastokens=False,
    )


async def group(actor: Any, tokenizer: Any, case: Case) -> list[Sample]:
    """A group of rollouts by ``run_async_nemo_gym_rollout``."""
    from nemo_rl.algorithms.utils import calculate_baseline_and_std_per_prompt
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.experience.rollouts import run_async_nemo_gym_rollout

    rows = [case.row for _ in range(case.size)]
    batch = BatchedDataDict({"extra_env_info": rows, "loss_multiplier": torch.ones(len(rows))})
    stream = run_async_nemo_gym_rollout(
        policy_generation=SimpleNamespace(cfg={"vllm_cfg": {"max_model_len": 4096}}),
        input_batch=batch,
        tokenizer=tokenizer,
        task_to_env={"nemo_gym": actor},
        generation_config=GENERATION,
        num_generations=case.size,
        log_full_result_tables=False,
    )
    [result] = [result async for result in stream]
    final = result.final_batch
    rewards = final["total_reward"]
    baseline, deviation = calculate_baseline_and_std_per_prompt(
        result.input_ids, rewards, torch.ones_like(rewards), leave_one_out_baseline=False
    )
    plain = (rewards - baseline).tolist()
    normalized = ((rewards - baseline) / (deviation + 1e-6)).tolist()
    samples = [
        told(case, log, masked)
        for log, masked in zip(final["message_log"], final["mask_sample"].tolist(), strict=True)
    ]
    for i, sample in enumerate(samples):
        sample.reward, sample.advantage, sample.normalized = rewards[i].item(), plain[i], normalized[i]
    return samples


def told(case: Case, log: list[Any], masked: bool) -> Sample:
    """The sample of a message log, as NeMo RL makes its batch of it: the model's turns are trained on."""
    first = next(i for i, message in enumerate(log) if message["role"] == "assistant")
    sample = Sample(case.name, [], [], [], [], 0.0, failed=masked)
    sample.prompt = [token for message in log[:first] for token in message["token_ids"].tolist()]
    for message in log[first:]:
        tokens, is_own = message["token_ids"].tolist(), message["role"] == "assistant"
        sample.response += tokens
        sample.mask += [int(is_own and not masked)] * len(tokens)
        sample.logprobs += message["generation_logprobs"].tolist() if is_own else [0.0] * len(tokens)
    return sample


async def single_controller(actor: Any, tokenizer: Any, case: Case) -> list[float]:
    """A prompt group by NeMo RL's single controller, which sends failed rows again."""
    from nemo_rl.experience.rollout_manager import AsyncNemoGymRolloutImpl, RolloutRetryPolicy, RolloutStats

    stats = RolloutStats()
    policy = RolloutRetryPolicy.single_attempt(max_gym_row_attempts=3)
    manager = AsyncNemoGymRolloutImpl(
        tokenizer, {"nemo_gym": actor}, 2, 4096, 1, GENERATION, retry_policy=policy, stats=stats
    )
    sample = {"extra_env_info": case.row, "idx": 0, "message_log": []}
    record = await manager.run_rollout(sample)
    return [completion.reward for completion in record.completions]


async def shut_down(folder: Path, policy: Policy, actor: Any) -> dict[str, int]:
    """What becomes of rollouts that run when NeMo RL shuts its environment down."""
    work = asyncio.ensure_future(group(actor, policy.tokenizer, ABANDONED))
    found = await acceptance.abandoned(folder, policy, [], lambda: as_coroutine(actor.shutdown.remote()))
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    return found


async def as_coroutine(ref: Any) -> Any:
    return await ref


class NemotronNanoVLV2Processor(tiny.Sight):
    """A processor with a name that NeMo RL knows."""

    model_input_names = ("pixel_values", "image_grid_thw")

    def __call__(self, text: str | list[str], images: list[Any], **options: Any) -> Any:
        if not isinstance(text, str):
            return super().__call__(text, images)
        read = super().__call__([text], images)
        return {**read, "input_ids": torch.tensor(read["input_ids"])}


async def pictures(folder: Path, policy: Policy) -> dict[str, Any]:
    """What the message logs of NeMo RL's actor, which runs in this process, have of pictures."""
    from gym_serve.interop.nemo_gym.nemo_rl import environment

    processor = NemotronNanoVLV2Processor(policy.tokenizer)
    settings = {"gym_serve": {"graph": str(folder / "graph.yaml"), "ray": False, "attempts": 1}}
    shown: list[int] = []  # pictures of each generation

    async def sample(prompt: list[int], sampling: dict[str, Any]) -> Any:
        shown.append(prompt.count(processor.image_token_id) // 16)
        return await policy.sample(prompt, sampling)

    with endpoint(policy.tokenizer, sample, processor=processor) as url:
        actor = environment()(
            {
                "model_name": str(folder / "model"),
                "base_urls": [url],
                "initial_global_config_dict": settings,
            }
        )
        actor.set_tokenizer(policy.tokenizer)
        actor._processor = processor
        rows = [{**SEEN.row, "_rowidx": i} for i in range(SEEN.size)]
        logs = [result["message_log"] async for _, result, _ in actor.run_rollouts(rows, "pictures")]
        actor.shutdown()
    return {"engine": sorted(shown), "trained": [seen(processor, log) for log in logs]}


def seen(processor: Any, log: list[Any]) -> dict[str, Any]:
    """What a message log has of pictures, each at the message that shows it."""
    for message in log:
        shown = message["token_ids"].tolist().count(processor.image_token_id)
        assert shown == 16 * ("pixel_values" in message)
    tokens = [token for message in log for token in message["token_ids"].tolist()]
    patches, grid = (
        torch.cat([message[name].as_tensor() for message in log if name in message])
        for name in ("pixel_values", "image_grid_thw")
    )
    return acceptance.seen(processor, tokens, patches, grid)


def failure_of(work: Any) -> dict[str, Any]:
    from nemo_rl.experience.failures import classify_rollout_failure

    try:
        asyncio.run(work)
    except Exception as error:
        cause = getattr(error, "cause", None) or error
        return {
            "type": type(cause).__name__,
            "class": classify_rollout_failure(error).value,
            "text": str(cause)[:300],
        }
    return {}


def main(folder: Path) -> list[Ran]:
    policy = Policy(folder)
    from gym_serve.interop.nemo_gym import nemo_rl

    os.environ["PYTHONPATH"] = ":".join(filter(None, sys.path))  # NeMo RL's actors get this environment
    ray.init(num_cpus=32, include_dashboard=False)
    nemo_rl.use()
    tokenizer = policy.tokenizer
    with endpoint(tokenizer, policy.sample) as url:
        actor = spin_up(folder, url, tokenizer)
        ray.get(actor.health_check.remote())
        ran = Ran("NeMo RL", "7ea279a")
        for case in CASES:
            ran.samples += asyncio.run(group(actor, tokenizer, case))
        ran.asked = list(policy.asked)
        ray.kill(actor, no_restart=False)
        again = asyncio.run(group(actor, tokenizer, Case("single", "accepted")))
        ran.extra["restarted"] = [each.reward for each in again]
        ray.get(actor.health_check.remote())
        ray.get(actor.shutdown.remote())
        ray.get(actor.shutdown.remote())
        raising = spin_up(folder, url, tokenizer, failures="raise")
        ran.extra["raised"] = failure_of(group(raising, tokenizer, Case("single", "failed")))
        ran.extra["sent again"] = asyncio.run(single_controller(raising, tokenizer, Case("single", "mixed")))
        ray.get(raising.shutdown.remote())
        ran.extra["abandoned"] = asyncio.run(shut_down(folder, policy, spin_up(folder, url, tokenizer)))
    ran.extra["pictures"] = asyncio.run(pictures(folder, policy))
    return [ran]


if __name__ == "__main__":
    acceptance.script(main)
