"""Run `AgentLoopWorker` of the verl that is installed, with gym_serve's agent loop and a tiny engine.

Run by `test_trainers.py` in the venv of `make interop`: ``python run_verl.py FOLDER``; prints JSON.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import ray
import tiny
import yaml
from hydra import compose, initialize_config_dir

WORDS = ("ring", "ring", "break", "refuse", "ring", "chatter")
"""Of two prompts, three rollouts each."""


class Server:
    """One of verl's engines, as its load balancer knows them."""

    def __init__(self, folder: str) -> None:
        sys.path.insert(0, str(Path(__file__).parent))
        self.engine = tiny.Engine(Path(folder))
        self.asked: list[dict[str, Any]] = []

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **more: Any
    ) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        ids, logprobs = self.engine.generate(
            prompt_ids, sampling_params["max_tokens"], sampling_params["temperature"]
        )
        self.asked.append({"prompt": prompt_ids, "generation": ids, "logprobs": logprobs})
        stop = "completed" if ids[-1] == self.engine.tokenizer.eos_token_id else "length"
        return TokenOutput(
            token_ids=ids, log_probs=logprobs, stop_reason=stop, extra_fields={"global_steps": 5}
        )

    async def all_asked(self) -> list[dict[str, Any]]:
        return self.asked


def config_of(folder: Path) -> Any:
    import verl

    loop = {"name": "gym", "_target_": "gym_serve.training.verl.GymAgentLoop", "attempts": 1}
    (folder / "gym.yaml").write_text(yaml.safe_dump([{**loop, "graph": str(folder / "graph.yaml")}]))
    rollout = "actor_rollout_ref.rollout"
    overrides = [
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"{rollout}.name=vllm",
        f"{rollout}.prompt_length=400",
        f"{rollout}.response_length=200",
        f"{rollout}.n=3",
        f"{rollout}.calculate_log_probs=True",
        f"{rollout}.agent.agent_loop_config_path={folder / 'gym.yaml'}",
    ]
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer/config"), version_base=None):
        return compose("ppo_trainer", overrides)


def columns() -> dict[str, Any]:
    prompts = np.empty(len(WORDS), dtype=object)
    prompts[:] = [[{"role": "user", "content": word}] for word in WORDS]
    uids = np.array([f"u{i // 3}" for i in range(len(WORDS))], dtype=object)
    return {"raw_prompt": prompts, "uid": uids, "agent_name": np.array(["gym"] * len(WORDS), dtype=object)}


async def v0(config: Any, client: Any) -> dict[str, Any]:
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
    from verl.protocol import DataProto
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    batch = DataProto.from_dict(non_tensors=columns(), meta_info={"global_steps": 5})
    output = await AgentLoopWorker(config, client).generate_sequences(batch)
    tensors = output.batch
    advantages, _ = compute_grpo_outcome_advantage(
        tensors["rm_scores"], tensors["response_mask"], columns()["uid"], norm_adv_by_std_in_grpo=False
    )
    return {
        "shapes": {key: list(value.shape) for key, value in tensors.items()},
        "prompts": [
            ids[mask.bool()].tolist()
            for ids, mask in zip(tensors["prompts"], tensors["attention_mask"][:, :400], strict=True)
        ],
        "responses": [
            ids[mask.bool()].tolist()
            for ids, mask in zip(tensors["responses"], tensors["attention_mask"][:, 400:], strict=True)
        ],
        "response_mask": tensors["response_mask"].tolist(),
        "logprobs": tensors["rollout_log_probs"].tolist(),
        "scores": tensors["rm_scores"].sum(-1).tolist(),
        "advantages": [
            row[mask.bool()].unique().tolist()
            for row, mask in zip(advantages, tensors["response_mask"], strict=True)
        ],
        "failed": output.non_tensor_batch["failed"].tolist(),
        "turns": output.non_tensor_batch["__num_turns__"].tolist(),
        "steps": [
            [int(x) if x is not None else None for x in output.non_tensor_batch[k]]
            for k in ("min_global_steps", "max_global_steps")
        ],
        "keys": sorted(output.meta_info["reward_extra_keys"]),
    }


def v1(config: Any, client: Any) -> dict[str, Any]:
    """The same by the trainer's V1: prompts in, trajectories in the TransferQueue."""
    import transfer_queue as tq
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
    from verl.utils import tensordict_utils as tu

    tq.init()
    words = ("ring", "break", "refuse")
    prompts = [[{"role": "user", "content": word}] for word in words]
    given = {"uid": list(words), "raw_prompt": prompts, "agent_name": ["gym"] * 3, "index": [0, 1, 2]}
    batch = tu.get_tensordict(given, {"global_steps": 5})
    tags = [{"is_prompt": True, "status": "pending", "global_steps": 5} for _ in words]
    tq.kv_batch_put(keys=list(words), partition_id="train", tags=tags)
    worker = AgentLoopWorkerTQ.remote(config, client)
    ray.get(worker.generate_sequences.remote(batch))
    buffer = ReplayBuffer("sync", config.trainer, 8, "drop", {}, poll_interval=0.2)
    found, _ = buffer.sample(global_steps=5, partition_id="train", batch_size=3)
    fields = ["prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores"]
    data = tq.kv_batch_get(keys=found.keys, partition_id="train", select_fields=fields)
    rows = [
        {"key": key, "tag": tag, **{field: data[field][i].tolist() for field in fields}}
        for i, (key, tag) in enumerate(zip(found.keys, found.tags, strict=True))
    ]
    tq.close()
    return {"rows": rows}


def main(folder: Path) -> dict[str, Any]:
    from verl.workers.rollout.llm_server import GlobalRequestLoadBalancer, LLMServerClient

    tiny.prepare(folder)
    here = str(Path(__file__).parent)
    ray.init(
        num_cpus=32,
        include_dashboard=False,
        runtime_env={"env_vars": {"PYTHONPATH": f"{here}:{Path(here).parent}"}},
    )
    servers = {name: ray.remote(Server).remote(str(folder / "model")) for name in ("a", "b")}
    balancer = ray.remote(GlobalRequestLoadBalancer).remote(servers)
    config = config_of(folder)
    client = LLMServerClient(config, balancer)
    found = {"v0": asyncio.run(v0(config, client)), "v1": v1(config, client)}
    found["asked"] = [asked for server in servers.values() for asked in ray.get(server.all_asked.remote())]
    return found


if __name__ == "__main__":
    faulthandler.dump_traceback_later(400, exit=True)  # says where it hangs
    print(json.dumps(main(Path(sys.argv[1]))))
