"""How fast boxes start, execute and end, how much memory one takes, and what is left of a killed owner.

    python -m benchmarks.boxes [--boxes 400] [--commands 500] [--live 256] [--episodes 1000] [--output FILE]
    python -m benchmarks.boxes --image IMAGE ...   containers of Docker or Podman (DOCKER_HOST) instead
    python -m benchmarks.boxes --cpuacct GROUP --episodes 200   the last part alone, and its CPU time

No Ray and no model. Boxes of bubblewrap, over this machine's own root:

- one after the other: seconds from the call to a box that has answered its first command;
- eight at a time: boxes created and closed per second;
- from a warm pool: seconds from the call to a box that has answered its first command, one call after the
  other, half again as far apart as a box takes to start;
- a live box: seconds of ``true``, and of ``echo`` by a shell;
- many live boxes, all at once: seconds until all live, memory of all their processes (PSS) per box, and
  seconds of ``true`` in each of them in turn;
- `oracle` on a task of Harbor's format, end to end through a graph in this process: episodes per second, and
  CPU time of each, of this process and all boxes, by an empty control group (`mkdir
  /sys/fs/cgroup/cpuacct/boxes`). Other work of the machine hardly changes that.

Prints one JSON object, and exits with status 1 if an episode did not score 1.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson
import psutil

from benchmarks.harness.reports import machine, save
from gym_serve import Gym
from gym_serve.environments.workspace.rows import HarborRows
from gym_serve.sandbox import BoxPool, Sandbox, SandboxProvider, SandboxSpec, find_provider

JSON = dict[str, Any]

LONG = 60.0
AT_ONCE = 8


def percentiles(seconds: list[float]) -> JSON:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50_ms": round(1000 * cuts[49], 2), "p99_ms": round(1000 * cuts[98], 2)}


async def first_commands(provider: SandboxProvider, spec: SandboxSpec, count: int) -> JSON:
    created, first = [], []
    for _ in range(count):
        begun = time.perf_counter()
        box = await provider.create(spec)
        created.append(time.perf_counter() - begun)
        assert (await box.exec(["true"], timeout=LONG)).ok
        first.append(time.perf_counter() - begun)
        await box.close()
    return {"create": percentiles(created), "create_to_first_command": percentiles(first)}


async def throughput(provider: SandboxProvider, spec: SandboxSpec, count: int) -> JSON:
    left = iter(range(count))

    async def worker() -> None:
        for _ in left:
            await (await provider.create(spec)).close()

    begun = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    return {"boxes_per_second": round(count / (time.perf_counter() - begun), 1), "at_once": AT_ONCE}


async def from_a_pool(provider: SandboxProvider, spec: SandboxSpec, count: int, apart: float) -> JSON:
    pool = BoxPool(provider, most=16, warm=8)
    await pool.start()
    first, ends = [], []
    for _ in range(count):
        begun = time.perf_counter()
        box = await pool.take(spec)
        assert (await box.exec(["true"], timeout=LONG)).ok
        first.append(time.perf_counter() - begun)
        ends.append(asyncio.create_task(pool.end(box)))
        await asyncio.sleep(apart)
    await asyncio.gather(*ends)
    await pool.stop()
    return {"take_to_first_command": percentiles(first[count // 5 :]), "apart_ms": round(1000 * apart, 1)}


async def commands(provider: SandboxProvider, spec: SandboxSpec, count: int) -> JSON:
    box = await provider.create(spec)
    measured: JSON = {}
    for name, command in (("true", ["true"]), ("shell_echo", "echo a")):
        seconds = []
        for _ in range(count):
            begun = time.perf_counter()
            assert (await box.exec(command, timeout=LONG)).ok
            seconds.append(time.perf_counter() - begun)
        measured[name] = percentiles(seconds)
    await box.close()
    return measured


async def many(provider: SandboxProvider, spec: SandboxSpec, count: int) -> JSON:
    pool = BoxPool(provider, most=count, warm=0)
    await pool.start()
    begun, seconds = time.perf_counter(), []
    boxes: list[Sandbox] = await asyncio.gather(*(pool.take(spec) for _ in range(count)))
    live = time.perf_counter() - begun
    for box in boxes:
        begun = time.perf_counter()
        assert (await box.exec(["true"], timeout=LONG)).ok
        seconds.append(time.perf_counter() - begun)
    processes = psutil.Process().children(recursive=True)
    pss = sum(process.memory_full_info().pss for process in processes)
    await asyncio.gather(*(pool.end(box) for box in boxes))
    await pool.stop()
    report: JSON = {"live": count, "seconds_until_live": round(live, 2), "true_in_each": percentiles(seconds)}
    return {**report, **({"mb_per_box": round(pss / count / 1e6, 2)} if processes else {})}


def task(folder: Path) -> None:
    files = {
        "task.toml": 'schema_version = "1.4"\n[environment]\nnetwork_mode = "no-network"\n',
        "instruction.md": "Write a to the file b.",
        "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\n",
        "solution/solve.sh": "#!/bin/sh\necho a > b\n",
        "tests/test.sh": '#!/bin/sh\n[ "$(cat b)" = a ] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n',
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


async def episodes(count: int, group: Path | None) -> JSON:
    def cpu_ms() -> float:
        return 0.0 if group is None else int((group / "cpuacct.usage").read_text()) / 1e6

    with tempfile.TemporaryDirectory() as place:
        task(Path(place))
        rows = list(HarborRows().rows(Path(place)))
        with Gym.from_graph("workspace", ray=False) as gym:
            begun, used, scores = time.perf_counter(), cpu_ms(), []
            async for rollout in gym.rollouts(rows, agent="oracle", repeats=count, concurrency=AT_ONCE):
                scores.append(rollout.get("reward") if "failure" not in rollout else None)
            seconds, used = time.perf_counter() - begun, cpu_ms() - used
    return {
        **({} if group is None else {"cpu_ms_per_episode": round(used / count, 1)}),
        "episodes_per_second": round(count / seconds, 1),
        "episodes": len(scores),
        "scored_1": scores.count(1.0),
    }


async def measure(arguments: argparse.Namespace) -> JSON:
    if arguments.cpuacct is not None:
        (arguments.cpuacct / "cgroup.procs").write_text("0")
        return {"machine": machine(), "oracle": await episodes(arguments.episodes, arguments.cpuacct)}
    provider = find_provider("docker" if arguments.image else "bubblewrap")
    spec = SandboxSpec(image=arguments.image, workdir="/app")
    await (await provider.create(spec)).close()
    alone = await first_commands(provider, spec, max(20, arguments.boxes // 4))
    report = {
        "machine": machine(),
        "one_after_the_other": alone,
        "at_once": await throughput(provider, spec, arguments.boxes),
        "warm": await from_a_pool(provider, spec, arguments.boxes, alone["create"]["p50_ms"] * 1.5e-3),
        "commands": await commands(provider, spec, arguments.commands),
        "many": await many(provider, spec, arguments.live),
    }
    return report if arguments.image else {**report, "oracle": await episodes(arguments.episodes, None)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("boxes", 400), ("commands", 500), ("live", 256), ("episodes", 1000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--image", help="image of containers; boxes of bubblewrap without it")
    parser.add_argument("--cpuacct", type=Path, help="control group to count CPU time by: episodes only")
    parser.add_argument("--output", type=Path, help="where the result is saved")
    arguments = parser.parse_args()
    report = asyncio.run(measure(arguments))
    print(orjson.dumps(report, option=orjson.OPT_INDENT_2).decode())
    if arguments.output is not None:
        save(arguments.output, report)
    if "oracle" in report and report["oracle"]["scored_1"] != arguments.episodes:
        sys.exit(1)


if __name__ == "__main__":
    main()
