"""Run `AgentLoopWorker` of the verl that is installed, with gym_serve's agent loop and a tiny engine.

Run by `test_acceptance.py` in the venv of `make interop`: ``python run_verl.py FOLDER``; prints JSON.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import acceptance
import numpy as np
import ray
import tiny
import yaml
from acceptance import (
    ABANDONED,
    CASES,
    LONGEST_PROMPT,
    LONGEST_RESPONSE,
    SEEN,
    Asked,
    Case,
    Policy,
    Ran,
    Sample,
)
from hydra import compose, initialize_config_dir
from transformers import AutoTokenizer

ROLLOUTS = [case for case in CASES for _ in range(case.size)]


class Server:
    """One of verl's engines, as its load balancer knows them."""

    def __init__(self, folder: Path) -> None:
        self.policy = Policy(folder)
        self._shown: list[int] = []

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: Any = None,
        **more: Any,
    ) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        self._shown += [len(image_data)] if image_data else []
        asked, stop = await self.policy.agenerate(
            prompt_ids, sampling_params["max_tokens"], sampling_params["temperature"]
        )
        reason = {"stop": "completed", "abort": "aborted"}.get(stop, stop)
        steps = {"min_global_steps": asked.begun, "max_global_steps": asked.ended}
        return TokenOutput(
            token_ids=asked.generation, log_probs=asked.logprobs, stop_reason=reason, extra_fields=steps
        )

    async def shown(self) -> list[int]:
        """How many pictures each generation had, of those that had some."""
        return self._shown

    async def asked(self) -> list[dict[str, Any]]:
        return [dataclasses.asdict(asked) for asked in self.policy.asked]


def config_of(folder: Path) -> Any:
    import verl

    loop = {"name": "gym", "_target_": "gym_serve.training.verl.GymAgentLoop", "attempts": 1}
    (folder / "gym.yaml").write_text(yaml.safe_dump([{**loop, "graph": str(folder / "graph.yaml")}]))
    rollout = "actor_rollout_ref.rollout"
    overrides = [
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"{rollout}.name=vllm",
        f"{rollout}.prompt_length={LONGEST_PROMPT}",
        f"{rollout}.response_length={LONGEST_RESPONSE}",
        f"{rollout}.n=2",
        f"{rollout}.calculate_log_probs=True",
        f"{rollout}.agent.agent_loop_config_path={folder / 'gym.yaml'}",
    ]
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer/config"), version_base=None):
        return compose("ppo_trainer", overrides)


def array(values: list[Any]) -> Any:
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found


def batch_of(rollouts: Sequence[Case]) -> Any:
    from verl.protocol import DataProto

    columns = {
        "raw_prompt": array([case.prompt for case in rollouts]),
        "extra_info": array([{"agent_ref": case.row["agent_ref"]} for case in rollouts]),
        "uid": array([case.name for case in rollouts]),
        "agent_name": array(["gym"] * len(rollouts)),
    }
    return DataProto.from_dict(non_tensors=columns, meta_info={"global_steps": 5})


async def v0(config: Any, client: Any) -> list[Sample]:
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    batch = batch_of(ROLLOUTS)
    uids = batch.non_tensor_batch["uid"]
    output = await AgentLoopWorker(config, client).generate_sequences(batch)
    tensors, others = output.batch, output.non_tensor_batch
    assert sorted(output.meta_info["reward_extra_keys"]) == ["failed", "score", "truncated"]
    plain, normalized = (
        compute_grpo_outcome_advantage(
            tensors["rm_scores"], tensors["response_mask"], uids, norm_adv_by_std_in_grpo=by_std
        )[0]
        for by_std in (False, True)
    )
    found = []
    for i, case in enumerate(ROLLOUTS):
        attended = tensors["attention_mask"][i].bool()
        response = tensors["responses"][i][attended[LONGEST_PROMPT:]].tolist()
        steps = [others[f"{end}_global_steps"][i] for end in ("min", "max")]
        found.append(
            Sample(
                case.name,
                prompt=tensors["prompts"][i][attended[:LONGEST_PROMPT]].tolist(),
                response=response,
                mask=tensors["response_mask"][i].tolist()[: len(response)],
                logprobs=tensors["rollout_log_probs"][i].tolist()[: len(response)],
                reward=tensors["rm_scores"][i].sum().item(),
                failed=bool(others["failed"][i]),
                truncated=bool(others["truncated"][i]),
                versions=[int(step) for step in steps if step is not None],
                advantage=plain[i].sum().item() / max(tensors["response_mask"][i].sum().item(), 1),
                normalized=normalized[i].sum().item() / max(tensors["response_mask"][i].sum().item(), 1),
            )
        )
    return found


