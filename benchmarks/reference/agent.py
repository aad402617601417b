"""The agent of the reference: ``python -m benchmarks.reference.agent MODEL_URL ENVIRONMENT_URL``."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
from fastapi import FastAPI

from benchmarks.reference import serve

client: aiohttp.ClientSession
model_url, environment_url = sys.argv[1:]


@asynccontextmanager
async def connected(app: FastAPI) -> AsyncIterator[None]:
    global client
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        yield


app = FastAPI(lifespan=connected)


@app.post("/run")
async def run(row: dict[str, Any]) -> dict[str, Any]:
    params = row["responses_create_params"]
    messages = [{"role": "system", "content": params["instructions"]}, *params["input"]]
    tools = [
        {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
        for tool in params["tools"]
    ]
    session = (await post(f"{environment_url}/seed_session", row))["session"]
    environment = f"{environment_url}/sessions/{session}"
    output: list[dict[str, Any]] = []
    try:
        while True:
            body = {"model": "loopback", "messages": messages, "tools": tools}
            completion = await post(f"{model_url}/v1/chat/completions", body)
            message = completion["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                break
            for call in message["tool_calls"]:
                function = call["function"]
                said = await post(f"{environment}/{function['name']}", orjson.loads(function["arguments"]))
                text = orjson.dumps(said).decode()
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
                output.append({"type": "function_call", "call_id": call["id"], **function})
                output.append({"type": "function_call_output", "call_id": call["id"], "output": text})
        content = [{"type": "output_text", "text": message["content"], "annotations": []}]
        output.append({"type": "message", "role": "assistant", "content": content})
        response = {"id": completion["id"], "output": output, "usage": completion["usage"]}
        verdict = await post(f"{environment}/verify", {**row, "response": response})
    finally:
        await post(f"{environment}/close", {})
    return {**row, "response": response, **verdict}


async def post(url: str, body: Any) -> Any:
    """The decoded answer."""
    headers = {"content-type": "application/json"}
    async with client.post(url, data=orjson.dumps(body), headers=headers) as answer:
        answer.raise_for_status()
        return orjson.loads(await answer.read())


if __name__ == "__main__":
    serve(app)
