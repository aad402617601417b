"""OpenRLHF (0.11): an agent executor that runs episodes of a graph; OpenRLHF's own engine generates.

    # agent.py, for --train.agent_func_path
    from gym_serve.training.openrlhf import executor

    AgentExecutor = executor("graphs/weather.yaml")

The label is the row, as JSON (``--data.label_key row``); a label that is no row is the ``expected_answer`` of
a row whose prompt is OpenRLHF's, as it is: leave out ``--data.apply_chat_template``. A rollout that failed
all its attempts is its prompt and one token, with the mean reward of its siblings: its advantage is 0.

Source: OpenRLHF 0.11, ``utils/agent.py``, ``trainer/ray/vllm_engine.py`` and
``trainer/ppo_utils/samples_generator.py``.
"""

from __future__ import annotations

import copy
from functools import partial
from itertools import groupby
from typing import Any

from gym_serve.training.episodes import Adapter, row_of
from gym_serve.training.samples import TrainingSample, samples
from gym_serve.types.errors import InvalidRequest
from gym_serve.types.model_endpoint import PolicyAnswer, PolicyRequest
from gym_serve.types.requests import JSON

__all__ = ["Executor", "executor", "result_of"]


def executor(graph: Any, **settings: Any) -> type[Any]:
    """The class ``AgentExecutor`` of an agent file."""
    from openrlhf.utils.agent import AgentExecutorBase

    return type(
        "AgentExecutor",
        (Executor, AgentExecutorBase),
        {"__init__": lambda self: Executor.__init__(self, graph, **settings)},
    )


class Executor(Adapter):
    """Runs an episode for every call of OpenRLHF."""

    async def execute(  # noqa: PLR0917  # OpenRLHF's
        self,
        prompt: str,
        label: str,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> JSON:
        """One rollout of at most ``max_length`` tokens, as OpenRLHF wants it. Raises `InvalidRequest` if
        there are images, or the row cannot be used, and `OperatorError`."""
        if images:
            raise InvalidRequest("this executor takes text only, got images")
        self.episodes(hf_tokenizer, partial(_generate, llm_engine), max_model_len=max_length)
        names = ("temperature", "top_p", "max_tokens")
        outcome = await self.outcome(
            _row_of(prompt, label),
            (prompt, label, id(sampling_params)),
            {name: getattr(sampling_params, name, None) for name in names},
            sampling_params,
            read=partial(samples, pad_token_id=hf_tokenizer.eos_token_id),
        )
        reward, end = await outcome.reward(), int(hf_tokenizer.eos_token_id)
        with_logprobs = sampling_params.logprobs is not None
        result = result_of(outcome.last, reward, end, with_logprobs=with_logprobs)
        return {"prompt": prompt, "label": label, **result}


async def _generate(engine: Any, request: PolicyRequest, sampling: Any) -> PolicyAnswer:
    params = copy.deepcopy(sampling)
    for key, value in request.sampling.items():
        if not hasattr(params, key):
            raise InvalidRequest(
                f"OpenRLHF's engine has no sampling parameter {key!r}: leave it out of the row"
            )
        setattr(params, key, value)
    params.logprobs = params.logprobs or 0  # the token's own
    output = (await engine.generate(request.prompt_ids, params)).outputs[0]
    if output.finish_reason == "abort":
        raise RuntimeError("the engine aborted the generation")
    ids = list(output.token_ids)
    logprobs = [of[token].logprob for token, of in zip(ids, output.logprobs or (), strict=True)]
    return PolicyAnswer(ids, logprobs, "length" if output.finish_reason == "length" else "stop")


def _row_of(prompt: str, label: Any) -> JSON:
    is_row = isinstance(label, str) and label.lstrip().startswith("{")
    try:
        return row_of({"row": label} if is_row else {}, prompt, expected_answer=label)
    except InvalidRequest:
        return row_of({}, prompt, expected_answer=label)


def result_of(sample: TrainingSample, reward: float, end: int, *, with_logprobs: bool) -> JSON:
    """What OpenRLHF makes an experience of; ``extra_logs`` has the same keys for all.

    Args:
        end: the token that ends a turn: the one action of a failure.
    """
    ids, mask, logprobs = sample.response_ids, sample.loss_mask, sample.logprobs
    if sample.failure is not None:
        ids, mask, logprobs = [end], [1], [0.0]
    start = at = len(sample.prompt_ids)
    ranges = []
    for is_action, tokens in groupby(mask):
        length = len(list(tokens))
        ranges += [(at, at + length)] if is_action else []
        at += length
    return {
        "observation_tokens": sample.prompt_ids + ids,
        "action_ranges": ranges,
        "rollout_log_probs": [0.0] * start + logprobs if with_logprobs else None,
        "reward": reward,
        "scores": reward,
        "truncated": sample.truncated,
        "extra_logs": {"failed": float(sample.failure is not None)},
        "images": None,
        "mm_train_inputs": None,
    }
