"""`ToolCallMultireward`: one tool call, scored by three rewards that a trainer may weigh separately.

The components are independent: a call can be right and badly placed, or well-formed and wrong. ``reward`` is
their sum, for trainers that take one reward only.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, StringConstraints

from gym_serve.grading import arguments_of, same_value
from gym_serve.metrics import MetricSpec, Score
from gym_serve.servers import ResourcesServer, Verdict, VerifyRequest, tool
from gym_serve.types.requests import JSON

City = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=100)]


class WeatherReport(BaseModel):
    """What `ToolCallMultireward.get_weather` answers."""

    city: str
    weather_description: str


class MultirewardRequest(VerifyRequest):
    """A row with the response to it."""

    expected_call: dict[str, Any] = Field(default_factory=dict)
    """The right call, ``{"name", "arguments"}``; without it no call is right."""


class MultirewardVerdict(Verdict):
    """The rewards and what they were given for."""

    reward_components: dict[str, float]
    """The three rewards by name; ``reward`` is their sum."""
    correctness: float
    """1.0 if a call has the expected name and arguments."""
    schema_valid: float
    """1.0 if the first call's arguments are an object with all required parameters of its tool."""
    format: float
    """1.0 for exactly one call, and no message."""
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
        """Score the calls of the response; the tool need not have been run."""
        calls = [(call.get("name"), arguments_of(call)) for call in request.response.function_calls]
        items = (item.get("type", "message") for item in request.response.output)
        components = {
            "correctness": float(
                any(_is_expected(name, arguments or {}, request.expected_call) for name, arguments in calls)
            ),
            "schema_valid": float(bool(calls) and _is_complete(*calls[0], request.responses_create_params)),
            "format": float(len(calls) == 1 and "message" not in items),
        }
        return MultirewardVerdict(
            reward=sum(components.values()),
            reward_components=components,
            **components,
            predicted_calls=[{"name": name, "arguments": arguments or {}} for name, arguments in calls],
        )


def _is_expected(name: Any, arguments: JSON, expected: JSON) -> bool:
    wanted = expected.get("arguments") or {}
    return (
        bool(expected)
        and name == expected.get("name")
        and isinstance(wanted, dict)
        and all(key in arguments and same_value(arguments[key], value) for key, value in wanted.items())
    )


def _is_complete(name: Any, arguments: JSON | None, params: JSON) -> bool:
    tools = (tool for tool in params.get("tools") or [] if isinstance(tool, dict))
    parameters: Any = next((tool.get("parameters") for tool in tools if tool.get("name") == name), None)
    required = (parameters or {}).get("required") or []
    return arguments is not None and all(key in arguments for key in required)
