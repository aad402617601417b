"""`Human`: a model whose answers a person types; the policy of `gym-serve play --human`."""

from __future__ import annotations

import asyncio
import re
import time
import uuid

from gym_serve.servers.model import ModelServer
from gym_serve.types.errors import BadRequest
from gym_serve.types.requests import JSON

__all__ = ["Human"]

_CALL = re.compile(r"/(\S+)\s*(.*)", re.DOTALL)


class Human(ModelServer):
    """Asks at the terminal. A line is a message; ``/tool {"argument": 1}`` is a tool call."""

    async def responses(self, body: JSON) -> JSON:
        """One turn, as a Response.

        Raises:
            BadRequest: the input ended.
        """
        tools = [str(tool.get("name")) for tool in body.get("tools") or []]
        hint = f', or /{tools[0]} {{"argument": ...}}' if tools else ""
        try:
            typed = await asyncio.to_thread(input, f"your answer{hint}: ")
        except EOFError:
            raise BadRequest("the input ended before the episode did") from None
        return {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": "human",
            "output": [_item(typed)],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": body.get("tools") or [],
            "usage": None,
        }


def _item(typed: str) -> JSON:
    if call := _CALL.fullmatch(typed.strip()):
        name, arguments = call.groups()
        key = uuid.uuid4().hex
        return {
            "type": "function_call",
            "id": f"fc_{key}",
            "call_id": f"call_{key}",
            "name": name,
            "arguments": arguments or "{}",
            "status": "completed",
        }
    text = {"type": "output_text", "text": typed, "annotations": []}
    return {
        "type": "message",
        "id": f"msg_{uuid.uuid4().hex}",
        "role": "assistant",
        "status": "completed",
        "content": [text],
    }
