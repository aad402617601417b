"""Anthropic Messages <-> Responses: requests, answers and streams of ``POST /v1/messages``.

Thinking blocks become reasoning items, with their signature as ``encrypted_content``. A tool result that is
an error becomes an output with status ``incomplete``. What Responses cannot express (documents, hosted
tools) is an error that names its place. Streams keep Anthropic's order.
(https://docs.anthropic.com/en/api/messages, https://docs.anthropic.com/en/docs/build-with-claude/streaming)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from gym_serve.types.errors import BadRequest
from gym_serve.types.exact import exact_json
from gym_serve.types.protocols.content import (
    checked,
    content_refusal,
    content_text,
    json_text,
    reasoning_texts,
    shown,
)
from gym_serve.types.protocols.items import answer_items, final_answer, message_item, new_id
from gym_serve.types.protocols.response_stream import FINAL_EVENTS, event_object
from gym_serve.types.requests import JSON

# Key of a call's arguments that are no JSON object: Anthropic's documentation of fine-grained tool streaming.
INVALID_JSON = "INVALID_JSON"

_STOPS = {"max_output_tokens": "max_tokens", "content_filter": "refusal"}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def response_to_message(response: Mapping[str, Any], body: Mapping[str, Any]) -> JSON:
    """The Message for a Response; ``body``, which it answers, names the model where the response does not."""
    content = [block for item in final_answer(response) for block in _content_blocks(item)]
    return {
        "id": new_id("msg"),
        "type": "message",
        "role": "assistant",
        "model": response.get("model") or body.get("model") or "",
        "content": content,
        **_stop_of(response, content),
        "usage": _message_usage(response.get("usage")),
    }


def error_message(status: int, error: Mapping[str, Any]) -> JSON:
    """The body of a failure in Anthropic's form, of what is under ``error`` in `GymError.to_body`."""
    kind = _ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {**error, "type": kind}}


def _content_blocks(item: Mapping[str, Any]) -> list[JSON]:
    kind = item.get("type", "message")
    if kind == "message":
        content = item.get("content")
        parts = [[part] for part in content] if isinstance(content, list) else [content]
        texts = [content_text(part) + content_refusal(part) for part in parts]
        return [{"type": "text", "text": text, "citations": None} for text in texts if text]
    if kind == "reasoning":
        return _thinking(item)
    call_id = str(item.get("call_id") or item.get("id") or new_id("toolu"))
    name, arguments = str(item.get("name") or ""), tool_input(item.get("arguments"))
    return [{"type": "tool_use", "id": call_id, "name": name, "input": arguments}]


def _thinking(item: Mapping[str, Any]) -> list[JSON]:
    signature = item.get("encrypted_content")
    signature = signature if isinstance(signature, str) else ""
    if texts := reasoning_texts(item):
        return [{"type": "thinking", "thinking": text, "signature": signature} for text in texts if text]
    return [{"type": "redacted_thinking", "data": signature}] if signature else []


def tool_input(arguments: Any) -> JSON:
    """The arguments of a call as an object; what is none stands under `INVALID_JSON`."""
    text = arguments if isinstance(arguments, str) else ""
    try:
        decoded = exact_json(text) if text else {}
        json.dumps(decoded)
    except (ValueError, RecursionError):  # the latter for what is nested too deeply to be sent on
        return {INVALID_JSON: text}
    # So does an object of just this form, or it could not be told from one that is none.
    return decoded if isinstance(decoded, dict) and decoded.keys() != {INVALID_JSON} else {INVALID_JSON: text}


def _stop_of(response: Mapping[str, Any], content: list[JSON]) -> JSON:
    """Why it ended: ``stop_reason`` and ``stop_sequence``."""
    details = response.get("incomplete_details")
    reason = _STOPS.get(str(details.get("reason"))) if isinstance(details, dict) else None
    sequence = None
    if reason is None:
        if any(block["type"] == "tool_use" for block in content):
            reason = "tool_use"
        elif any(content_refusal(item.get("content")) for item in _answer(response.get("output"))):
            reason = "refusal"
        elif isinstance(sequence := response.get("stop_sequence"), str):
            reason = "stop_sequence"
        else:
            reason, sequence = "end_turn", None
    return {"stop_reason": reason, "stop_sequence": sequence}


def _answer(output: Any) -> list[Any]:
    return answer_items(output) if isinstance(output, list) else []


