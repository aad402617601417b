"""Messages and tools, between Chat Completions and Responses.

Responses writes a function flat (``{"type", "name", "parameters"}``), chat nests it (``{"type", "function":
{...}}``). ``strict`` is dropped on the way to chat, as in NeMo Gym: some engines constrain decoding with it,
and then sample from another distribution than the policy's.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from typing import Any

from gym_serve.types.errors import BadRequest, Unavailable
from gym_serve.types.protocols.content import (
    checked,
    content_refusal,
    content_text,
    json_text,
    responses_content,
    shown,
    split_think,
    with_chat_parts,
)
from gym_serve.types.protocols.tokens import item_tokens
from gym_serve.types.requests import JSON

_CHAT_KEYS = ("tool_calls", "reasoning_content", "reasoning", "refusal")  # of an assistant's chat message


# The operating system's randomness costs a call of it each time; users seed the `random` module itself.
_random = random.Random()
os.register_at_fork(after_in_child=_random.seed)


def new_id(prefix: str) -> str:
    """A fresh id as OpenAI writes them, e.g. ``msg_1f0c...``. It is unique, and no secret."""
    return f"{prefix}_{_random.getrandbits(128):032x}"


def message_item(text: str, refusal: str = "") -> JSON:
    """An assistant's output message."""
    content: list[JSON] = []
    if text or not refusal:
        content.append({"type": "output_text", "text": text, "annotations": []})
    if refusal:
        content.append({"type": "refusal", "refusal": refusal})
    return {
        "id": new_id("msg"),
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": content,
    }


