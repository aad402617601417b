"""`Gym.from_graph(..., ray=False)`: a graph in this process. `tests/transports` compares its trajectories."""

from __future__ import annotations

import inspect
import json
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel

from gym_serve import (
    AsyncGym,
    BadRequest,
    GraphError,
    Gym,
    InvalidRequest,
    ResourcesServer,
    Unavailable,
    Verdict,
)
from gym_serve.client.policy import AsyncPolicy, Policy

ROOT = Path(__file__).parents[2]
WEATHER = ROOT / "graphs" / "weather.yaml"
ROWS = ROOT / "environments" / "simple_weather" / "data" / "example.jsonl"


class Lamp(ResourcesServer):
    """Notes that it was started and stopped."""

    events: list[str]

    async def start(self) -> None:
        await super().start()
        Lamp.events.append(f"{self.name} on")

    async def stop(self) -> None:
        await super().stop()
        Lamp.events.append(f"{self.name} off")

    async def verify(self, request: Any) -> Verdict:
        return Verdict(reward=1.0)


class Broken(ResourcesServer):
    """Cannot start."""

    async def start(self) -> None:
        raise OSError("no such lamp")

    async def verify(self, request: Any) -> Verdict:
        return Verdict(reward=1.0)


def graph(**resources: Any) -> dict[str, Any]:
    return {
        "models": {"policy": {"type": "scripted_model"}},
        "resources": resources,
        "agents": {
            f"{name}_agent": {"type": "simple_agent", "model": "policy", "resources": name}
            for name in resources
        },
    }


def test_rollouts_groups_and_files_without_ray(tmp_path: Path) -> None:
    code = f"""
import asyncio, sys
from gym_serve import Gym
with Gym.from_graph({str(WEATHER)!r}, ray=False) as gym:
    rollouts = gym.run({str(ROWS)!r}, repeats=2)
    assert len(rollouts) == 18 and all("failure" not in r for r in rollouts)
    async def rest():
        groups = [g async for g in gym.groups({str(ROWS)!r}, size=2)]
        return groups
    groups = asyncio.run(rest())
    report = gym.collect({str(ROWS)!r}, {str(tmp_path / "out.jsonl")!r})
    assert len(groups) == 9 and report.complete
    assert {{s["state"] for s in gym.health().values()}} == {{"ready"}}
print("ray" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout, done.stderr) == ("False\n", ""), done.stderr
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 9


def test_servers_start_before_and_stop_after_those_that_call_them() -> None:
    Lamp.events = []
    with Gym.from_graph(graph(one={"type": Lamp}, two={"type": Lamp}), ray=False) as gym:
        assert Lamp.events == ["one on", "two on"]
        rows = [{"responses_create_params": {"input": "x"}, "agent_ref": {"name": "two_agent"}}]
        assert gym.run(rows)[0]["reward"] == 1.0
    assert Lamp.events == ["one on", "two on", "two off", "one off"]


def test_a_server_that_cannot_start_is_named_and_the_others_are_stopped() -> None:
    Lamp.events = []
    with pytest.raises(Unavailable, match=r"bad did not start: OSError: no such lamp"):
        Gym.from_graph(graph(lamp={"type": Lamp}, bad={"type": Broken}), ray=False)
    assert Lamp.events == ["lamp on", "lamp off"]


def test_what_needs_a_cluster_is_named_all_at_once() -> None:
    given = graph(
        lamp={"type": Lamp, "num_gpus": 1}, other={"type": Lamp, "runtime_env": {"env_vars": {"A": "b"}}}
    )
    with pytest.raises(GraphError) as caught:
        Gym.from_graph(given, ray=False)
    assert [problem.partition(";")[0] for problem in caught.value.problems] == [
        "lamp: num_gpus needs a cluster",
        "other: runtime_env needs a cluster",
    ]
    with pytest.raises(InvalidRequest, match="`address` must be left out"):
        Gym.from_graph(WEATHER, "auto", ray=False)
    with pytest.raises(InvalidRequest, match="`dashboard` must be left out"):
        Gym.from_graph(WEATHER, ray=False, dashboard=True)


def test_replicas_and_cpus_are_no_obstacle() -> None:
    Lamp.events = []
    with Gym.from_graph(graph(lamp={"type": Lamp, "num_replicas": 4, "num_cpus": 2}), ray=False) as gym:
        for refused in (lambda: gym.handle("lamp"), gym.pressure):
            with pytest.raises(BadRequest, match=r"needs a graph on a Ray cluster; .* in this process"):
                refused()
        with pytest.raises(BadRequest, match="takes no weights"):
            gym.policy.update_weights("policy", "1", tensors=b"")
        with pytest.raises(BadRequest, match="needs a graph on a Ray cluster"):
            gym.policy.set_endpoints("policy", ["http://127.0.0.1:1/v1"])


@pytest.mark.parametrize(("blocking", "awaited"), [(Gym, AsyncGym), (Policy, AsyncPolicy)])
def test_both_faces_have_the_same_methods_and_wait_in_their_own_way(blocking: type, awaited: type) -> None:
    def methods(cls: type) -> dict[str, Any]:
        functions = {name: getattr(cls, name) for name in vars(cls) if name[0] != "_" and name != "of"}
        return {name: function for name, function in functions.items() if inspect.isroutine(function)}

    assert methods(blocking).keys() == methods(awaited).keys()
    for name, method in methods(awaited).items():
        assert inspect.iscoroutinefunction(method), name
        assert not inspect.iscoroutinefunction(methods(blocking)[name]), name
        parameters = [
            list(inspect.signature(cls[name]).parameters.values())
            for cls in map(methods, (blocking, awaited))
        ]
        assert parameters[0] == parameters[1], name


async def test_a_graph_that_is_awaited_from_its_start_to_its_end(tmp_path: Path) -> None:
    Lamp.events = []
    async with await AsyncGym.from_graph(graph(lamp={"type": Lamp}), ray=False) as gym:
        (rollout,) = await gym.run([{"prompt": "x"}])
        assert [group.usable async for group in gym.groups([{"prompt": "x"}], size=2)] == [True]
        assert not await gym.compares(rollout)
        assert (await gym.compare([rollout])).rollouts[0].reward == 1.0
        assert (await gym.collect([{"prompt": "x"}], tmp_path / "out.jsonl")).complete
        await gym.policy.update_weights("policy", "7")
        assert await gym.policy.version() == "7"
    assert Lamp.events == ["lamp on", "lamp off"]


async def test_every_call_works_inside_a_running_loop() -> None:
    Lamp.events = []
    with Gym.from_graph(graph(lamp={"type": Lamp}), ray=False) as gym:
        row = {"prompt": "x"}
        found = [rollout["reward"] async for rollout in gym.rollouts([row], repeats=3)]
        assert found == [1.0] * 3
        for rollouts in (gym.run([row]), await AsyncGym.of(gym).run([row])):
            assert [rollout["reward"] for rollout in rollouts] == [1.0]
        assert gym.health() == await AsyncGym.of(gym).health()
        body = {"response": {"output": []}}
        assert gym.call("lamp", "verify", body) == await AsyncGym.of(gym).call("lamp", "verify", body)


def test_an_interrupt_cancels_what_run_began() -> None:
    """As Ctrl-C does in a notebook: the rollouts do not go on behind the user's back."""
    code = f"""
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
from gym_serve import Gym, ResourcesServer, Verdict
import asyncio
class Slow(ResourcesServer):
    async def verify(self):
        os.write(1, b"verifying ")
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            os.write(1, b"cancelled ")
            raise
graph = {graph()!r}
graph["resources"] = {{"slow": {{"type": Slow}}}}
graph["agents"] = {{"agent": {{"type": "simple_agent", "model": "policy", "resources": "slow"}}}}
with Gym.from_graph(graph, ray=False) as gym:
    try:
        gym.run([{{"prompt": "x"}}])
    except KeyboardInterrupt:
        os.write(1, b"interrupted ")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert sorted(done.stdout.split()) == ["cancelled", "interrupted", "verifying"], done.stderr


def test_its_name_says_what_it_is_and_it_stays_in_its_process() -> None:
    Lamp.events = []
    with Gym.from_graph(graph(lamp={"type": Lamp}), ray=False) as gym:
        said = "<Gym 'default': a graph in this process (ray=False), servers policy, lamp, lamp_agent>"
        assert repr(gym) == said
        with pytest.raises(TypeError, match="in this process"):
            pickle.dumps(gym)


class Large(ResourcesServer):
    """Gives the row's number back."""

    class Row(BaseModel):
        big: int

    async def verify(self, row: Row) -> Verdict:
        return Verdict(reward=1.0, value=row.big)


