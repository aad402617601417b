"""verl (0.9): `GymAgentLoop`, an agent loop that a config file selects; verl's own servers generate.

    # gym.yaml, for actor_rollout_ref.rollout.agent.agent_loop_config_path
    - name: gym
      _target_: gym_serve.training.verl.GymAgentLoop
      graph: graphs/weather.yaml

Rows of the data set select it by their column ``agent_name: gym``. Each `AgentLoopWorker` runs the graph in
its process (`Episodes`), and every generation goes to verl's ``server_manager``.

A failed rollout is never trained on. Trainer V1 (TransferQueue): the session has no output, and verl forms
the group of the others. Trainer V0: the batch must be complete, so the failure is an output whose mask is 0.
verl counts its score in its group all the same; so the score is the mean of its siblings in this worker.

Source: verl 0.9, ``experimental/agent_loop/agent_loop.py`` and ``trainer/ppo/v1/agent_loop_tq.py``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from gym_serve.training.episodes import Adapter, row_of
from gym_serve.training.samples import TrainingSample, fitted, samples
from gym_serve.types.media import opened
from gym_serve.types.model_endpoint import PolicyAnswer, PolicyRequest
from gym_serve.types.requests import JSON
from gym_serve.types.rows import Rollout

__all__ = ["AgentLoop", "answer_of", "output_of"]


def __getattr__(name: str) -> Any:
    """``GymAgentLoop``: verl is imported when verl asks for it, and not before."""
    if name != "GymAgentLoop":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from verl.experimental.agent_loop.agent_loop import AgentLoopBase

    loop = type(name, (AgentLoop, AgentLoopBase), {"__doc__": AgentLoop.__doc__, "__module__": __name__})
    return globals().setdefault(name, loop)


class AgentLoop:
    """Runs an episode of a graph for a row of verl's data set. verl makes one for each sample."""

    def __init__(
        self,
        trainer_config: Any,
        server_manager: Any,
        tokenizer: Any,
        processor: Any = None,
        *,
        graph: Any,
        data_config: Any = None,
        agent: str | None = None,
        overrides: Mapping[str, Any] | None = None,
        attempts: int = 3,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> None:
        # Not AgentLoopBase's: it renders the chat template several times, for every sample.
        key = (str(graph), str(overrides), id(server_manager), id(asyncio.get_running_loop()))
        if key not in _workers:
            rollout = trainer_config.config.actor_rollout_ref.rollout
            options = {"agent": agent, "overrides": overrides, "attempts": attempts, "timeout": timeout}
            data = getattr(data_config, "config", None) or {}
            _workers[key] = _Worker(server_manager, (tokenizer, processor), graph, rollout, data, **options)
        self._worker = _workers[key]

    async def run(self, sampling_params: Mapping[str, Any], **columns: Any) -> Any:
        """The output of one sample; for V1, which gives a ``session_id``, a list of them: a harness's
        branches are trained on too, and the list of a failed rollout is empty.

        Args:
            **columns: the sample's columns. Its row is the JSON in ``extra_info.row``, as ``gym-serve export
                --to verl`` writes it, or is made of ``raw_prompt``, the keys of ``extra_info`` and, as
                ``expected_answer``, of ``reward_model.ground_truth``.
        """
        fields = await self.outputs(sampling_params, **columns)
        from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

        outputs = [AgentLoopOutput(**each) for each in fields]
        return outputs if "session_id" in columns else outputs[-1]

    async def outputs(self, sampling_params: Mapping[str, Any], **columns: Any) -> list[JSON]:
        """The fields of the outputs of one sample, the verified conversation last; see `run`."""
        worker = self._worker
        row, prompt = _row_of(columns), columns.get("uid")
        outcome = await worker.outcome(row, prompt, sampling_params, sampling_params, read=worker.fitting)
        last = outcome.last
        if "session_id" in columns and last.failure is not None:
            return []
        others = [sample for sample in outcome.samples if sample is not last and sample.failure is None]
        logprobs = worker.with_logprobs
        fields = [output_of(each, outcome.rollout, with_logprobs=logprobs) for each in (*others, last)]
        if last.failure is not None:
            fields[-1]["reward_score"] = await outcome.reward()
        return fields


class _Worker(Adapter):
    """What the samples of one of verl's workers share."""

    def __init__(
        self, server_manager: Any, reads: tuple[Any, Any], graph: Any, rollout: Any, data: Any, **options: Any
    ) -> None:
        super().__init__(graph, **options)
        self.with_logprobs = bool(rollout.calculate_log_probs)
        self._servers = server_manager
        self._limits = (int(rollout.prompt_length), int(rollout.response_length))
        tokenizer, processor = reads
        self._pad = int(tokenizer.pad_token_id or 0)
        template = dict(data.get("apply_chat_template_kwargs") or {})
        self.episodes(
            tokenizer,
            self._generate,
            processor=processor,
            max_model_len=sum(self._limits),
            chat_template_kwargs=template,
        )

    def fitting(self, rollout: Rollout) -> list[TrainingSample]:
        return [fitted(each, *self._limits) for each in samples(rollout, pad_token_id=self._pad)]

    async def _generate(self, request: PolicyRequest, sampling: Mapping[str, Any]) -> PolicyAnswer:
        longest = self._limits[1]
        limit = min(request.sampling.get("max_tokens") or longest, longest)
        assert self._episodes is not None
        output = await self._servers.generate(
            request_id=self._episodes.name(request),
            prompt_ids=request.prompt_ids,
            sampling_params={**sampling, **request.sampling, "max_tokens": limit, "logprobs": True},
            **({"image_data": list(map(opened, request.pictures))} if request.pictures else {}),
        )
        if output.stop_reason in ("aborted", "abort"):
            raise RuntimeError("verl aborted the generation")
        return answer_of(output, limit)


_workers: dict[tuple[Any, ...], _Worker] = {}


def answer_of(output: Any, limit: int) -> PolicyAnswer:
    """verl's ``TokenOutput`` as an answer. The weights may have changed within it: it has two versions."""
    ids = list(output.token_ids)
    first, last = (output.extra_fields.get(f"{end}_global_steps") for end in ("min", "max"))
    versions = None if first is None or not ids else [*[str(first)] * (len(ids) - 1), str(last)]
    is_cut = output.stop_reason == "length" or len(ids) >= limit
    return PolicyAnswer(ids, output.log_probs, "length" if is_cut else "stop", versions)


def _row_of(columns: Mapping[str, Any]) -> JSON:
    """See `row_of`; the columns of the row are in verl's ``extra_info``."""
    extra, graded = columns.get("extra_info"), columns.get("reward_model")
    answer = graded.get("ground_truth") if isinstance(graded, Mapping) else None
    own = extra if isinstance(extra, Mapping) else {}
    return row_of(own, columns.get("raw_prompt"), expected_answer=answer)


def output_of(sample: TrainingSample, rollout: Rollout, *, with_logprobs: bool) -> JSON:
    """The fields of an ``AgentLoopOutput``. Those of all samples have the same keys, which verl demands."""
    timeline = rollout.timeline
    seconds = {
        kind: math.fsum(step.duration for step in timeline.steps if step.kind == kind) if timeline else 0.0
        for kind in ("model", "tool")
    }
    steps = [int(version) for version in sample.versions if version is not None and version.isdecimal()]
    items = rollout["response"].get("output") or () if isinstance(rollout.get("response"), dict) else ()
    turns = sum(item.get("type", "message") in ("message", "function_call_output") for item in items)
    return {
        "prompt_ids": sample.prompt_ids,
        "response_ids": sample.response_ids,
        "response_mask": sample.loss_mask,
        "response_logprobs": sample.logprobs if with_logprobs else None,
        "multi_modal_data": {"images": list(map(opened, sample.pictures))} if sample.media else {},
        "reward_score": sample.reward,
        "num_turns": 1 + turns,
        "metrics": {"generate_sequences": seconds["model"], "tool_calls": seconds["tool"]},
        "extra_fields": {
            "reward_extra_info": {
                "score": sample.reward,
                "failed": float(sample.failure is not None),
                "truncated": float(sample.truncated),
            },
            "turn_scores": [],
            "tool_rewards": [],
            "min_global_steps": min(steps, default=None),
            "max_global_steps": max(steps, default=None),
        },
    }
