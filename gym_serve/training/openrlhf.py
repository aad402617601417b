"""OpenRLHF (0.11): an agent executor that runs episodes of a graph; OpenRLHF's own engine generates.

    # agent.py, for --train.agent_func_path
    from gym_serve.training.openrlhf import executor

    AgentExecutor = executor("graphs/weather.yaml")

OpenRLHF gives a prompt and a label. The label is the row, as JSON (``--data.label_key row``); a label that
is no row is the ``expected_answer`` of a row whose prompt is OpenRLHF's, as it is: leave out
``--data.apply_chat_template``.

OpenRLHF has no value for a failure, and divides by the number of a sample's actions. A rollout that failed
all its attempts is its prompt and one token, with the mean reward of its siblings: its advantage is 0, and
the mean of the group is what it would be without it.

`reward_app` serves a graph's verifier at ``--reward.remote_url``, for OpenRLHF's single-turn executor.

Source: OpenRLHF 0.11, ``utils/agent.py``, ``trainer/ray/vllm_engine.py`` and
``trainer/ppo_utils/samples_generator.py``.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from gym_serve.client.gym import Gym
from gym_serve.training.episodes import Episodes, row_of
from gym_serve.training.samples import TrainingSample, samples, verified
from gym_serve.types.errors import BadRequest, InvalidRequest, NotFound
from gym_serve.types.policy import PolicyAnswer, PolicyRequest
from gym_serve.types.requests import JSON
from gym_serve.types.rows import with_prompt

ENDS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "</s>")
"""Tokens that end a turn of common models, as text."""

__all__ = ["ENDS", "Executor", "executor", "result_of", "reward_app"]


def executor(graph: Any, **settings: Any) -> type[Any]:
    """The class ``AgentExecutor`` of an agent file.

    Args:
        graph: path of a graph file, or what stands under its ``args``.
        **settings: of `Executor`.
    """
    from openrlhf.utils.agent import AgentExecutorBase

    return type(
        "AgentExecutor",
        (Executor, AgentExecutorBase),
        {"__init__": lambda self: Executor.__init__(self, graph, **settings)},
    )


class Executor:
    """Runs an episode for every call of OpenRLHF.

    Args:
        graph: path of a graph file, or what stands under its ``args``.
        agent: the agent of the graph; by default the row's, or the only one.
        overrides: values of the graph by path.
        attempts: how often a rollout is tried if its failure is worth it.
        timeout: seconds for one attempt; by default the agent's limits alone.
    """

    def __init__(
        self,
        graph: Any,
        *,
        agent: str | None = None,
        overrides: Mapping[str, Any] | None = None,
        attempts: int = 3,
        timeout: float | None = None,
    ) -> None:
        self._graph = graph
        self._overrides = overrides
        self._options = {"agent": agent, "attempts": attempts, "timeout": timeout}
        self._episodes: Episodes | None = None

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
        """One rollout, as OpenRLHF wants it.

        Args:
            prompt: OpenRLHF's prompt.
            label: the row as JSON, or the expected answer.
            sampling_params: vLLM's ``SamplingParams``.
            max_length: most tokens of the whole rollout.
            hf_tokenizer: OpenRLHF's tokenizer.
            llm_engine: has ``generate(token_ids, sampling_params)``.
            images: must be empty.

        Raises:
            InvalidRequest: there are images, or the row cannot be used.
            OperatorError: a setting is wrong.
        """
        if images:
            raise InvalidRequest("this executor takes text only, got images")
        if self._episodes is None:
            generate = partial(_generate, llm_engine)
            settings = {"max_model_len": max_length}
            self._episodes = Episodes(
                self._graph, hf_tokenizer, generate, overrides=self._overrides, settings=settings
            )
        given = ("temperature", "top_p", "max_tokens")
        sampling = {key: getattr(sampling_params, key, None) for key in given}
        with self._episodes.among_siblings((prompt, label, id(sampling_params))) as siblings:
            rollout = await self._episodes.run(
                _row_of(prompt, label), sampling, sampling_params, **self._options
            )
            if verified(samples(rollout)).failure is None:
                siblings.add(rollout)
        rollout = await siblings.compared(rollout)
        sample = verified(samples(rollout, pad_token_id=hf_tokenizer.eos_token_id))
        reward = sample.reward if sample.failure is None else await siblings.mean()
        with_logprobs = sampling_params.logprobs is not None
        result = result_of(sample, reward, int(hf_tokenizer.eos_token_id), with_logprobs=with_logprobs)
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
    """See the module."""
    is_row = isinstance(label, str) and label.lstrip().startswith("{")
    try:
        return row_of({"row": label} if is_row else {}, prompt, expected_answer=label)
    except InvalidRequest:
        return row_of({}, prompt, expected_answer=label)


def result_of(sample: TrainingSample, reward: float, end: int, *, with_logprobs: bool) -> JSON:
    """What OpenRLHF makes an experience of; ``extra_logs`` has the same keys for all.

    Args:
        sample: what there is to train on.
        reward: the reward; of a failure, the mean of its siblings.
        end: the token that ends a turn: the one action of a failure.
    """
    ids, mask, logprobs = sample.response_ids, sample.loss_mask, sample.logprobs
    if sample.failure is not None:
        ids, mask, logprobs = [end], [1], [0.0]
    given = len(sample.prompt_ids)
    ranges = []
    at = given
    for is_action, tokens in groupby(mask):
        length = len(list(tokens))
        ranges += [(at, at + length)] if is_action else []
        at += length
    return {
        "observation_tokens": sample.prompt_ids + ids,
        "action_ranges": ranges,
        "rollout_log_probs": [0.0] * given + logprobs if with_logprobs else None,
        "reward": reward,
        "scores": reward,
        "truncated": sample.truncated,
        "extra_logs": {"failed": float(sample.failure is not None)},
        "images": None,
        "mm_train_inputs": None,
    }


def reward_app(
    graph: Any, *, environment: str | None = None, ends: Sequence[str] = ENDS, **options: Any
) -> Starlette:
    """An ASGI application for ``--reward.remote_url``: a graph's verifier, of responses of one turn.

    Serve it by ``uvicorn``. OpenRLHF posts ``query`` (the prompt and its response), ``prompts`` and
    ``labels``, which are read as by `Executor`, and gets ``rewards``, ``scores`` and ``extra_logs``, each a
    list.

    Args:
        graph: path of a graph file, or what stands under its ``args``.
        environment: the environment whose verifier scores; by default the only one.
        ends: what ends a turn in ``query``, which has its special tokens; it is cut off.
        **options: of `Gym.from_graph`.

    Raises:
        GraphError: the graph has problems.
        NotFound: there is no such environment, or several of which none is named.
        BadRequest: its verifier needs the session of the episode.
    """
    gym = Gym.from_graph(graph, **options)
    names = list(gym.graph.get("resources") or {})
    if environment is None and len(names) != 1:
        raise NotFound(f"`environment` must be one of {', '.join(names)}")
    name = names[0] if environment is None else environment
    if gym.call(name, "reverify_mode") == "unsupported":
        raise BadRequest(f"{name} scores what happened in its session: use `executor` instead")

    async def reward(request: Request) -> JSONResponse:
        body = await request.json()
        asked = zip(body["query"], body["prompts"], body["labels"], strict=True)
        verdicts = await asyncio.gather(*(verified_by(*each) for each in asked))
        return JSONResponse({"rewards": verdicts, "scores": verdicts, "extra_logs": {}})

    async def verified_by(query: str, prompt: str, label: Any) -> float:
        text = query.removeprefix(prompt)
        for end in ends:
            text = text.removesuffix(end)
        message = {"type": "message", "role": "assistant", "status": "completed", "id": "msg_0"}
        output = [{**message, "content": [{"type": "output_text", "text": text, "annotations": []}]}]
        row = with_prompt(_row_of(prompt, label))
        verdict = await gym.acall(name, "verify", {**row, "response": {"output": output}})
        return float(verdict["reward"])

    return Starlette(routes=[Route("/{path:path}", reward, methods=["POST"])])
