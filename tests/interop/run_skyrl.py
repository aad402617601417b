"""Run SkyRL's own checks and pre-processing on gym_serve's generator, with a tiny engine.

Run by `test_acceptance.py` in the venv of `make interop`: ``python run_skyrl.py FOLDER``; prints JSON.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import acceptance
import tiny
from acceptance import ABANDONED, CASES, LONGEST_RESPONSE, SEEN, Case, Policy, Ran, Sample

from gym_serve.types.media import opened


class Engines:
    """``inference_engine_client``: samples from the tiny model, and takes new weights now and then."""

    def __init__(self, policy: Policy, processor: Any = None) -> None:
        self.policy = policy
        self.processor = processor
        self.shown: list[int] = []  # pictures of each generation

    async def render_chat_completion(self, payload: dict[str, Any]) -> dict[str, Any]:
        """As vLLM's endpoint, whose tensors are encoded: here they are left out."""
        [message] = payload["json"]["messages"]
        urls = [part["image_url"]["url"] for part in message["content"]]
        mark, ids, places = self.processor.image_token, list[int](), []
        for url in urls:
            [one] = self.processor(text=[mark], images=[opened(url)])["input_ids"]
            places.append({"offset": len(ids) + 1, "length": len(one)})
            ids += [0, *one]
        return {
            "token_ids": ids,
            "features": {"mm_placeholders": {"image": places}, "kwargs_data": {"image": urls}},
        }

    @property
    def weight_version(self) -> int:
        return self.policy.version

    async def generate(self, batch: dict[str, Any], model: str | None = None) -> dict[str, Any]:
        [prompt], params = batch["prompt_token_ids"], batch["sampling_params"]
        for features in batch.get("mm_features") or ():
            places = features["mm_placeholders"]["image"]
            seen = [i for one in places for i in range(one["offset"], one["offset"] + one["length"])]
            assert {prompt[i] for i in seen} == {self.processor.image_token_id}
            assert len(seen) == prompt.count(self.processor.image_token_id)
            self.shown.append(len(features["kwargs_data"]["image"]))
        asked, stop = await self.policy.agenerate(prompt, params["max_tokens"], params["temperature"])
        return {
            "responses": [""],
            "response_ids": [asked.generation],
            "stop_reasons": [stop],
            "response_logprobs": [asked.logprobs],
        }


def config_of(folder: Path, prompts: int, size: int, *, by_std: bool) -> Any:
    from skyrl.train.config import SkyRLTrainConfig

    return SkyRLTrainConfig.from_cli_overrides(
        [
            f"trainer.policy.model.path={folder / 'model'}",
            f"trainer.train_batch_size={prompts}",
            f"trainer.policy_mini_batch_size={prompts}",
            f"trainer.algorithm.grpo_norm_by_std={str(by_std).lower()}",
            f"generator.n_samples_per_prompt={size}",
        ]
    )


def trainer_of(
    folder: Path, policy: Policy, cases: Sequence[Case], size: int, processor: Any = None
) -> tuple[Any, Any, list[str]]:
    """A trainer, what its generator is given, and the group of each prompt."""
    from skyrl.train.generators.base import GeneratorInterface
    from skyrl.train.generators.utils import prepare_generator_input

    from gym_serve.training.skyrl import experiment

    cfg = config_of(folder, len(cases), size, by_std=False)
    exp = experiment(str(folder / "graph.yaml"), attempts=1, processor=processor)
    generator = exp.get_generator(None, cfg, policy.tokenizer, Engines(policy, processor))
    assert isinstance(generator, GeneratorInterface)
    prompts = [
        {
            "prompt": case.prompt,
            "env_class": None,
            "env_extras": {"row": json.dumps(case.row)},
            "uid": case.name,
        }
        for case in cases
    ]
    sampling = {"temperature": 1.0, "top_p": 1.0, "max_tokens": LONGEST_RESPONSE, "logprobs": 1}
    given, uids = prepare_generator_input(prompts, size, sampling, "gym", "train", 1)
    trainer = SimpleNamespace(
        cfg=cfg,
        generator=generator,
        tokenizer=policy.tokenizer,
        all_metrics={},
        dispatch=SimpleNamespace(get_lcm_dp_size=lambda: 1),
    )
    return trainer, given, uids


async def groups(folder: Path, policy: Policy, cases: Sequence[Case], size: int) -> list[Sample]:
    """Groups of one size, which SkyRL has one of."""
    from skyrl.train.trainer import RayPPOTrainer

    trainer, given, uids = trainer_of(folder, policy, cases, size)
    output = await RayPPOTrainer.generate(trainer, given)
    found = [
        Sample(
            uid,
            prompt=output["prompt_token_ids"][i],
            response=output["response_ids"][i],
            mask=output["loss_masks"][i],
            logprobs=output["rollout_logprobs"][i],
            reward=output["rewards"][i],
            failed=output["stop_reasons"][i] == "error",
            truncated=output["stop_reasons"][i] == "length",
        )
        for i, uid in enumerate(uids)
    ]
    share = sum(sample.failed for sample in found) / len(found)
    assert abs(float(trainer.all_metrics["generate/gym_failed"]) - share) < 1e-6
    output, uids = RayPPOTrainer.postprocess_generator_output(trainer, output, uids)
    for name, by_std in (("advantage", False), ("normalized", True)):
        trainer.cfg = config_of(folder, len(cases), size, by_std=by_std)
        batch = RayPPOTrainer.convert_to_training_input(trainer, output, uids)
        batch["values"] = None
        batch = RayPPOTrainer.compute_advantages_and_returns(trainer, batch)
        weighted = (batch["advantages"] * batch["loss_mask"]).sum(-1) / batch["loss_mask"].sum(-1).clamp(
            min=1
        )
        for sample, advantage in zip(found, weighted.tolist(), strict=True):
            setattr(sample, name, advantage)
    return found


async def pictures(folder: Path, policy: Policy) -> dict[str, Any]:
    """What SkyRL's batch has of pictures."""
    from skyrl.train.trainer import RayPPOTrainer

    processor = tiny.Sight(policy.tokenizer)
    trainer, given, uids = trainer_of(folder, policy, [SEEN], SEEN.size, processor)
    output = await RayPPOTrainer.generate(trainer, given)
    output, uids = RayPPOTrainer.postprocess_generator_output(trainer, output, uids)
    batch = RayPPOTrainer.convert_to_training_input(trainer, output, uids)
    found = [
        acceptance.seen(processor, *each)
        for each in zip(
            batch["sequences"].tolist(), batch["pixel_values"], batch["image_grid_thw"], strict=True
        )
    ]
    return {"engine": sorted(trainer.generator._engines.shown), "trained": found}


async def run(folder: Path) -> list[Ran]:
    from skyrl.train.trainer import RayPPOTrainer

    policy, ran = Policy(folder), Ran("SkyRL", version("skyrl"))
    for size in (2, 3):
        ran.samples += await groups(folder, policy, [case for case in CASES if case.size == size], size)
    ran.asked = list(policy.asked)
    trainer, given, _ = trainer_of(folder, policy, [ABANDONED], ABANDONED.size)
    work = asyncio.ensure_future(RayPPOTrainer.generate(trainer, given))  # as its fully asynchronous trainer
    ran.extra["abandoned"] = await acceptance.abandoned(folder, policy, [work], work.cancel)
    ran.extra["pictures"] = await pictures(folder, policy)
    return [ran]


if __name__ == "__main__":
    acceptance.script(lambda folder: asyncio.run(run(folder)))