def _message_usage(usage: Any) -> JSON:
    """The usage in Anthropic's form: there, ``input_tokens`` are those that no cache answered."""
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("input_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else 0
    prompt = _count(usage.get("input_tokens"))
    return {
        "input_tokens": max(0, prompt - cached),
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": _count(usage.get("output_tokens")),
    }


def _count(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0


_EFFORT_BUDGETS = ((4096, "low"), (16384, "medium"))  # tokens of thinking; more is "high"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_FURTHER = ("top_k", "seed", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


def message_to_params(body: Mapping[str, Any]) -> JSON:
    """The Responses body for a Messages body.

    ``stop_sequences``, ``top_k`` and sampling that Anthropic's API lacks and engines have (``seed``, ...)
    travel in ``metadata.extra_body``, as a row writes them. Raises `BadRequest` with the place of a problem.
    """
    items: list[JSON] = []
    for i, message in enumerate(checked(body.get("messages"), list, "messages")):
        items += _message_items(message, f"messages[{i}]")
    params: JSON = {"input": items}
    for key, name in (("model", "model"), ("max_tokens", "max_output_tokens")):
        if body.get(key) is not None:
            params[name] = body[key]
    params |= {key: body[key] for key in ("temperature", "top_p") if body.get(key) is not None}
    if system := _system(body.get("system")):
        params["instructions"] = system
    _set_tools(params, body)
    if effort := _effort(body.get("thinking")):
        params["reasoning"] = {"effort": effort}
    if text := _format(body):
        params["text"] = {"format": text}
    further = {"stop": body.get("stop_sequences"), **{key: body.get(key) for key in _FURTHER}}
    further = {key: value for key, value in further.items() if value is not None}
    if further:
        params["metadata"] = {"extra_body": json_text(further, "stop_sequences")}
    return params


def _system(system: Any) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    blocks = _blocks_of(system, "system")
    return "\n\n".join(_text_of(block, "text", f"system[{i}]") for i, block in enumerate(blocks))


def _set_tools(params: JSON, body: Mapping[str, Any]) -> None:
    tools = []
    for i, tool in enumerate(checked(body.get("tools") or [], list, "tools")):
        if not isinstance(tool, dict) or tool.get("type", "custom") != "custom" or "name" not in tool:
            kind = tool.get("type") if isinstance(tool, dict) else tool
            raise BadRequest(f"tools[{i}]: only tools of the client's own are known, not {shown(kind)}")
        function = {"type": "function", "name": tool["name"], "parameters": tool.get("input_schema")}
        tools.append({**function, "description": tool.get("description"), "strict": tool.get("strict")})
    if not tools:
        return
    params["tools"] = tools
    if body.get("tool_choice") is None:
        return
    choice = checked(body["tool_choice"], dict, "tool_choice")
    if choice.get("disable_parallel_tool_use"):
        params["parallel_tool_calls"] = False
    if choice.get("type") == "tool":
        params["tool_choice"] = {"type": "function", "name": choice.get("name")}
    elif (chosen := _CHOICES.get(str(choice.get("type")))) is not None:
        params["tool_choice"] = chosen
    else:
        raise BadRequest(f"tool_choice: {shown(choice.get('type'))} is none of auto, any, none and tool")


def _effort(thinking: Any) -> str | None:
    if not isinstance(thinking, dict) or thinking.get("type") not in ("enabled", "adaptive"):
        return None
    budget = thinking.get("budget_tokens")
    if type(budget) is not int:
        return "medium"
    return next((effort for limit, effort in _EFFORT_BUDGETS if budget <= limit), "high")


def _format(body: Mapping[str, Any]) -> JSON | None:
    """The format of the answer: ``output_config.format``, or ``output_format`` as it was called before."""
    config = body.get("output_config")
    wanted = config.get("format") if isinstance(config, dict) else body.get("output_format")
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        return None
    return {"type": "json_schema", "name": "answer", "schema": wanted.get("schema"), "strict": True}


def _message_items(message: Any, where: str) -> list[JSON]:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise BadRequest(f"{where}: a message of role {shown(role)} has no Responses form")
    content = message.get("content")
    if isinstance(content, str):
        item = message_item(content) if role == "assistant" else {"role": role, "content": content}
        return [{**item, "type": "message"}]
    items: list[JSON] = []
    for i, block in enumerate(_blocks_of(content, f"{where}.content")):
        at = f"{where}.content[{i}]"
        block_item = _assistant_item(block, at) if role == "assistant" else _tool_output(block, at)
        if block_item is not None:
            if _goes_on(items, block_item):
                items[-1]["summary"] += block_item["summary"]
            else:
                items.append(block_item)
            continue
        part = _input_part(block, at)
        # Parts in a row are one message.
        if items and items[-1].get("role") == role:
            items[-1]["content"].append(part)
        else:
            items.append({"type": "message", "role": role, "content": [part]})
    return items


def _assistant_item(block: JSON, where: str) -> JSON:
    kind = block.get("type")
    if kind == "text":
        return message_item(_text_of(block, "text", where))
    if kind == "thinking":
        summary = [{"type": "summary_text", "text": _text_of(block, "thinking", where)}]
        signed = {"encrypted_content": _text_of(block, "signature", where)} if block.get("signature") else {}
        return {"type": "reasoning", "id": f"rs_{where}", "summary": summary, **signed}
    if kind == "redacted_thinking":
        data = _text_of(block, "data", where)
        return {"type": "reasoning", "id": f"rs_{where}", "summary": [], "encrypted_content": data}
    if kind == "tool_use":
        arguments = _arguments(block.get("input"), where)
        call_id = _text_of(block, "id", where)
        call = {"type": "function_call", "id": call_id, "call_id": call_id, "status": "completed"}
        return {**call, "name": _text_of(block, "name", where), "arguments": arguments}
    raise BadRequest(f"{where}: an assistant's block of type {shown(kind)} has no Responses form")


def _goes_on(items: list[JSON], item: JSON) -> bool:
    """Whether a thinking block is a further part of the item before it: a signature is of a whole item."""
    signature = item.get("encrypted_content")
    if not (signature and item["summary"] and items and items[-1].get("summary")):
        return False
    return bool(items[-1].get("encrypted_content") == signature)


def _arguments(arguments: Any, where: str) -> str:
    """The arguments of a call: `tool_input` backwards."""
    if arguments is None:
        return "{}"
    raw = checked(arguments, dict, f"{where}.input").get(INVALID_JSON)
    if arguments.keys() == {INVALID_JSON} and isinstance(raw, str) and tool_input(raw) == arguments:
        return raw
    return json_text(arguments, f"{where}.input")


def _tool_output(block: JSON, where: str) -> JSON | None:
    if block.get("type") != "tool_result":
        return None
    output = block.get("content") or ""
    if not isinstance(output, str):
        blocks = _blocks_of(output, f"{where}.content")
        output = [_input_part(part, f"{where}.content[{i}]") for i, part in enumerate(blocks)]
        if all(part["type"] == "input_text" for part in output):
            output = "".join(part["text"] for part in output)
    call_id = _text_of(block, "tool_use_id", where)
    status = "incomplete" if block.get("is_error") else "completed"
    return {"type": "function_call_output", "call_id": call_id, "output": output, "status": status}


def _input_part(block: JSON, where: str) -> JSON:
    kind = block.get("type")
    if kind == "text":
        return {"type": "input_text", "text": _text_of(block, "text", where)}
    if kind == "image":
        return {"type": "input_image", "image_url": _image_url(block.get("source"), where), "detail": "auto"}
    raise BadRequest(f"{where}: a block of type {shown(kind)} has no Responses form")


def _image_url(source: Any, where: str) -> str:
    source = source if isinstance(source, dict) else {}
    url, kind, data = source.get("url"), source.get("media_type"), source.get("data")
    if source.get("type") == "base64" and isinstance(kind, str) and isinstance(data, str):
        return f"data:{kind};base64,{data}"
    if source.get("type") == "url" and isinstance(url, str):
        return url
    raise BadRequest(f"{where}: an image needs a source of the type url or base64")


def _blocks_of(content: Any, where: str) -> list[JSON]:
    blocks = checked(content, list, where)
    return [checked(block, dict, f"{where}[{i}]") for i, block in enumerate(blocks)]


def _text_of(block: Mapping[str, Any], key: str, where: str) -> str:
    return checked(block.get(key), str, f"{where}.{key}")


_DELTAS = {
    "response.output_text.delta": ("text", "text_delta", "text"),
    "response.refusal.delta": ("text", "text_delta", "text"),
    "response.reasoning_summary_text.delta": ("thinking", "thinking_delta", "thinking"),
    "response.reasoning_text.delta": ("thinking", "thinking_delta", "thinking"),
    "response.function_call_arguments.delta": ("tool_use", "input_json_delta", "partial_json"),
}
_BLOCKS: dict[str, JSON] = {
    "text": {"type": "text", "text": "", "citations": None},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


class MessageStream:
    """One stream."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._model = str(body.get("model") or "")
        self._eager = _eager_tools(body.get("tools"))
        self._index = -1
        self._open: tuple[str, Any] | None = None
        self._started = False
        self._content: list[JSON] = []

    def event(self, event: Mapping[str, Any]) -> Iterator[JSON]:
        if not self._started:
            self._started = True
            yield self._start(event)
        kind = str(event.get("type"))
        if kind in _DELTAS:
            yield from self._delta(event, *_DELTAS[kind])
        elif kind == "response.output_item.added":
            yield from self._added(event_object(event, "item"), event.get("output_index"))
        elif kind == "response.output_item.done":
            yield from self._done(event_object(event, "item"))
        elif kind in FINAL_EVENTS:
            yield from self._stop()
            response = event_object(event, "response")
            delta = _stop_of(response, self._content)
            yield {"type": "message_delta", "delta": delta, "usage": _message_usage(response.get("usage"))}
            yield {"type": "message_stop"}

    def _start(self, event: Mapping[str, Any]) -> JSON:
        response = event.get("response")
        model = response.get("model") if isinstance(response, dict) else None
        message: JSON = {
            "id": new_id("msg"),
            "type": "message",
            "role": "assistant",
            "model": model or self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _message_usage(None),
        }
        return {"type": "message_start", "message": message}

    def _added(self, item: JSON, index: Any) -> Iterator[JSON]:
        if item.get("type") == "function_call":
            yield from self._stop()
            block = {**_content_blocks(item)[0], "input": {}}
            kind = "eager_input" if block["name"] in self._eager else "input"
            yield from self._begin((kind, index), block)

    def _delta(self, event: Mapping[str, Any], kind: str, delta: str, field: str) -> Iterator[JSON]:
        text = event.get("delta")
        if not isinstance(text, str) or not text:
            return
        part = (event.get("output_index"), event.get("summary_index", event.get("content_index")))
        if kind == "tool_use":
            if self._open != ("eager_input", event.get("output_index")):
                return
        elif self._open != (kind, part):
            yield from self._stop()
            yield from self._begin((kind, part), dict(_BLOCKS[kind]))
        content = {"type": delta, field: text}
        yield {"type": "content_block_delta", "index": self._index, "delta": content}

    def _done(self, item: JSON) -> Iterator[JSON]:
        arguments = item.get("arguments")
        if self._open is not None and self._open[0] == "input" and isinstance(arguments, str) and arguments:
            tool_arguments = tool_input(arguments)
            text = json_text(tool_arguments, "input") if INVALID_JSON in tool_arguments else arguments
            delta = {"type": "input_json_delta", "partial_json": text}
            yield {"type": "content_block_delta", "index": self._index, "delta": delta}
        signature = item.get("encrypted_content") if item.get("type") == "reasoning" else None
        if isinstance(signature, str) and signature:
            if self._open is not None and self._open[0] == "thinking":
                delta = {"type": "signature_delta", "signature": signature}
                yield {"type": "content_block_delta", "index": self._index, "delta": delta}
            elif not item.get("summary") and not item.get("content"):
                yield from self._begin(("redacted", None), {"type": "redacted_thinking", "data": signature})
        yield from self._stop()

    def _begin(self, key: tuple[str, Any], block: JSON) -> Iterator[JSON]:
        self._index += 1
        self._open = key
        self._content.append(block)
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _stop(self) -> Iterator[JSON]:
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": self._index}


def _eager_tools(tools: Any) -> frozenset[str]:
    listed = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    return frozenset(str(tool.get("name")) for tool in listed if tool.get("eager_input_streaming") is True)


def message_events(message: Mapping[str, Any]) -> Iterator[JSON]:
    """The events of a finished Message, each block's content in one delta."""
    yield {"type": "message_start", "message": {**message, "content": [], "stop_reason": None}}
    for index, block in enumerate(message.get("content") or ()):
        begun, deltas = _taken_apart(block)
        yield {"type": "content_block_start", "index": index, "content_block": begun}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    delta = {"stop_reason": message.get("stop_reason"), "stop_sequence": message.get("stop_sequence")}
    yield {"type": "message_delta", "delta": delta, "usage": message.get("usage")}
    yield {"type": "message_stop"}


def _taken_apart(block: JSON) -> tuple[JSON, list[JSON]]:
    kind = block.get("type")
    if kind == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block.get("text") or ""}]
    if kind == "thinking":
        begun = {**block, "thinking": "", "signature": ""}
        signature = {"type": "signature_delta", "signature": block.get("signature") or ""}
        return begun, [{"type": "thinking_delta", "thinking": block.get("thinking") or ""}, signature]
    if kind == "tool_use":
        arguments = json_text(block.get("input") or {}, "input")
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]
    return block, []
