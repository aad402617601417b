"""A user's folder and two nodes that lack it: `Gym.from_graph` and `gym-serve up` bring its code there.

    python -m support.shipping FOLDER

FOLDER/there becomes the /tmp of the second node, and the user's folder is hidden from the first. A trainer
deploys the graph and ends. Then rollouts run all the time, while `up` is called with the same code, with new
code, and with broken code. Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import aclosing
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gym_serve import Gym
from gym_serve.cluster.starting import free_port
from support.processes import environment, replicas_of
from support.two_machines import BIN, two_machines

GRAPH = """
applications:
  - name: shop
    route_prefix: /shop
    import_path: gym_serve.graph:app
    args:
      models: {policy: {type: "my_model:Slow"}}
      resources: {env: {type: "my_env:MyEnv", num_replicas: 2, max_replicas_per_node: 1}}
      agents: {agent: {type: simple_agent, model: policy, resources: env}}
"""
ENVIRONMENT = """
import os
from pathlib import Path
from typing import Any

import my_prices
from pydantic import BaseModel

from gym_serve import ResourcesServer, Verdict, VerifyRequest

VERSION = (Path(__file__).parent / "version.txt").read_text().strip()


class MyEnv(ResourcesServer):
    class Session(BaseModel):
        seeded_by: int = 0

    async def seed(self, row: dict[str, Any], session: Session) -> None:
        session.seeded_by = os.getpid()

    async def verify(self, request: VerifyRequest, session: Session) -> Verdict:
        reward = float(session.seeded_by == os.getpid())
        return Verdict(reward=reward, version=VERSION, price=my_prices.PRICE, pid=os.getpid())
"""
MODEL = """
import asyncio
from gym_serve.deployments.scripted_model import ScriptedModel

class Slow(ScriptedModel):
    async def responses(self, body):
        await asyncio.sleep(0.5)
        return await super().responses(body)
"""
TRAINER = """
import json
import sys

import my_env  # a trainer may use its own package too

from gym_serve import Gym

rows = [{"responses_create_params": {"input": "Hello."}}] * 4
with Gym.from_graph("graph.yaml", address=sys.argv[1], name="trained") as gym:
    found = [[rollout["reward"], rollout.get("version"), rollout.get("price")] for rollout in gym.run(rows)]
print(json.dumps({"here": my_env.VERSION, "rollouts": found}))
"""
ROW = {"responses_create_params": {"input": "Hello."}}
CONCURRENCY = 8
PHASE_SECONDS = 10.0


def write(user: Path, version: str, price: int) -> None:
    """The user's folder with one version of its code."""
    package = user / "my_env"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(ENVIRONMENT)
    (package / "version.txt").write_text(version)
    (user / "pyproject.toml").write_text('[tool.setuptools.package-data]\nmy_env = ["*.txt"]\n')
    (user / "my_prices.py").write_text(f"PRICE = {price}\n")
    (user / "my_model.py").write_text(MODEL)
    (user / "graph.yaml").write_text(GRAPH)
    (user / "train.py").write_text(TRAINER)


def trainer(user: Path, address: str) -> dict[str, Any]:
    """A trainer in the user's folder that deploys the graph for itself: what it printed."""
    command = [sys.executable, "train.py", address]
    ran = subprocess.run(command, cwd=user, capture_output=True, text=True, check=False)
    if ran.returncode:
        sys.exit(f"the trainer: {ran.stdout}{ran.stderr}")
    printed: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return printed


def up(user: Path, address: str, packages: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command, in the user's folder, with further packages that are installed there only."""
    command = [str(BIN / "gym-serve"), "up", "graph.yaml", "--address", address, "--json"]
    env = environment()
    if packages is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(packages), env.get("PYTHONPATH")]))
    return subprocess.run(command, cwd=user, env=env, capture_output=True, text=True, check=False)


def lacking() -> list[bool]:
    """Of each node, whether its processes find the package."""
    asked = ray.remote(num_cpus=0)(lambda name: find_spec(name) is not None)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    found: list[bool] = ray.get([asked.options(scheduling_strategy=p).remote("my_env") for p in places])
    return found


class Load:
    """Rollouts, all the time, and what came of each."""

    def __init__(self, gym: Gym) -> None:
        self._gym = gym
        self._stop = False
        self.ended: list[dict[str, Any]] = []

    async def run(self) -> None:
        """Until `stop`."""

        def rows() -> Any:
            while not self._stop:
                yield ROW

        async with aclosing(self._gym.rollouts(rows(), concurrency=CONCURRENCY)) as rollouts:
            async for rollout in rollouts:
                keys = ("reward", "version", "price", "pid", "_ng_failure_class")
                found = {key: rollout.get(key) for key in keys}
                self.ended.append(
                    {"at": time.monotonic(), "retries": rollout.get("_ng_attempt_index", 0), **found}
                )

    def stop(self) -> None:
        """Start no more."""
        self._stop = True

    def during(self, since: float, until: float) -> dict[str, Any]:
        """Of a time: rollouts per second, the longest time without one, and their versions."""
        ended = [one for one in self.ended if since <= one["at"] < until]
        times = [since, *(one["at"] for one in ended), until]
        return {
            "seconds": round(until - since, 1),
            "per_second": round(len(ended) / (until - since), 2),
            "longest_gap": round(max(later - one for one, later in pairwise(times)), 2),
            "versions": sorted({(one["version"], one["price"]) for one in ended}),
        }


