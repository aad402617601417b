"""Run NeMo RL's own rollout code on gym_serve: its actor, post-processing, groups and accounting of failures.

Run by `test_trainers.py` in the venv of `make interop`: ``python run_nemo_rl.py FOLDER``; prints JSON.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import tiny
import torch
from support.endpoint import endpoint

WORDS = ("ring", "refuse", "chatter")
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": None, "max_new_tokens": 300}
GENERATION = {**SAMPLING, "stop_strings": None, "stop_token_ids": None}


def row(word: str) -> dict[str, Any]:
    return {
        "responses_create_params": {"input": [{"role": "user", "content": word}]},
        "agent_ref": {"type": "responses_api_agents", "name": "ringer"},
    }


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


async def rollouts(actor: Any, tokenizer: Any, words: list[str], size: int) -> list[dict[str, Any]]:
    """Groups of rollouts by ``run_async_nemo_gym_rollout``."""
    from nemo_rl.algorithms.utils import calculate_baseline_and_std_per_prompt
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.experience.rollouts import run_async_nemo_gym_rollout

    rows = [row(word) for word in words]
    batch = BatchedDataDict({"extra_env_info": rows, "loss_multiplier": torch.ones(len(rows))})
    found = []
    async for group in run_async_nemo_gym_rollout(
        policy_generation=SimpleNamespace(cfg={"vllm_cfg": {"max_model_len": 4096}}),
        input_batch=batch,
        tokenizer=tokenizer,
        task_to_env={"nemo_gym": actor},
        generation_config=GENERATION,
        num_generations=size,
        log_full_result_tables=False,
    ):
        final = group.final_batch
        rewards = final["total_reward"]
        baseline, _ = calculate_baseline_and_std_per_prompt(
            group.input_ids, rewards, torch.ones_like(rewards), leave_one_out_baseline=False
        )
        found.append(
            {
                "rewards": rewards.tolist(),
                "masked": final["mask_sample"].tolist(),
                "advantages": (rewards - baseline).tolist(),
                "logs": [
                    [
                        {
                            "role": message["role"],
                            "token_ids": message["token_ids"].tolist(),
                            "logprobs": message.get("generation_logprobs", torch.tensor([])).tolist(),
                        }
                        for message in log
                    ]
                    for log in final["message_log"]
                ],
                "turns": group.rollout_metrics["turns_per_sample/mean"],
            }
        )
    return found


async def single_controller(actor: Any, tokenizer: Any, word: str) -> dict[str, Any]:
    """A prompt group by NeMo RL's single controller, which sends failed rows again."""
    from nemo_rl.experience.rollout_manager import AsyncNemoGymRolloutImpl, RolloutRetryPolicy, RolloutStats

    stats = RolloutStats()
    policy = RolloutRetryPolicy.single_attempt(max_gym_row_attempts=3)
    manager = AsyncNemoGymRolloutImpl(
        tokenizer, {"nemo_gym": actor}, 2, 4096, 1, GENERATION, retry_policy=policy, stats=stats
    )
    sample = {"extra_env_info": row(word), "idx": 0, "message_log": []}
    record = await manager.run_rollout(sample)
    return {"rewards": [completion.reward for completion in record.completions]}


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


def main(folder: Path) -> dict[str, Any]:
    tiny.prepare(folder)
    engine, asked, lock = tiny.Engine(folder / "model"), [], threading.Lock()

    def sample(prompt: list[int], sampling: dict[str, Any]) -> Any:
        with lock:
            ids, logprobs = engine.generate(prompt, sampling["max_tokens"], sampling["temperature"])
            asked.append({"prompt": prompt, "generation": ids, "logprobs": logprobs})
        return ids, logprobs, "stop" if ids[-1] == engine.tokenizer.eos_token_id else "length"

    from gym_serve.interop.nemo_gym import nemo_rl

    os.environ["PYTHONPATH"] = ":".join(filter(None, sys.path))  # NeMo RL's actors get this environment
    ray.init(num_cpus=32, include_dashboard=False)
    nemo_rl.use()
    tokenizer = engine.tokenizer
    with endpoint(tokenizer, sample) as url:
        actor = spin_up(folder, url, tokenizer)
        ray.get(actor.health_check.remote())
        found: dict[str, Any] = {}
        words = [word for word in WORDS for _ in range(2)]
        found["groups"] = asyncio.run(rollouts(actor, tokenizer, words, 2))
        found["failing"] = asyncio.run(rollouts(actor, tokenizer, ["break"] * 2, 2))
        found["flaky"] = asyncio.run(rollouts(actor, tokenizer, ["flaky uneven"] * 3, 3))
        ray.kill(actor, no_restart=False)
        found["restarted"] = asyncio.run(rollouts(actor, tokenizer, ["ring"] * 2, 2))
        ray.get(actor.health_check.remote())
        ray.get(actor.shutdown.remote())
        ray.get(actor.shutdown.remote())
        raising = spin_up(folder, url, tokenizer, failures="raise")
        found["raised"] = failure_of(rollouts(raising, tokenizer, ["break"] * 2, 2))
        found["sent_again"] = asyncio.run(single_controller(raising, tokenizer, "flaky ring"))
        ray.get(raising.shutdown.remote())
    return {**found, "asked": asked}


if __name__ == "__main__":
    faulthandler.dump_traceback_later(400, exit=True)  # says where it hangs
    print(json.dumps(main(Path(sys.argv[1]))))
