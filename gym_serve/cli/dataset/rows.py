"""What is wrong with a row, beyond the schema of `gym_serve.types.rows`: every problem, each with its place.

It checks the fields that docs/formats.md (Rows) defines: input items, tools, the two JSON strings in
``metadata``, ``agent_ref`` and the stamps. A kind of item or tool that the page does not name is left alone:
the Responses API has more of them, and gets new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import orjson

from gym_serve.rollouts.stamps import rollout_index, task_index
from gym_serve.types.errors import InvalidRequest
from gym_serve.types.requests import JSON
from gym_serve.types.rows import check_row, with_prompt

__all__ = ["row_problems"]

_ROLES = ("user", "assistant", "system", "developer")
_PARAMS = "responses_create_params"
_OPTIONS = ("extra_body", "chat_template_kwargs")
_REQUIRED: dict[str, dict[str, type | tuple[type, ...]]] = {
    "function_call": {"call_id": str, "name": str, "arguments": str},
    "function_call_output": {"call_id": str, "output": (str, list)},
    "reasoning": {"summary": list},
}


def row_problems(row: JSON) -> Iterator[str]:
    """The problems of a row, ``"place: what"`` each; none for one that can be run."""
    try:
        row = with_prompt(row)
        check_row(row)
    except InvalidRequest as error:
        yield from error.message.removeprefix("invalid row: ").split("; ")
        return
    params = row[_PARAMS]
    yield from _input(params["input"])
    yield from _tools(params.get("tools") or [])
    yield from _metadata(params.get("metadata"))
    yield from _agent_ref(row.get("agent_ref"))
    for name in _OPTIONS:
        if not isinstance(row.get(name), dict | None):
            yield f"{name} must be an object"
    yield from _stamps(row)


def _input(given: str | list[JSON]) -> Iterator[str]:
    if isinstance(given, str):
        return
    called: set[str] = set()
    for index, item in enumerate(given):
        place = f"{_PARAMS}.input[{index}]"
        kind = item.get("type", "message")
        if kind == "message":
            yield from _message(item, place)
        elif kind in _REQUIRED:
            for key, types in _REQUIRED[kind].items():
                if not isinstance(item.get(key), types):
                    yield f"{place}.{key}: {_named(types)} is missing in a {kind}"
        if kind == "function_call":
            called.add(str(item.get("call_id")))
        elif kind == "function_call_output" and str(item.get("call_id")) not in called:
            yield f"{place}.call_id: no function_call before it has this call_id"


def _message(item: JSON, place: str) -> Iterator[str]:
    if item.get("role") not in _ROLES:
        yield f"{place}.role must be one of {', '.join(_ROLES)}, got {str(item.get('role'))[:50]!r}"
    content = item.get("content")
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        yield f"{place}.content must be a text or a list of parts"
        return
    for index, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            yield f"{place}.content[{index}] must be an object with a type, e.g. input_text"
        elif part["type"] in ("input_text", "output_text") and not isinstance(part.get("text"), str):
            yield f"{place}.content[{index}].text: a text is missing"


def _tools(tools: list[JSON]) -> Iterator[str]:
    names: set[str] = set()
    for index, tool in enumerate(tools):
        place = f"{_PARAMS}.tools[{index}]"
        kind = tool.get("type")
        if not isinstance(kind, str):
            yield f"{place}.type: missing; 'function' for a tool of the environment"
        if kind != "function":
            continue
        name = tool.get("name")
        if not isinstance(name, str) or not name:
            hint = "; it stands beside type here, not in 'function' as in Chat Completions"
            yield f"{place}.name: a name is missing{hint if isinstance(tool.get('function'), dict) else ''}"
        elif name in names:
            yield f"{place}.name: {name!r} is there twice"
        else:
            names.add(name)
        if not isinstance(tool.get("parameters"), dict | None):
            yield f"{place}.parameters must be a JSON schema"


def _metadata(metadata: Any) -> Iterator[str]:
    if not isinstance(metadata, dict | None):
        yield f"{_PARAMS}.metadata must be an object"
        return
    for name in _OPTIONS:
        value = (metadata or {}).get(name)
        if value is not None and not _is_json_object(value):
            yield f"{_PARAMS}.metadata.{name} must be a JSON object written as a string"


def _is_json_object(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        return isinstance(orjson.loads(value), dict)
    except orjson.JSONDecodeError:
        return False


def _agent_ref(ref: Any) -> Iterator[str]:
    if ref is None:
        return
    if not isinstance(ref, dict) or not isinstance(ref.get("name"), str) or not ref["name"]:
        yield 'agent_ref must be {"type": "responses_api_agents", "name": "..."}'
    elif ref.get("type") not in (None, "responses_api_agents"):
        yield f"agent_ref.type must be 'responses_api_agents', got {str(ref['type'])[:50]!r}"


def _stamps(row: JSON) -> Iterator[str]:
    checks: dict[str, Callable[[JSON], int]] = {
        "_ng_task_index": task_index,
        "_ng_rollout_index": rollout_index,
    }
    for stamp, check in checks.items():
        if row.get(stamp) is not None:
            try:
                check(row)
            except InvalidRequest as error:
                yield error.message


def _named(types: type | tuple[type, ...]) -> str:
    names: dict[type, str] = {str: "a text", list: "a list"}
    return " or ".join(names[kind] for kind in (types if isinstance(types, tuple) else (types,)))
