"""A model server on loopback: HTTP/1.1 with as little as possible between socket and answer.

One core serves more than 20,000 requests a second, so that it limits no benchmark: the
parser is httptools' own C, headers are ignored, requests are not decoded, and answers are bytes that were
encoded before. A client sends its next request after the answer to the one before, as HTTP clients do.

The turn of an episode follows from the request alone: each tool call that was run is one tool message in
it. A search for the message's bytes finds it, which no text can imitate: inside a JSON string the quotes
are escaped.

Token ids count the tokens of the episode, so the prompt and the generation of one turn are a prefix of the
next prompt, as with a real engine. They are sent as vLLM does: the prompt's on the completion, the
generated ones on the choice, with one ``logprobs`` entry each.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, cast

import orjson
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from benchmarks.loopback import Behaviour

__all__ = ["MODEL", "Answers", "Model", "ModelProtocol", "Stats", "http"]

MODEL = "loopback"
"""Name of the model; the server answers to any other as well."""

_FIRST_ID = 10_000
_IDS = 90_000
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 429: "Too Many Requests", 500: "Server Error"}

# Compact, as orjson, aiohttp's callers and openai write JSON; and with a space, as Python's json does.
_TOOL_MESSAGE = (b'"role":"tool"', b'"role": "tool"')
_TOOL_OUTPUT = (b'"type":"function_call_output"', b'"type": "function_call_output"')
_STREAM = (b'"stream":true', b'"stream": true')


def http(status: int, body: Any, headers: str = "") -> bytes:
    """A whole HTTP response.

    Args:
        status: its status.
        body: what is sent as JSON, or bytes to be sent as they are.
        headers: further header lines, each with its line end.
    """
    content = body if isinstance(body, bytes) else orjson.dumps(body)
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
        f"{headers}content-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


_MALFORMED = http(400, {"error": {"message": "this is no HTTP request"}})
_NO_ROUTE = http(
    404, {"error": {"message": "the routes are /v1/chat/completions, /v1/responses, /v1/models, /stats"}}
)
_FAULTS = {
    "overloaded": http(429, {"error": {"message": "injected: too many requests"}}, "retry-after: 0.1\r\n"),
    "error": http(500, {"error": {"message": "injected: internal error"}}),
    "garbage": http(200, b'{"choices": [{"mess'),
}


@dataclass
class Stats:
    """What has happened so far; ``GET /stats`` shows it.

    Attributes:
        requests: requests for a turn.
        answered: those that were answered, by a fault as well.
        abandoned: those whose client closed the connection instead of waiting.
        open: those that wait for their answer.
        received: bytes of their bodies.
        sent: bytes of the answers, with headers.
    """

    requests: int = 0
    answered: int = 0
    abandoned: int = 0
    open: int = 0
    received: int = 0
    sent: int = 0


class Model:
    """What the connections of one server share.

    Args:
        behaviour: what it does.
    """

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.answers = Answers(behaviour)
        self.stats = Stats()


class ModelProtocol(asyncio.Protocol):
    """One connection.

    Args:
        model: answers its requests.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._stats = model.stats
        self._loop = asyncio.get_running_loop()
        self._chat = model.answers.chat
        self._latency = model.behaviour.latency_ms / 1000
        self._token_latency = model.behaviour.token_latency_ms / 1000
        self._parser = HttpRequestParser(self)
        self._open = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, and with it whoever waits for an answer."""
        self._stats.abandoned += self._open
        self._stats.open -= self._open
        self._open = 0

    def data_received(self, data: bytes) -> None:
        """Bytes came in; the parser calls the four methods below."""
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade):
            self._transport.write(_MALFORMED)
            self._transport.close()

    def on_message_begin(self) -> None:
        """A request begins."""
        self._url = b""
        self._body: list[bytes] = []

    def on_url(self, part: bytes) -> None:
        """A part of its URL."""
        self._url += part

    def on_body(self, part: bytes) -> None:
        """A part of its body."""
        self._body.append(part)

    def on_message_complete(self) -> None:
        """It is complete."""
        if self._url == b"/v1/chat/completions":
            self._turn(self._chat)
        elif self._url == b"/v1/responses":
            self._turn(self._model.answers.responses)
        elif self._url == b"/v1/models":
            self._write(self._model.answers.models)
        elif self._url == b"/stats":
            self._write(http(200, asdict(self._stats)))
        else:
            self._write(_NO_ROUTE)

    def _turn(self, answer: Callable[[bytes], bytes]) -> None:
        body = b"".join(self._body)
        stats = self._stats
        stats.requests += 1
        stats.received += len(body)
        stats.open += 1
        self._open += 1
        fault = self._model.behaviour.fault(stats.requests)
        if fault == "hang":
            return
        if fault == "drop":
            self._transport.abort()
            return
        parts = self._model.answers.chat_stream(body) if fault is None and answer == self._chat else None
        if parts is not None:
            self._loop.call_later(self._latency, self._stream, parts, 0)
            return
        content = answer(body) if fault is None else _FAULTS[fault]
        if self._latency:
            self._loop.call_later(self._latency, self._answer, content)
        else:
            self._answer(content)

    def _stream(self, parts: list[bytes], at: int) -> None:
        if not self._open:  # the connection was lost meanwhile
            return
        if not self._token_latency:
            self._answer(b"".join(parts))
        elif at + 1 < len(parts):
            self._transport.write(parts[at])
            self._loop.call_later(self._token_latency, self._stream, parts, at + 1)
        else:
            self._answer(parts[at])

    def _answer(self, content: bytes) -> None:
        if not self._open:  # the connection was lost meanwhile
            return
        self._open -= 1
        self._stats.open -= 1
        self._stats.answered += 1
        self._stats.sent += len(content)
        self._write(content)

    def _write(self, content: bytes) -> None:
        self._transport.write(content)
        if not self._parser.should_keep_alive():
            self._transport.close()


class Answers:
    """The answers of a model.

    Args:
        behaviour: what it does.
    """

    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour
        # A turn is 1 KB without token ids, and 1 MB at most with those of a long episode.
        self.chat_turn = lru_cache(maxsize=256)(self._chat_turn)
        self.chat_parts = lru_cache(maxsize=256)(self._chat_parts)
        self.responses_turn = lru_cache(maxsize=256)(self._responses_turn)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "gym_serve"}
        self.models = http(200, {"object": "list", "data": [model]})

    def chat(self, body: bytes) -> bytes:
        """The answer to ``POST /v1/chat/completions``."""
        return self.chat_turn(_count(body, _TOOL_MESSAGE) // self._behaviour.calls_per_turn)

    def chat_stream(self, body: bytes) -> list[bytes] | None:
        """The answer in the parts of a stream, headers first; None for a request that wants none."""
        if not _count(body, _STREAM):
            return None
        return self.chat_parts(_count(body, _TOOL_MESSAGE) // self._behaviour.calls_per_turn)

    def responses(self, body: bytes) -> bytes:
        """The answer to ``POST /v1/responses``."""
        if _count(body, _STREAM):
            return _NO_STREAM
        return self.responses_turn(_count(body, _TOOL_OUTPUT) // self._behaviour.calls_per_turn)

    def _chat_turn(self, turn: int) -> bytes:
        text, calls = self._said(turn)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [
                {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
                for id_, name, arguments in calls
            ]
        prompt, generated, log_probs = self._tokens(turn)
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "finish_reason": "tool_calls" if calls else "stop",
            "logprobs": None,
        }
        completion = {
            "id": f"chatcmpl-{turn}",
            "object": "chat.completion",
            "created": 0,
            "model": MODEL,
            "choices": [choice],
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": len(generated),
                "total_tokens": len(prompt) + len(generated),
            },
        }
        if self._behaviour.tokens:
            completion["prompt_token_ids"] = prompt
            choice["token_ids"] = generated
            choice["logprobs"] = {
                "content": [
                    {"token": f"token_id:{id_}", "logprob": log_prob, "bytes": None, "top_logprobs": []}
                    for id_, log_prob in zip(generated, log_probs, strict=True)
                ]
            }
        return http(200, completion)

    def _chat_parts(self, turn: int) -> list[bytes]:
        """A part for every word or call; the last one has all that is known at the end."""
        completion = orjson.loads(self.chat_turn(turn).partition(b"\r\n\r\n")[2])
        (choice,) = completion.pop("choices")
        head = {**completion, "object": "chat.completion.chunk", "usage": None}
        text = choice["message"]["content"] or ""
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"content": word} for word in re.findall(r"\s*\S+\s*$|\s*\S+", text)]
        deltas += [
            {"tool_calls": [{**c, "index": i}]} for i, c in enumerate(choice["message"].get("tool_calls", []))
        ]
        chunks = [
            {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
        ]
        end = {key: value for key, value in choice.items() if key != "message"}
        chunks.append({**head, "choices": [{**end, "delta": {}}]})
        chunks.append({**head, "choices": [], "usage": completion["usage"]})
        events = [b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks]
        events[-1] += b"data: [DONE]\n\n"
        return [_STREAM_HEAD, *(b"%x\r\n%b\r\n" % (len(event), event) for event in events), b"0\r\n\r\n"]

    def _responses_turn(self, turn: int) -> bytes:
        text, calls = self._said(turn)
        output: list[dict[str, Any]] = [
            {
                "type": "function_call",
                "id": f"fc_{id_}",
                "call_id": id_,
                "name": name,
                "arguments": arguments,
                "status": "completed",
            }
            for id_, name, arguments in calls
        ]
        if text is not None:
            content = [{"type": "output_text", "text": text, "annotations": []}]
            message = {"type": "message", "id": f"msg_{turn}", "role": "assistant", "status": "completed"}
            output.append({**message, "content": content})
        prompt, generated, log_probs = self._tokens(turn)
        if self._behaviour.tokens:
            output[-1] |= {
                "prompt_token_ids": prompt,
                "generation_token_ids": generated,
                "generation_log_probs": log_probs,
            }
        response = {
            "id": f"resp_{turn}",
            "object": "response",
            "created_at": 0,
            "model": MODEL,
            "status": "completed",
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "error": None,
            "incomplete_details": None,
            "usage": {
                "input_tokens": len(prompt),
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": len(generated),
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": len(prompt) + len(generated),
            },
        }
        return http(200, response)

    def _said(self, turn: int) -> tuple[str | None, list[tuple[str, str, str]]]:
        """The text of a turn, None if it has none, and id, name and arguments of its calls."""
        behaviour = self._behaviour
        if turn >= behaviour.turns:
            return behaviour.answer, []
        ids = (f"call_{turn}_{number}" for number in range(behaviour.calls_per_turn))
        return None, [(id_, behaviour.tool, behaviour.arguments) for id_ in ids]

    def _tokens(self, turn: int) -> tuple[list[int], list[int], list[float]]:
        """The ids of the prompt, those generated, and their log probabilities."""
        each = self._behaviour.tokens
        prompt = each * (2 * turn + 1)  # the row's own, then a generation and tool outputs for each turn
        ids = [_FIRST_ID + position % _IDS for position in range(prompt + each)]
        return ids[:prompt], ids[prompt:], [-round(id_ % 997 / 997, 6) for id_ in ids[prompt:]]


def _count(body: bytes, spellings: tuple[bytes, ...]) -> int:
    return sum(map(body.count, spellings))


_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_NO_STREAM = http(400, {"error": {"message": "this model does not stream", "code": "unsupported"}})
