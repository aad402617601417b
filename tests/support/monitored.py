"""A graph under load, with faults: it makes every series that the boards and alerts read.

    python -m support.monitored --minutes 4    # in tests/: draws the boards for docs/

Nothing is made up but the model: its endpoints (`support.sums_endpoint`) are processes that are killed and
started again, its tool runs in a sandbox, a judge scores, a replica of the environment is killed with its
sessions, and a trainer takes groups without their slowest rollouts, and tells new versions of the policy.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
from pydantic import BaseModel

from gym_serve import AsyncGym, Gym, ModelClient, ResourcesServer, Verdict, VerifyRequest, tool
from gym_serve.cli import local_ray
from gym_serve.cli.monitoring import monitoring
from gym_serve.cluster.starting import free_port
from gym_serve.judging import CacheSettings, JudgeCalls, LabelJudge, final_text, open_cache
from gym_serve.sandbox import Limits, SandboxPool, find_sandbox
from support.processes import children_titled, environment

JSON = dict[str, Any]
TESTS = Path(__file__).parents[1]
_BATCH = 12  # groups that the trainer takes for each version


class Sums(ResourcesServer):
    """Sums: a tool that runs Python in a sandbox, and a judge that compares the answer."""

    class Config(ResourcesServer.Config):
        judge: ModelClient
        cache: Path

    class Session(BaseModel):
        programs: int = 0

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._pool = self.manage(SandboxPool(find_sandbox("process"), Limits(), size=1))
        cache = open_cache(CacheSettings(path=self.config.cache, model="sums"))
        self._judge = LabelJudge(
            [self.config.judge],
            self.manage(JudgeCalls(16, cache)),
            "Is {sum} the same as {answer}? Say [[yes]] or [[no]].",
            ["[[yes]]", "[[no]]"],
        )

    @tool
    async def python(self, code: str, session: Session) -> str:
        """Run a program."""
        session.programs += 1
        if session.programs > 1:
            return "one program is enough"
        python = await self._pool.take()
        try:
            done = await python.execute(code, timeout=20, output_limit=1000)
        finally:
            await python.stop()
        return done.stdout or done.error or ""

    async def verify(self, request: VerifyRequest, session: Session) -> Verdict:
        row = request.model_extra or {}
        said = final_text(request.response.model_dump()) or "nothing"
        ballot = await self._judge.ask({"sum": str(row["sum"]), "answer": said})
        return Verdict(reward={"[[yes]]": 1.0, "[[no]]": 0.0}.get(str(ballot.label), 0.25))


class Endpoint:
    """An endpoint of a model, by its URL; in a process, while it is up."""

    def __init__(self) -> None:
        self._port = free_port()
        self._begun = time.time()
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://127.0.0.1:{self._port}/v1"

    def start(self) -> None:
        command = [sys.executable, "-m", "support.sums_endpoint", str(self._port), str(self._begun)]
        self._process = subprocess.Popen(command, cwd=TESTS)
        for _ in range(200):
            with suppress(httpx.TransportError):
                httpx.get(f"{self.url}/models", trust_env=False)
                return
            time.sleep(0.1)
        raise TimeoutError(f"no endpoint at {self.url}")

    def hang(self) -> None:
        """Answer no more, though the process lives; or go on."""
        if self._process is not None:
            self._process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Monitored:
    """The endpoints, the graph, its load and its faults.

    Args:
        folder: for the cache of the judge's verdicts.
    """

    def __init__(self, folder: Path) -> None:
        self.endpoints = {"first": Endpoint(), "second": Endpoint(), "judge": Endpoint()}
        self._cache = folder / "verdicts.sqlite"
        self._versions = itertools.count(1)

    def __enter__(self) -> Monitored:
        for endpoint in self.endpoints.values():
            endpoint.start()
        return self

    def __exit__(self, *raised: object) -> None:
        for endpoint in self.endpoints.values():
            endpoint.kill()

    def graph(self) -> JSON:
        """The policy takes few calls at a time, and the environment scales with its sessions."""
        quick = {"look_back_period_s": 2, "upscale_delay_s": 1, "downscale_delay_s": 60}
        urls = {name: endpoint.url for name, endpoint in self.endpoints.items()}
        return {
            "models": {
                "policy": {
                    "type": "chat_model",
                    "model": "sums",
                    "base_url": [urls["first"], urls["second"]],
                    "max_ongoing_requests": 6,
                    "health_interval": 3,
                },
                "judge": {"type": "chat_model", "model": "sums", "base_url": urls["judge"], "max_retries": 0},
            },
            "resources": {
                "sums": {
                    "type": "support.monitored:Sums",
                    "judge": "judge",
                    "cache": str(self._cache),
                    "inline": ["judge"],
                    "autoscaling": {**quick, "min_replicas": 2, "max_replicas": 3, "target_sessions": 8},
                }
            },
            "agents": {"solver": {"type": "simple_agent", "model": "policy", "resources": "sums"}},
        }

    def faults(self, gym: Gym) -> list[tuple[float, Callable[[], None]]]:
        """What goes wrong: a share of the run's time, and what happens then."""
        second, judge = self.endpoints["second"], self.endpoints["judge"]
        return [
            (0.1, second.kill),
            (0.3, lambda: _lose_sessions(gym, "sums")),
            (0.4, second.start),
            (0.5, judge.kill),
            (0.6, judge.start),
            (0.75, second.kill),
            (0.85, second.start),
        ]

    async def run(self, gym: Gym, seconds: float, done: Callable[[], bool] = lambda: False) -> None:
        """Put the graph under load, with all faults, for so long or until it is done."""
        begun = time.monotonic()

        def is_over() -> bool:
            return done() or time.monotonic() > begun + seconds

        async def fail() -> None:
            for share, fault in self.faults(gym):
                await asyncio.sleep(max(0.0, begun + share * seconds - time.monotonic()))
                await asyncio.to_thread(fault)

        async def chat() -> None:
            body = {"model": "policy", "messages": [{"role": "user", "content": "1 and 1?"}], "stream": True}
            async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
                while True:
                    await client.post(f"{gym.url}/policy/v1/chat/completions", json=body)
                    await asyncio.sleep(0.5)

        beside = [asyncio.create_task(work()) for work in (fail, chat)]
        try:
            rows, batch = _rows(is_over), _BATCH
            async with gym.stream(
                rows, size=3, oversample=1, max_staleness=2, batch=batch, concurrency=24
            ) as groups:
                async for group in groups:
                    if is_over():
                        break
                    batch -= group.usable
                    if not batch:
                        batch = _BATCH
                        await AsyncGym.of(gym).policy.update_weights("policy", f"step-{next(self._versions)}")
        finally:
            for task in beside:
                task.cancel()
            ended = await asyncio.gather(*beside, return_exceptions=True)
        for outcome in ended:
            if isinstance(outcome, Exception):
                raise outcome


