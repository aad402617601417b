"""`@tool`: a method of a resources server that the model can call.

Its JSON schema derives from the signature: annotations give the types (any that pydantic knows), defaults
make arguments optional, and the docstring (Google, NumPy or reST style) gives the descriptions. Two
parameters are injected: ``session``, the state of the episode, and one that is annotated with the class's
``Row``, the row's own keys. A parameter ``row`` of another type is refused: the model would supply it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_type_hints

import docstring_parser
from pydantic import ConfigDict, Field, TypeAdapter, create_model
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError

from gym_serve.servers.base import place_of
from gym_serve.types.requests import JSON

Extra = Literal["ignore", "forbid"]
"""What happens to arguments that a tool does not have: they are dropped, or the call is refused."""

# Key that an agent adds to a row without tools when it opens a session: the environment then answers the
# tools of its class. Other clients get the same answer as from NeMo Gym.
WANTS_TOOLS = "_ng_wants_tools"
TASK_STEPS = (
    "_ng_steps"  # field of a seed's answer: the task goes on after the policy's last message (`next_step`)
)
UNVERIFIED = "_ng_unverified"  # key of a row that no verdict is asked for: it may lack what `verify` needs

UnavailableTools = Literal["fail", "show"]
"""Behaviour if a tool is unavailable: the episode fails, or the model is shown the tool's answer."""

UNAVAILABLE = frozenset({429, 502, 503, 504})  # statuses of a tool that is busy, gone or too slow

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__gym_serve_tool__"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")

# Routes of a server; no tool may have one of these names.
RESERVED = frozenset({"seed_session", "verify", "close_session", "aggregate_metrics", "reverify_mode"})
RESERVED |= {"compare", "reset", "step", "close", "mcp"}


def is_tool_name(name: str) -> bool:
    """Whether a name that a model wrote can be a tool's: it must not be a route, a path or markup."""
    return name not in RESERVED and _NAME.fullmatch(name) is not None


@dataclass(frozen=True)
class ToolDescription:
    """A tool as a model gets it."""

    name: str
    description: str
    parameters: JSON

    def openai(self) -> JSON:
        """The tool for a row's ``responses_create_params.tools`` (OpenAI's function tool)."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": False,
        }

    def mcp(self) -> JSON:
        """The tool as an entry of MCP's ``tools/list``."""
        return {"name": self.name, "description": self.description, "inputSchema": self.parameters}


@dataclass(frozen=True)
class ToolSpec(ToolDescription):
    """A method that is a tool, as its signature and docstring describe it."""

    arguments: TypeAdapter[Any]
    returns: TypeAdapter[Any]
    takes_session: bool  # whether the method has a ``session`` parameter
    row: str | None = None  # name of its parameter for the row's own keys, if it has one


def tool(method: F) -> F:
    """Mark a method of a `ResourcesServer` as a tool."""
    setattr(method, _MARK, True)
    return method


def tools_of(cls: type, extra: Extra = "ignore") -> dict[str, ToolSpec]:
    """The tools of a class, inherited ones included, in the order of their definition.

    Raises `TypeError` where a signature has no schema, with file, line, class, method and parameter.
    """
    specs: dict[str, ToolSpec] = {}
    for base in reversed(cls.__mro__):
        for name in vars(base):
            member = inspect.getattr_static(cls, name)
            if getattr(member, _MARK, False):
                specs[name] = _describe(cls, name, member, extra)
    return specs


def hints_of(cls: type, method: Callable[..., Any]) -> dict[str, Any]:
    """Type hints of a method; classes nested in its class or a base (``Session``) can be named."""
    nested = {name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()}
    try:
        return get_type_hints(method, localns=nested, include_extras=True)
    except NameError as error:
        where = f"{place_of(method)}: {cls.__name__}.{method.__name__}"
        raise TypeError(f"{where}: {error}; is it imported at module level?") from None


def _describe(cls: type, name: str, method: Callable[..., Any], extra: Extra) -> ToolSpec:
    where = f"{place_of(method)}: tool {cls.__name__}.{name}"
    hints = hints_of(cls, method)
    doc = docstring_parser.parse(inspect.getdoc(method) or "")
    described = {p.arg_name: p.description for p in doc.params}
    fields: dict[str, Any] = {}
    parameters = list(inspect.signature(method).parameters.values())[1:]
    row = next((name for name, hint in hints.items() if hint is getattr(cls, "Row", method)), None)
    for parameter in parameters:
        if parameter.name in ("session", row):
            continue
        if parameter.name == "row":
            raise TypeError(
                f"{where}: argument `row` would come from the model; annotate it with the class's `Row` to "
                "get the row of the episode, or give an argument of the model another name"
            )
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(f"{where}: `{parameter}` has no schema; name each argument")
        if parameter.name not in hints:
            raise TypeError(f"{where}: argument `{parameter.name}` needs a type annotation")
        default = ... if parameter.default is parameter.empty else parameter.default
        field = Field(default=default, description=described.get(parameter.name))
        fields[parameter.name] = (hints[parameter.name], field)
    # The schema is the same either way: a model is never told that it may invent arguments.
    config = ConfigDict(extra=extra, json_schema_extra={"additionalProperties": False})
    result = hints.get("return", Any)
    try:
        arguments = TypeAdapter(create_model(f"{name}_arguments", __config__=config, **fields))
        schema = _untitled(arguments.json_schema())
        returns = TypeAdapter(result)
        returns.json_schema(mode="serialization")
    except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema):
        types = {f"argument `{key}`": hint for key, (hint, _) in fields.items()} | {"its result": result}
        what, hint = next((item for item in types.items() if not _has_schema(item[1])), (name, ""))
        problem = f"{what} is of type {hint}, for which pydantic has no JSON schema; use another type"
        raise TypeError(f"{where}: {problem}") from None
    description = "\n\n".join(filter(None, [doc.short_description, doc.long_description]))
    takes_session = any(p.name == "session" for p in parameters)
    return ToolSpec(name, description, schema, arguments, returns, takes_session, row)


def _untitled(schema: JSON) -> JSON:
    schema.pop("title", None)
    for prop in schema.get("properties", {}).values():
        prop.pop("title", None)
    return schema


def _has_schema(hint: Any) -> bool:
    try:
        TypeAdapter(hint).json_schema()
    except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema):
        return False
    return True
