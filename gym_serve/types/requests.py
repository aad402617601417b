"""The bodies that environments read and write (docs/formats.md, Rows and Environments), as pydantic models.

Only what an environment touches is a model. Rows, responses and rollouts on their way through
are plain dicts, so that unknown keys survive and nothing is validated twice.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    model_serializer,
)
from pydantic_core import PydanticSerializationError

from gym_serve.types.errors import InvalidRequest

JSON = dict[str, Any]


class Response(BaseModel):
    """A finished episode as OpenAI's Response object (docs/formats.md, Models).

    Only ``output`` is looked at; everything else is kept as it came.
    """

    model_config = ConfigDict(extra="allow")

    output: list[JSON]
    """Every item of the episode: messages, reasoning, calls and their outputs, in order."""

    @property
    def messages(self) -> list[JSON]:
        """The assistant's messages."""
        messages = (i for i in self.output if i.get("type", "message") == "message")
        return [message for message in messages if message.get("role") == "assistant"]

    @property
    def output_text(self) -> str:
        """All text of all assistant messages, joined without a separator (as OpenAI's property)."""
        return "".join(map(message_text, self.messages))

    @property
    def last_text(self) -> str:
        """Text of the last assistant message; empty if there is none."""
        return message_text(self.messages[-1]) if self.messages else ""

    @property
    def function_calls(self) -> list[JSON]:
        """The calls that the model made: ``{call_id, name, arguments: str}``."""
        return [i for i in self.output if i.get("type") == "function_call"]

    @property
    def tool_outputs(self) -> dict[str, str]:
        """The text of each call's output, by ``call_id``."""
        outputs = (i for i in self.output if i.get("type") == "function_call_output")
        return {str(i.get("call_id")): _text(i.get("output")) for i in outputs}


class VerifyRequest(BaseModel):
    """A row with the response to score. Subclasses type the row's own keys.

    Further keys of the row stay readable as attributes.
    """

    model_config = ConfigDict(extra="allow")

    responses_create_params: JSON = Field(default_factory=dict)
    """The Responses body that the row asked for."""
    response: Response
    """What the agent did."""


def _finite(reward: float) -> float:
    if not math.isfinite(reward):
        raise ValueError("a reward is a finite number")
    return reward


class Verdict(BaseModel):
    """The result of a verifier: the reward, and any fields of its own."""

    model_config = ConfigDict(extra="allow")

    reward: Annotated[float, AfterValidator(_finite)]
    """Finite; 0 to 1 by convention."""
    reason: str | None = None
    """Why the reward is below the full one, in a sentence for people: what was looked for, and what was found
    in its place ("no line 'Answer: X' found; the text ends 'C: William Shakespeare'"). A verdict without one
    has no such key."""

    @model_serializer(mode="wrap")
    def _without_an_empty_reason(self, handler: SerializerFunctionWrapHandler) -> JSON:
        fields: JSON = handler(self)
        if fields.get("reason") is None:
            fields.pop("reason", None)
        return fields


def json_of(answer: BaseModel) -> JSON:
    """An answer as JSON. A key may be of a model's own JSON, with half of a surrogate pair, which pydantic
    does not write: whoever sends it mends it."""
    try:
        return answer.model_dump(mode="json")
    except PydanticSerializationError:
        written: JSON = json.loads(json.dumps(answer.model_dump(), default=str))
        return written


class CompareRequest(BaseModel):
    """The rollouts of a group, to be scored against one another."""

    model_config = ConfigDict(extra="allow")

    conversation_history: list[JSON]
    """The messages that all of them answer."""
    response_objs: list[Response]
    """What the agent did, once per rollout."""
    principle: str | None = None
    """The principle to judge by, if the row has one."""


class Comparison(BaseModel):
    """The rewards of a group, and any fields of the environment's own."""

    model_config = ConfigDict(extra="allow")

    rewards: list[Annotated[float, AfterValidator(_finite)]]
    """One per rollout, in their order; they take the place of the rewards of ``verify``."""


def input_items(content: str | list[JSON]) -> list[JSON]:
    """The ``input`` of a Responses body as a new list of items; a text is one message of the user."""
    return [{"role": "user", "content": content}] if isinstance(content, str) else list(content)


def message_text(message: JSON) -> str:
    """The text of a message item; its content is a string or a list of parts."""
    return _text(message.get("content"))


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = (part.get("text") for part in content if isinstance(part, dict))
    return "".join(text for text in texts if isinstance(text, str))


def parse(schema: TypeAdapter[Any], body: Any, what: str) -> Any:
    """``body`` as ``schema``'s type. Raises `InvalidRequest` with every problem at once, each with its
    place."""
    try:
        return schema.validate_python(body)
    except ValidationError as error:
        raise InvalidRequest(f"invalid {what}: {'; '.join(problems_of(error, what))}") from None


def problems_of(error: ValidationError, what: str) -> list[str]:
    """What pydantic found, each after its place. Values are left out: they may be secret."""
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    return [f"{'.'.join(map(str, one['loc'])) or what}: {in_our_words(one['msg'])}" for one in problems]


def in_our_words(message: str) -> str:
    """A message of pydantic: a validator's own words alone, and "must be" for "Input should be"."""
    message = message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return message.replace("Input should", "must", 1)
