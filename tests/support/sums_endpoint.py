"""An endpoint of a model in a process of its own, which can be killed.

Its model computes sums with a tool, and gets better at saying the result the longer the run lasts. Asked by a
judge, it compares two numbers. Like a busy engine, it refuses a request now and then. SIGUSR1 lets it hang,
as an engine does whose process lives, or go on.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import sys
import time
from typing import Any

from aiohttp import web

JSON = dict[str, Any]

_BEGUN = 0.0
_chance = random.Random()
_going = asyncio.Event()


def answer(body: JSON) -> tuple[JSON, str]:
    """A message, and why it ends."""
    messages = body["messages"]
    numbers = [int(number) for number in re.findall(r"\d+", str(messages[-1]["content"]))]
    if not body.get("tools"):
        word = "yes" if numbers[0] == numbers[1] else "no"
        return {"role": "assistant", "content": "Hm." if _chance.random() < 0.08 else f"[[{word}]]"}, "stop"
    results = [message["content"] for message in messages if message["role"] == "tool"]
    if not results or _chance.random() < 0.3:
        name = "python" if _chance.random() > 0.03 else "calculator"  # which there is not
        asked = re.findall(r"\d+", str(messages[0]["content"]))
        call = {"name": name, "arguments": json.dumps({"code": f"print({' + '.join(asked)})"})}
        calls = [{"id": f"c{len(messages)}", "type": "function", "function": call}]
        return {"role": "assistant", "content": None, "tool_calls": calls}, "tool_calls"
    knows = _chance.random() < min(0.3 + (time.time() - _BEGUN) / 300, 0.9)
    text = str(numbers[0] if numbers and knows else 0)
    return {"role": "assistant", "content": text}, "stop"


def usage(messages: list[JSON]) -> JSON:
    """Tokens, as an engine with a prefix cache counts them."""
    sizes = [120 + len(str(message)) // 3 for message in messages]
    cached = 16 * (sum(sizes[:-1]) // 16)
    made = _chance.randint(20, 90)
    return {
        "prompt_tokens": sum(sizes),
        "completion_tokens": made,
        "total_tokens": sum(sizes) + made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


async def complete(request: web.Request) -> web.StreamResponse:
    """``POST /v1/chat/completions``."""
    body = await request.json()
    await _going.wait()
    await asyncio.sleep(_chance.lognormvariate(-3.4, 0.5))
    if _chance.random() < 0.02:
        error = {"error": {"message": "the queue is full"}}
        return web.json_response(error, status=429, headers={"retry-after": "0.2"})
    message, reason = answer(body)
    head = {"id": "c", "created": int(time.time()), "model": body["model"]}
    used = usage(body["messages"])
    if not body.get("stream"):
        await asyncio.sleep(_chance.lognormvariate(-3.2, 0.6))
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        return web.json_response({**head, "object": "chat.completion", "choices": [choice], "usage": used})
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    if "tool_calls" in message:
        message["tool_calls"] = [{**call, "index": i} for i, call in enumerate(message["tool_calls"])]
    for choices in (
        [{"index": 0, "delta": message, "finish_reason": None}],
        [{"index": 0, "delta": {}, "finish_reason": reason}],
        [],
    ):
        chunk = {**head, "object": "chat.completion.chunk", "choices": choices, "usage": None}
        if not choices:
            chunk["usage"] = used
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await asyncio.sleep(0.02)
    await response.write(b"data: [DONE]\n\n")
    return response


async def models(request: web.Request) -> web.Response:
    """``GET /v1/models``."""
    return web.json_response({"object": "list", "data": [{"id": "sums", "object": "model"}]})


async def listen(application: web.Application) -> None:
    """Hang, or go on, at each SIGUSR1."""
    _going.set()
    toggle = lambda: _going.clear() if _going.is_set() else _going.set()  # noqa: E731
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, toggle)


if __name__ == "__main__":
    _port, _BEGUN = int(sys.argv[1]), float(sys.argv[2])
    application = web.Application(client_max_size=0)
    application.router.add_post("/v1/chat/completions", complete)
    application.router.add_get("/v1/models", models)
    application.on_startup.append(listen)
    web.run_app(application, host="127.0.0.1", port=_port, print=None, access_log=None)
