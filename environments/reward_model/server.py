"""`RewardModel`: conversations scored by a model with a reward head, or a classifier.

The score is a function of the conversation alone, so a stored response can be scored again. A model that
cannot be reached, or answers no score, is a failure to try again, never a 0.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator
from typing_extensions import Self

from gym_serve.environments.reward_model.scores import (
    Conversation,
    Head,
    Score,
    conversation_of,
    read_score,
    scoring_request,
)
from gym_serve.judging import CacheSettings, JudgeCalls, open_cache
from gym_serve.servers import ModelClient, ResourcesServer, Verdict, VerifyRequest

__all__ = ["RewardModel", "RewardVerdict"]


class RewardVerdict(Verdict):
    """The reward and what it was made from."""

    reward_model_score: float
    """What the model said, before ``scale``, ``offset`` and ``clip``."""
    reward_model_label: str | None
    """The most probable class; None for a scalar head."""


class RewardModel(ResourcesServer):
    """Any conversation: the reward is a reward model's score of it."""

    reverify_mode: ClassVar[Literal["stateless"]] = "stateless"
    restorable: ClassVar[bool] = True  # there is no state

    class Config(ResourcesServer.Config):
        """Settings of the environment."""

        reward_model: ModelClient
        """The model: a ``pooling_model``, or a ``vllm_engine`` with ``runner: pooling``."""
        head: Head = "scalar"
        """What it has at its end: one number (``/pooling``), or classes (``/classify``)."""
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
                raise ValueError("clip: the least reward is not below the greatest")
            return self

    config: Config

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._cache = open_cache(self.config.cache)
        self._calls = JudgeCalls(self.config.max_concurrency, self._cache)

    async def stop(self) -> None:
        await super().stop()
        if self._cache is not None:
            self._cache.close()

    async def verify(self, request: VerifyRequest) -> RewardVerdict:
        """Score the conversation.

        Raises:
            VerifierFailed: the model could not be reached, or gave no score.
            BadRequest: the conversation has something that a chat cannot hold.
        """
        config = self.config
        messages = conversation_of(
            request.responses_create_params, request.response.output, config.conversation
        )
        answer = await self._calls.ask(
            config.reward_model,
            scoring_request(messages, config.head, sigmoid=config.sigmoid),
            lambda answer: read_score(answer, config.head, config.class_index),
            protocol="pooling" if config.head == "scalar" else "classify",
        )
        assert answer.verdict is not None  # `read_score` gives one, or raises
        score: Score = answer.verdict
        reward = config.offset + config.scale * score.value
        if config.clip is not None:
            reward = min(max(reward, config.clip[0]), config.clip[1])
        return RewardVerdict(reward=reward, reward_model_score=score.value, reward_model_label=score.label)
