"""`ToolArgumentComparison`: the next action of a conversation, compared with the expected one.

An action is a message or tool calls; nothing is executed. Strings are compared by the words that they share,
floats within a tolerance, everything else exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import Enum
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from gym_serve.grading import decode_arguments, excerpt, listed, listed_calls, pair_up
from gym_serve.grading.answers import visible
from gym_serve.metrics import MetricSpec, Score
from gym_serve.servers import ResourcesServer, Response, Verdict, VerifyRequest


class Category(str, Enum):
    """Why an action got its reward. The texts are those that NeMo Gym's rollouts have, but for `HEDGE`."""

    NOTHING = "No tool call or chat message was found in the response"
    NO_CALL = "No tool call was found when one was expected"
    MESSAGE = "A chat message was found as expected"
    NO_MESSAGE = "A tool call was executed when a chat message was expected"
    OTHER_TOOL = "The tool in a tool call is not the expected tool"
    NO_JSON = "An error occurred when decoding the arguments string in a tool call as a JSON object"
    OTHER_TYPE = "The type of an argument value in a tool call is different than the expected type"
    OTHER_KEYS = (
        "The keys in an object in an argument value in a tool call are different than the keys in the "
        "expected object"
    )
    OTHER_LENGTH = "A list in an argument value in a tool call has a different length than the expected list"
    OTHER_VALUE = "An argument value in a tool call is different than the expected value"
    CALL = "A tool call that matches the expected tool call was found"
    OTHER_COUNT = "The number of tool calls in a batch is different than expected"
    HEDGE = "Tool calls were made beside the expected ones, as further guesses"
    CALLS = "A tool-call batch that matches the expected tool calls was found"


class ComparisonSettings(BaseModel):
    """What counts as the expected calls, and how much of them earns what."""

    model_config = ConfigDict(extra="forbid")

    word_count_similarity_threshold: float = Field(default=0.1, ge=0.0, le=0.5)
    """Share of equal words, of the words of both strings together, from which two strings of several words
    match: 0.5 where all words are equal, in any order."""
    floating_point_comparison_threshold: float = Field(default=1e-6, gt=0.0)
    """Absolute difference below which two floats match."""
    parallel_tool_call_rewarding: bool = False
    """Whether the number of calls counts. The three settings below matter only then; else a response may
    have one call of another tool beside the expected ones, and repeat these."""
    allow_subset: bool = False
    """Score a response with fewer calls than expected, instead of giving it 0."""
    allow_superset: bool = False
    """Score a response with more calls than expected, instead of giving it 0."""
    parallel_tool_call_reward_mode: Literal["binary_strict", "fractional", "f1"] = "binary_strict"
    """``binary_strict``: 1 if every required call was made. ``fractional``: the share of the required calls
    that was made. ``f1``: twice the matched calls, of the expected and the made ones together."""


class Action(NamedTuple):
    """A tool call; its arguments are JSON text, or anything else that a model gave."""

    name: Any
    arguments: Any


class Outcome(NamedTuple):
    """What a comparison gave."""

    reward: float
    category: Category


def compare_calls(
    expected: Sequence[Action], actual: Sequence[Action], settings: ComparisonSettings
) -> Outcome:
    """Compare calls in any order. Raises ValueError: the arguments of an expected call cannot be read."""
    if settings.parallel_tool_call_rewarding:
        missing, surplus = len(actual) < len(expected), len(actual) > len(expected)
        if (missing and not settings.allow_subset) or (surplus and not settings.allow_superset):
            return Outcome(0.0, Category.OTHER_COUNT)
    wanted = [(name, decode_arguments(arguments)) for name, arguments in expected]
    actions = [(name, _decoded(arguments)) for name, arguments in actual]
    problems = [[_problem(one, other, settings) for other in actions] for one in wanted]
    matched = pair_up([[i for i, problem in enumerate(row) if problem is None] for row in problems])
    if not settings.parallel_tool_call_rewarding and len(matched) == len(expected):
        fitting = {i for row in problems for i, problem in enumerate(row) if problem is None}
        guesses = [name for i, (name, _) in enumerate(actual) if i not in fitting]
        if len(guesses) > MAX_SURPLUS or any(name == one.name for name in guesses for one in expected):
            return Outcome(0.0, Category.HEDGE)
    reward = _reward(len(matched), len(expected), len(actual), settings)
    if reward == 1.0:
        return Outcome(reward, Category.CALL if len(expected) == 1 else Category.CALLS)
    unmatched = [number for number in range(len(expected)) if number not in matched]
    if not unmatched or len(matched) == len(actual):
        return Outcome(reward, Category.OTHER_COUNT)
    # The first problem beyond another name is that of the call that came nearest.
    reasons = (problem for problem in problems[unmatched[0]] if problem not in (None, Category.OTHER_TOOL))
    return Outcome(reward, next(reasons, None) or Category.OTHER_TOOL)


MAX_SURPLUS = 1
"""Calls of other tools that may stand beside the expected ones where their number does not count."""

_UNREADABLE = object()


def _decoded(arguments: Any) -> Any:
    try:
        return decode_arguments(arguments)
    except ValueError:
        return _UNREADABLE


