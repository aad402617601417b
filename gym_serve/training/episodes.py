"""`Episodes`: a graph in the trainer's process, whose policy is the trainer's own engine.

verl, OpenRLHF, SkyRL and slime call a piece of the user's code with every prompt, and hand it an engine:
token ids and sampling go in, token ids and log-probabilities come out. `Episodes` is that code for all of
them, and `Adapter` the base of what each trainer calls. An environment that needs more than this process runs
elsewhere: give its URL in the graph (``type: http``).
"""

from __future__ import annotations

import asyncio
import copy
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, NamedTuple

import orjson

from gym_serve.client.gym import AsyncGym, Gym
from gym_serve.graph import load_graph
from gym_serve.graph.classes import find_class
from gym_serve.servers.base import Server
from gym_serve.training.samples import TrainingSample, media_in, samples, verified
from gym_serve.training.trl.rollouts import messages_of
from gym_serve.types.errors import GraphError, InvalidRequest, VerifierFailed
from gym_serve.types.exact import exact_bytes, exact_json
from gym_serve.types.media import pictures_in
from gym_serve.types.model_endpoint import PolicyAnswer, PolicyRequest
from gym_serve.types.requests import JSON, input_items
from gym_serve.types.rows import Rollout, failed_rollout, with_prompt

__all__ = [
    "Adapter",
    "Episodes",
    "Outcome",
    "Siblings",
    "columns_of",
    "endpoints_of",
    "refuse_unseen",
    "row_of",
    "settings_for",
]

Generate = Callable[[PolicyRequest, Any], Awaitable[PolicyAnswer]]
"""The trainer's engine: one generation. It is given what `Episodes.run_all` was given as ``context``."""

_MODEL = "callback_model"

_PARAMS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "max_tokens": "max_output_tokens",
}  # by vLLM's names


class Episodes:
    """Runs episodes of a graph in this process. Construct it in the event loop in which ``generate`` is to
    run.

    Args:
        tokenizer: the trainer's, of ``transformers``. It is copied: a tokenizer is not made for two threads.
        generate: the trainer's engine; called with one request at a time, as often as there are episodes.
        models: the model servers that the trainer's engine stands for; by default the models of all agents.
        settings: settings of these models (`callback_model`), where the graph says no other.
        processor: the trainer's, of ``transformers``, for a policy that reads pictures.

    Raises `GraphError` if the graph has problems, or no model that an agent names.
    """

    def __init__(
        self,
        graph: str | Path | Mapping[str, Any],
        tokenizer: Any,
        generate: Generate,
        *,
        overrides: Mapping[str, Any] | None = None,
        models: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
        processor: Any = None,
    ) -> None:
        source = load_graph(graph, overrides=overrides or {})
        policies = list(models) or source.spec.policies()
        if not policies:
            raise GraphError("agents: none names a model of the graph; give `models`", source=source.path)
        processor = processor if hasattr(processor, "image_token") else None
        model, specs = _model_with(*copy.deepcopy((tokenizer, processor))), source.spec.models
        replaced = {
            f"models.{name}": {**(settings or {}), **settings_for(_MODEL, specs.get(name)), "type": model}
            for name in policies
        }
        self._gym = Gym.from_graph(graph, overrides={**(overrides or {}), **replaced}, ray=False)
        self._tasks = count()
        self._contexts: dict[str, Any] = {}
        self._siblings: dict[Any, Siblings] = {}
        self._prefix = secrets.token_hex(4)

        async def batch(requests: list[PolicyRequest]) -> list[PolicyAnswer]:
            tasks = [(request.episode or "").partition("-")[0] for request in requests]
            return [await generate(r, self._contexts.get(t)) for r, t in zip(requests, tasks, strict=True)]

        for name in policies:
            self._gym.policy.serve(name, batch, max_batch=1)

    async def run_all(
        self,
        rows: Sequence[JSON],
        sampling: Mapping[str, Any] | None = None,
        context: Any = None,
        **options: Any,
    ) -> list[Rollout]:
        """An episode of each row, in their order; with ``options`` as for `Gym.rollouts`.

        ``sampling`` is the trainer's ``temperature``, ``top_p`` and ``max_tokens``, which hold before the
        rows' own. Other keys, and None, are left to ``context``. Raises `OperatorError`.
        """
        values = sampling or {}
        params = {name: values[key] for key, name in _PARAMS.items() if values.get(key) is not None}
        numbered = [{**row, "_ng_task_index": next(self._tasks)} for row in rows]
        names = [str(row["_ng_task_index"]) for row in numbered]
        self._contexts.update(dict.fromkeys(names, context))
        options = {"attempts": 3, "max_failures": 1, "concurrency": max(len(rows), 1), **options}
        try:
            return await AsyncGym.of(self._gym).run(numbered, params=params, **options)
        finally:
            for name in names:
                del self._contexts[name]

    async def compared(self, scored: Sequence[Rollout]) -> list[Rollout]:
        """The scored rollouts of one prompt, with the rewards of their group where the environment compares
        them. If that fails, all of them have failed."""
        if not scored:
            return []
        group = await AsyncGym.of(self._gym).compare(scored)
        if group.usable:
            return group.rollouts
        error = VerifierFailed(str(group.reason))
        return [Rollout(failed_rollout(each, error, each["response"])) for each in scored]

    @contextmanager
    def among_siblings(self, prompt: Any) -> Iterator[Siblings]:
        """While a rollout of a prompt runs; None for a rollout without siblings."""
        key = object() if prompt is None else prompt
        siblings = self._siblings.setdefault(key, Siblings(self.compared))
        siblings.running += 1
        try:
            yield siblings
        finally:
            siblings.running -= 1
            if siblings.running == 0:
                siblings.ended.set()
                self._siblings.pop(key, None)

    def name(self, request: PolicyRequest) -> str:
        """A name of the request's episode that no other process has, for an engine's prefix cache."""
        return f"{self._prefix}-{request.episode or request.id}"

    def close(self) -> None:
        self._gym.shutdown()


