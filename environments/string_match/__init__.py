"""`StringMatch`: short answers in free text, compared with ``expected_answer`` as strings."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator

from gym_serve.environments.string_match.grading import ExtractionMode, extract, same_letters, similarity
from gym_serve.grading import ending, excerpt, stated
from gym_serve.metrics import MetricSpec, Score
from gym_serve.servers import ResourcesServer, Response, Verdict, VerifyRequest


class StringMatchRequest(VerifyRequest):
    """A row with the response to it."""

    expected_answer: Annotated[str, AfterValidator(stated)]
    extraction_mode: ExtractionMode = "final_answer"  # where the answer stands in the text
    case_sensitive: bool = False  # compare letter by letter, without any tolerance


class StringMatchVerdict(Verdict):
    """The reward and what it was given for."""

    extracted_answer: str | None  # the answer that was compared; None if the text gives none
    expected_answer: str


class StringMatch(ResourcesServer):
    """Short answers: reward 1.0 for the expected string, 0.98 for a number next to it, else 0.0."""

    reverify_mode: ClassVar[Literal["stateless"]] = "stateless"
    metrics: ClassVar[MetricSpec] = MetricSpec(scores=(Score("accuracy"),), answer="extracted_answer")

    # Not a coroutine: it then runs in a thread, so a long text does not block the event loop.
    def verify(self, request: StringMatchRequest) -> StringMatchVerdict:
        expected, mode = request.expected_answer, request.extraction_mode
        text = _text(request.response)
        answer = extract(text, mode)
        reward, reason = 0.0, None
        if answer is None:
            reason = f"expected {excerpt(expected)}, but {_MISSING[mode]}: {ending(text)}"
        else:
            same = same_letters if request.case_sensitive else similarity
            reward = float(same(expected, answer))
            near = ", a number near to it" if reward else ""
            reason = None if reward == 1.0 else f"expected {excerpt(expected)}, got {excerpt(answer)}{near}"
        return StringMatchVerdict(
            reward=reward, extracted_answer=answer, expected_answer=expected, reason=reason
        )


_MISSING: dict[ExtractionMode, str] = {
    "boxed": "no closed \\boxed{} found",
    "final_answer": "no line 'Answer: X' and no box found",
    "last_line": "no line of text found",
    "full_response": "no text found",
}


def _text(response: Response) -> str:
    """The text parts of all assistant messages, one below the other: each has lines of its own."""
    texts: list[str] = []
    for message in response.messages:
        content = message.get("content")
        if isinstance(content, str):
            texts.append(content)
        elif isinstance(content, list):
            parts = (part.get("text") for part in content if isinstance(part, dict))
            texts += [part for part in parts if isinstance(part, str)]
    return "\n".join(texts)
