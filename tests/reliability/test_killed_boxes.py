"""Nothing is left of 32 boxes, ten seconds after the process or the node that owns them was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from support.sandboxes import needs_bubblewrap

pytestmark = [needs_bubblewrap, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(3600)]

BOXES = 32
SECONDS = 10.0

OWNER = """
import asyncio, os, sys

mark, folder, kind = sys.argv[1:]

class Owner:
    async def hold(self):
        from gym_serve.sandbox import BoxPool, SandboxSpec, find_provider

        from gym_serve.workers.pool import end_with_parent

        self.watching = asyncio.ensure_future(end_with_parent(os.getppid()))  # as a replica does
        self.pool = BoxPool(find_provider("bubblewrap"), most=COUNT, warm=4)
        await self.pool.start()
        boxes = await asyncio.gather(*(self.pool.take(SandboxSpec(workdir="/app")) for _ in range(COUNT)))
        for box in boxes:
            done = await box.exec(f"echo a > file; (setsid sleep {mark} &); sleep {mark} &", timeout=60)
            assert done.ok, done
        self.commands = [asyncio.ensure_future(box.exec(["sleep", mark], timeout=3600)) for box in boxes]
        return os.getpid()

async def alone():
    print(await (owner := Owner()).hold(), flush=True)
    await asyncio.sleep(3600)

if kind in ("driver", "group"):
    asyncio.run(alone())
else:
    import time
    import ray
    from gym_serve.cluster.starting import try_twice

    options = {"object_store_memory": 80_000_000, "include_dashboard": False, "log_to_driver": False}
    start = lambda: ray.init(num_cpus=1, _temp_dir=folder, **options)
    try_twice("Ray", start, ray.shutdown, lambda error: True)
    owner = ray.remote(Owner).remote()
    print(ray.get(owner.hold.remote()), flush=True)
    time.sleep(3600)
""".replace("COUNT", str(BOXES))

GRAPH = {
    "insecure": True,  # a Ray of its own, for a moment
    "models": {"policy": {"type": "scripted_model"}},
    "resources": {"workspace": {"type": "workspace", "max_boxes": BOXES, "warm_boxes": 0}},
    "agents": {"oracle": {"type": "oracle", "model": "policy", "resources": "workspace"}},
}
"""Boxes of a replica of Serve: each runs a solution that does not end."""

SERVE = f"""
import asyncio, sys, threading, time
import psutil
import ray
from gym_serve import Gym
from gym_serve.cluster.starting import free_port, try_twice
from ray import serve

mark, folder, kind = sys.argv[1:]
options = dict(object_store_memory=80_000_000, include_dashboard=False, log_to_driver=False)
start = lambda: ray.init(num_cpus=8, _temp_dir=folder, **options)
try_twice("Ray", start, ray.shutdown, lambda error: True)  # which a machine under load keeps from starting
row = dict(
    responses_create_params=dict(input="Sleep."),
    test_command="true",
    solution=f"echo a > file; (setsid sleep {{mark}} &); sleep {{mark}} & sleep {{mark}}",
)
serve.start(http_options=dict(host="127.0.0.1", port=free_port()))
gym = Gym.from_graph({GRAPH!r})
once = dict(agent="oracle", repeats={BOXES}, concurrency={BOXES}, attempts=1)
threading.Thread(target=gym.run, args=([row],), kwargs=once, daemon=True).start()
sleepers = []
while len(sleepers) < 3 * {BOXES}:
    time.sleep(0.2)
    found = psutil.process_iter(["name", "cmdline"])
    sleepers = [p for p in found if p.info["name"] == "sleep" and mark in (p.info["cmdline"] or ())]
parents = sleepers[0].parents()
outside = max(number for number, process in enumerate(parents) if process.name() == "bwrap") + 1
print(parents[outside].pid, flush=True)
time.sleep(3600)
"""


def _left(mark: str) -> list[str]:
    """Processes of boxes, and mounts of them that this machine sees."""
    processes = [
        " ".join(process.info["cmdline"])
        for process in psutil.process_iter(["cmdline"])
        if process.info["cmdline"] and process.info["cmdline"][-1] == mark
    ]
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if "/lower/" in line]
    return processes + mounts


def _alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    alive = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
        except psutil.NoSuchProcess:
            continue
    return alive


def _killed(kind: str, owner: int, driver: subprocess.Popen[bytes]) -> list[int]:
    """The processes to kill."""
    below = psutil.Process(driver.pid).children(recursive=True)
    raylets = [process.pid for process in below if process.name() == "raylet"]
    if kind == "node":  # of which Ray's own tools would kill the processes one by one
        inside = {child.pid for child in psutil.Process(owner).children(recursive=True)}
        return [process.pid for process in below if process.pid not in inside]
    return {"replica": [owner], "raylet": raylets}.get(kind.removeprefix("serve "), [driver.pid])


@pytest.mark.parametrize("rounds", [int(os.environ.get("GYM_KILLS", "3"))])
@pytest.mark.parametrize(
    "kind",
    [
        *("driver", "group", "replica", "ray driver", "raylet", "node"),
        *("serve replica", "serve raylet", "serve driver"),
    ],
)
def test_nothing_is_left(kind: str, rounds: int, tmp_path: Path) -> None:
    longest = 0.0
    for number in range(rounds):
        mark = f"{os.getpid()}{number}.5"
        with tempfile.TemporaryDirectory(prefix="gs", ignore_cleanup_errors=True) as folder:
            driver = subprocess.Popen(
                [sys.executable, "-c", SERVE if kind.startswith("serve") else OWNER, mark, folder, kind],
                stdout=subprocess.PIPE,
                env={**os.environ, "TMPDIR": str(tmp_path), "RAY_AUTH_MODE": "disabled"},
                start_new_session=True,
            )
            assert driver.stdout is not None
            below: list[psutil.Process] = []
            try:
                with driver.stdout:
                    owner = int(driver.stdout.readline())
                below = psutil.Process(driver.pid).children(recursive=True)
                boxes: list[psutil.Process] = []
                while len(boxes) < 4 * BOXES:  # of each, its first process, and three that sleep
                    assert driver.poll() is None
                    boxes = psutil.Process(owner).children(recursive=True)
                killed = _killed(kind, owner, driver)
                assert killed
                for process in killed:
                    if kind == "group":
                        os.killpg(process, signal.SIGKILL)
                    else:
                        os.kill(process, signal.SIGKILL)
                begun = time.monotonic()
                while _left(mark) or _alive(boxes):
                    assert time.monotonic() - begun < SECONDS, (_left(mark), _alive(boxes))
                    time.sleep(0.1)
                longest = max(longest, time.monotonic() - begun)
            finally:
                driver.kill()
                driver.wait()
                for process in _alive(below):
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
        assert os.listdir(tmp_path) == []
    print(f"{kind}: nothing was left after {longest:.1f} s at most, in {rounds} rounds")