class Siblings:
    """The rollouts of one prompt that run in this process, for trainers that ask for each by itself.

    Such a trainer counts the reward of every rollout in its group. A failure whose reward is the mean of its
    siblings leaves the mean of the group where it is without it, and has the advantage 0; it makes the
    deviation smaller (docs/released-trainers.md).
    """

    def __init__(self, compare: Callable[[Sequence[Rollout]], Awaitable[list[Rollout]]]) -> None:
        self._compare = compare
        self._scored: list[Rollout] = []
        self._comparing: asyncio.Future[list[Rollout]] | None = None
        self.running = 0
        self.ended = asyncio.Event()

    def add(self, rollout: Rollout) -> None:
        """Count a rollout that has a reward to train on. Call it before the rollout leaves the group."""
        self._scored.append(rollout)

    async def compared(self, rollout: Rollout) -> Rollout:
        """A rollout with the reward of its group, once all have ended, where its environment compares them.
        It has failed if the comparison did. A rollout that was not added, and one without ``compare``, is as
        it was."""
        place = next((i for i, each in enumerate(self._scored) if each is rollout), None)
        return rollout if place is None else (await self._settled())[place]

    async def mean(self) -> float:
        """The mean reward of those that were added, once all have ended; 0 if there are none."""
        rewards = [each.reward for each in await self._settled() if each.failure is None]
        return fmean(rewards) if rewards else 0.0

    async def _settled(self) -> list[Rollout]:
        await self.ended.wait()
        if self._comparing is None:
            self._comparing = asyncio.ensure_future(self._compare(self._scored))
        return await asyncio.shield(self._comparing)  # the others wait for it too


class Outcome(NamedTuple):
    """A rollout, and what there is to train on."""

    rollout: Rollout
    samples: list[TrainingSample]
    siblings: Siblings

    @property
    def last(self) -> TrainingSample:
        return verified(self.samples)

    async def reward(self) -> float:
        return self.last.reward if self.last.failure is None else await self.siblings.mean()


