"""`EquivalenceLlmJudge`: free-text answers that a judge model compares with the expected one.

The first comparison decides what happens next: an equal answer may be asked again with the sides
swapped, one that is not equal again with the whole text instead of what a pattern found in it.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from gym_serve.environments.equivalence_llm_judge.extraction import answer_text, last_match, question_text
from gym_serve.environments.equivalence_llm_judge.judge import (
    MAX_ANSWER_CHARS,
    PROMPT_TEMPLATE,
    check_template,
)
from gym_serve.judging import (
    Ballot,
    JudgeCalls,
    JudgeSettings,
    LabelJudge,
    both_orders,
    escape_labels,
    open_cache,
)
from gym_serve.metrics import MetricSpec, Score
from gym_serve.servers import ModelClient, ResourcesServer, Verdict, VerifyRequest
from gym_serve.types.errors import InvalidRequest

__all__ = ["EquivalenceLlmJudge", "EquivalenceRequest", "EquivalenceVerdict", "TemplateMetadata"]


class TemplateMetadata(BaseModel):
    """How the row's prompt asks for the answer; further keys are ignored."""

    model_config = ConfigDict(extra="allow")

    output_regex: str | None = None
    """Pattern that finds the answer in the text."""


class EquivalenceRequest(VerifyRequest):
    """A row with the response to it."""

    expected_answer: str | None = None
    """The right answer; else ``metadata.expected_answer``."""
    metadata: dict[str, Any] | None = None
    """Further data of the row."""
    template_metadata: TemplateMetadata | None = None
    """Settings that come with the prompt's template."""

    @property
    def expected(self) -> str:
        """The right answer; empty if the row has none."""
        inner = (self.metadata or {}).get("expected_answer")
        return self.expected_answer or ("" if inner is None else str(inner))


class EquivalenceVerdict(Verdict):
    """The reward and what it was given for."""

    expected_answer: str
    """The row's."""
    judge_evaluations: list[dict[str, Any]]
    """The judge's calls: ``{"responses_create_params", "response", "verdict_label"}``."""


class EquivalenceLlmJudge(ResourcesServer):
    """Free-text answers: reward 1.0 for one that the judge finds equal to the expected one, else 0.0."""

    reverify_mode: ClassVar[Literal["stateless"]] = "stateless"
    metrics: ClassVar[MetricSpec] = MetricSpec(scores=(Score("accuracy"),))

    class Config(JudgeSettings):
        """Settings of the environment."""

        judge: ModelClient
        """The model that judges."""
        judge_prompt_template: Annotated[str, AfterValidator(check_template)] = PROMPT_TEMPLATE
        """The prompt, with ``{expected_answer}``, ``{generated_answer}`` and ``{question}``."""
        question_extract_regex: str | None = None
        """Pattern that finds the question in the last user message; else it is all of it."""
        response_extract_regex: str | None = None
        """Pattern that finds the answer in the last assistant message; else it is all of it."""
        msg_extraction_failure: str = "[NO VALID ANSWER EXTRACTED]"
        """What the judge is shown when there is no assistant message."""
        check_twice_swap: bool = False
        """Ask about an equal answer again with the two sides swapped."""
        reward_if_swap_fails: float = 0.0
        """Reward of an answer that is equal one way round only."""
        use_per_record_regex: bool = True
        """A row's ``template_metadata.output_regex`` goes before ``response_extract_regex``."""
        extraction_length_threshold: int | None = Field(120, ge=0)
        """With a longer expected answer, the row's pattern is not used, and the judge is asked once."""
        check_full_generation_on_fail: bool = True
        """If what the row's pattern found is not equal, ask again with the whole text."""
        reward_if_full_generation_succeeds: float = 0.5
        """Reward if the whole text is equal then."""

    config: Config

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._cache = open_cache(self.config.judge_cache)
        self._calls = JudgeCalls(self.config.judge_max_concurrency, self._cache)

    async def stop(self) -> None:
        await super().stop()
        if self._cache is not None:
            self._cache.close()

    async def verify(self, request: EquivalenceRequest) -> EquivalenceVerdict:
        """Let the judge compare the response's answer with the expected one.

        Raises:
            InvalidRequest: the row has no expected answer.
            VerifierFailed: the judge did not answer.
        """
        expected = request.expected
        if not expected:
            raise InvalidRequest("expected_answer: the row has none")
        reward, ballots = await self._judged(request, expected)
        return EquivalenceVerdict(
            reward=reward,
            expected_answer=expected,
            judge_evaluations=[
                {
                    "responses_create_params": vote.request,
                    "response": vote.response,
                    "verdict_label": vote.verdict,
                }
                for ballot in ballots
                for vote in ballot.votes
            ],
        )

    async def _judged(self, request: EquivalenceRequest, expected: str) -> tuple[float, list[Ballot]]:
        config = self.config
        # In threads: a search may take its full second, and gives the event loop free meanwhile.
        asked = question_text(request.responses_create_params)
        question = await asyncio.to_thread(last_match, asked, config.question_extract_regex)
        own = (request.template_metadata or TemplateMetadata()).output_regex
        own = own if config.use_per_record_regex else None
        threshold = config.extraction_length_threshold
        long = own is not None and threshold is not None and len(expected) > threshold
        text = answer_text(request.response)
        pattern = None if long else own or config.response_extract_regex
        answer = await asyncio.to_thread(last_match, text, pattern) or config.msg_extraction_failure

        async def ask(first: str, second: str) -> Ballot:
            return await self._ask(question, first, second)

        equal = config.judge_equal_label
        if long or not config.check_twice_swap:
            ballots = [await ask(expected, answer)]
        else:
            ballots = await both_orders(ask, expected, answer, equal)
        if ballots[0].label == equal:
            both = all(ballot.label == equal for ballot in ballots)
            return (1.0 if both else config.reward_if_swap_fails), ballots
        if long or not own or not config.check_full_generation_on_fail:
            return 0.0, ballots
        whole = await ask(expected, text or config.msg_extraction_failure)
        reward = config.reward_if_full_generation_succeeds if whole.label == equal else 0.0
        return reward, [*ballots, whole]

    async def _ask(self, question: str, expected: str, generated: str) -> Ballot:
        config = self.config
        labels = (config.judge_equal_label, config.judge_not_equal_label)
        judge = LabelJudge(
            (config.judge, *config.further_judges),
            self._calls,
            config.judge_prompt_template,
            labels,
            config.judge_responses_create_params,
            config.judge_system_message,
            votes=config.judge_votes,
        )
        return await judge.ask(
            {
                "question": question,
                "expected_answer": escape_labels(expected, labels, MAX_ANSWER_CHARS),
                "generated_answer": escape_labels(generated, labels, MAX_ANSWER_CHARS),
            }
        )
