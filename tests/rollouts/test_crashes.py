"""20 SIGKILLs of a collector at random instants, resumed each time: each rollout once, nothing lost."""

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from support.processes import environment
from support.rollouts import JSON, read_jsonl, rows, write_jsonl

from gym_serve.rollouts.files import read_records

ROWS, REPEATS, KILLS = 150, 4, 20

# Failures that are the same in every process, so that what must come of them is known: of every
# seventh rollout the first attempt, of every eleventh all, and every thirteenth is hopeless.
COLLECTOR = """
import asyncio, random, sys
from support.rollouts import collection, scored
from gym_serve.rollouts import collect
from gym_serve.types.errors import BadRequest, Unavailable

async def run(row):
    await asyncio.sleep(random.random() * 0.02)
    number = row["_ng_task_index"] * 4 + row["_ng_rollout_index"]
    if number >= so_far:
        await asyncio.Event().wait()
    if number % 13 == 0:
        raise BadRequest("hopeless")
    if number % 11 == 0 or (number % 7 == 0 and "_ng_attempt_index" not in row):
        raise Unavailable("gone")
    return scored(row)

def acknowledge(progress):
    print(progress.scored, flush=True)

source, output, so_far = sys.argv[1], sys.argv[2], int(sys.argv[3])
collecting = collect(source, output, collection(run, repeats=4), resume=True, progress=acknowledge)
report = asyncio.run(collecting)
assert report.complete
"""


# Begins a round of retries every time. Failures depend on the attempt, and now and then the key is refused.
RETRIER = """
import asyncio, random, sys
from support.rollouts import collection, scored
from gym_serve.rollouts import collect
from gym_serve.types.errors import BadRequest, EndpointAccessDenied, Unavailable

async def run(row):
    await asyncio.sleep(random.random() * 0.02)
    if random.random() < 0.003:
        raise EndpointAccessDenied("expired")
    number = row["_ng_task_index"] * 4 + row["_ng_rollout_index"]
    attempt = row.get("_ng_attempt_index", 0)
    if number % 13 == 0 and attempt < 2:
        raise BadRequest("not yet")
    if number % 11 == 0 and attempt < 5:
        raise Unavailable("gone")
    return scored(row)

def acknowledge(progress):
    print(progress.scored, flush=True)

source, output = sys.argv[1:3]
collecting = collect(source, output, collection(run, repeats=4), retry_failed=True, progress=acknowledge)
report = asyncio.run(collecting)
assert report.complete == (report.operator_error is None)
sys.exit(0 if report.complete and not report.progress.failed else 5)
"""


def start(source: Path, output: Path, so_far: int, collector: str = COLLECTOR) -> subprocess.Popen[bytes]:
    """A collector that gets no further than to the rollout ``so_far``: it lives until it is killed."""
    return subprocess.Popen(
        [sys.executable, "-c", collector, source, output, str(so_far)],
        stdout=subprocess.PIPE,
        env=environment(tests=True),
    )


def kill_at_some_instant(process: subprocess.Popen[bytes], chance: random.Random) -> int:
    """Kill it after the start, or after a few results; how many rollouts it had acknowledged."""
    assert process.stdout is not None
    acknowledged = 0
    for _ in range(chance.randrange(12)):
        acknowledged = int(process.stdout.readline() or acknowledged)
    time.sleep(chance.random() * 0.05)
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read().split()
    process.stdout.close()
    process.wait()
    return int(rest[-1]) if rest else acknowledged


@pytest.mark.parametrize("suffix", ["", ".zst"])
def test_20_kills(tmp_path: Path, suffix: str) -> None:
    chance = random.Random(3)
    source = write_jsonl(tmp_path / "rows.jsonl", rows(ROWS))
    output = tmp_path / f"out.jsonl{suffix}"
    kills = KILLS if not suffix else 4
    for kill in range(kills):
        process = start(source, output, ROWS * REPEATS * (kill + 1) // (kills + 1))
        acknowledged = kill_at_some_instant(process, chance)
        assert process.returncode == -signal.SIGKILL
        assert len(list(read_records(output))) >= acknowledged
    process = start(source, output, ROWS * REPEATS)
    process.communicate()
    assert process.returncode == 0

    numbers = range(ROWS * REPEATS)
    hopeless = {n for n in numbers if n % 13 == 0}
    exhausted = {n for n in numbers if n % 11 == 0} - hopeless
    found = Counter(map(number, read_records(output)))
    assert found == Counter(set(numbers) - hopeless - exhausted)
    failures = Counter(map(number, read_records(tmp_path / f"out_failures.jsonl{suffix}")))
    once = {n for n in numbers if n % 7 == 0} - hopeless - exhausted
    assert {n: failures[n] for n in failures} == {
        **dict.fromkeys(hopeless, 1),
        **dict.fromkeys(exhausted, 3),
        **dict.fromkeys(once, 1),
    }
    if not suffix:
        assert len(read_jsonl(tmp_path / "out_materialized_inputs.jsonl")) == len(numbers)
    assert len({r["_ng_run_id"] for r in read_records(output)}) == 1


def test_kills_while_failed_rollouts_are_made_again(tmp_path: Path) -> None:
    chance = random.Random(5)
    source = write_jsonl(tmp_path / "rows.jsonl", rows(ROWS))
    output = tmp_path / "out.jsonl"
    before = 0
    for _ in range(KILLS // 2):
        acknowledged = kill_at_some_instant(start(source, output, 0, RETRIER), chance)
        stored = len(list(read_records(output)))
        assert stored >= max(acknowledged, before)
        before = stored
    for _ in range(60):
        process = start(source, output, 0, RETRIER)
        process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == 5
    numbers = range(ROWS * REPEATS)
    scored, failures = list(read_records(output)), list(read_records(tmp_path / "out_failures.jsonl"))
    assert Counter(map(number, scored)) == Counter(numbers)
    ids = Counter(record["_ng_rollout_id"] for record in (*scored, *failures))
    assert set(ids.values()) == {1}
    failed = Counter(map(number, failures))
    expected = {n: 5 if n % 11 == 0 else 2 for n in numbers if n % 13 == 0 or n % 11 == 0}
    assert failed == expected
    assert {record["_ng_failure_class"] for record in failures} == {"bad_request", "unavailable"}


def number(rollout: JSON) -> int:
    return int(rollout["_ng_task_index"] * REPEATS + rollout["_ng_rollout_index"])