def assistant_items(message: Mapping[str, Any], *, parse_think: bool) -> list[JSON]:
    """The output items of one assistant message: reasoning, then text, then calls; at least one.

    ``parse_think`` takes ``<think>`` tags in the text as reasoning. A reasoning field (``reasoning_content``,
    ``reasoning``) always is. Raises `BadRequest` for arguments that cannot be written as JSON.
    """
    content = message.get("content")
    text, refused = content_text(content), message.get("refusal")
    refusal = refused if refused and isinstance(refused, str) else content_refusal(content)
    field = message.get("reasoning_content") or message.get("reasoning")
    blocks = [field] if isinstance(field, str) else []
    if parse_think:
        tagged, text = split_think(text, is_answer=True)
        blocks.extend(tagged)
    items: list[JSON] = []
    if blocks:
        summary = [{"type": "summary_text", "text": block} for block in blocks]
        items.append({"id": new_id("rs"), "type": "reasoning", "summary": summary})
    calls = message.get("tool_calls")
    calls = [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    if text or refusal or not (items or calls):
        items.append(message_item(text, refusal))
    items.extend(map(_call_item, calls))
    return items


def answer_items(output: list[Any]) -> list[Any]:
    """What the model said last: the items after the last tool output. (The calls before that were already
    run, and must not be run again.)"""
    start = len(output)
    while start > 0 and is_answer(output[start - 1]):
        start -= 1
    return output[start:]


def final_answer(response: Mapping[str, Any]) -> list[Any]:
    """The `answer_items` of a Response. Raises `Unavailable` for a failed one."""
    output = response.get("output")
    if not isinstance(output, list) or response.get("error"):
        raise Unavailable(f"the response failed: {shown(response.get('error') or response)}")
    return answer_items(output)


def is_answer(item: Any) -> bool:
    """Whether an item of an episode is what the model said: a message, reasoning, or a call."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    return kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant")


def messages_to_items(messages: Sequence[Any], *, token_ids: bool = False) -> list[JSON]:
    """The Responses input of a chat conversation; ``<think>`` tags of the assistant are reasoning.

    ``token_ids`` keeps the token bundle of an assistant message, on its last item. Raises `BadRequest`.
    """
    items: list[JSON] = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role in ("user", "system", "developer"):
            content = responses_content(message.get("content"), f"{where}.content")
            items.append({"role": role, "content": content, "type": "message"})
        elif role == "assistant":
            turn = assistant_items(message, parse_think=True)
            if token_ids:
                turn[-1].update(item_tokens(message, where) or {})
            items.extend(turn)
        elif role == "tool":
            items.append(_output_item(message, where))
        else:
            raise BadRequest(f"{where}: a message of role {shown(role)} has no Responses form")
    return items


def input_form(item: JSON, where: str) -> list[JSON]:
    """The items of a Responses input for one that may be a chat message; other items stay as they are.

    Rows that were made from chat data have such messages in their ``input``: an assistant's with
    ``tool_calls`` or reasoning, a tool's answer, parts of a user's. Raises `BadRequest`.
    """
    if (item.get("type") or "message") != "message":
        return [item]
    role, content = item.get("role"), item.get("content")
    if role == "tool":
        if not item.get("tool_call_id"):
            raise BadRequest(f"`{where}` must have a `tool_call_id`, as its role is 'tool'")
        return [_output_item(item, where)]
    if role == "assistant" and any(item.get(key) for key in _CHAT_KEYS):
        calls = item.get("tool_calls") or []
        if not isinstance(calls, list) or not all(map(_is_call, calls)):
            raise BadRequest(f"`{where}.tool_calls` must be a list of calls of functions")
        turn = assistant_items(item, parse_think=False)
        for item_of_turn in turn:
            if item_of_turn["type"] != "reasoning":
                del item_of_turn[
                    "id"
                ]  # the message has none, and an API that knows its own would refuse another
        turn[-1].update(item_tokens(item, where) or {})
        return turn
    if role != "assistant" and isinstance(content, list):
        return [{**item, "content": with_chat_parts(content, f"{where}.content")}]
    return [item]


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _output_item(message: Mapping[str, Any], where: str) -> JSON:
    output = responses_content(message.get("content"), f"{where}.content")
    call_id = checked(message.get("tool_call_id") or "", str, f"{where}.tool_call_id")
    return {"type": "function_call_output", "call_id": call_id, "output": output, "status": "completed"}


def _call_item(call: Mapping[str, Any]) -> JSON:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        # Some backends send the arguments decoded.
        arguments = "" if arguments is None else json_text(arguments, "arguments")
    call_id, name = call.get("id"), function.get("name")
    call_id = call_id if isinstance(call_id, str) and call_id else new_id("call")
    return {
        "type": "function_call",
        "call_id": call_id,
        "name": name if isinstance(name, str) else "",
        "arguments": arguments,
        "id": call_id,
        "status": "completed",
    }


_FUNCTION_KEYS = ("name", "description", "parameters")


def chat_tools(tools: Any) -> list[JSON]:
    """Function tools in chat form. Raises `BadRequest` for a hosted tool, or one without a name."""
    converted = []
    for i, tool in enumerate(checked(tools, list, "tools")):
        if not isinstance(tool, dict) or tool.get("type", "function") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else tool
            raise BadRequest(f"tools[{i}]: a chat backend takes function tools only, not {shown(kind)}")
        if not isinstance(tool.get("name"), str):
            raise BadRequest(f"`tools[{i}]` must have a name")
        function = {key: tool[key] for key in _FUNCTION_KEYS if tool.get(key) is not None}
        converted.append({"type": "function", "function": function})
    return converted


def responses_tools(tools: Any) -> list[JSON]:
    """Chat tools in Responses form. Raises `BadRequest`: a tool that is no function."""
    converted = []
    for i, tool in enumerate(checked(tools or [], list, "tools")):
        function = tool.get("function") if isinstance(tool, dict) else None
        converted.append({**checked(function, dict, f"tools[{i}].function"), "type": "function"})
    return converted


def chat_tool_choice(choice: Any) -> Any:
    """``tool_choice`` in chat form. Raises `BadRequest`: the choice of a hosted tool."""
    if not isinstance(choice, dict) or "function" in choice:
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        tools = [chat_tool_choice(tool) for tool in checked(choice.get("tools"), list, "tool_choice.tools")]
        allowed = {"mode": choice.get("mode", "auto"), "tools": tools}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    raise BadRequest(f"tool_choice: {shown(choice.get('type'))} has no chat form")


def responses_tool_choice(choice: Any) -> Any:
    """``tool_choice`` in Responses form; null is ``"auto"``."""
    if not isinstance(choice, dict):
        return "auto" if choice is None else choice
    if isinstance(choice.get("function"), dict):
        return {"type": "function", "name": choice["function"].get("name")}
    if isinstance(choice.get("allowed_tools"), dict):
        allowed = choice["allowed_tools"]
        listed = checked(allowed.get("tools"), list, "tool_choice.tools")
        tools = [responses_tool_choice(tool) for tool in listed]
        return {"type": "allowed_tools", "mode": allowed.get("mode", "auto"), "tools": tools}
    return dict(choice)


def chat_response_format(text: Any) -> JSON | None:
    """``response_format`` for ``text.format``; None for plain text, chat's default."""
    wanted = text.get("format") if isinstance(text, dict) else None
    if not isinstance(wanted, dict) or wanted.get("type") == "text":
        return None
    if wanted.get("type") == "json_object":
        return {"type": "json_object"}
    if wanted.get("type") == "json_schema":
        schema = {k: v for k, v in wanted.items() if k != "type" and v is not None}
        return {"type": "json_schema", "json_schema": schema}
    raise BadRequest(f"text.format: {shown(wanted.get('type'))} has no chat form")


def responses_text_format(response_format: Any) -> JSON | None:
    """``text.format`` for ``response_format``; None without one."""
    if not isinstance(response_format, dict):
        return None
    schema = response_format.get("json_schema")
    return {**(schema if isinstance(schema, dict) else {}), "type": response_format.get("type", "text")}
