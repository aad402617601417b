"""`Mcqa`: multiple-choice questions, graded by the letter that the model's text answers.

A row is scored from its own fields and the response alone. A response without a readable answer scores 0. A
row whose fields have the wrong types, or whose right letter is missing or is no option, is `InvalidRequest`.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, model_validator
from typing_extensions import Self

from gym_serve.environments.mcqa.grading import GradingMode, choices_of, match_letter, match_output_regex
from gym_serve.grading import ending
from gym_serve.metrics import MetricSpec, Score
from gym_serve.servers import ResourcesServer, Verdict, VerifyRequest


class TemplateMetadata(BaseModel):
    """How the row's prompt asks for the answer; further keys are ignored."""

    model_config = ConfigDict(extra="allow")

    output_regex: str | list[str] | None = None
    """Patterns that find the answer; they go before any grading mode."""

    @property
    def patterns(self) -> list[str]:
        return [self.output_regex] if isinstance(self.output_regex, str) else self.output_regex or []


class McqaRequest(VerifyRequest):
    """A row of multiple-choice data with the response to it."""

    options: list[dict[str, str | None]] | None = None
    """Objects of letter and option text; a text of None takes the option out."""
    expected_answer: str | None = None  # the letter of the right option
    grading_mode: GradingMode = "strict_single_letter_boxed"
    """How the answer is found in the text, unless the server's config says it."""
    template_metadata: TemplateMetadata | None = None  # settings that come with the prompt's template

    @model_validator(mode="after")
    def _has_gold(self) -> Self:
        expected = self.right_letter
        letters = [letter for letter, _ in choices_of(self.options or [])]
        if not expected:
            raise ValueError("expected_answer is missing: the letter of the right option")
        if letters and expected not in letters:
            raise ValueError(
                f"expected_answer {expected[:20]!r} is no letter of options, which has {letters[:30]}"
            )
        if not self.options and not (self.template_metadata and self.template_metadata.patterns):
            raise ValueError("options is missing: the letters that can be answered, and their texts")
        return self

    @property
    def right_letter(self) -> str:
        return (self.expected_answer or "").strip().upper()


class McqaVerdict(Verdict):
    """The reward and what it was given for."""

    extracted_answer: str | None
    """Letter of the option that the text answers; None if it answers none, or more than one."""
    expected_answer: str


class Mcqa(ResourcesServer):
    """Multiple-choice questions: reward 1.0 for the letter of the right option, else 0.0."""

    reverify_mode: ClassVar[Literal["stateless"]] = "stateless"
    restorable: ClassVar[bool] = True  # there is no state
    metrics: ClassVar[MetricSpec] = MetricSpec(
        scores=(Score("accuracy"),),
        answer="extracted_answer",
        key_metrics=(
            "mean/reward",
            "pass@1[avg-of-{k}]/*",
            "pass@{k}/no_answer",
            "majority@{k}/accuracy",
            "pass@1/accuracy",
        ),
    )

    class Config(ResourcesServer.Config):
        grading_mode: GradingMode | None = None
        """Grading mode of all rows, whatever they say themselves."""

    config: Config

    # Not a coroutine: it then runs in a thread, so a long text or pattern does not block the event loop.
    def verify(self, request: McqaRequest) -> McqaVerdict:
        template = request.template_metadata or TemplateMetadata()
        mode = self.config.grading_mode or request.grading_mode
        choices = choices_of(request.options or [])
        text = request.response.output_text
        answer = match_output_regex(text, choices, template.patterns)
        if answer is None:
            answer = match_letter(text, choices, mode)
        expected = request.right_letter
        reason = None
        if answer is None:
            reason = f"expected {expected}, but {_MISSING[mode]}: {ending(text)}"
        elif answer != expected:
            reason = f"expected {expected}, got {answer}"
        return McqaVerdict(
            reward=float(reason is None), extracted_answer=answer, expected_answer=expected, reason=reason
        )


_MISSING: dict[GradingMode, str] = {
    "strict_single_letter_boxed": "no \\boxed{X} with the letter of one option found",
    "lenient_boxed": "no \\boxed{X} with the letter or the text of one option found",
    "lenient_answer_colon": "no line 'Answer: X' with the letter or the text of one option found",
    "lenient_answer_colon_md": "no line 'Answer: X' with the letter of one option found",
}
