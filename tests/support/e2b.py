"""A service of E2B's API alone: requests are read by the models of its SDK, programs run in bwrap."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from e2b.api.client.models import NewSandboxV2, Sandbox, SandboxTimeoutRequest
from e2b.envd.process import process_pb
from e2b.envd.process.process_connect import Process, ProcessASGIApplication
from protobuf import Oneof
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

KEY = "e2b_0123456789abcdef0123456789abcdef01234567"
"""Of the account."""
TEMPLATES = {"base": None, "no-python": "python3", "no-unshare": "unshare"}
"""What each lacks."""


class Service(Process):
    """Its sandboxes.

    Attributes:
        asked: what each was asked to be, by its id.
        lives: seconds that each has left, as they were last asked for.
        processes: the program of each.
        refuses: the status of the answer to whoever asks for another one.
    """

    def __init__(self) -> None:
        self.asked: dict[str, NewSandboxV2] = {}
        self.lives: dict[str, list[int]] = {}
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.refuses: int | None = None
        self._numbers = itertools.count(1)

    def application(self) -> Starlette:
        routes = [
            Route("/v2/sandboxes", self._create, methods=["POST"]),
            Route("/sandboxes/{id}/timeout", self._renew, methods=["POST"]),
            Route("/sandboxes/{id}", self._delete, methods=["DELETE"]),
            Route("/health", self._health),
            Mount("/", ProcessASGIApplication(self)),
        ]
        return Starlette(routes=routes)

    async def _create(self, request: Request) -> Response:
        if request.headers["x-api-key"] != KEY:
            return JSONResponse({"code": 401, "message": "Invalid API key"}, status_code=401)
        if self.refuses:
            return JSONResponse({"code": self.refuses, "message": "no"}, status_code=self.refuses)
        asked = NewSandboxV2.from_dict(await request.json())
        assert not asked.additional_properties, asked.additional_properties
        if asked.template_id not in TEMPLATES:
            message = f"template '{asked.template_id}' not found"
            return JSONResponse({"code": 404, "message": message}, status_code=404)
        name = f"i{next(self._numbers)}"
        self.asked[name], self.lives[name] = asked, [asked.timeout]
        made = Sandbox(asked.template_id, name, "client", "0.5.7", envd_access_token=f"token-{name}")
        return JSONResponse(made.to_dict(), status_code=201)

    async def _renew(self, request: Request) -> Response:
        asked = SandboxTimeoutRequest.from_dict(await request.json())
        name = request.path_params["id"]
        if name not in self.asked:
            return JSONResponse({"code": 404, "message": "not found"}, status_code=404)
        self.lives[name].append(asked.timeout)
        return Response(status_code=204)

    async def _delete(self, request: Request) -> Response:
        await self.end(request.path_params["id"])
        return Response(status_code=204)

    async def _health(self, request: Request) -> Response:
        return Response(status_code=204 if self._sandbox(request.headers) in self.asked else 502)

    def _sandbox(self, headers: Any) -> str:
        name = headers["e2b-sandbox-id"]
        assert headers["x-access-token"] == f"token-{name}"
        return str(name)

    async def end(self, name: str) -> None:
        """End a sandbox, as the service does when its time to live is over."""
        self.asked.pop(name, None)
        process = self.processes.get(name)
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    # The program of the service in each sandbox

    async def start(
        self, request: process_pb.StartRequest, ctx: Any
    ) -> AsyncIterator[process_pb.StartResponse]:
        headers = ctx.request_headers
        name = self._sandbox(headers)
        assert base64.b64decode(headers["authorization"].removeprefix("Basic ")) == b"root:"
        assert request.stdin
        config = request.process
        process = self.processes[name] = await _run(self.asked[name].template_id, config)
        yield _event(start=process_pb.ProcessEvent.StartEvent(pid=process.pid))
        async for field, data in _outputs(process):
            yield _event(data=process_pb.ProcessEvent.DataEvent(output=Oneof(field, data)))
        status = await process.wait()
        yield _event(end=process_pb.ProcessEvent.EndEvent(exit_code=status, exited=True, status=""))

    async def send_input(
        self, request: process_pb.SendInputRequest, ctx: Any
    ) -> process_pb.SendInputResponse:
        process = self.processes[self._sandbox(ctx.request_headers)]
        assert request.process.selector == Oneof("pid", process.pid)
        assert request.input.input.field == "stdin"
        process.stdin.write(request.input.input.value)
        await process.stdin.drain()
        return process_pb.SendInputResponse()


def _event(**event: Any) -> process_pb.StartResponse:
    [(field, value)] = event.items()
    return process_pb.StartResponse(event=process_pb.ProcessEvent(event=Oneof(field, value)))


async def _run(template: str, config: process_pb.ProcessConfig) -> asyncio.subprocess.Process:
    missing = TEMPLATES[template]
    hidden = ("--ro-bind", "/dev/null", f"/usr/bin/{missing}") if missing else ()
    links = [word for name in ("bin", "lib", "lib64") for word in ("--symlink", f"usr/{name}", f"/{name}")]
    return await asyncio.create_subprocess_exec(
        *("bwrap", "--unshare-all", "--as-pid-1", "--die-with-parent", "--cap-add", "ALL", "--clearenv"),
        *("--ro-bind", "/usr", "/usr", *hidden, "--ro-bind", "/etc", "/etc", *links),
        *("--dir", "/tmp", "--proc", "/proc", "--dev", "/dev", "--setenv", "PATH", "/usr/bin:/bin"),
        *("--", config.cmd, *config.args),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **config.envs},
    )


async def _outputs(process: asyncio.subprocess.Process) -> AsyncIterator[tuple[str, bytes]]:
    pieces: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue(1)

    async def read(field: str, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(1 << 15):
            await pieces.put((field, data))
        await pieces.put((field, b""))

    reading = [asyncio.create_task(read(field, getattr(process, field))) for field in ("stdout", "stderr")]
    try:
        left = len(reading)
        while left:
            field, data = await pieces.get()
            if data:
                yield field, data
            else:
                left -= 1
    finally:
        for task in reading:
            task.cancel()


@asynccontextmanager
async def service() -> AsyncIterator[tuple[Service, dict[str, str]]]:
    """A service, and the variables that lead the SDK to it."""
    there = Service()
    config = uvicorn.Config(there.application(), port=0, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    socket = config.bind_socket()
    serving = asyncio.create_task(server.serve([socket]))
    url = f"http://127.0.0.1:{socket.getsockname()[1]}"
    try:
        yield (
            there,
            {
                "E2B_API_KEY": KEY,
                "E2B_API_URL": url,
                "E2B_SANDBOX_URL": url,
                "E2B_HTTP_VERSION": "1.1",
            },
        )
    finally:
        for name in list(there.asked):
            await there.end(name)
        server.should_exit = True
        await serving
