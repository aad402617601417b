"""Requests: a Responses body as a Chat Completions body, the reverse, and the sampling parameters of both.

**Responses -> chat.** Consecutive reasoning, message and function_call items are one turn of the model and
become one assistant message; an output or another role ends the turn. What chat cannot express is an error. A
message shows its reasoning before its calls, so reasoning that follows an answered call starts another
message, after the output of that call. A turn with token ids stays one, because the tokens keep the order.

**Sampling parameters**, lowest precedence first: the deployment's ``extra_body``, the row's
``metadata.extra_body``, explicit fields of the request, the deployment's overrides, which keep training
on-policy whatever a caller sends. Chat-template arguments follow the same order, merged key by key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import orjson

from gym_serve.types.errors import BadRequest
from gym_serve.types.protocols.content import (
    chat_content,
    checked,
    content_refusal,
    content_text,
    json_text,
    reasoning_texts,
    shown,
    split_think,
    wrap_think,
)
from gym_serve.types.protocols.items import (
    chat_response_format,
    chat_tool_choice,
    chat_tools,
    input_form,
    messages_to_items,
    responses_text_format,
    responses_tool_choice,
    responses_tools,
)
from gym_serve.types.protocols.tokens import LOGPROBS, includes_logprobs, item_tokens
from gym_serve.types.requests import JSON

ReasoningForm = Literal["field", "think_tags", "drop"]

# What the prompt would lack without it, and only the server of an API has.
_STATE = ("conversation", "previous_response_id", "prompt")

# Converted below, or without a counterpart in chat.
_RESPONSES_ONLY = frozenset(
    {
        "background",
        "context_management",
        "include",
        "input",
        "instructions",
        "max_output_tokens",
        "max_tool_calls",
        "model",
        "reasoning",
        "text",
        "tools",
        "truncation",
        *_STATE,
    }
)


def responses_to_chat(
    params: Mapping[str, Any], *, reasoning: ReasoningForm = "field", token_ids: bool = False
) -> JSON:
    """The body of ``POST /v1/chat/completions`` for a body of ``POST /v1/responses``.

    Args:
        reasoning: how the model's earlier reasoning is shown to it: as ``reasoning_content`` and
            ``reasoning`` (two spellings of one field), as ``<think>`` tags in the content, or not at all.
        token_ids: put the last token bundle of each turn on its assistant message, for an engine that
            continues from tokens instead of text.

    Raises:
        BadRequest: something that chat has no form for, with its place in the body.
    """
    for key in _STATE:
        if params.get(key) is not None:
            raise BadRequest(f"{key}: send the whole conversation, a chat backend keeps none")
    messages = _chat_messages(params.get("input"), reasoning, token_ids)
    if instructions := params.get("instructions"):
        messages = _with_instructions(checked(instructions, str, "instructions"), messages)
    chat: JSON = {"messages": messages}
    chat.update((key, value) for key, value in params.items() if key not in _RESPONSES_ONLY)
    if params.get("model") is not None:
        chat["model"] = params["model"]
    if params.get("max_output_tokens") is not None:
        chat["max_tokens"] = params["max_output_tokens"]
    effort = params.get("reasoning")
    if isinstance(effort, dict) and effort.get("effort") is not None:
        chat["reasoning_effort"] = effort["effort"]
    text = params.get("text")
    response_format = chat_response_format(text)
    if response_format is not None:
        chat["response_format"] = response_format
    if isinstance(text, dict) and text.get("verbosity") is not None:
        chat["verbosity"] = text["verbosity"]
    if includes_logprobs(params):
        chat["logprobs"] = True
    _set_tools(chat, params)
    return chat


def _set_tools(chat: JSON, params: Mapping[str, Any]) -> None:
    if params.get("tools"):
        chat["tools"] = chat_tools(params["tools"])
        if chat.get("tool_choice") is not None:
            chat["tool_choice"] = chat_tool_choice(chat["tool_choice"])
        return
    if chat.get("tool_choice") == "required":
        raise BadRequest("tool_choice 'required' needs at least one tool")
    # Backends refuse these two without tools.
    chat.pop("tool_choice", None)
    chat.pop("parallel_tool_calls", None)


def _with_instructions(instructions: str, messages: list[JSON]) -> list[JSON]:
    leading = [instructions]
    rest = list(messages)
    while rest and rest[0]["role"] in ("system", "developer"):
        leading.append(content_text(rest.pop(0)["content"]))
    return [{"role": "system", "content": "\n\n".join(leading)}, *rest]


def _chat_messages(items: Any, reasoning: ReasoningForm, token_ids: bool) -> list[JSON]:
    if isinstance(items, str):
        return [{"role": "user", "content": [{"type": "text", "text": items}]}]
    if not isinstance(items, list):
        raise BadRequest(f"`input` must be a string or a list of items, got {shown(items)}")
    turn = _Turn(reasoning, token_ids)
    for i, raw in enumerate(items):
        where = f"input[{i}]"
        for item in input_form(checked(raw, dict, where), where):
            turn.take(item, where)
    turn.end()
    return turn.messages


class _Message:
    """Assistant items in a row, on their way to one assistant message."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.refusal = ""
        self.reasoning: list[str] = []
        self.calls: list[JSON] = []

    def join(self, later: _Message) -> None:
        self.text += later.text
        self.refusal += later.refusal
        self.reasoning += later.reasoning
        self.calls += later.calls

    def chat(self, form: ReasoningForm) -> JSON:
        # Templates of thinking models want a string beside reasoning, null only beside calls alone.
        text = "".join(self.text)
        content: Any = text or ("" if self.reasoning else None)
        if self.refusal:
            # Among the parts of the content, as templates show the model those, and no field of another name.
            texts = [{"type": "text", "text": text}] if text else []
            content = [*texts, {"type": "refusal", "refusal": self.refusal}]
        message: JSON = {"role": "assistant", "content": content}
        if self.calls:
            message["tool_calls"] = self.calls
        if self.reasoning and form == "field":
            message["reasoning_content"] = message["reasoning"] = "\n\n".join(self.reasoning)
        return message