class Adapter:
    """What a trainer calls for the rollout of a prompt; the base of the adapters.

    ``agent`` is by default the row's, or the only one; ``timeout``: seconds for one attempt.
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
        self._sees = False

    def episodes(
        self, tokenizer: Any, generate: Generate, *, processor: Any = None, **settings: Any
    ) -> Episodes:
        """The graph, which the first call starts in its event loop; see `Episodes`. Settings may be None."""
        if self._episodes is None:
            chosen = {name: value for name, value in settings.items() if value is not None}
            overrides = self._overrides
            self._sees = hasattr(processor, "image_token")
            self._episodes = Episodes(
                self._graph,
                tokenizer,
                generate,
                overrides=overrides,
                settings=chosen,
                processor=processor,
            )
        return self._episodes

    async def outcome(
        self,
        row: JSON,
        prompt: Any,
        sampling: Mapping[str, Any],
        context: Any = None,
        *,
        read: Callable[[Rollout], list[TrainingSample]] = samples,
    ) -> Outcome:
        """The outcome of one rollout, with the reward that its environment gives it within its group.

        ``prompt`` names its siblings' prompt; None for a rollout without siblings. Raises InvalidRequest: the
        row has media that the trainer's policy is not given.
        """
        refuse_unseen(row, sees=self._sees)
        assert self._episodes is not None, "the graph must be started"
        with self._episodes.among_siblings(prompt) as siblings:
            (rollout,) = await self._episodes.run_all([row], sampling, context, **self._options)
            if verified(read(rollout)).failure is None:
                siblings.add(rollout)
        rollout = await siblings.compared(rollout)
        return Outcome(rollout, read(rollout), siblings)


def refuse_unseen(row: Mapping[str, Any], *, sees: bool) -> None:
    """Raises InvalidRequest: a row, or a rollout, has media that the trainer's policy is not given.

    ``sees``: it is given pictures.
    """
    items = input_items(with_prompt(dict(row)).get("responses_create_params", {}).get("input") or [])
    response = row.get("response")
    output = response.get("output") if isinstance(response, dict) else None
    for part in media_in([*items, *(output or ())]):
        if not sees or not list(pictures_in([part])):
            kinds = "text and pictures" if sees else "text only"
            raise InvalidRequest(f"the trainer's policy takes {kinds}, got {part['type']}")


def row_of(columns: Mapping[str, Any], prompt: Any = None, **keys: Any) -> JSON:
    """The row of a trainer's sample: the one in its column ``row``, as JSON, or one made of its prompt and
    further keys that are not None. Raises `InvalidRequest` if there is neither."""
    row = columns.get("row")
    if row is None:
        if prompt is None or not len(prompt):
            raise InvalidRequest("a sample needs a column `row`, or a prompt; it has neither")
        further = {key: value for key, value in keys.items() if value is not None}
        messages = prompt if isinstance(prompt, str) else list(prompt)
        row = {**further, **columns, "responses_create_params": {"input": messages}}
        row.pop("row", None)
        plain: JSON = orjson.loads(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY))
        return plain
    if isinstance(row, str | bytes):
        try:
            row = exact_json(row)
        except ValueError as error:
            raise InvalidRequest(f"`row` must be a row as JSON: {error}") from None
    if not isinstance(row, dict):
        raise InvalidRequest(f"`row` must be a JSON object, got {type(row).__name__}")
    return row


def columns_of(row: JSON) -> JSON:
    """A row as a record of the data sets that trainers read: its prompt, and the row itself where each of
    them has a place for it, for `row_of`. verl's agent loop is called ``gym``."""
    text = exact_bytes(row).decode()
    return {
        "prompt": messages_of(row["responses_create_params"]),
        "row": text,
        "extra_info": {"row": text},
        "metadata": {"row": text},
        "agent_name": "gym",
        "data_source": str(row.get("benchmark_row", "gym")).partition("/")[0],
    }


def _model_with(tokenizer: Any, processor: Any) -> type[Server]:
    callback_model: Any = find_class("model", _MODEL)

    class TrainersModel(callback_model):  # type: ignore[misc]  # found by its name, as in a graph
        """The trainer's engine and tokenizer."""

        requires: ClassVar[Mapping[str, str]] = {}

        class Config(callback_model.Config):  # type: ignore[misc]
            """The settings of `callback_model`."""

            tokenizer: str = "the trainer's"
            pictures: bool = processor is not None

        def load_tokenizer(self) -> Any:
            return tokenizer

        def load_processor(self) -> Any:
            return processor

    return TrainersModel


def endpoints_of(graph: Any, overrides: Mapping[str, Any], **settings: Any) -> JSON:
    r"""Overrides of a graph that make `chat_model`\ s of its agents' models, for trainers with an endpoint.

    ``settings`` are those of the models, which by default take the endpoint of each row alone; ``overrides``
    are kept. Raises `GraphError` if the graph has problems, or no model that an agent names.
    """
    source = load_graph(graph, overrides=overrides)
    names = source.spec.policies()
    if not names:
        raise GraphError("agents: none names a model of the graph", source=source.path)
    # No call goes to the address of this machine: every row has an endpoint.
    by_row = {"base_url": "http://127.0.0.1:9/v1", "model": "policy", "row_endpoints": True}
    policy = {"type": "chat_model", **(by_row if "base_url" not in settings else {}), **settings}
    replaced = {
        f"models.{name}": {**settings_for("chat_model", source.spec.models[name]), **policy} for name in names
    }
    return {**overrides, **replaced}


def settings_for(type_: str, model: Any) -> JSON:
    """The settings of a model of a graph that a model of another type takes as well: all but its tokens."""
    own = model if isinstance(model, Mapping) else {}
    fields = find_class("model", type_).Config.model_fields.keys() - {"tokenizer", "return_token_ids"}
    return {key: value for key, value in own.items() if key in fields}
