"""`MultiStepSynonyms`: look up a value for each synonym, then submit all values."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, StringConstraints, TypeAdapter, ValidationError

from gym_serve.grading import arguments_of, excerpt, same_value
from gym_serve.metrics import MetricSpec, Score
from gym_serve.servers import ResourcesServer, Response, Verdict, VerifyRequest, tool

_ANSWER_TOOL = "extract_synonym_values"
_INTEGER: TypeAdapter[int] = TypeAdapter(int)


def value_of(synonym: str) -> int:
    """The made-up value of a word: the sum of its code points."""
    return sum(map(ord, synonym))


class SynonymValue(BaseModel):
    """What `MultiStepSynonyms.get_synonym_value` answers."""

    synonym_value: int


class Extraction(BaseModel):
    """What `MultiStepSynonyms.extract_synonym_values` answers."""

    success: bool


class SynonymsRequest(VerifyRequest):
    """A row with the response to it."""

    expected_synonyms: list[str]
    """The synonyms of the term that the prompt asks about, in the order of the prompt."""
    expected_synonym_values: Annotated[list[int], Field(min_length=1)]
    minefield_label: str  # the term itself, whose value is a likely mistake
    minefield_label_value: int


class SynonymsVerdict(Verdict):
    """The reward, and how far an answer is off."""

    parsed_synonym_values: list[int]  # the values that were handed in, as far as they can be read as integers
    accuracy: bool
    set_overlap: float  # share of the expected values among them, 0 to 1
    original_term_minefield_hit: bool
    order_instruction_following_failure: bool
    """Whether all expected values are there, and the answer is wrong all the same: in another order, or
    with others between them."""


class MultiStepSynonyms(ResourcesServer):
    """Values of synonyms: reward 1.0 for the expected list, in its order, else 0.0."""

    reverify_mode: ClassVar[Literal["stateless"]] = "stateless"
    metrics: ClassVar[MetricSpec] = MetricSpec(scores=(Score("accuracy"),))

    @tool
    async def get_synonym_value(
        self, synonym: Annotated[str, StringConstraints(max_length=1000)]
    ) -> SynonymValue:
        """Get the value of a synonym.

        Args:
            synonym: The synonym, as it is written.
        """
        return SynonymValue(synonym_value=value_of(synonym))

    @tool
    async def extract_synonym_values(self, synonym_values: list[int]) -> Extraction:
        """Hand in the values of all synonyms that are asked for. Call it once, at the end.

        Args:
            synonym_values: The values, in the order in which the synonyms are listed.
        """
        return Extraction(success=True)

    async def verify(self, request: SynonymsRequest) -> SynonymsVerdict:
        expected = request.expected_synonym_values
        words = _handed_in(request.response)
        right = same_value(words, expected)
        numbers = {n for n in words if isinstance(n, int | float) and not isinstance(n, bool)}
        overlap = len(numbers & set(expected)) / len(set(expected))
        return SynonymsVerdict(
            reward=float(right),
            reason=None if right else f"expected the values {expected}, got {excerpt(words)}",
            parsed_synonym_values=_integers(words),
            accuracy=right,
            set_overlap=overlap,
            original_term_minefield_hit=request.minefield_label in words
            or request.minefield_label_value in numbers,
            order_instruction_following_failure=not right and overlap == 1.0,
        )


def _handed_in(response: Response) -> list[Any]:
    for call in reversed(response.function_calls):
        if call.get("name") == _ANSWER_TOOL:
            values = (arguments_of(call) or {}).get("synonym_values")
            return values if isinstance(values, list) else []
    return []


def _integers(values: list[Any]) -> list[int]:
    """``values`` as the tool reads its arguments: ``"7"`` is 7. Values that are not integers are left out."""
    integers: list[int] = []
    for value in values:
        with suppress(ValidationError):
            integers.append(_INTEGER.validate_python(value))
    return integers
