"""`ToolArgumentComparison`: the next action of a conversation against the expected one.

An action is a message or tool calls. Nothing is executed: the action itself is the answer.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, Field

from gym_serve.environments.function_calls import decode_arguments
from gym_serve.environments.tool_argument_comparison.comparison import (
    Action,
    Category,
    ComparisonSettings,
    Outcome,
    compare_calls,
)
from gym_serve.metrics import MetricSpec, Score
from gym_serve.servers import ResourcesServer, Response, Verdict, VerifyRequest

__all__ = ["ActionRequest", "ActionVerdict", "ExpectedAction", "ToolArgumentComparison"]


def _readable(arguments: str) -> str:
    decode_arguments(arguments)
    return arguments


class ExpectedMessage(BaseModel):
    """A message to the user; any will do."""

    type: Literal["message"]
    content: str
    """What the expert said."""


class ExpectedCall(BaseModel):
    """A tool call."""

    type: Literal["function_call"]
    name: str
    """The tool."""
    arguments: Annotated[str, AfterValidator(_readable)]
    """Its arguments as JSON text."""


class ExpectedCalls(BaseModel):
    """Several tool calls in one turn, in any order."""

    type: Literal["function_call_batch"]
    calls: list[ExpectedCall] = Field(min_length=1)
    """The calls."""


ExpectedAction = Annotated[ExpectedMessage | ExpectedCall | ExpectedCalls, Field(discriminator="type")]


class ActionRequest(VerifyRequest):
    """A row with the response to it."""

    expected_action: ExpectedAction
    """What the expert did next."""


class ActionVerdict(Verdict):
    """The reward and what it was given for."""

    category: Category
    """How the action compares with the expected one."""


class ToolArgumentComparison(ResourcesServer):
    """The next action of a conversation: reward 1.0 for the expected message or tool calls, else 0.0."""

    reverify_mode: ClassVar[Literal["stateless"]] = "stateless"
    metrics: ClassVar[MetricSpec] = MetricSpec(scores=(Score("accuracy"),))

    class Config(ResourcesServer.Config):
        """Settings of the environment."""

        tool_call_comparator_config: ComparisonSettings = ComparisonSettings()
        """How calls are compared."""

    config: Config

    def verify(self, request: ActionRequest) -> ActionVerdict:
        """Compare the action in the response with the expected one."""
        outcome = self._outcome(request.expected_action, request.response)
        return ActionVerdict(reward=outcome.reward, category=outcome.category)

    def _outcome(self, expected: ExpectedAction, response: Response) -> Outcome:
        calls = [Action(call.get("name"), call.get("arguments")) for call in response.function_calls]
        if not calls and not _says_something(response):
            return Outcome(0.0, Category.NOTHING)
        if isinstance(expected, ExpectedMessage):
            return Outcome(0.0, Category.NO_MESSAGE) if calls else Outcome(1.0, Category.MESSAGE)
        if not calls:
            return Outcome(0.0, Category.NO_CALL)
        wanted = [expected] if isinstance(expected, ExpectedCall) else expected.calls
        return compare_calls(
            [Action(call.name, call.arguments) for call in wanted],
            calls,
            self.config.tool_call_comparator_config,
        )


def _says_something(response: Response) -> bool:
    """Whether there is a message with a text; a refusal has none."""
    for message in response.messages:
        content = message.get("content")
        if isinstance(content, str):
            return True
        parts = content if isinstance(content, list) else []
        if any(isinstance(part, dict) and part.get("type") == "output_text" for part in parts):
            return True
    return False
