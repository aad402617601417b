"""`WorkerPool`: who is at fault, time-outs, deaths, cancellation, and what is left afterwards (nothing)."""

import asyncio
import os
import resource
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import work
from support.processes import is_running
from support.waiting import until

from gym_serve.types.errors import Unavailable, VerifierFailed
from gym_serve.workers import WorkerPool, WorkFailed
from gym_serve.workers import pool as pool_module

MEMORY = 1 << 30
LONG = 60.0
WORK = Path(work.__file__)


def workers() -> list[psutil.Process]:
    """The running ones of these tests; others may have left processes of theirs."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if any(part.endswith("workers/child.py") for part in child.cmdline()):
                found.append(child)
    return found


def new_pool(size: int = 1, path: Path = WORK, memory_bytes: int = MEMORY) -> WorkerPool:
    return WorkerPool("test", path, size, memory_bytes=memory_bytes)


async def run(pool: WorkerPool, what: str, argument: Any = None, cpu_seconds: float = LONG) -> Any:
    return await pool.run([what, argument], cpu_seconds=cpu_seconds)


@pytest.fixture
async def pool() -> AsyncIterator[WorkerPool]:
    pool = new_pool()
    await pool.start()
    yield pool
    await pool.stop()
    assert workers() == []


@pytest.mark.parametrize("value", [None, 1.5, "\ud800 é", [{"a": [True]}]])
async def test_returns_what_the_work_returns(pool: WorkerPool, value: Any) -> None:
    assert await run(pool, "echo", value) == value


@pytest.mark.parametrize("cpu_seconds", [0.05, 0.3])
async def test_cpu_time_in_c_code_is_the_requests_fault(pool: WorkerPool, cpu_seconds: float) -> None:
    with pytest.raises(WorkFailed, match=rf"more than {cpu_seconds} s of CPU time"):
        await run(pool, "spin", cpu_seconds=cpu_seconds)
    assert await run(pool, "echo", 1) == 1


async def test_each_request_has_its_own_cpu_time(pool: WorkerPool) -> None:
    before = workers()
    for _ in range(5):
        assert await run(pool, "burn", 0.1, cpu_seconds=0.3) == 0.1
    assert workers() == before


async def test_wall_time_does_not_count(pool: WorkerPool) -> None:
    assert await run(pool, "sleep", 0.5, cpu_seconds=0.05) == 0.5


async def test_a_machine_that_gives_no_time_is_at_fault(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = asyncio.wait_for

    async def impatient(work: Any, patience: float) -> Any:
        assert patience == 62.0  # a minute, and 20 times the CPU time
        return await ask(work, 0.2)

    monkeypatch.setattr(pool_module.asyncio, "wait_for", impatient)
    with pytest.raises(VerifierFailed, match="overloaded"):
        await run(pool, "sleep", 1000, cpu_seconds=0.1)
    monkeypatch.undo()
    assert await run(pool, "echo", 1) == 1


@pytest.mark.parametrize(
    ("what", "argument", "reason"),
    [
        ("raise", "no number", "ValueError: no number"),
        ("raise", "x" * 10_000, "x{1000}$"),
        ("allocate", 2 * MEMORY, "too much memory"),
        ("signal", signal.SIGSEGV, "two test workers died of it, the last one with signal 11"),
        ("signal", signal.SIGABRT, "signal 6"),
        ("exit", 3, "exit status 3"),
        (
            "touch",
            3 * MEMORY // 4,
            "too much memory: two test workers died of it, the last one with signal 9",
        ),
        ("allocate", -1, "ValueError"),
    ],
)
async def test_a_request_that_breaks_its_worker_is_at_fault(
    pool: WorkerPool, what: str, argument: Any, reason: str
) -> None:
    with pytest.raises(WorkFailed, match=reason):
        await run(pool, what, argument)
    assert await run(pool, "echo", 1) == 1


async def test_a_request_that_fills_the_memory_of_the_machine_is_at_fault() -> None:
    mine = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    pool = new_pool(memory_bytes=2 * mine + (512 << 20))
    await pool.start()
    try:
        with pytest.raises(WorkFailed, match=r"too much memory: two test workers died of it, .* signal 9"):
            await run(pool, "touch", mine + (300 << 20))
    finally:
        await pool.stop()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_worker_that_is_killed_from_outside_is_the_machines_fault(
    pool: WorkerPool, number: signal.Signals
) -> None:
    with pytest.raises(
        VerifierFailed, match=f"two test workers died of it, the last one with signal {number}"
    ):
        await run(pool, "signal", number)
    assert await run(pool, "echo", 1) == 1


async def test_a_result_that_is_too_long(pool: WorkerPool) -> None:
    assert await run(pool, "echo", "x" * 900_000) == "x" * 900_000
    with pytest.raises(WorkFailed, match="too long"):
        await run(pool, "echo", "x" * 1_100_000)
    assert await run(pool, "echo", 1) == 1


async def test_a_failure_costs_one_worker() -> None:
    pool = new_pool(2)
    await pool.start()
    try:
        before = {worker.pid for worker in workers()}
        with pytest.raises(WorkFailed):
            await run(pool, "spin", cpu_seconds=0.1)
        await until(lambda: len(workers()) == 2)
        assert len(before & {worker.pid for worker in workers()}) == 1
        assert await asyncio.gather(*(run(pool, "echo", n) for n in range(4))) == [0, 1, 2, 3]
    finally:
        await pool.stop()
    assert workers() == []


async def test_first_in_first_out(pool: WorkerPool) -> None:
    done: list[int] = []

    async def one(n: int) -> None:
        await run(pool, "echo", n)
        done.append(n)

    await asyncio.gather(*map(one, range(10)))
    assert done == list(range(10))


async def test_idle_worker_killed_from_outside(pool: WorkerPool) -> None:
    [worker] = workers()
    worker.kill()
    assert await run(pool, "echo", 1) == 1
    assert [child.status() != psutil.STATUS_ZOMBIE for child in workers()] == [True]


async def test_busy_worker_killed_from_outside(pool: WorkerPool) -> None:
    [worker] = workers()
    idle = worker.cpu_times().user
    task = asyncio.create_task(run(pool, "burn", 0.5))
    await until(lambda: worker.cpu_times().user > idle + 0.1)
    worker.kill()
    assert await task == 0.5  # in another one
    assert workers()[0].pid != worker.pid


async def test_cancelled_in_the_queue_and_at_work(pool: WorkerPool) -> None:
    at_work = asyncio.create_task(run(pool, "spin", cpu_seconds=0.5))
    queued = [asyncio.create_task(run(pool, "spin")) for _ in range(50)]
    await asyncio.sleep(0.1)
    for task in (at_work, *queued):
        task.cancel()
    outcomes = await asyncio.gather(at_work, *queued, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    assert await run(pool, "echo", 1) == 1


async def test_a_cancelled_request_keeps_its_worker(pool: WorkerPool) -> None:
    before = workers()
    task = asyncio.create_task(run(pool, "sleep", 0.3))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await run(pool, "echo", 1) == 1
    assert workers() == before


async def test_stop_ends_waiting_requests() -> None:
    pool = new_pool()
    await pool.start()
    tasks = [asyncio.create_task(run(pool, "spin")) for _ in range(3)]
    await asyncio.sleep(0.1)
    await pool.stop()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Unavailable] * 3
    assert workers() == []
    with pytest.raises(Unavailable, match="not running"):
        await run(pool, "echo", 1)
    await pool.stop()


async def test_a_stop_that_is_cancelled_can_be_repeated() -> None:
    pool = new_pool()
    await pool.start()
    stopping = asyncio.create_task(pool.stop())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    stopping.cancel()
    await asyncio.wait([stopping])
    await pool.stop()
    assert workers() == []


async def test_worker_with_much_memory_in_use_is_replaced(pool: WorkerPool) -> None:
    before = workers()
    assert await run(pool, "keep", MEMORY // 4) == MEMORY // 4
    assert workers() == before
    assert await run(pool, "keep", MEMORY // 3) == MEMORY // 3
    assert await run(pool, "echo", 1) == 1
    assert workers() != before


async def test_the_memory_of_the_parent_does_not_count() -> None:
    ballast = bytearray(os.urandom(1)) * (150 << 20)
    pool = new_pool(memory_bytes=200 << 20)
    await pool.start()
    try:
        before = workers()
        assert await run(pool, "echo", len(ballast)) == len(ballast)
        assert await run(pool, "echo", 1) == 1
        assert workers() == before
    finally:
        await pool.stop()


async def test_worker_has_no_secrets(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    workers()[0].kill()
    environment = await run(pool, "environment")
    assert "PATH" in environment
    assert "OPENAI_API_KEY" not in environment


async def test_a_parent_that_ignores_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGPROF, signal.SIG_IGN)  # inherited through exec
    pool = new_pool()
    try:
        await pool.start()
        with pytest.raises(WorkFailed, match="CPU time"):
            await run(pool, "spin", cpu_seconds=0.1)
    finally:
        await pool.stop()
        signal.signal(signal.SIGPROF, before)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("raise SystemExit(3)", "exit status 3"),
        ("import os; os.kill(os.getpid(), 11)", "signal 11"),
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("def warm_up(): raise ValueError('cold')", "ValueError: cold"),
    ],
)
async def test_worker_that_does_not_start(script: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "work.py"
    path.write_text(script)
    pool = new_pool(2, path)
    with pytest.raises(VerifierFailed, match=f"a test worker does not start: .*{message}"):
        await pool.start()
    assert workers() == []


async def test_replacement_that_does_not_start(tmp_path: Path) -> None:
    path = tmp_path / "work.py"
    path.write_text("from support.work import *")
    pool = new_pool(1, path)
    await pool.start()
    try:
        path.rename(tmp_path / "elsewhere.py")
        with pytest.raises(WorkFailed):
            await run(pool, "spin", cpu_seconds=0.1)
        with pytest.raises(VerifierFailed, match="does not start"):
            await run(pool, "echo", 1)
        await until(lambda: workers() == [])
        (tmp_path / "elsewhere.py").rename(path)
        assert await run(pool, "echo", 1) == 1
    finally:
        await pool.stop()


def test_event_loop_outside_the_main_thread() -> None:
    results: list[int] = []

    async def both() -> None:
        pool = new_pool()
        await pool.start()
        with pytest.raises(WorkFailed):
            await run(pool, "spin", cpu_seconds=0.1)
        results.append(await run(pool, "echo", 1))
        await pool.stop()

    thread = threading.Thread(target=lambda: asyncio.run(both()))
    thread.start()
    thread.join()
    assert results == [1]


async def test_workers_die_with_their_parent() -> None:
    program = f"""
import asyncio, psutil
from pathlib import Path
from gym_serve.workers import WorkerPool

async def main():
    pool = WorkerPool("test", Path({str(WORK)!r}), 2, memory_bytes={MEMORY})
    await pool.start()
    busy = asyncio.create_task(pool.run(["spin", None], cpu_seconds=1000))
    await asyncio.sleep(0.2)
    print(*(worker.pid for worker in psutil.Process().children()), flush=True)
    await busy

asyncio.run(main())
"""
    command = [sys.executable, "-c", program]
    parent = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    pids = [int(pid) for pid in (await parent.stdout.readline()).split()]
    assert len(pids) == 2
    parent.kill()
    await parent.communicate()
    await until(lambda: not any(map(is_running, pids)))


async def test_cpu_time_of_a_busy_machine(pool: WorkerPool) -> None:
    """A request that takes three quarters of its time when alone is no failure beside four times the load."""
    burners = [
        # Sessions of their own, as the scheduler is fair to sessions.
        await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass", start_new_session=True)
        for _ in range(4 * (os.cpu_count() or 1))
    ]
    try:
        assert await run(pool, "burn", 0.6, cpu_seconds=0.8) == 0.6
    finally:
        for burner in burners:
            burner.kill()
            await burner.wait()
