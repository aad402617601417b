"""`GenrmCompare`: the rollouts of a group, compared in pairs by a generative reward model.

``verify`` returns the neutral score, and the collector calls ``compare`` when the group is settled. If the
model cannot be reached, the group fails; if its answer has no scores, that pair stays neutral.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from gym_serve.environments.genrm_compare.scoring import (
    PRINCIPLE,
    RANKING_MIDPOINT,
    Comparison,
    MessageFormat,
    Scores,
    Strategy,
    comparison_request,
    mean_scores,
    metrics_of,
    pairs_of,
    parse_scores,
    reasoning_of,
    relative_weights,
    shortest_bonus,
    style_density,
)
from gym_serve.judging import Answer, CacheSettings, JudgeCalls, ask_within, open_cache
from gym_serve.servers import CompareRequest, ModelClient, ResourcesServer, Response, Verdict, VerifyRequest
from gym_serve.servers import Comparison as GroupRewards
from gym_serve.types.requests import JSON


class GenrmCompare(ResourcesServer):
    """Open-ended tasks: the reward of a rollout is its mean score in comparisons within its group."""

    reverify_mode: ClassVar[Literal["unsupported"]] = "unsupported"

    class Config(ResourcesServer.Config):
        genrm: ModelClient
        """The generative reward model."""
        genrm_responses_create_params: dict[str, Any] = Field(default_factory=dict)
        """Responses body of each call, less ``input``: temperature, max_output_tokens, ..."""
        message_format: MessageFormat = "roles"
        """How the model is asked: in the roles of a GenRM's chat template, or in a prompt for any model."""
        comparison_strategy: Strategy = "circular"
        """Each response with the next one (n comparisons), or each with each (n (n - 1) / 2)."""
        num_judges_per_comparison: PositiveInt = 1
        """Times that each pair is compared."""
        max_concurrency: PositiveInt = 64
        """Calls of the model at once, for one group."""
        use_principle: bool = False
        """Tell the model what to judge by: the row's ``principle``, else ``default_principle``."""
        default_principle: str = PRINCIPLE
        """The principle to judge by, if the row has none."""
        max_answer_chars: PositiveInt = 50_000
        """Of a longer answer the model is shown only this many characters at its start."""
        genrm_parse_retries: NonNegativeInt = 3
        """How often the model is asked again if its answer has no scores."""
        genrm_cache: CacheSettings | None = None
        """Keep the model's scores on disk, and ask the same only once; read at the start only."""
        default_score: float = 3.0
        """Score where there is none."""
        default_ranking: float = RANKING_MIDPOINT
        """Ranking where there is none."""
        reasoning_bonus: NonNegativeFloat = 0.0
        """For the shortest reasoning, if that response is among the best."""
        answer_bonus: NonNegativeFloat = 0.0
        """For the shortest answer, if that response is among the best."""
        top_percentile: float = Field(0.2, ge=0, le=1)
        """Share of the group that counts as the best."""
        group_reasoning_length_penalty_coeff: NonNegativeFloat = 0.0
        """Reward between the shortest and the longest reasoning of the group."""
        group_answer_length_penalty_coeff: NonNegativeFloat = 0.0
        """Reward between the shortest and the longest answer of the group."""
        group_style_penalty_coeff: NonNegativeFloat = 0.0
        """Reward between the least and the most densely formatted answer of the group."""

    config: Config

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._calls = self.manage(JudgeCalls(None, open_cache(self.config.genrm_cache)))

    async def verify(self, request: VerifyRequest) -> Verdict:
        """The neutral score: a rollout is rewarded with its group."""
        return Verdict(
            reward=self.config.default_score, reason="neutral: rollouts are rewarded with their group"
        )

    async def compare(self, request: CompareRequest) -> GroupRewards:
        """Compare the rollouts of a group in pairs."""
        responses = request.response_objs
        if len(responses) < 2:
            return GroupRewards(rewards=[self.config.default_score] * len(responses))
        comparisons = await self._compared(request)
        rewards = mean_scores(comparisons, len(responses), self.config.default_score)
        results = [
            {
                "response_i": comparison.first,
                "response_j": comparison.second,
                "judge_idx": comparison.judge,
                "score_1": comparison.scores.first,
                "score_2": comparison.scores.second,
                "ranking": comparison.scores.ranking,
            }
            for comparison in comparisons
        ]
        fields = {"comparison_results": results, "metrics": metrics_of(comparisons)}
        return GroupRewards.model_validate({"rewards": self._adjusted(rewards, responses), **fields})

    async def _compared(self, request: CompareRequest) -> list[Comparison]:
        config = self.config
        slots = asyncio.Semaphore(config.max_concurrency)
        pairs = pairs_of(len(request.response_objs), config.comparison_strategy)
        work = [
            asyncio.create_task(self._compare(request, first, second, judge, slots))
            for judge in range(config.num_judges_per_comparison)
            for first, second in pairs
        ]
        try:
            return list(await asyncio.gather(*work))
        finally:
            for task in work:  # the others of a group in which one failed
                task.cancel()

    async def _compare(
        self, request: CompareRequest, first: int, second: int, judge: int, slots: asyncio.Semaphore
    ) -> Comparison:
        config = self.config
        principle = (request.principle or config.default_principle) if config.use_principle else None
        responses = request.response_objs
        default = Scores(config.default_score, config.default_score, config.default_ranking)

        async def ask(chars: int) -> Answer[Scores]:
            body = comparison_request(
                config.genrm_responses_create_params,
                request.conversation_history,
                (_shown(responses[first], chars), _shown(responses[second], chars)),
                principle=principle,
                message_format=config.message_format,
            )
            async with slots:
                return await self._calls.ask(
                    config.genrm,
                    body,
                    lambda completion: parse_scores(_text_of(completion), default),
                    protocol="chat_completions",
                    vote=judge,
                )

        for _ in range(1 + config.genrm_parse_retries):
            answer = await ask_within(ask, config.max_answer_chars)
            if answer.verdict is not None:
                return Comparison(first, second, judge, answer.verdict, parsed=True)
        return Comparison(first, second, judge, default, parsed=False)

    def _adjusted(self, rewards: list[float], responses: list[Response]) -> list[float]:
        config = self.config
        thoughts = list(map(reasoning_of, responses))
        answers = [response.output_text for response in responses]
        best = max(0, int(len(rewards) * config.top_percentile) - 1)
        threshold = sorted(rewards, reverse=True)[best]
        for texts, bonus in ((thoughts, config.reasoning_bonus), (answers, config.answer_bonus)):
            rewards = _sums(rewards, shortest_bonus(rewards, texts, bonus, threshold))
        for values, coefficient in (
            ([float(len(text.strip())) for text in thoughts], config.group_reasoning_length_penalty_coeff),
            ([float(len(text.strip())) for text in answers], config.group_answer_length_penalty_coeff),
            ([style_density(text) for text in answers], config.group_style_penalty_coeff),
        ):
            rewards = _sums(rewards, [weight * coefficient for weight in relative_weights(values)])
        return rewards


def _shown(response: Response, chars: int) -> str:
    return response.output_text[:chars].strip() or "None"


def _text_of(completion: JSON) -> str:
    content = completion["choices"][0]["message"].get("content")
    return content if isinstance(content, str) else ""


def _sums(first: list[float], second: list[float]) -> list[float]:
    return [a + b for a, b in zip(first, second, strict=True)]
