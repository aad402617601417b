"""Rollouts on a cluster of two nodes whose parts are killed at random, with models that misbehave.

    RAY_AUTH_MODE=token RAY_AUTH_TOKEN=... python -m support.chaos --rollouts 5000 --kills 35 --minutes 20

Half of the rollouts come by the replica transport of a driver, half by HTTP through the proxy. The same
rows are run undisturbed first. What may come of a rollout is the reward of the undisturbed run, or a typed
failure that says "try again", once, within its deadline. Prints what happened to standard error, and one JSON
object at the end; its ``wrong`` counts everything else.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson

from benchmarks.loopback import Behaviour, run_model_server
from gym_serve import AsyncGym, Gym, Progress
from support.ledger import Ledger
from support.processes import children_titled
from support.rollouts import JSON, read_jsonl
from support.two_nodes import TwoNodes, two_nodes

NAME = "chaos"
TIMEOUT = 20.0
"""Seconds for one attempt."""
LATE = 40.0
"""Seconds that an attempt may overrun, on a slow machine that starts replicas all the time."""
ATTEMPTS = 8

EPISODE: dict[str, Any] = {"turns": 3, "tool": "add", "arguments": '{"amount": 7}'}
MODELS = {
    "sound": Behaviour(**EPISODE, latency_ms=5),
    "faulty": Behaviour(
        **EPISODE,
        latency_ms=20,
        faults={"overloaded": 29, "error": 41, "drop": 83, "garbage": 101, "hang": 307},
    ),
    "slow": Behaviour(**EPISODE, latency_ms=400),
}
PARTS = {
    "agent": f"ray::ServeReplica:{NAME}:agent",
    "environment": f"ray::ServeReplica:{NAME}:env",
    "model": f"ray::ServeReplica:{NAME}:policy",
    "gateway": f"ray::ServeReplica:{NAME}:gateway",
    "proxy": "ray::ProxyActor",
    "controller": "ray::ServeController",
}


def graph(model: str) -> JSON:
    # Serve looks every 10 seconds by default: then most of the time goes by with nothing left to be killed.
    quick = {"health_check_period_s": 1.0}
    server = {"num_replicas": 2, "max_replicas_per_node": 2, **quick}
    return {
        "models": {"policy": {**server, "type": "chat_model", "base_url": model, "model": "m"}},
        "resources": {"env": {**server, "type": Ledger, "num_replicas": 3}},
        "agents": {
            "agent": {
                **server,
                "type": "simple_agent",
                "model": "policy",
                "resources": "env",
                "model_timeout": 5.0,
                "close_timeout": 5.0,
            }
        },
        # Serve gives up on a deployment whose first starts fail, three per replica, and a killed
        # controller counts anew: a node and a starting replica, killed then, are enough for a single one.
        "gateway": {"num_replicas": 2, **quick},
    }


def rows(count: int) -> list[JSON]:
    return [{"responses_create_params": {"input": f"question {n}"}, "number": n} for n in range(count)]


class Killer:
    """Kills one part after the other, as the rollouts go on.

    Args:
        cluster: its second node is killed as well.
        generator: chooses the parts.
        kills: how many; every part once before any comes again.
        total: rollouts, by which the kills are spaced.
    """

    def __init__(self, cluster: TwoNodes, generator: random.Random, kills: int, total: int) -> None:
        self._cluster = cluster
        self._random = generator
        self._finished: Counter[str] = Counter()
        names = [*PARTS, "node"]
        order = [name for _ in range(0, kills, len(names)) for name in generator.sample(names, len(names))]
        self._plan = [(total * (n + 1) // (kills + 2), name) for n, name in enumerate(order[:kills])]
        self.killed: list[str] = []

    def progress_of(self, way: str) -> Any:
        """A callback for the collection that comes this way."""

        def progress(now: Progress) -> None:
            self._finished[way] = now.finished

        return progress

    def run(self, collecting: Future[None]) -> None:
        """Kill everything that is planned; in the main thread, where alone Ray can start a node."""
        started = time.monotonic()
        for finished, name in self._plan:
            while self._finished.total() < finished:
                if collecting.done():
                    return
                time.sleep(0.05)
            if name == "node":
                self._cluster.replace_second()
            else:
                self._process(name)
            self.killed.append(name)
            say(f"{time.monotonic() - started:6.1f} s  {self._finished.total():5d} finished   killed: {name}")

    def _process(self, name: str) -> None:
        give_up = time.monotonic() + 180
        while time.monotonic() < give_up:
            if found := children_titled(PARTS[name]):
                os.kill(self._random.choice(list(found)), signal.SIGKILL)
                return
            time.sleep(0.1)  # the one that was killed before is not back yet
        raise AssertionError(f"no {name} to kill")


def judge(folder: Path, count: int) -> JSON:
    """What came of the rollouts, next to those of the undisturbed run."""
    expected = {rollout["number"]: rollout["reward"] for rollout in read_jsonl(folder / "undisturbed.jsonl")}
    scored: Counter[int] = Counter()
    failed: Counter[int] = Counter()
    wrong: Counter[str] = Counter()
    attempts: Counter[str] = Counter()
    slowest = 0.0
    for way in ("handle", "http"):
        for rollout in read_jsonl(folder / f"{way}.jsonl"):
            scored[rollout["number"]] += 1
            wrong["fabricated"] += rollout["reward"] != expected[rollout["number"]]
            slowest = max(slowest, rollout["_ng_latency_s"])
        failures = folder / f"{way}_failures.jsonl"
        last: dict[int, JSON] = {}
        for failure in read_jsonl(failures) if failures.exists() else []:
            attempts[failure["_ng_failure_class"]] += 1
            last[failure["number"]] = failure
            wrong["not retryable"] += not failure["failure"]["retryable"]
            wrong["not masked"] += failure["mask_sample"] is not True
            slowest = max(slowest, failure["_ng_latency_s"])
        failed.update(last.keys() - scored.keys())
    outcomes = scored + failed
    wrong["lost"] = count - len(outcomes)
    wrong["doubled"] = sum(number - 1 for number in outcomes.values())
    wrong["late"] = int(slowest > TIMEOUT + LATE)
    return {
        "rollouts": count,
        "scored": len(scored),
        "failed": len(failed),
        "failed_attempts": attempts,
        "slowest_attempt_s": round(slowest, 1),
        "wrong": +wrong,
    }


async def disturbed(gym: Gym, folder: Path, killer: Killer, rollouts: int, minutes: float) -> None:
    """Collect both ways."""
    remote = Gym.connect(gym.url)
    given = rows(rollouts)
    collections = [
        AsyncGym.of(one).collect(
            given[start::2],
            folder / f"{way}.jsonl",
            concurrency=32,
            attempts=ATTEMPTS,
            timeout=TIMEOUT,
            progress=killer.progress_of(way),
        )
        for start, way, one in ((0, "handle", gym), (1, "http", remote))
    ]
    await asyncio.wait_for(asyncio.gather(*collections), 60 * minutes)
    await asyncio.to_thread(remote.shutdown)


def run_twice(
    gym: Gym, folder: Path, killer: Killer, urls: list[str], *, rollouts: int, minutes: float
) -> JSON:
    """The undisturbed run, and the other one."""
    started = time.monotonic()
    gym.collect(rows(rollouts), folder / "undisturbed.jsonl", concurrency=64)
    say(f"{time.monotonic() - started:6.1f} s  {rollouts:5d} finished   undisturbed")
    gym.policy.set_endpoints("policy", urls)
    started = time.monotonic()
    with ThreadPoolExecutor() as executor:
        collecting = executor.submit(lambda: asyncio.run(disturbed(gym, folder, killer, rollouts, minutes)))
        killer.run(collecting)
        collecting.result()
    seconds = round(time.monotonic() - started, 1)
    return {"seconds": seconds, "killed": killer.killed, **judge(folder, rollouts)}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(
    cluster: TwoNodes,
    generator: random.Random,
    *,
    rollouts: int,
    kills: int,
    minutes: float,
    folder: Path | None = None,
) -> JSON:
    """What comes of it: the arguments of `main`."""
    with ExitStack() as stack:
        models = {name: stack.enter_context(run_model_server(how)) for name, how in MODELS.items()}
        urls = {name: f"{server.url}/v1" for name, server in models.items()}
        killer = Killer(cluster, generator, kills, rollouts)
        folder = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        gym = stack.enter_context(Gym.from_graph(graph(urls["sound"]), name=NAME, address=cluster.address))
        return run_twice(
            gym, folder, killer, [urls["faulty"], urls["slow"]], rollouts=rollouts, minutes=minutes
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=5000)
    parser.add_argument("--kills", type=int, default=35)
    parser.add_argument("--minutes", type=float, default=20.0, help="at most")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10_000))
    parser.add_argument("--folder", type=Path, help="where the rollouts are kept; nowhere by default")
    options = parser.parse_args()
    say(f"--seed {options.seed}")
    seed = options.__dict__.pop("seed")
    with two_nodes() as cluster:
        result = run(cluster, random.Random(seed), **vars(options))
    say("".join(f"\n  {name:18} {value}" for name, value in result.items()))
    print(orjson.dumps({"seed": seed, **result}).decode(), flush=True)


if __name__ == "__main__":
    main()
