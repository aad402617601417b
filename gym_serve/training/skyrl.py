"""SkyRL (0.3): a generator that runs episodes of a graph; SkyRL's own inference engines generate.

    python -m skyrl.train.entrypoints.main_base trainer.override_entrypoint=gym_serve.training.skyrl \\
        gym.graph=graphs/weather.yaml data.train_data="['rows.parquet']" ...

`main` is SkyRL's entry point with `experiment`, whose only difference is the generator. An experiment of
your own derives from ``experiment(graph)`` instead of ``BasePPOExp``.

A failed rollout is tried again. One that failed all its attempts has a mask of zeros, and the mean reward
of its siblings in the batch, so that it does not move the mean of its group.

Source: SkyRL 0.3, ``train/generators/base.py``, ``train/entrypoints/main_base.py``, ``train/trainer.py`` and
``backends/skyrl_train/inference_servers``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import yaml

from gym_serve.training.episodes import Episodes, row_of
from gym_serve.training.samples import TrainingSample, samples, verified
from gym_serve.types.errors import InvalidRequest
from gym_serve.types.policy import PolicyAnswer, PolicyRequest
from gym_serve.types.requests import JSON

__all__ = ["Generator", "experiment", "main", "output_of"]


class Generator:
    """Runs an episode for each prompt of a batch. SkyRL's ``GeneratorInterface``, by its shape.

    Args:
        graph: path of a graph file, or what stands under its ``args``.
        inference_engine_client: SkyRL's.
        tokenizer: SkyRL's.
        model_name: name of the policy at the engines.
        max_model_len: most tokens of a prompt and its generation together; None leaves that to the engines.
        agent: the agent of the graph; by default the row's, or the only one.
        overrides: values of the graph by path.
        attempts: how often a rollout is tried if its failure is worth it.
        timeout: seconds for one attempt; by default the agent's limits alone.
    """

    def __init__(
        self,
        graph: Any,
        inference_engine_client: Any,
        tokenizer: Any,
        *,
        model_name: str | None = None,
        max_model_len: int | None = None,
        agent: str | None = None,
        overrides: Mapping[str, Any] | None = None,
        attempts: int = 3,
        timeout: float | None = None,
    ) -> None:
        self._graph = graph
        self._engines = inference_engine_client
        self._tokenizer = tokenizer
        self._model = model_name
        self._overrides = overrides
        self._settings = {} if max_model_len is None else {"max_model_len": max_model_len}
        self._options = {"agent": agent, "attempts": attempts, "timeout": timeout}
        self._episodes: Episodes | None = None

    async def generate(self, input_batch: Mapping[str, Any]) -> JSON:
        """The trajectories of a ``GeneratorInput``, as a ``GeneratorOutput``.

        Raises:
            InvalidRequest: a row cannot be used.
            OperatorError: a setting is wrong.
        """
        if self._episodes is None:
            self._episodes = Episodes(
                self._graph,
                self._tokenizer,
                self._generate,
                overrides=self._overrides,
                settings=self._settings,
            )
        sampling = input_batch.get("sampling_params") or {}
        prompts = input_batch["prompts"]
        extras = input_batch.get("env_extras") or [{}] * len(prompts)
        rows = [row_of(extra, prompt) for prompt, extra in zip(prompts, extras, strict=True)]
        rollouts = await self._episodes.run_all(rows, sampling, sampling, **self._options)
        groups = _groups(input_batch.get("trajectory_ids"), len(rows))
        for members in groups.values():
            scored = [i for i in members if rollouts[i].failure is None]
            compared = await self._episodes.compared([rollouts[i] for i in scored])
            for i, rollout in zip(scored, compared, strict=True):
                rollouts[i] = rollout
        pad = int(self._tokenizer.eos_token_id)
        found = [verified(samples(rollout, pad_token_id=pad)) for rollout in rollouts]
        if any(sample.media for sample in found):
            raise InvalidRequest("SkyRL's generator here takes text only, got images or audio")
        seconds = [float(rollout.get("_ng_latency_s") or 0.0) for rollout in rollouts]
        return output_of(
            found,
            input_batch.get("trajectory_ids"),
            seconds,
            with_logprobs=sampling.get("logprobs") is not None,
        )

    async def _generate(self, request: PolicyRequest, sampling: Mapping[str, Any]) -> PolicyAnswer:
        assert self._episodes is not None
        params = {**sampling, **request.sampling}
        params["logprobs"] = params.get("logprobs") or 0  # the token's own
        before = self._version()
        batch = {
            "prompt_token_ids": [request.prompt_ids],
            "sampling_params": params,
            "session_ids": [self._episodes.name(request)],
        }
        output = await self._engines.generate(
            batch, **({} if self._model is None else {"model": self._model})
        )
        if output["stop_reasons"][0] == "abort":
            raise RuntimeError("SkyRL aborted the generation")
        ids = list(output["response_ids"][0])
        logprobs = (output.get("response_logprobs") or [None])[0]
        finish = "length" if output["stop_reasons"][0] == "length" else "stop"
        # The engines freeze while they take new weights, and go on with them.
        versions = [*[before] * (len(ids) - 1), self._version()] if before is not None and ids else None
        return PolicyAnswer(ids, logprobs, finish, versions)  # type: ignore[arg-type]

    def _version(self) -> str | None:
        version = getattr(self._engines, "weight_version", None)
        return None if version is None else str(version)


def output_of(
    found: Sequence[TrainingSample],
    trajectory_ids: Sequence[Any] | None,
    seconds: Sequence[float],
    *,
    with_logprobs: bool,
) -> JSON:
    """A ``GeneratorOutput`` of one sample for each prompt, in their order."""
    rewards = [sample.reward for sample in found]
    for members in _groups(trajectory_ids, len(found)).values():
        scored = [found[i].reward for i in members if found[i].failure is None]
        for i in members:
            if found[i].failure is not None:
                rewards[i] = fmean(scored) if scored else 0.0
    failed = sum(sample.failure is not None for sample in found)
    reasons = [
        "length" if sample.truncated else "stop" if sample.failure is None else "error" for sample in found
    ]
    return {
        "prompt_token_ids": [sample.prompt_ids for sample in found],
        "response_ids": [sample.response_ids for sample in found],
        "rewards": rewards,
        "loss_masks": [sample.loss_mask for sample in found],
        "stop_reasons": reasons,
        "rollout_metrics": {
            "generate/gym_failed": failed / len(found),
            "generate/gym_truncated": sum(sample.truncated for sample in found) / len(found),
        },
        "rollout_logprobs": [sample.logprobs for sample in found] if with_logprobs else None,
        "trajectory_ids": trajectory_ids,
        "trajectory_generation_times": list(seconds),
        "rollout_expert_indices": None,
        "is_last_step": None,
        "env_metrics": None,
        "pixel_values": None,
        "image_grid_thw": None,
    }


def _groups(trajectory_ids: Sequence[Any] | None, size: int) -> dict[Any, list[int]]:
    """The places of the rollouts of each prompt."""
    groups: dict[Any, list[int]] = {}
    for at, id_ in enumerate(trajectory_ids or [None] * size):
        groups.setdefault(getattr(id_, "instance_id", ("alone", at)), []).append(at)
    return groups


def experiment(graph: Any, **settings: Any) -> type[Any]:
    """SkyRL's ``BasePPOExp`` with a `Generator` of the graph.

    Args:
        graph: as for `Generator`.
        **settings: of `Generator`.
    """
    from skyrl.train.entrypoints import main_base
    from skyrl.train.generators.base import GeneratorInterface

    generator = type("GymGenerator", (Generator, GeneratorInterface), {"__doc__": Generator.__doc__})

    class GymExp(main_base.BasePPOExp):  # type: ignore[misc]
        """The experiment of the graph."""

        def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> Any:
            name = main_base.resolve_policy_model_name(cfg)
            return generator(graph, inference_engine_client, tokenizer, **{"model_name": name, **settings})

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
