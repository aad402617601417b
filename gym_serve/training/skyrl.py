"""SkyRL (0.4): a generator that runs episodes of a graph; SkyRL's own inference engines generate.

    python -m skyrl.train.entrypoints.main_base trainer.override_entrypoint=gym_serve.training.skyrl \\
        gym.graph=graphs/weather.yaml data.train_data="['rows.parquet']" ...

`main` is SkyRL's entry point with `experiment`. An experiment of your own derives from ``experiment(graph)``
instead of ``BasePPOExp``. A rollout that failed all its attempts has a mask of zeros, and the mean reward of
its siblings in the batch, so that it does not move the mean of its group.

With ``generator.vision_language_generator=true`` the policy reads pictures. SkyRL's engines make what they
generate from (``mm_features``), and the policy's processor what SkyRL trains on.

Source: SkyRL 0.4, ``train/generators/base.py``, ``train/generators/skyrl_vlm_generator.py``,
``train/entrypoints/main_base.py``, ``train/trainer.py`` and ``backends/skyrl_train/inference_servers``.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import yaml

from gym_serve.training.episodes import Adapter, row_of
from gym_serve.training.samples import TrainingSample, picture_tensors, samples
from gym_serve.types.errors import InvalidRequest
from gym_serve.types.model_endpoint import PolicyAnswer, PolicyRequest
from gym_serve.types.requests import JSON

__all__ = ["Generator", "experiment", "main", "output_of"]


class Generator(Adapter):
    """Runs an episode for each prompt of a batch. SkyRL's ``GeneratorInterface``, by its shape.

    ``max_model_len``: most tokens of a prompt and its generation together; None leaves that to the engines.
    ``processor``: the policy's, of ``transformers``, if it reads pictures.
    """

    def __init__(
        self,
        graph: Any,
        inference_engine_client: Any,
        tokenizer: Any,
        *,
        model_name: str | None = None,
        max_model_len: int | None = None,
        processor: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(graph, **options)
        self._engines = inference_engine_client
        self._tokenizer = tokenizer
        self._processor = processor
        self._model = {} if model_name is None else {"model": model_name}
        self._max_model_len = max_model_len

    async def generate(self, input_batch: Mapping[str, Any]) -> JSON:
        """The trajectories of a ``GeneratorInput``, as a ``GeneratorOutput``.

        Raises InvalidRequest: a row has media that the policy is not given, or only some rollouts have
        pictures.
        """
        limit = self._max_model_len
        self.episodes(self._tokenizer, self._generate, processor=self._processor, max_model_len=limit)
        sampling = input_batch.get("sampling_params") or {}
        prompts, ids = input_batch["prompts"], input_batch.get("trajectory_ids")
        extras = input_batch.get("env_extras") or [{}] * len(prompts)
        rows = [row_of(extra, prompt) for prompt, extra in zip(prompts, extras, strict=True)]
        read = partial(samples, pad_token_id=int(self._tokenizer.eos_token_id))
        outcomes = await asyncio.gather(
            *(
                self.outcome(row, getattr(id_, "instance_id", None), sampling, sampling, read=read)
                for row, id_ in zip(rows, ids or [None] * len(rows), strict=True)
            )
        )
        last = _seen_alike([outcome.last for outcome in outcomes])
        no_logprobs = sampling.get("logprobs") is None
        return {
            **output_of(last, [await outcome.reward() for outcome in outcomes]),
            **await asyncio.to_thread(_pictures_of, last, self._processor),
            "rollout_logprobs": None if no_logprobs else [each.logprobs for each in last],
            "trajectory_ids": ids,
            "trajectory_generation_times": [float(o.rollout.get("_ng_latency_s") or 0.0) for o in outcomes],
        }

    async def _generate(self, request: PolicyRequest, sampling: Mapping[str, Any]) -> PolicyAnswer:
        assert self._episodes is not None
        params = {**sampling, **request.sampling}
        params["logprobs"] = params.get("logprobs") or 0  # the token's own
        before = self._version()
        batch: JSON = {
            "prompt_token_ids": [request.prompt_ids],
            "sampling_params": params,
            "session_ids": [self._episodes.name(request)],
        }
        if request.pictures:
            batch["mm_features"] = [await self._features(request)]
        output = await self._engines.generate(batch, **self._model)
        if output["stop_reasons"][0] == "abort":
            raise RuntimeError("SkyRL aborted the generation")
        ids = list(output["response_ids"][0])
        logprobs = (output.get("response_logprobs") or [None])[0]
        finish = "length" if output["stop_reasons"][0] == "length" else "stop"
        # The engines freeze while they take new weights, and go on with them.
        versions = [*[before] * (len(ids) - 1), self._version()] if before is not None and ids else None
        return PolicyAnswer(ids, logprobs, finish, versions)  # type: ignore[arg-type]

    async def _features(self, request: PolicyRequest) -> JSON:
        """What the engines make of the pictures, at their places in the prompt."""
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in request.pictures]
        body = {**self._model, "messages": [{"role": "user", "content": parts}]}
        shown = await self._engines.render_chat_completion({"json": body})
        features: JSON = shown["features"]
        places = features["mm_placeholders"]["image"]
        tokens = [shown["token_ids"][one["offset"] : one["offset"] + one["length"]] for one in places]
        return {**features, "mm_placeholders": {"image": _placed(tokens, request.prompt_ids)}}

    def _version(self) -> str | None:
        version = getattr(self._engines, "weight_version", None)
        return None if version is None else str(version)


def _placed(pictures: Sequence[list[int]], prompt: list[int]) -> list[JSON]:
    """Where the tokens of each picture are in a prompt. Raises InvalidRequest: some are not there."""
    places: list[JSON] = []
    start = 0
    for tokens in pictures:
        width = len(tokens)
        ends = range(start, len(prompt) - width + 1)
        at = next((i for i in ends if prompt[i : i + width] == tokens), None)
        if at is None:
            raise InvalidRequest(
                f"picture {len(places)} has {width} tokens in SkyRL's engines, and others by the policy's "
                "processor: both must have the same model and the same settings of pictures"
            )
        places.append({"offset": at, "length": width})
        start = at + width
    return places


def _seen_alike(results: Sequence[TrainingSample]) -> list[TrainingSample]:
    """The samples of a batch, all with pictures or all without, as SkyRL needs them.

    A failure without tokens is another rollout's sample with a mask of zeros. Raises InvalidRequest: a scored
    rollout has no pictures, and others have some.
    """
    shown = next((sample for sample in results if sample.media), None)
    if shown is None:
        return list(results)
    blind = next((sample for sample in results if not sample.media and sample.failure is None), None)
    if blind is not None:
        raise InvalidRequest(
            f"SkyRL trains on batches with a picture in every rollout or in none: rollout {blind.rollout_id} "
            f"has none, and {shown.rollout_id} has {len(shown.media)}"
        )
    unused = replace(shown, loss_mask=[0] * len(shown.loss_mask), truncated=False)
    return [sample if sample.media else replace(unused, failure=sample.failure) for sample in results]


def _pictures_of(results: Sequence[TrainingSample], processor: Any) -> JSON:
    """SkyRL's tensors of the pictures of a batch; none if it has none."""
    if not results[0].media:
        return {}
    tensors = [picture_tensors(processor, sample) for sample in results]
    missing = {"pixel_values", "image_grid_thw"} - tensors[0].keys()
    if missing:
        raise InvalidRequest(
            f"SkyRL trains on `pixel_values` and `image_grid_thw`, as Qwen's models have them; "
            f"{type(processor).__name__} gives {', '.join(sorted(tensors[0]))}"
        )
    return {name: [each[name] for each in tensors] for name in ("pixel_values", "image_grid_thw")}