def _reward(matched: int, expected: int, actual: int, settings: ComparisonSettings) -> float:
    if not settings.parallel_tool_call_rewarding:
        return float(matched == expected)
    if settings.parallel_tool_call_reward_mode == "f1":
        return 2 * matched / (expected + actual)
    required = min(expected, actual) if settings.allow_subset else expected
    if settings.parallel_tool_call_reward_mode == "fractional":
        return matched / required
    return float(matched == required)


def _problem(
    expected: tuple[Any, Any], actual: tuple[Any, Any], settings: ComparisonSettings
) -> Category | None:
    """How a call differs from the expected one; None if it does not."""
    if actual[0] != expected[0]:
        return Category.OTHER_TOOL
    if actual[1] is _UNREADABLE:
        return Category.NO_JSON
    return _difference(expected[1], actual[1], settings)


def _difference(expected: Any, actual: Any, settings: ComparisonSettings) -> Category | None:
    if type(actual) is not type(expected):
        return Category.OTHER_TYPE
    pairs: Sequence[tuple[Any, Any]] = ()
    if isinstance(expected, dict):
        if actual.keys() != expected.keys():
            return Category.OTHER_KEYS
        pairs = [(value, actual[key]) for key, value in expected.items()]
    elif isinstance(expected, list):
        if len(actual) != len(expected):
            return Category.OTHER_LENGTH
        pairs = list(zip(expected, actual, strict=True))
    elif not _matches(expected, actual, settings):
        return Category.OTHER_VALUE
    differences = (_difference(one, other, settings) for one, other in pairs)
    return next((difference for difference in differences if difference is not None), None)


def _matches(expected: Any, actual: Any, settings: ComparisonSettings) -> bool:
    if isinstance(expected, float):
        return bool(abs(actual - expected) < settings.floating_point_comparison_threshold)
    if not isinstance(expected, str):
        return bool(actual == expected)
    words, others = Counter(expected.lower().split()), Counter(actual.lower().split())
    totals = words.total(), others.total()
    if min(totals) < 2:
        return bool(actual == expected)
    return (words & others).total() / sum(totals) >= settings.word_count_similarity_threshold


def _readable(arguments: str) -> str:
    decode_arguments(arguments)
    return arguments


class ExpectedMessage(BaseModel):
    """A message to the user; any will do."""

    type: Literal["message"]
    content: str


class ExpectedCall(BaseModel):
    """A tool call."""

    type: Literal["function_call"]
    name: str
    arguments: Annotated[str, AfterValidator(_readable)]


class ExpectedCalls(BaseModel):
    """Several tool calls in one turn, in any order."""

    type: Literal["function_call_batch"]
    calls: list[ExpectedCall] = Field(min_length=1)


ExpectedAction = Annotated[ExpectedMessage | ExpectedCall | ExpectedCalls, Field(discriminator="type")]


class ActionRequest(VerifyRequest):
    """A row with the response to it."""

    expected_action: ExpectedAction


class ActionVerdict(Verdict):
    """The reward and what it was given for."""

    category: Category  # how the action compares with the expected one


class ToolArgumentComparison(ResourcesServer):
    """The next action of a conversation: reward 1.0 for the expected message or tool calls, else 0.0."""

    reverify_mode: ClassVar[Literal["stateless"]] = "stateless"
    metrics: ClassVar[MetricSpec] = MetricSpec(scores=(Score("accuracy"),))

    class Config(ResourcesServer.Config):
        tool_call_comparator_config: ComparisonSettings = ComparisonSettings()
        """How calls are compared."""

    config: Config

    def verify(self, request: ActionRequest) -> ActionVerdict:
        outcome = self._outcome(request.expected_action, request.response)
        reason = None if outcome.reward == 1.0 else _reason(outcome, request)
        return ActionVerdict(reward=outcome.reward, reason=reason, category=outcome.category)

    def _outcome(self, expected: ExpectedAction, response: Response) -> Outcome:
        calls = [Action(call.get("name"), call.get("arguments")) for call in response.function_calls]
        if not calls and not visible(response.output_text).strip():  # a refusal has no text
            return Outcome(0.0, Category.NOTHING)
        if isinstance(expected, ExpectedMessage):
            return Outcome(0.0, Category.NO_MESSAGE) if calls else Outcome(1.0, Category.MESSAGE)
        if not calls:
            return Outcome(0.0, Category.NO_CALL)
        wanted = [expected] if isinstance(expected, ExpectedCall) else expected.calls
        actions = [Action(call.name, call.arguments) for call in wanted]
        return compare_calls(actions, calls, self.config.tool_call_comparator_config)


def _reason(outcome: Outcome, request: ActionRequest) -> str:
    expected = request.expected_action
    if isinstance(expected, ExpectedMessage):
        wanted = "a message"
    else:
        calls = [expected] if isinstance(expected, ExpectedCall) else expected.calls
        wanted = listed(f"{call.name}({call.arguments})" for call in calls)
    tool_calls, text = request.response.function_calls, request.response.output_text
    called = f"the calls {listed_calls(tool_calls)}" if tool_calls else f"the text {excerpt(text)}"
    return f"{outcome.category.value}: expected {wanted}, found {called}"
