"""`LiveBoxes`: the boxes of an environment, for the people of its machine who ask what runs there.

Each environment answers at a socket in a folder that only its user may enter, which no box shows. Whoever is
killed leaves a socket that nobody answers; the next look removes it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gym_serve.sandbox.boxes import Sandbox, SandboxRefused
from gym_serve.types.errors import GymError, NotFound, Unavailable
from gym_serve.types.requests import JSON

logger = logging.getLogger("gym_serve")

_LOOK_SECONDS = 10.0
_LINE = 1 << 24
_PAGE = os.sysconf("SC_PAGE_SIZE")


def folder_of_sockets() -> Path:
    """Where the sockets are."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gym-serve" / "boxes"


@dataclass
class _Live:
    box: Sandbox
    about: JSON
    begun: float = field(default_factory=time.monotonic)


class LiveBoxes:
    """The boxes of one environment, by id; `start` and `stop` with its server."""

    def __init__(self, **about: Any) -> None:
        self._about = about
        self._boxes: dict[str, _Live] = {}
        self._server: asyncio.Server | None = None
        self._path = folder_of_sockets() / f"{os.getpid()}-{secrets.token_hex(3)}.sock"

    def add(self, box: Sandbox, **about: Any) -> None:
        """A box lives."""
        self._boxes[secrets.token_hex(4)] = _Live(box, {**self._about, **about})

    def remove(self, box: Sandbox) -> None:
        """It does no more."""
        self._boxes = {name: live for name, live in self._boxes.items() if live.box is not box}

    async def start(self) -> None:
        """Answer. Without a place for the socket, nobody can look, and all else goes on."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._path.parent.chmod(0o700)
            self._server = await asyncio.start_unix_server(self._answer, self._path, limit=_LINE)
        except OSError as error:
            logger.info("`gym-serve sandbox list` does not show the boxes of this process: %s", error)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = json.loads(await reader.readline())
            answer = await (self._exec(request) if "id" in request else self._list())
        except SandboxRefused as error:
            answer = {"error": str(error)}
        except GymError as error:
            answer = {"error": error.message}
        except (ValueError, OSError):
            answer = {"error": "the request must be a line of JSON"}
        with suppress(ConnectionError):
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
            writer.close()

    async def _list(self) -> JSON:
        boxes = list(self._boxes.items())
        memory = await asyncio.gather(*(_memory(live.box) for _, live in boxes))
        now = time.monotonic()
        return {
            "boxes": [
                {"id": name, **live.about, "age": round(now - live.begun, 1), "memory_mb": used}
                for (name, live), used in zip(boxes, memory, strict=True)
            ]
        }

    async def _exec(self, request: JSON) -> JSON:
        live = self._boxes.get(request["id"])
        if live is None:
            raise NotFound(f"there is no box {request['id']} any more")
        done = await live.box.exec(request["command"], timeout=request["timeout"], user=request["user"])
        return {"exit_status": done.status, "output": done.text, "ended": done.ended}


async def _memory(box: Sandbox) -> int | None:
    """Memory of a box's processes in MiB, as the box itself says; None if it does not."""
    with suppress(GymError, SandboxRefused, ValueError, IndexError):
        done = await box.exec("cat /proc/[0-9]*/statm 2>/dev/null", timeout=_LOOK_SECONDS, user=0)
        pages = [line.split() for line in done.stdout.splitlines()]
        return sum(int(words[1]) - int(words[2]) for words in pages) * _PAGE >> 20
    return None


def live_boxes() -> list[JSON]:
    """The boxes of this machine that its user's environments own, the oldest first."""
    boxes = [box for path in _sockets() if (answer := _ask(path, {})) for box in answer["boxes"]]
    return sorted(boxes, key=lambda box: -box["age"])


def exec_in(box: str, command: str | list[str], *, timeout: float, user: str | None = None) -> JSON:
    """Run a command in a box by its id, or by the beginning of it that only one has.

    Returns ``exit_status``, ``output`` and ``ended``, as `ExecResult` has them.

    Raises:
        NotFound: there is no such box, or several.
        Unavailable: the box refuses the command, or is gone.
    """
    ids = {each["id"]: path for path in _sockets() for each in (_ask(path, {}) or {"boxes": []})["boxes"]}
    fits = [name for name in ids if name.startswith(box)]
    if len(fits) != 1:
        raise NotFound(
            f"{len(fits)} live boxes have an id that begins with {box!r}; see gym-serve sandbox list"
        )
    request = {"id": fits[0], "command": command, "timeout": timeout, "user": user}
    answer = _ask(ids[fits[0]], request, timeout + _LOOK_SECONDS)
    if answer is None or "error" in answer:
        raise Unavailable(str((answer or {}).get("error", "its environment does not answer")))
    return answer


def _sockets() -> Iterator[Path]:
    yield from sorted(folder_of_sockets().glob("*.sock"))


def _ask(path: Path, request: JSON, timeout: float = 2 * _LOOK_SECONDS) -> JSON | None:
    with socket.socket(socket.AF_UNIX) as there:
        there.settimeout(timeout)
        try:
            there.connect(str(path))
            there.sendall(json.dumps(request).encode() + b"\n")
            with there.makefile("rb") as file:
                answer: JSON = json.loads(file.readline())
                return answer
        except (ConnectionRefusedError, FileNotFoundError):  # of a process that was killed
            path.unlink(missing_ok=True)
        except (OSError, ValueError) as error:
            logger.warning("%s does not answer: %s", path, error)
    return None
