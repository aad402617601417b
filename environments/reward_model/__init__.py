"""`RewardModel`: conversations scored by a model with a reward head, or a classifier (vLLM's, 0.11 to 0.33).

If the model cannot be reached or gives no score, verification fails and is tried again; it never scores 0.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field, PositiveInt, model_validator
from typing_extensions import Self

from gym_serve.judging import Answer, CacheSettings, JudgeCalls, ask_within, open_cache
from gym_serve.servers import ModelClient, ResourcesServer, Verdict, VerifyRequest
from gym_serve.types.errors import VerifierFailed
from gym_serve.types.protocols import responses_to_chat
from gym_serve.types.requests import JSON, Response, input_items

Head = Literal["scalar", "classes"]
"""What the model has at its end: one number, or the probabilities of classes."""

Conversation = Literal["answer", "episode"]
"""What the model is shown after the prompt: the last message, or everything with calls and their outputs."""


class Score(NamedTuple):
    """The model's raw score, or the probability of the class `class_index`; and the most probable class, if
    any.
    """

    value: float
    label: str | None


def conversation_of(
    params: JSON, output: list[JSON], conversation: Conversation, chars: int | None = None
) -> list[JSON]:
    """The chat messages to score; of the last one ``chars`` alone, if given. Reasoning is left out: reward
    models have not learned from it. Raises BadRequest: they hold something that a chat cannot.
    """
    items = input_items(params.get("input") or [])
    last_alone = conversation == "answer" or chars is not None
    body = {"input": items if last_alone else [*items, *output], "instructions": params.get("instructions")}
    chat: list[JSON] = responses_to_chat(body, reasoning="drop")["messages"]
    if last_alone:
        chat.append({"role": "assistant", "content": Response(output=output).last_text[:chars]})
    return chat


def read_score(answer: JSON, head: Head, class_index: int) -> Score:
    """The score in an answer. Raises VerifierFailed: there is none: another head, another class count, or not
    a finite number.
    """
    data = answer.get("data") if isinstance(answer, dict) else None
    entry = data[0] if isinstance(data, list) and data and isinstance(data[0], dict) else {}
    values = entry.get("data" if head == "scalar" else "probs")
    if not isinstance(values, list):
        raise VerifierFailed(f"the reward model returned no scores: {str(answer)[:200]}")
    if head == "scalar" and len(values) != 1:
        raise VerifierFailed(f"the reward model has {len(values)} outputs, but a scalar head has one")
    if head == "classes" and class_index >= len(values):
        lack = f"so `class_index` {class_index} does not exist"
        raise VerifierFailed(f"the reward model has {len(values)} classes, {lack}")
    value = values[0 if head == "scalar" else class_index]
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise VerifierFailed(f"the reward model's score is not a finite number: {str(value)[:50]}")
    label = entry.get("label") if head == "classes" else None
    return Score(float(value), label if isinstance(label, str) else None)


class RewardVerdict(Verdict):
    """The reward and what it was made from."""

    reward_model_score: float  # what the model said, before ``scale``, ``offset`` and ``clip``
    reward_model_label: str | None  # the most probable class; None for a scalar head


class RewardModel(ResourcesServer):
    """Any conversation: the reward is a reward model's score of it."""

    reverify_mode: ClassVar[Literal["stateless"]] = "stateless"
    restorable: ClassVar[bool] = True  # there is no state

    class Config(ResourcesServer.Config):
        reward_model: ModelClient
        """The model: a ``pooling_model``, or a ``vllm_engine`` with ``runner: pooling``."""
        head: Head = "scalar"
        """Output layer of the model: one number (``/pooling``), or classes (``/classify``)."""
        sigmoid: bool = False
        """Squeeze a scalar into 0 to 1, in the model server."""
        class_index: int = Field(1, ge=0)
        """The class whose probability is the score; of two, 1 is usually the good one."""
        conversation: Conversation = "answer"
        """Show it the last message after the prompt (``answer``), or all calls and outputs (``episode``)."""
        scale: float = 1.0
        """Factor of the score."""
        offset: float = 0.0
        """Added to that."""
        clip: tuple[float, float] | None = None
        """The least and the greatest reward."""
        max_concurrency: PositiveInt = 256
        """Calls of the model at once, in each replica; read at the start only."""
        cache: CacheSettings | None = None
        """Keep the model's answers on disk, and ask the same only once; read at the start only."""

        @model_validator(mode="after")
        def _clip_is_a_range(self) -> Self:
            if self.clip is not None and not self.clip[0] < self.clip[1]:
                raise ValueError("`clip` must be two numbers, the lower one first")
            return self

    config: Config

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._calls = self.manage(JudgeCalls(self.config.max_concurrency, open_cache(self.config.cache)))

    async def verify(self, request: VerifyRequest) -> RewardVerdict:
        """Score the conversation."""
        config = self.config
        params, output = request.responses_create_params, request.response.output
        size, is_scalar = len(str(output)), config.head == "scalar"

        async def ask(chars: int) -> Answer[Score]:
            shown = conversation_of(params, output, config.conversation, None if chars == size else chars)
            body: JSON = {"messages": shown, "add_generation_prompt": False}
            if is_scalar:
                body |= {"task": "classify", "use_activation": config.sigmoid}
            return await self._calls.ask(
                config.reward_model,
                body,
                lambda answer: read_score(answer, config.head, config.class_index),
                protocol="pooling" if is_scalar else "classify",
            )

        answer = await ask_within(ask, size)
        assert answer.verdict is not None  # `read_score` gives one, or raises
        score: Score = answer.verdict
        reward = config.offset + config.scale * score.value
        if config.clip is not None:
            reward = min(max(reward, config.clip[0]), config.clip[1])
        return RewardVerdict(
            reward=reward,
            reason=f"the reward model's score is {score.value:g}",
            reward_model_score=score.value,
            reward_model_label=score.label,
        )