async def pictures(config: Any, client: Any, folder: Path) -> list[dict[str, Any]]:
    """What verl's batch has of pictures: of its worker with a processor."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

    worker = AgentLoopWorker(config, client)
    worker.processor = tiny.Sight(AutoTokenizer.from_pretrained(folder / "model"))
    output = await worker.generate_sequences(batch_of([SEEN] * SEEN.size))
    sequences = output.batch["input_ids"].tolist()
    inputs = output.non_tensor_batch["multi_modal_inputs"]
    return [
        acceptance.seen(worker.processor, sequence, given["pixel_values"], given["image_grid_thw"])
        for sequence, given in zip(sequences, inputs, strict=True)
    ]


def v1(config: Any, client: Any) -> list[Sample]:
    """The same by the trainer's V1: prompts in, trajectories in the TransferQueue. A failure has none."""
    import transfer_queue as tq
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
    from verl.utils import tensordict_utils as tu

    tq.init()
    names = [case.name for case in CASES]
    given = {
        "uid": names,
        "raw_prompt": [case.prompt for case in CASES],
        "extra_info": [{"agent_ref": case.row["agent_ref"]} for case in CASES],
        "agent_name": ["gym"] * len(CASES),
        "index": [*range(len(CASES))],
        "__rollout_n__": [case.size for case in CASES],
    }
    batch = tu.get_tensordict(given, {"global_steps": 5})
    tags = [{"is_prompt": True, "status": "pending", "global_steps": 5} for _ in names]
    tq.kv_batch_put(keys=names, partition_id="train", tags=tags)
    worker = AgentLoopWorkerTQ.remote(config, client)
    ray.get(worker.generate_sequences.remote(batch))
    buffer = ReplayBuffer("sync", config.trainer, 8, "drop", {}, poll_interval=0.2)
    found, _ = buffer.sample(global_steps=5, partition_id="train", batch_size=len(names))
    fields = ["prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores"]
    data = tq.kv_batch_get(keys=found.keys, partition_id="train", select_fields=fields)
    samples = [
        Sample(
            key.rsplit("_", 2)[0],
            prompt=data["prompts"][i].tolist(),
            response=data["responses"][i].tolist(),
            mask=data["response_mask"][i].tolist(),
            logprobs=data["rollout_log_probs"][i].tolist(),
            reward=data["rm_scores"][i][-1].item(),
            versions=[int(tag[f"{end}_global_steps"]) for end in ("min", "max")],
        )
        for i, (key, tag) in enumerate(zip(found.keys, found.tags, strict=True))
    ]
    tq.close()
    return samples


async def cancelled(folder: Path, config: Any, servers: Any) -> dict[str, int]:
    """What becomes of rollouts whose worker is cancelled.

    verl tells its engines nothing of that, so the calls of its client are looked at.
    """
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
    from verl.workers.rollout.llm_server import LLMServerClient

    class Client(LLMServerClient):
        endless = 0
        stopped = 0

        async def generate(self, request_id: str, **given: Any) -> Any:
            self.endless += (last := "the total is" in tokenizer.decode(given["prompt_ids"]))
            try:
                return await super().generate(request_id, **given)
            except asyncio.CancelledError:
                self.stopped += 1
                raise
            finally:
                self.endless -= last

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    client = Client(config, servers)
    batch = batch_of([ABANDONED] * ABANDONED.size)
    work = asyncio.ensure_future(AgentLoopWorker(config, client).generate_sequences(batch))
    return await acceptance.abandoned(folder, client, [work], work.cancel)


def main(folder: Path) -> list[Ran]:
    from verl.workers.rollout.llm_server import GlobalRequestLoadBalancer, LLMServerClient

    here = Path(__file__).parent
    ray.init(
        num_cpus=32,
        include_dashboard=False,
        runtime_env={"env_vars": {"PYTHONPATH": f"{here}:{here.parent}"}},
    )
    found = []
    for trainer, run in (("verl V0", lambda *given: asyncio.run(v0(*given))), ("verl V1", v1)):
        servers = {name: ray.remote(Server).remote(folder) for name in ("a", "b")}
        config, balancer = config_of(folder), ray.remote(GlobalRequestLoadBalancer).remote(servers)
        samples = run(config, LLMServerClient(config, balancer))
        told = [asked for server in servers.values() for asked in ray.get(server.asked.remote())]
        found.append(Ran(trainer, version("verl"), samples, [Asked(**asked) for asked in told]))
        if run is not v1:
            found[-1].extra["abandoned"] = asyncio.run(cancelled(folder, config, balancer))
            trained = asyncio.run(pictures(config, LLMServerClient(config, balancer), folder))
            shown = sorted(n for server in servers.values() for n in ray.get(server.shown.remote()))
            found[-1].extra["pictures"] = {"engine": shown, "trained": trained}
    return found


if __name__ == "__main__":
    acceptance.script(main)
