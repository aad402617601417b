"""Profiles of running replicas: where their CPU time goes, as a flame graph.

Each replica runs py-spy on itself, which comes with Ray's Serve. It samples the stacks of all threads from
outside of the process: nothing is instrumented, and what holds Python's lock is seen as well. A process may
be read by its child wherever the kernel does not forbid ptrace altogether.

The profile is a file of `speedscope <https://www.speedscope.app>`_, whose page works offline too. It keeps
the order of time, and has the threads and replicas of a server side by side; `flame_graph` draws it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from gym_serve.graph.pressure import reports_of
from gym_serve.servers.runner import EACH
from gym_serve.servers.transport import Call, Reply
from gym_serve.types.errors import BadRequest, GymError, NotFound, Unavailable
from gym_serve.types.requests import JSON

PROFILE = f"{EACH}profile"
"""The operation with which a replica profiles itself; no route of the gateway leads to it."""

MAX_SECONDS = 300.0

_RATE = 100  # samples per second
_PATIENCE_SECONDS = 60.0  # beyond the time of sampling
_PR_SET_PTRACER = 0x59616D61
_ANY = ctypes.c_ulong(-1)


async def profile_server(application: str, server: str, seconds: float) -> JSON:
    """The profile of all replicas of a server, as a speedscope file.

    Args:
        application: name of the graph.
        server: name of the server.
        seconds: how long to sample.

    Raises:
        BadRequest: ``seconds`` is not between 0 and `MAX_SECONDS`.
        NotFound: no replica runs.
        Unavailable: a replica cannot be profiled; says why.
    """
    if not 0 < seconds <= MAX_SECONDS:
        raise BadRequest(f"`seconds` must be above 0 and at most {MAX_SECONDS:g}, got {seconds:g}")
    patience = seconds + _PATIENCE_SECONDS
    found = await reports_of(application, [server], PROFILE, {"seconds": seconds}, patience)
    if not found[server]:
        raise NotFound(f"no replica of {server} runs")
    return joined({report["replica"]: report["profile"] for report in found[server]}, server)


async def dispatch_profile(call: Call, replica: str) -> Reply:
    """Answer `PROFILE` in a replica; it goes on with its calls meanwhile.

    Args:
        call: its body has ``seconds``.
        replica: id of the replica.
    """
    try:
        content = await _profile(float(orjson.loads(call.body)["seconds"]))
    except GymError as error:
        return Reply.failed(error)
    return Reply.of({"replica": replica, "profile": content})


def joined(replicas: Mapping[str, JSON], name: str) -> JSON:
    """Several speedscope files as one.

    Args:
        replicas: the files by replica, whose name then precedes those of its threads.
        name: of the result.
    """
    frames: list[Any] = []
    profiles: list[JSON] = []
    for replica, content in replicas.items():
        offset = len(frames)
        frames += content["shared"]["frames"]
        for profile in content["profiles"]:
            samples = [[offset + frame for frame in stack] for stack in profile["samples"]]
            profiles.append({**profile, "name": f"{replica} {profile['name']}", "samples": samples})
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "name": name,
        "exporter": "gym-serve",
        "activeProfileIndex": 0,
        "shared": {"frames": frames},
        "profiles": profiles,
    }


async def _profile(seconds: float) -> JSON:
    """Sample this process.

    Raises:
        Unavailable: py-spy is missing, or may not read this process.
    """
    program = shutil.which("py-spy", path=sysconfig.get_path("scripts")) or shutil.which("py-spy")
    if program is None:
        raise Unavailable("a profile needs py-spy on the machine of the replica: pip install py-spy")
    with tempfile.TemporaryDirectory(prefix="gym_serve_") as folder, _readable_by_children():
        file = Path(folder) / "profile.json"
        process = await asyncio.create_subprocess_exec(
            *(program, "record", "--pid", str(os.getpid()), "--format", "speedscope", "--nonblocking"),
            *("--duration", str(max(1, round(seconds))), "--rate", str(_RATE), "--output", str(file)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            _, told = await process.communicate()
        except asyncio.CancelledError:
            process.kill()
            raise
        if process.returncode or not file.exists():
            raise Unavailable(f"py-spy failed: {_reason(told)}")
        content: JSON = orjson.loads(await asyncio.to_thread(file.read_bytes))
        return content


@contextmanager
def _readable_by_children() -> Iterator[None]:
    """Allow other processes of this user to read this one, where Linux (Yama) allows it to parents alone."""
    if sys.platform != "linux":
        yield
        return
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_PTRACER, 0, 0, 0, 0)


def _reason(told: bytes) -> str:
    lines = [line.strip() for line in told.decode("utf-8", "replace").splitlines() if line.strip()]
    return " ".join(lines)[:500] or "it said nothing; the machine may forbid ptrace"
