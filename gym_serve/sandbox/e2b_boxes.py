"""`E2BBoxes`: boxes that are sandboxes of E2B, a service, by its own SDK.

Each is a virtual machine. In it, our first process (`gym_serve.sandbox.attached`) runs as a program of the
service's, with processes, mounts and, without a network, loopback of its own: what an agent does there
reaches neither the service's own program nor the first process. Its output is taken as text.

No connection is the machine's lease: the service ends it when its time to live is over, which its owner
renews for as long as it has the box.
"""

from __future__ import annotations

import asyncio
import binascii
import logging
import os
import shlex
import socket
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from httpx import HTTPError

from gym_serve.sandbox.attached import FIRST, PYTHON, SOURCE, STDOUT, Channel, Message, settings_of
from gym_serve.sandbox.boxes import Sandbox, SandboxSpec
from gym_serve.sandbox.resident_boxes import ResidentBox
from gym_serve.types.errors import EndpointAccessDenied, InvalidRequest, Unavailable

if TYPE_CHECKING:
    from e2b import AsyncCommandHandle, AsyncSandbox

T = TypeVar("T")

logger = logging.getLogger("gym_serve")

OWNER = "gym-serve"
"""Metadata of all its sandboxes; the value says which process made one, ``host:pid``."""

_TTL_SECONDS = 120
_RENEW_SECONDS = 40.0
_START_SECONDS = 60.0
_MOST_WAITING = 16  # pieces of output
_MOST_ERRORS = 500  # letters
_UNSHARED = ("unshare", "--fork", "--pid", "--mount-proc", "--ipc")


class E2BBoxes:
    """Makes sandboxes of E2B; see the module. ``E2B_API_KEY`` is the account's."""

    def problems(self) -> list[str]:
        """See `SandboxProvider.problems`."""
        try:
            import e2b  # noqa: F401
        except ImportError:
            return ["sandbox: e2b needs its SDK (Python 3.11 or newer): pip install 'gym-serve[e2b]'"]
        if not os.environ.get("E2B_API_KEY"):
            return ["sandbox: e2b: E2B_API_KEY must be the key of an account: https://e2b.dev/dashboard"]
        return []

    async def create(self, spec: SandboxSpec, *, layer: Path | None = None) -> Sandbox:
        """See `SandboxProvider.create`. Changes stay in the sandbox: ``layer`` must be None."""
        if spec.image is None or spec.root is not None or spec.layers or layer is not None:
            raise InvalidRequest(
                "a sandbox of E2B is made of a template, which `image` names, not of folders"
            )
        if spec.network == "model":
            raise InvalidRequest(
                "a sandbox of E2B has no way to a model here: its network must be none, allowlist or full"
            )
        if others := [host for host in spec.allowed_hosts if "/" in host or ":" in host]:
            raise InvalidRequest(f"E2B allows hosts by name or IPv4 address, not {', '.join(others)}")
        async with AsyncExitStack() as stack:
            channel = await _said(self._start(stack, spec), spec.image)
            channel.stack = stack.pop_all()
        box = ResidentBox(channel, spec)
        async with box.beginning():
            await box.begin(settings_of(spec, machine=True), SOURCE)
        return box

    async def _start(self, stack: AsyncExitStack, spec: SandboxSpec) -> Channel:
        from e2b import ALL_TRAFFIC, AsyncSandbox, SandboxNetworkOpts

        listed = SandboxNetworkOpts(allow_out=list(spec.allowed_hosts), deny_out=[ALL_TRAFFIC])
        sandbox = await AsyncSandbox.create(
            spec.image,
            timeout=_TTL_SECONDS,
            metadata={OWNER: f"{socket.gethostname()}:{os.getpid()}"},
            allow_internet_access=spec.network != "none",
            network=listed if spec.network == "allowlist" else None,
        )
        stack.push_async_callback(_ended, sandbox, asyncio.create_task(_renewed(sandbox)))
        program = _Program()
        alone = ("--net",) if spec.network == "none" else ()
        program.handle = await sandbox.commands.run(
            shlex.join(["exec", *_UNSHARED, *alone, "/bin/sh", "-c", FIRST, "sh", PYTHON]),
            background=True,
            user="root",
            stdin=True,
            on_stdout=program.add,
            on_stderr=program.add_error,
            timeout=0,  # as long as the sandbox lives
            retain_output=False,
        )
        await stack.enter_async_context(program)
        channel = await stack.enter_async_context(Channel(program))
        first = await asyncio.wait_for(channel.reader.read(1), _START_SECONDS)
        if first != b"r":
            needs = program.errors.strip() or "it needs python3, 3.9 or newer, and unshare, in the template"
            raise InvalidRequest(f"a box of {spec.image} does not start: {needs}")
        return channel


