"""`XlamFc`: the function calls of one step, compared with those that the row expects. Nothing is executed."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator

from gym_serve.grading import arguments_of, decoded_arguments, excerpt, is_call, listed_calls, pair_up
from gym_serve.metrics import MetricSpec, Score
from gym_serve.servers import ResourcesServer, Verdict, VerifyRequest


def _decoded(arguments: Any) -> Any:
    return arguments_of({"arguments": arguments}) if isinstance(arguments, str) else arguments


class ExpectedCall(BaseModel):
    """A call that the model has to make."""

    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_decoded)] = {}
    """Arguments with these values, in any order; the model may give more. JSON text will do as well."""


class XlamRequest(VerifyRequest):
    """A row with the response to it."""

    expected_answers: list[ExpectedCall]
    """The expected calls, in any order; an empty list: the model has to call nothing."""


class XlamVerdict(Verdict):
    """The reward and what it was given for."""

    num_expected: int
    num_predicted: int
    num_correct: int
    predicted_calls: list[dict[str, Any]]
    """The model's calls: ``{"name", "arguments"}``; arguments that are no JSON are shown as ``{}``."""


class XlamFc(ResourcesServer):
    """Function calls: reward 1.0 if the expected ones were made and no others, else 0.0."""

    reverify_mode: ClassVar[Literal["stateless"]] = "stateless"
    metrics: ClassVar[MetricSpec] = MetricSpec(scores=(Score("accuracy"),))

    async def verify(self, request: XlamRequest) -> XlamVerdict:
        expected = request.expected_answers
        calls = request.response.function_calls
        decoded = [(call.get("name"), decoded_arguments(call)) for call in calls]
        fits = [
            [i for i, call in enumerate(decoded) if is_call(*call, one.name, one.arguments)]
            for one in expected
        ]
        pairs = pair_up(fits)
        right = len(pairs) == len(expected) == len(decoded)
        missing = [one for number, one in enumerate(expected) if number not in pairs]
        return XlamVerdict(
            reward=float(right),
            reason=None if right else _reason(missing, calls, len(expected)),
            num_expected=len(expected),
            num_predicted=len(decoded),
            num_correct=len(pairs),
            predicted_calls=[{"name": name, "arguments": {} if a is None else a} for name, a in decoded],
        )


def _reason(missing: list[ExpectedCall], calls: list[dict[str, Any]], num_expected: int) -> str:
    shown_calls = listed_calls(calls)
    if missing:
        first = missing[0]
        return f"no call is {first.name}({excerpt(first.arguments)}); the calls made: {shown_calls}"
    return f"{num_expected} calls were expected, and {len(calls)} made: {shown_calls}"
