"""`XlamFc`: the function calls of one step, compared with those that the row expects.

Nothing is executed: the calls themselves are the answer. Arguments that are not a JSON object count as none.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field

from gym_serve.grading import arguments_of, decoded_arguments, pair_up, same_value
from gym_serve.metrics import MetricSpec, Score
from gym_serve.servers import ResourcesServer, Verdict, VerifyRequest


def _decoded(arguments: Any) -> Any:
    return arguments_of({"arguments": arguments}) if isinstance(arguments, str) else arguments


class ExpectedCall(BaseModel):
    """A call that the model has to make."""

    name: str
    """The function's name."""
    arguments: Annotated[dict[str, Any], BeforeValidator(_decoded)] = {}
    """Arguments with these values, in any order; the model may give more. JSON text will do as well."""


class XlamRequest(VerifyRequest):
    """A row with the response to it."""

    expected_answers: list[ExpectedCall] = Field(default_factory=list)
    """The expected calls, in any order; none: the model has to call nothing."""


class XlamVerdict(Verdict):
    """The reward and what it was given for."""

    num_expected: int
    """Number of expected calls."""
    num_predicted: int
    """Number of calls that the model made."""
    num_correct: int
    """Number of expected calls that were made."""
    predicted_calls: list[dict[str, Any]]
    """The model's calls: ``{"name", "arguments"}``; arguments that are no JSON are ``{}``."""


class XlamFc(ResourcesServer):
    """Function calls: reward 1.0 if the expected ones were made and no others, else 0.0."""

    reverify_mode: ClassVar[Literal["stateless"]] = "stateless"
    metrics: ClassVar[MetricSpec] = MetricSpec(scores=(Score("accuracy"),))

    async def verify(self, request: XlamRequest) -> XlamVerdict:
        """Pair the expected calls with those that were made."""
        expected = request.expected_answers
        calls = request.response.function_calls
        predicted = [
            {
                "name": call.get("name"),
                "arguments": {} if (given := decoded_arguments(call)) is None else given,
            }
            for call in calls
        ]
        fits = [[i for i, call in enumerate(predicted) if _fits(call, one)] for one in expected]
        correct = len(pair_up(fits))
        return XlamVerdict(
            reward=float(correct == len(expected) == len(predicted)),
            num_expected=len(expected),
            num_predicted=len(predicted),
            num_correct=correct,
            predicted_calls=predicted,
        )


def _fits(call: dict[str, Any], expected: ExpectedCall) -> bool:
    arguments = call["arguments"] if isinstance(call["arguments"], dict) else {}
    return call["name"] == expected.name and all(
        key in arguments and same_value(arguments[key], value) for key, value in expected.arguments.items()
    )