def test_numbers_of_any_size_come_back_exactly(tmp_path: Path) -> None:
    """In rows without an index of their own, which are told apart by their content, and in all files."""
    numbers = [2**64 + 1, 2**70, -(2**63) - 1, 10**400]
    rows = [{"responses_create_params": {"input": "?"}, "big": number} for number in numbers]
    out = tmp_path / "out.jsonl"
    with Gym.from_graph(graph(large={"type": Large}), ray=False) as gym:
        assert [int(each["value"]) for each in gym.run(rows)] == numbers
        report = gym.collect(rows, out, repeats=2)
        assert report.complete
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert (
        sorted(each["value"] for each in written)
        == sorted(each["big"] for each in written)
        == sorted(2 * numbers)
    )


class Stuck(ResourcesServer):
    """Its verification never returns for some rows."""

    class Row(BaseModel):
        stuck: bool

    never: ClassVar[threading.Event] = threading.Event()

    def verify(self, row: Row) -> Verdict:
        if row.stuck:
            Stuck.never.wait()
        return Verdict(reward=1.0)


@pytest.mark.thorough
def test_verifications_that_never_return_leave_the_others_their_rewards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gym_serve.servers.sessions._STOP_SECONDS", 0.1)
    rows = [{"responses_create_params": {"input": "?"}, "stuck": n < 10} for n in range(30)]
    settings = graph(env={"type": Stuck})
    settings["agents"]["env_agent"] |= {"verify_timeout": 1.0, "close_timeout": 0.5}
    with Gym.from_graph(settings, ray=False) as gym:
        rollouts = gym.run(rows, attempts=3)
    Stuck.never.set()
    assert [each.get("reward") for each in rollouts if "failure" not in each] == [1.0] * 20
    assert {each["failure"]["kind"] for each in rollouts if "failure" in each} == {"verify_timeout"}


def test_a_program_ends_though_its_rows_wait(tmp_path: Path) -> None:
    program = f"""
import queue
from gym_serve import Gym

def rows():
    yield {{"responses_create_params": {{"input": "?"}}, "city": "Paris"}}
    yield queue.Queue().get()

with Gym.from_graph({str(WEATHER)!r}, ray=False) as gym:
    with gym.stream(rows(), size=1, max_staleness=1) as stream:
        print(len(next(stream).rollouts))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
