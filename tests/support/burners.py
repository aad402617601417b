"""A policy some of whose answers take a verifier long."""

from __future__ import annotations

from typing import Any

from gym_serve import ModelServer

BURNERS = [f"\\boxed{{\\gcd(9^{{9^9}},{n})}}" for n in range(2, 36)]  # 20 s of CPU time each, if it were let
HONEST = ["The answer is \\boxed{5}"] * 3 + ["\\boxed{6}", "\\boxed{7}", "\\boxed{8}"]


class Numbered(ModelServer):
    """Gives the answer whose number is the prompt."""

    async def responses(self, params: Any) -> dict[str, Any]:
        content = [
            {
                "type": "output_text",
                "text": [*BURNERS, *HONEST][int(params["input"][0]["content"])],
                "annotations": [],
            }
        ]
        message = {
            "type": "message",
            "id": "m",
            "role": "assistant",
            "status": "completed",
            "content": content,
        }
        return {"id": "r", "object": "response", "created_at": 0, "model": "m", "output": [message]}
