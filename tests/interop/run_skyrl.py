"""Run SkyRL's own checks and pre-processing on gym_serve's generator, with a tiny engine.

Run by `test_trainers.py` in the venv of `make interop`: ``python run_skyrl.py FOLDER``; prints JSON.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tiny

WORDS = ("ring", "flaky uneven")


class Engines:
    """``inference_engine_client``: samples from the tiny model, and takes new weights now and then."""

    weight_version = 0

    def __init__(self, folder: Path) -> None:
        self.engine = tiny.Engine(folder)
        self.asked: list[dict[str, Any]] = []

    async def generate(self, batch: dict[str, Any], model: str | None = None) -> dict[str, Any]:
        [prompt], params = batch["prompt_token_ids"], batch["sampling_params"]
        ids, logprobs = self.engine.generate(prompt, params["max_tokens"], params["temperature"])
        self.weight_version += 1
        self.asked.append({"prompt": prompt, "generation": ids, "logprobs": logprobs})
        stop = "stop" if ids[-1] == self.engine.tokenizer.eos_token_id else "length"
        return {
            "responses": [""],
            "response_ids": [ids],
            "stop_reasons": [stop],
            "response_logprobs": [logprobs],
        }


async def run(folder: Path) -> dict[str, Any]:
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.generators.base import GeneratorInterface
    from skyrl.train.generators.utils import prepare_generator_input
    from skyrl.train.trainer import RayPPOTrainer

    from gym_serve.training.skyrl import experiment

    cfg = SkyRLTrainConfig.from_cli_overrides(
        [
            f"trainer.policy.model.path={folder / 'model'}",
            "trainer.train_batch_size=2",
            "trainer.policy_mini_batch_size=2",
            "trainer.algorithm.grpo_norm_by_std=false",
            "generator.n_samples_per_prompt=3",
        ]
    )
    engines = Engines(folder / "model")
    tokenizer = engines.engine.tokenizer
    exp = experiment(str(folder / "graph.yaml"), attempts=1)
    generator = exp.get_generator(None, cfg, tokenizer, engines)
    assert isinstance(generator, GeneratorInterface)
    prompts = [
        {
            "prompt": [{"role": "user", "content": word}],
            "env_class": None,
            "env_extras": {"row": json.dumps({"prompt": word})},
            "uid": word,
        }
        for word in WORDS
    ]
    sampling = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 300, "logprobs": 1}
    given, uids = prepare_generator_input(prompts, 3, sampling, "gym", "train", 1)
    trainer = SimpleNamespace(
        cfg=cfg,
        generator=generator,
        tokenizer=tokenizer,
        all_metrics={},
        dispatch=SimpleNamespace(get_lcm_dp_size=lambda: 1),
    )
    output = await RayPPOTrainer.generate(trainer, given)
    told = {
        key: output[key] for key in ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs")
    }
    found = {**told, "scores": list(output["rewards"]), "stop_reasons": output["stop_reasons"], "uids": uids}
    output, uids = RayPPOTrainer.postprocess_generator_output(trainer, output, uids)
    batch = RayPPOTrainer.convert_to_training_input(trainer, output, uids)
    batch["values"] = None
    batch = RayPPOTrainer.compute_advantages_and_returns(trainer, batch)
    weighted = batch["advantages"] * batch["loss_mask"]
    found["advantages"] = [
        row[mask.bool()].unique().tolist() for row, mask in zip(weighted, batch["loss_mask"], strict=True)
    ]
    found["shapes"] = {key: list(batch[key].shape) for key in ("sequences", "loss_mask", "rollout_logprobs")}
    found["metrics"] = {key: float(value) for key, value in trainer.all_metrics.items() if "gym" in key}
    return {**found, "asked": engines.asked}


def main(folder: Path) -> dict[str, Any]:
    tiny.prepare(folder)
    return asyncio.run(run(folder))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(400, exit=True)  # says where it hangs
    print(json.dumps(main(Path(sys.argv[1]))))