def _rows(is_over: Callable[[], bool]) -> Iterator[JSON]:
    chance = random.Random(0)
    while not is_over():
        first, second = chance.randint(1, 200), chance.randint(1, 200)
        yield {"responses_create_params": {"input": f"What is {first} + {second}?"}, "sum": first + second}


def _lose_sessions(gym: Gym, server: str) -> None:
    """Kill replicas, until an agent has counted sessions that were lost: one replica may have had none."""
    ends = time.monotonic() + 60
    while not _lost(gym):
        if time.monotonic() > ends:
            raise TimeoutError(f"no session of {server} was lost")
        pid, *_ = children_titled(f"ray::ServeReplica:{gym.name}:{server}")
        os.kill(pid, signal.SIGKILL)
        for _ in range(10):
            time.sleep(0.5)
            if _lost(gym):
                return


def _lost(gym: Gym) -> bool:
    return any(point["value"] for point in gym.stats()["metrics"].get("gym_serve_sessions_lost_total", []))


def main() -> None:
    """Draw the boards of a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4)
    minutes = parser.parse_args().minutes
    folder = Path(tempfile.mkdtemp(prefix="gym-serve-monitored-"))
    os.environ["PYTHONPATH"] = environment(tests=True)["PYTHONPATH"]  # replicas import this module
    with Monitored(folder) as monitored, Gym.from_graph(monitored.graph(), name="sums") as gym:
        with mock.patch.object(local_ray, "connect"):  # this process has it already
            monitoring(folder)
        address = f"127.0.0.1:{free_port()}"
        command = [
            "prometheus",
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
        ]
        prometheus = subprocess.Popen([*command, f"--web.listen-address={address}"])
        try:
            asyncio.run(monitored.run(gym, 60 * minutes))
            boards = runpy.run_path(str(TESTS.parent / "docs" / "board_pictures.py"))
            boards["draw_all"](f"http://{address}", minutes)
        finally:
            prometheus.terminate()
            prometheus.wait()


if __name__ == "__main__":
    main()