def output_of(results: Sequence[TrainingSample], rewards: Sequence[float]) -> JSON:
    """A ``GeneratorOutput`` of one sample for each prompt, in their order, with its reward."""
    failed = sum(sample.failure is not None for sample in results)
    reasons = [
        "length" if sample.truncated else "stop" if sample.failure is None else "error" for sample in results
    ]
    unused = ("rollout_expert_indices", "is_last_step", "env_metrics", "pixel_values", "image_grid_thw")
    return {
        "prompt_token_ids": [sample.prompt_ids for sample in results],
        "response_ids": [sample.response_ids for sample in results],
        "rewards": list(rewards),
        "loss_masks": [sample.loss_mask for sample in results],
        "stop_reasons": reasons,
        "rollout_metrics": {
            "generate/gym_failed": failed / len(results),
            "generate/gym_truncated": sum(sample.truncated for sample in results) / len(results),
        },
        **dict.fromkeys(unused),
    }


def experiment(graph: Any, **settings: Any) -> type[Any]:
    """SkyRL's ``BasePPOExp`` with a `Generator` of the graph."""
    from skyrl.train.entrypoints import main_base
    from skyrl.train.generators.base import GeneratorInterface

    generator = type("GymGenerator", (Generator, GeneratorInterface), {"__doc__": Generator.__doc__})

    class GymExp(main_base.BasePPOExp):  # type: ignore[misc]
        """The experiment of the graph."""

        def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> Any:
            own: JSON = {"model_name": main_base.resolve_policy_model_name(cfg)}
            if cfg.generator.vision_language_generator:
                from transformers import AutoProcessor

                own["processor"] = AutoProcessor.from_pretrained(cfg.trainer.policy.model.path)
            return generator(graph, inference_engine_client, tokenizer, **{**own, **settings})

    return GymExp


def main() -> None:
    """SkyRL's entry point with the `experiment` of the settings ``gym.NAME=VALUE`` (values in YAML)."""
    import ray
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.entrypoints import main_base

    own = [argument for argument in sys.argv[1:] if argument.startswith("gym.")]
    settings = {
        name: yaml.safe_load(value) for name, _, value in (each[len("gym.") :].partition("=") for each in own)
    }
    if "graph" not in settings:
        raise SystemExit("gym.graph=FILE is missing: the graph that makes the rollouts")
    cfg = SkyRLTrainConfig.from_cli_overrides([each for each in sys.argv[1:] if each not in own])
    main_base.validate_cfg(cfg)
    main_base.initialize_ray(cfg)
    # Not on the head node, as SkyRL has it.
    ray.get(ray.remote(num_cpus=1)(_run).remote(cfg, settings))


def _run(cfg: Any, settings: JSON) -> None:
    experiment(**settings)(cfg).run()
