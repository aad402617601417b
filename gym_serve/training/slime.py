"""slime: a function for ``--custom-generate-function-path`` that runs episodes of a graph by slime's router.

    # rollout.py, for --custom-generate-function-path rollout.generate
    from gym_serve.training.slime import generator

    generate = generator("graphs/weather.yaml")

A harness's branches, and histories that were tokenized again, are samples of their own with the same
``rollout_id``. A rollout that failed all its attempts has the status ``FAILED`` and ``remove_sample``, so
its loss is 0. slime counts its reward in its group, so the reward is the mean of its siblings.

slime cuts a batch into groups by the number of its samples; with branches it takes the whole batch as one
group. `group_rewards` forms the groups by prompt, counts a rollout once, and leaves failures out:
``--custom-reward-post-process-path gym_serve.training.slime.group_rewards``.

Source: slime at 624b824 (August 2026), ``rollout/sglang_rollout.py``, ``ray/rollout.py``, ``utils/types.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from statistics import fmean, stdev
from typing import Any

from gym_serve.training.episodes import Adapter, row_of
from gym_serve.training.samples import TrainingSample, picture_tensors
from gym_serve.types.errors import InvalidRequest
from gym_serve.types.model_endpoint import PolicyAnswer, PolicyRequest

__all__ = ["generator", "group_rewards"]


def generator(graph: Any, **options: Any) -> Callable[..., Awaitable[Any]]:
    """The function ``generate(args, sample, sampling_params)``.

    A sample's row is the JSON in its ``metadata["row"]``, or is made of its prompt, its metadata and, as
    ``expected_answer``, its label.
    """
    adapter = Adapter(graph, **options)

    async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
        from slime.rollout.sglang_rollout import GenerateState
        from slime.utils.http_utils import post

        state = GenerateState(args)
        limit = getattr(args, "rollout_max_context_len", None)
        if sample.multimodal_inputs and "row" not in (sample.metadata or {}):
            raise InvalidRequest("pictures must be in the row, as JSON in the sample's metadata: `row`")
        generating = partial(_generate, state, args, post)
        adapter.episodes(state.tokenizer, generating, processor=state.processor, max_model_len=limit)
        outcome = await adapter.outcome(
            row_of(sample.metadata or {}, sample.prompt, expected_answer=sample.label),
            sample.group_index,
            {**sampling_params, "max_tokens": sampling_params.get("max_new_tokens")},
            (sampling_params, sample.session_id),
        )
        if state.aborted:  # the weights change: slime begins the sample anew
            sample.status = type(sample).Status.ABORTED
            return sample
        last = outcome.last
        if last.failure is not None:
            return filled(sample, last, await outcome.reward())
        read = partial(picture_tensors, state.processor)
        kept = [each for each in outcome.samples if each.failure is None]
        parts = [
            filled(sample if each is last else copy.deepcopy(sample), each, each.reward, read)
            for each in kept
        ]
        return parts[0] if len(parts) == 1 else parts

    return generate


async def _generate(state: Any, args: Any, post: Any, request: PolicyRequest, context: Any) -> PolicyAnswer:
    if state.aborted:
        raise RuntimeError("slime aborts its generations")
    sampling, session = context
    params = {**sampling, **request.sampling}
    params["max_new_tokens"] = params.pop("max_tokens", sampling.get("max_new_tokens"))
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    payload = {"input_ids": request.prompt_ids, "sampling_params": params, "return_logprob": True}
    if request.pictures:
        payload["image_data"] = list(request.pictures)
    return answer_of(await post(url, payload, headers={"X-SMG-Routing-Key": session} if session else None))


def group_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """slime's rewards of a batch, and what is left of them within their groups: its GRPO's advantages.

    slime's ``rewards_normalization`` and ``grpo_std_normalization`` hold. A failed rollout has 0.0 there.
    """
    raw = [float(sample.get_reward_value(args)) for sample in samples]
    if not args.rewards_normalization:
        return raw, raw
    groups: dict[Any, dict[Any, float]] = {}
    for sample, reward in zip(samples, raw, strict=True):
        if not sample.remove_sample:
            groups.setdefault(sample.group_index, {})[sample.rollout_id] = reward
    advantages = []
    for sample, reward in zip(samples, raw, strict=True):
        if sample.remove_sample:
            advantages.append(0.0)
            continue
        rewards = list(groups[sample.group_index].values())
        deviation = stdev(rewards) if len(rewards) > 1 else 0.0
        scale = deviation + 1e-6 if args.grpo_std_normalization else 1.0
        advantages.append((reward - fmean(rewards)) / scale)
    return raw, advantages


def filled(
    sample: Any,
    trained: TrainingSample,
    reward: float,
    tensors: Callable[[TrainingSample], dict[str, Any]] = lambda trained: {},
) -> Any:
    """slime's sample with what there is to train on. ``tensors``: those of its pictures."""
    sample.tokens = trained.input_ids
    sample.response_length = len(trained.response_ids)
    sample.loss_mask = trained.loss_mask
    sample.rollout_log_probs = trained.logprobs
    sample.weight_versions = [version for version in dict.fromkeys(trained.versions) if version is not None]
    sample.multimodal_train_inputs = tensors(trained) if trained.media else None
    sample.reward = reward
    sample.remove_sample = trained.failure is not None
    if getattr(sample, "rollout_id", None) is None:
        sample.rollout_id = sample.index
    statuses = type(sample).Status
    if trained.failure is not None:
        sample.status = statuses.FAILED
    else:
        sample.status = statuses.TRUNCATED if trained.truncated else statuses.COMPLETED
    return sample


def answer_of(output: Mapping[str, Any]) -> PolicyAnswer:
    """SGLang's answer of ``/generate``. Raises `RuntimeError`: slime aborted the generation."""
    meta = output["meta_info"]
    finish = (meta.get("finish_reason") or {}).get("type")
    if finish == "abort":
        raise RuntimeError("slime aborted the generation")
    tokens = meta.get("output_token_logprobs") or []
    version = meta.get("weight_version")
    return PolicyAnswer(
        [each[1] for each in tokens],
        [each[0] for each in tokens],
        "length" if finish == "length" else "stop",
        None if version is None else str(version),
    )
