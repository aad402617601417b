"""`JudgeSettings`: what every environment lets people set about its judges."""

from __future__ import annotations

from typing import Any

from pydantic import Field, PositiveInt, model_validator
from typing_extensions import Self

from gym_serve.judging.cache import CacheSettings, VerdictCache
from gym_serve.judging.prompts import check_labels
from gym_serve.servers.clients import ModelClient
from gym_serve.servers.resources import ResourcesServer

__all__ = ["JudgeSettings", "open_cache"]


class JudgeSettings(ResourcesServer.Config):
    """Settings of an environment whose judge says whether two answers are equal.

    A subclass gives `judge_prompt_template` a default, and checks its fields.
    """

    judge: ModelClient | None = None
    """The model that judges."""
    judge_system_message: str | None = None
    """Message before each prompt."""
    judge_prompt_template: str
    """The prompt of each call; one of the two messages asks for the labels."""
    judge_responses_create_params: dict[str, Any] = Field(default_factory=dict)
    """Responses body of each call of the judge, less ``input``: temperature, max_output_tokens, ..."""
    judge_equal_label: str = Field("[[A=B]]", min_length=2)
    """The judge's verdict "equal"."""
    judge_not_equal_label: str = Field("[[A!=B]]", min_length=2)
    """The judge's verdict "not equal"."""
    further_judges: list[ModelClient] = Field(default_factory=list)
    """Models that vote beside ``judge``; more than half of all votes decide, and a tie is "not equal"."""
    judge_votes: PositiveInt = 1
    """How often each judge is asked the same."""
    judge_max_concurrency: PositiveInt | None = 256
    """Calls of judges at once, in each replica; null sets no limit. Read at the start only."""
    judge_cache: CacheSettings | None = None
    """Keep the judge's replies on disk, and ask the same only once; read at the start only."""

    @model_validator(mode="after")
    def _labels_can_be_said(self) -> Self:
        labels = (self.judge_equal_label, self.judge_not_equal_label)
        if labels[0] == labels[1]:
            raise ValueError("judge_equal_label and judge_not_equal_label are the same")
        if self.judge is not None:
            try:
                check_labels(labels, self.judge_prompt_template, self.judge_system_message)
            except ValueError as error:
                raise ValueError(
                    f"judge_equal_label, judge_not_equal_label: {error} "
                    "(judge_prompt_template, judge_system_message)"
                ) from None
        return self


def open_cache(settings: CacheSettings | None) -> VerdictCache | None:
    """The verdict cache of an environment; None for one without.

    Raises:
        BadRequest: its file cannot be opened.
    """
    return None if settings is None else VerdictCache(settings)
