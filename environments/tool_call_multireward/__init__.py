"""`ToolCallMultireward`: one tool call, scored by three independent rewards; ``reward`` is their sum."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, StringConstraints

from gym_serve.grading import arguments_of, excerpt, is_call, listed_calls
from gym_serve.metrics import MetricSpec, Score
from gym_serve.servers import ResourcesServer, Verdict, VerifyRequest, tool
from gym_serve.types.requests import JSON

City = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=100)]


class WeatherReport(BaseModel):
    """What `ToolCallMultireward.get_weather` answers."""

    city: str
    weather_description: str


class ExpectedCall(BaseModel):
    """The right call."""

    model_config = ConfigDict(extra="allow")

    name: str
    arguments: dict[str, Any] = {}  # arguments with these values; the model may give more


class MultirewardRequest(VerifyRequest):
    """A row with the response to it."""

    expected_call: ExpectedCall  # the right call, ``{"name", "arguments"}``


class MultirewardVerdict(Verdict):
    """The rewards and what they were given for."""

    reward_components: dict[str, float]  # the three rewards by name; ``reward`` is their sum
    correctness: float  # 1.0 if a call has the expected name and arguments
    schema_valid: float
    """1.0 if the first call of a tool of the row has an object with all its required parameters."""
    format: float  # 1.0 for exactly one call, and no message
    predicted_calls: list[dict[str, Any]]
    """The model's calls: ``{"name", "arguments"}``; arguments that cannot be read are ``{}``."""


class ToolCallMultireward(ResourcesServer):
    """One tool call: a reward each for the right call, valid arguments and nothing else, 0 to 3 in all."""

    reverify_mode: ClassVar[Literal["stateless"]] = "stateless"
    metrics: ClassVar[MetricSpec] = MetricSpec(
        scores=tuple(Score(name, field=name) for name in ("correctness", "schema_valid", "format"))
    )

    @tool
    async def get_weather(self, city: City) -> WeatherReport:
        """Get the current weather of a city.

        Args:
            city: Name of the city.
        """
        return WeatherReport(city=city, weather_description=f"The weather in {city} is sunny.")

    async def verify(self, request: MultirewardRequest) -> MultirewardVerdict:
        calls = [(call.get("name"), arguments_of(call)) for call in request.response.function_calls]
        items = (item.get("type", "message") for item in request.response.output)
        expected = request.expected_call
        declared = _declared(request.responses_create_params)
        correct = any(is_call(*call, expected.name, expected.arguments) for call in calls)
        declared_call = next(
            (call for call in calls if isinstance(call[0], str) and call[0] in declared), None
        )
        required = ((declared[declared_call[0]] or {}).get("required") or []) if declared_call else []
        valid = (
            declared_call is not None
            and declared_call[1] is not None
            and all(key in declared_call[1] for key in required)
        )
        alone = len(calls) == 1 and "message" not in items
        components = {"correctness": float(correct), "schema_valid": float(valid), "format": float(alone)}
        faults = [
            *([] if correct else [f"no call is {expected.name}({excerpt(expected.arguments)})"]),
            *([] if valid else ["no call of a declared tool has all its required parameters"]),
            *([] if alone else ["it is not one call and nothing else"]),
        ]
        shown_calls = listed_calls(request.response.function_calls)
        return MultirewardVerdict(
            reward=sum(components.values()),
            reason=f"{'; '.join(faults)}; the calls made: {shown_calls}" if faults else None,
            reward_components=components,
            correctness=float(correct),
            schema_valid=float(valid),
            format=float(alone),
            predicted_calls=[{"name": name, "arguments": arguments or {}} for name, arguments in calls],
        )


def _declared(params: JSON) -> dict[Any, Any]:
    """The parameters of the row's tools, by name."""
    tools = (tool for tool in params.get("tools") or [] if isinstance(tool, dict))
    return {tool["name"]: tool.get("parameters") for tool in tools if isinstance(tool.get("name"), str)}