class _Program:
    """Input and output of the first process; an async context manager while that runs.

    After its first letter, its output is lines of base64.
    """

    handle: AsyncCommandHandle[None]

    def __init__(self) -> None:
        self.errors = ""
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue(_MOST_WAITING)
        self._first = True
        self._rest = ""

    async def add(self, text: str) -> None:
        if self._first:
            self._first = False
            await self._messages.put(Message(STDOUT, text[:1].encode()))
            text = text[1:]
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            await self._messages.put(Message(STDOUT, binascii.a2b_base64(line)))

    def add_error(self, text: str) -> None:
        self.errors = (self.errors + text)[-_MOST_ERRORS:]

    async def __aenter__(self) -> None:
        self._ending = asyncio.create_task(self._end())

    async def __aexit__(self, *failure: object) -> None:
        self._ending.cancel()
        await asyncio.gather(self._ending, return_exceptions=True)
        await self.handle.disconnect()

    async def _end(self) -> None:
        try:
            await self.handle.wait()
        except Exception as error:  # the box is gone, whatever it is
            logger.debug("the first process of a sandbox of E2B ended: %r", error)
        await self._messages.put(None)

    async def read_out(self) -> Message | None:
        return await self._messages.get()

    async def write_in(self, data: bytes) -> None:
        try:
            await self.handle.send_stdin(data)
        except Exception as error:  # of the SDK, or of the HTTP client below it
            raise ConnectionError(str(error)) from error


async def _renewed(sandbox: AsyncSandbox) -> None:
    from e2b import NotFoundException

    while True:
        await asyncio.sleep(_RENEW_SECONDS)
        try:
            await sandbox.set_timeout(_TTL_SECONDS)
        except NotFoundException:
            return  # its output has ended, too
        except Exception as error:  # of the SDK, or of the HTTP client below it
            logger.warning("sandbox %s of E2B is not renewed: %s", sandbox.sandbox_id, error)


async def _ended(sandbox: AsyncSandbox, renewing: asyncio.Task[None]) -> None:
    renewing.cancel()
    try:
        await sandbox.kill()
    except Exception as error:
        logger.warning("sandbox %s of E2B ends in %d s: %s", sandbox.sandbox_id, _TTL_SECONDS, error)


async def _said(work: Coroutine[Any, Any, T], what: str) -> T:
    """What ``work`` returns; what the service says instead, as errors of a provider."""
    from e2b import AuthenticationException, SandboxException
    from e2b.exceptions import ServiceBusyException

    try:
        return await work
    except AuthenticationException as error:
        raise EndpointAccessDenied(f"E2B refuses the key in E2B_API_KEY: {error}") from error
    except SandboxException as error:
        failure = InvalidRequest if error.status_code in (400, 403, 404, 422) else Unavailable
        raise failure(f"a sandbox of {what} does not start: {error}") from error
    except (ServiceBusyException, HTTPError, OSError, asyncio.TimeoutError) as error:
        raise Unavailable(f"a sandbox of {what} does not start: {str(error) or 'not in time'}") from error