class Held:
    """Sessions that are opened by HTTP, and closed by their verdict much later."""

    def __init__(self, url: str, number: int) -> None:
        self._url = url
        self._ids = [self._post("seed_session", ROW).headers["x-session-id"] for _ in range(number)]

    def verdicts(self) -> list[list[Any]]:
        """Reward and version of each."""
        body = {**ROW, "response": {"output": []}}
        found = []
        for id in self._ids:
            verdict = self._post("verify", body, id).json()
            found.append([verdict["reward"], verdict["version"]])
            self._post("close_session", {}, id)
        return found

    def _post(self, op: str, body: Any, id: str | None = None) -> httpx.Response:
        headers = {"x-session-id": id} if id else {}
        answer = httpx.post(f"{self._url}/env/{op}", json=body, headers=headers, timeout=60)
        assert answer.is_success, answer.text
        return answer


def changed(before: dict[str, set[int]], after: dict[str, set[int]]) -> list[str]:
    """The servers with other processes."""
    return sorted(name for name in before | after if before.get(name) != after.get(name))


async def scenario(user: Path, address: str, client: str, url: str) -> dict[str, Any]:
    said: dict[str, Any] = {}
    with await asyncio.to_thread(Gym.attach, "shop", address=address) as gym:
        load = Load(gym)
        running = asyncio.create_task(load.run())

        async def phase(name: str, act: Callable[[], Any] | None = None) -> Any:
            began = time.monotonic()
            result = await (asyncio.to_thread(act) if act else asyncio.sleep(PHASE_SECONDS))
            said[name] = load.during(began, time.monotonic())
            return result

        await asyncio.sleep(3)
        first = replicas()
        await phase("before")
        said["nodes"] = len({await asyncio.to_thread(node_of, pid) for pid in first["env"]})
        same = await phase("same code", lambda: up(user, address))
        said["same"] = {"rc": same.returncode, "changed": changed(first, replicas())}
        remote = await phase("from no node", lambda: up(user, client))
        said["remote"] = {"rc": remote.returncode, "changed": changed(first, replicas())}
        write(user, "2", 20)
        held = await asyncio.to_thread(Held, url, 6)
        verdicts = asyncio.create_task(asyncio.to_thread(lambda: (time.sleep(12), held.verdicts())[1]))
        new = await phase("new code", lambda: up(user, address))
        said["new"] = {"rc": new.returncode, "said": new.stderr[-500:], "held": await verdicts}
        await asyncio.sleep(2)
        said["new"]["changed"] = changed(first, replicas())
        await phase("after")
        (user / "my_env" / "__init__.py").write_text("import json\n\nimport no_such_package\n")
        broken = await asyncio.to_thread(up, user, address)
        said["missing here"] = {"rc": broken.returncode, "said": broken.stdout + broken.stderr}
        # A package that the user has, and the nodes have not.
        packages = user / "lib" / "site-packages"
        packages.mkdir(parents=True)
        (packages / "only_here.py").write_text("")
        (user / "my_env" / "__init__.py").write_text("import sys\n\nimport only_here\n" + ENVIRONMENT)
        there = await asyncio.to_thread(up, user, address, packages)
        said["missing there"] = {"rc": there.returncode, "said": there.stdout + there.stderr}
        await phase("at the end")
        load.stop()
        await running
    said["rewards"] = sorted({(one["reward"], one["_ng_failure_class"] or "") for one in load.ended})
    said["rollouts"] = len(load.ended)
    said["retried"] = sum(one["retries"] > 0 for one in load.ended)
    return said


def node_of(pid: int) -> str:
    """The raylet that has started a process."""
    return str(psutil.Process(pid).ppid())


def replicas() -> dict[str, set[int]]:
    return replicas_of("shop")


def main(folder: Path) -> None:
    user, there = folder / "user", folder / "there"
    there.mkdir(parents=True)
    write(user, "1", 10)
    os.environ["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"
    # The nodes shall not have this process's own modules.
    os.environ["PYTHONPATH"] = environment().get("PYTHONPATH", "")
    port = free_port()
    with two_machines(str(there), hidden=str(user), client_port=port) as address:
        had = lacking()
        trained = trainer(user, address)
        first = up(user, address)
        if first.returncode:
            sys.exit(f"up: {first.stdout}{first.stderr}")
        url = json.loads(first.stdout)["url"]
        said = asyncio.run(scenario(user, address, f"ray://127.0.0.1:{port}", url))
    print(json.dumps({"had": had, "trained": trained, **said}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
