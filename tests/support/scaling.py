"""Models that take a while to answer."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from gym_serve import ModelServer


class Answers(ModelServer):
    """Answers after a while."""

    async def responses(self, body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0.1)
        text = {"type": "output_text", "text": "done", "annotations": []}
        message = {"type": "message", "role": "assistant", "content": [text]}
        return {"object": "response", "output": [message], "usage": None}


class Held(Answers):
    """Answers once the file is there whose path it is asked for."""

    async def responses(self, body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.to_thread(_wait_for, Path(body["input"]))
        return await super().responses(body)


def _wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.05)