class _Turn:
    """A turn of the model and the outputs of its calls, on their way to `messages`."""

    def __init__(self, form: ReasoningForm, token_ids: bool) -> None:
        self.messages: list[JSON] = []
        self._form = form
        self._token_ids = token_ids
        self._tokens: JSON | None = None
        self._said: list[_Message] = []  # another one begins with each reasoning that follows a call
        self._outputs: list[JSON] = []

    def take(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type") or ("message" if item.get("role") else None)
        if kind == "function_call_output":
            content = chat_content(item.get("output"), f"{where}.output")
            call_id = _item_text(item, "call_id", where)
            self._outputs.append({"role": "tool", "content": content, "tool_call_id": call_id})
            return
        if kind == "message" and item.get("role") != "assistant":
            self.end()
            self.messages.append(_other_message(item, where))
            return
        if self._outputs:
            self._write()
        if not self._said:
            self._said.append(_Message())
        if kind == "message":
            self._add_text(content_text(item.get("content")))
            self._said[-1].refusal += content_refusal(item.get("content"))
        elif kind == "reasoning":
            self._add_reasoning([text for text in reasoning_texts(item) if text])
        elif kind == "function_call":
            self._said[-1].calls.append(_chat_call(item, where))
        else:
            raise BadRequest(f"{where}: an item of type {shown(kind)} has no chat form")
        if self._token_ids:
            self._tokens = item_tokens(item, where) or self._tokens

    def end(self) -> None:
        self._write()
        self._write()  # what was left for a further turn

    def _add_text(self, text: str) -> None:
        message = self._said[-1]
        if self._form != "think_tags":
            blocks, text = split_think(text)
            message.reasoning.extend(blocks)
        message.text.append(text)

    def _add_reasoning(self, blocks: list[str]) -> None:
        if blocks and self._said[-1].calls and self._form != "drop":
            self._said.append(_Message())
        if self._form == "think_tags":
            self._said[-1].text.append(wrap_think(blocks))
        else:
            self._said[-1].reasoning.extend(blocks)

    def _write(self) -> None:
        """Write the turn with its outputs; what follows the last answered call begins the next turn."""
        messages, outputs, tokens = self._said, self._outputs, self._tokens
        self._said, self._outputs, self._tokens = [], [], None
        unused = Counter(output["tool_call_id"] for output in outputs)  # an output answers one call
        written: list[_Message] = []
        is_answered = False  # the last one that is written
        for message in messages:
            answered = Counter(call["id"] for call in message.calls) & unused
            unused -= answered
            has_answer = bool(answered)
            if written and (tokens or not is_answered):
                written[-1].join(message)
                is_answered = is_answered or has_answer
            else:
                written.append(message)
                is_answered = has_answer
        if len(written) > 1 and not is_answered:
            self._said = [written.pop()]
        if not written:
            self.messages += outputs
        for message, behind in zip(written, _by_message(written, outputs), strict=True):
            self.messages += [{**message.chat(self._form), **(tokens or {})}, *behind]


def _by_message(written: list[_Message], outputs: list[JSON]) -> list[list[JSON]]:
    """The outputs of the calls of each message; one without its call goes behind the last message."""
    places: dict[str, list[int]] = {}
    for i, message in enumerate(written):
        for call in message.calls:
            places.setdefault(call["id"], []).append(i)
    behind: list[list[JSON]] = [[] for _ in written]
    for output in outputs if written else ():
        free = places.get(output["tool_call_id"])
        behind[free.pop(0) if free else -1].append(output)
    return behind


def _other_message(item: Mapping[str, Any], where: str) -> JSON:
    role = item.get("role")
    if role not in ("user", "system", "developer"):
        raise BadRequest(f"{where}: a message of role {shown(role)} has no chat form")
    return {"role": role, "content": chat_content(item.get("content"), f"{where}.content")}


def _chat_call(item: Mapping[str, Any], where: str) -> JSON:
    function = {"arguments": _item_text(item, "arguments", where), "name": _item_text(item, "name", where)}
    return {"id": _item_text(item, "call_id", where), "function": function, "type": "function"}


def _item_text(item: Mapping[str, Any], key: str, where: str) -> str:
    return checked(item.get(key), str, f"{where}.{key}")


_SAME = ("model", "service_tier", "store", "temperature", "top_logprobs", "top_p", "user", "stream")
_CONVERTED = frozenset(
    {
        "chat_template_kwargs",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "metadata",
        "n",
        "parallel_tool_calls",
        "reasoning_effort",
        "response_format",
        "stream_options",
        "tool_choice",
        "tools",
        "verbosity",
        *_SAME,
    }
)


def chat_to_params(chat: Mapping[str, Any], *, token_ids: bool = False) -> JSON:
    """The body of ``POST /v1/responses`` for a body of ``POST /v1/chat/completions``.

    ``<think>`` tags in the assistant's texts become reasoning. Sampling that Responses lacks (seed, stop,
    penalties, top_k, ...) travels in ``metadata.extra_body``, as a row writes it. ``token_ids`` keeps the
    token bundles of assistant messages. Raises `BadRequest` for what Responses has no form for.
    """
    if chat.get("n") not in (None, 1):
        raise BadRequest("n: this server gives one choice for a call")
    messages = checked(chat.get("messages"), list, "messages")
    parallel = chat.get("parallel_tool_calls")
    params: JSON = {key: chat[key] for key in _SAME if chat.get(key) is not None}
    params["input"] = messages_to_items(messages, token_ids=token_ids)
    params["tools"] = responses_tools(chat.get("tools"))
    params["tool_choice"] = responses_tool_choice(chat.get("tool_choice"))
    params["parallel_tool_calls"] = True if parallel is None else parallel
    limit = chat.get("max_completion_tokens") or chat.get("max_tokens")
    if limit is not None:
        params["max_output_tokens"] = limit
    if chat.get("logprobs"):
        params["include"] = [LOGPROBS]
    if chat.get("reasoning_effort") is not None:
        params["reasoning"] = {"effort": chat["reasoning_effort"]}
    text = {"format": responses_text_format(chat.get("response_format")), "verbosity": chat.get("verbosity")}
    text = {key: value for key, value in text.items() if value is not None}
    if text:
        params["text"] = text
    metadata = _metadata(chat)
    if metadata:
        params["metadata"] = metadata
    return params


def _metadata(chat: Mapping[str, Any]) -> JSON:
    original = chat.get("metadata")
    metadata = dict(original) if isinstance(original, dict) else {}
    further = {k: v for k, v in chat.items() if k not in _CONVERTED and v is not None}
    template = chat.get("chat_template_kwargs")
    if template:
        checked(template, dict, "chat_template_kwargs")
    for key, explicit in (("extra_body", further), ("chat_template_kwargs", template)):
        if explicit:
            metadata[key] = json_text({**metadata_object(original, key), **explicit}, key)
    return metadata


def apply_sampling(
    chat: Mapping[str, Any],
    *,
    extra_body: Mapping[str, Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> JSON:
    """The body for a chat backend with everybody's sampling parameters merged in.

    ``extra_body`` are the deployment's defaults; ``overrides`` always hold, and null leaves a key out. Raises
    `BadRequest` if ``metadata.extra_body`` or either ``chat_template_kwargs`` is no JSON object.
    """
    metadata = chat.get("metadata")
    body: JSON = {**(extra_body or {}), **metadata_object(metadata, "extra_body")}
    # An explicit null says "no preference": it must not hide a value from below.
    body.update((key, value) for key, value in chat.items() if value is not None or key not in body)
    template = {
        **(chat_template_kwargs or {}),
        **metadata_object(metadata, "chat_template_kwargs"),
        **_object(body.get("chat_template_kwargs"), "chat_template_kwargs"),
    }
    if template:
        body["chat_template_kwargs"] = template
    body.update(overrides or {})
    return {key: value for key, value in body.items() if value is not None or key not in (overrides or {})}


def metadata_object(metadata: Any, key: str) -> JSON:
    """The object under ``metadata[key]``: a JSON string (as OpenAI's metadata wants it) or an object. Raises
    `BadRequest` if it is neither."""
    value = metadata.get(key) if isinstance(metadata, dict) else None
    if isinstance(value, str) and value:
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise BadRequest(f"`metadata.{key}` must be JSON: {error}") from None
    return _object(value, f"metadata.{key}")


def _object(value: Any, where: str) -> JSON:
    return dict(checked(value, dict, where)) if value else {}
