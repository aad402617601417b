"""`VerifierPool`: time-outs, deaths, cancellation, and what is left afterwards (nothing)."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from gym_serve.environments.math_with_judge import process
from gym_serve.environments.math_with_judge.pool import VerifierPool
from gym_serve.types.errors import Unavailable, VerifierFailed

MEMORY = 2 << 30
LONG = 60.0
ENDLESS = "\\boxed{9^{9^9}}"
TERMS = "+".join(f"x^{{{n}}}" for n in range(200))
SLOW = f"\\boxed{{\\frac{{x^{{200}}-1}}{{x-1}}-({TERMS})}}"  # 0, after about a second


def workers() -> list[psutil.Process]:
    """The running ones; other environments' tests may have left processes of theirs."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if any(part.endswith("math_with_judge/worker.py") for part in child.cmdline()):
                found.append(child)
    return found


async def eventually(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - of other processes, which set no event
        await asyncio.sleep(0.01)


async def equal(pool: VerifierPool, gold: str, answer: str, timeout: float = LONG) -> bool:
    return (await pool.verify(f"\\boxed{{{gold}}}", answer, timeout=timeout)).equal


@pytest.fixture
async def pool() -> AsyncIterator[VerifierPool]:
    pool = VerifierPool(1, memory_bytes=MEMORY)
    await pool.start()
    yield pool
    await pool.stop()
    assert workers() == []


async def test_compares(pool: VerifierPool) -> None:
    comparison = await pool.verify("\\boxed{\\frac34}", "It is \\boxed{0.75}.", timeout=LONG)
    assert comparison == (True, "0.750000000000000", "0.75")
    assert await pool.verify("\\boxed{\\frac12}", "Who knows?", timeout=LONG) == (False, None, None)


async def test_time_out_costs_one_worker() -> None:
    pool = VerifierPool(2, memory_bytes=MEMORY)
    await pool.start()
    try:
        before = {worker.pid for worker in workers()}
        with pytest.raises(VerifierFailed, match="took over"):
            await equal(pool, "42", ENDLESS, timeout=0.2)
        await eventually(lambda: len(workers()) == 2)
        assert len(before & {worker.pid for worker in workers()}) == 1
        assert await asyncio.gather(*(equal(pool, str(n), f"\\boxed{{{n}}}") for n in range(4))) == [True] * 4
    finally:
        await pool.stop()
    assert workers() == []


async def test_time_in_the_queue_does_not_count(pool: VerifierPool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(worker: process.WorkerProcess, request: list[str]) -> dict[str, Any]:
        await asyncio.sleep(0.2 if request[1] == SLOW else 0)
        return {"equal": True, "extracted": None, "written": None, "spent": False}

    monkeypatch.setattr(process.WorkerProcess, "ask", ask)
    slow = asyncio.create_task(equal(pool, "0", SLOW))
    quick = [asyncio.create_task(equal(pool, "5", "\\boxed{5}", timeout=0.1)) for _ in range(20)]
    assert await asyncio.gather(slow, *quick) == [True] * 21


async def test_first_in_first_out(pool: VerifierPool) -> None:
    done: list[int] = []

    async def one(n: int) -> None:
        await equal(pool, str(n), f"\\boxed{{{n}}}")
        done.append(n)

    await asyncio.gather(*map(one, range(10)))
    assert done == list(range(10))


async def test_idle_worker_killed_from_outside(pool: VerifierPool) -> None:
    [worker] = workers()
    worker.kill()
    assert await equal(pool, "5", "\\boxed{5}")
    assert [child.status() != psutil.STATUS_ZOMBIE for child in workers()] == [True]


async def test_busy_worker_killed_from_outside(pool: VerifierPool) -> None:
    [worker] = workers()
    idle = worker.cpu_times().user
    task = asyncio.create_task(equal(pool, "0", SLOW))
    await eventually(lambda: worker.cpu_times().user > idle)
    worker.kill()
    assert await task  # tried once more, if it was not done
    assert await equal(pool, "5", "\\boxed{5}")


async def test_answer_that_kills_every_worker(pool: VerifierPool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, asked_again = asyncio.Event(), asyncio.Event()
    ask = process.WorkerProcess.ask

    async def noted(worker: process.WorkerProcess, request: list[str]) -> dict[str, Any]:
        (asked_again if asked.is_set() else asked).set()
        return await ask(worker, request)

    monkeypatch.setattr(process.WorkerProcess, "ask", noted)
    first = workers()[0]
    task = asyncio.create_task(equal(pool, "42", ENDLESS))
    await asked.wait()
    first.kill()
    await eventually(lambda: any(worker.pid != first.pid for worker in workers()))
    second = next(worker for worker in workers() if worker.pid != first.pid)
    await asked_again.wait()
    second.kill()
    with pytest.raises(VerifierFailed, match=r"two math-verify workers died on this answer.* signal 9"):
        await task
    assert await equal(pool, "5", "\\boxed{5}")


async def test_cancelled_in_the_queue_and_at_work(pool: VerifierPool) -> None:
    at_work = asyncio.create_task(equal(pool, "42", ENDLESS, timeout=0.5))
    queued = [asyncio.create_task(equal(pool, "42", ENDLESS)) for _ in range(50)]
    await asyncio.sleep(0.1)
    for task in (at_work, *queued):
        task.cancel()
    outcomes = await asyncio.gather(at_work, *queued, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    assert await equal(pool, "5", "\\boxed{5}")


async def test_cancelled_quick_task_keeps_its_worker(pool: VerifierPool) -> None:
    before = workers()
    task = asyncio.create_task(equal(pool, "0", SLOW))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await equal(pool, "5", "\\boxed{5}")
    assert workers() == before


async def test_stop_ends_waiting_tasks() -> None:
    pool = VerifierPool(1, memory_bytes=MEMORY)
    await pool.start()
    tasks = [asyncio.create_task(equal(pool, "42", ENDLESS)) for _ in range(3)]
    await asyncio.sleep(0.1)
    await pool.stop()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Unavailable] * 3
    assert workers() == []
    with pytest.raises(Unavailable, match="not running"):
        await equal(pool, "5", "\\boxed{5}")
    await pool.stop()


async def test_worker_with_much_memory_in_use_is_replaced() -> None:
    pool = VerifierPool(1, memory_bytes=100 << 20)  # half of it is less than SymPy alone
    await pool.start()
    try:
        before = workers()
        assert await equal(pool, "5", "\\boxed{5}")
        assert await equal(pool, "5", "\\boxed{5}")
        assert workers() != before
        assert not await equal(pool, "5", "\\boxed{2^{10^8}+1}")  # more than it may have
        assert await equal(pool, "5", "\\boxed{5}")
    finally:
        await pool.stop()


async def test_worker_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    pool = VerifierPool(1, memory_bytes=MEMORY)
    await pool.start()
    try:
        assert "sk-secret" not in workers()[0].environ().values()
    finally:
        await pool.stop()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("raise SystemExit(3)", "exit status 3"),
        ("import os; os.kill(os.getpid(), 11)", "signal 11"),
        (
            """import socket
connection = socket.socket(fileno=0)
connection.sendall(b'{"error": "No module named math_verify"}\\n')
connection.recv(1)
""",
            r"pip install 'gym-serve\[math\]'",
        ),
    ],
)
async def test_worker_that_does_not_start(
    script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "worker.py"
    path.write_text(script)
    monkeypatch.setattr(process, "_SCRIPT", path)
    pool = VerifierPool(2, memory_bytes=MEMORY)
    with pytest.raises(VerifierFailed, match=message):
        await pool.start()
    assert workers() == []


async def test_replacement_that_does_not_start(
    pool: VerifierPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(process, "_SCRIPT", tmp_path / "missing.py")
        with pytest.raises(VerifierFailed, match="took over"):
            await equal(pool, "42", ENDLESS, timeout=0.2)
        with pytest.raises(VerifierFailed, match="does not start"):
            await equal(pool, "5", "\\boxed{5}")
        await eventually(lambda: workers() == [])
    assert await equal(pool, "5", "\\boxed{5}")


def test_event_loop_outside_the_main_thread() -> None:
    results: list[bool] = []

    async def run() -> None:
        pool = VerifierPool(1, memory_bytes=MEMORY)
        await pool.start()
        with pytest.raises(VerifierFailed):
            await equal(pool, "42", ENDLESS, timeout=0.2)
        results.append(await equal(pool, "5", "\\boxed{5}"))
        await pool.stop()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    thread.join()
    assert results == [True]


async def test_workers_die_with_their_parent() -> None:
    program = f"""
import asyncio, psutil
from gym_serve.environments.math_with_judge.pool import VerifierPool

async def main():
    pool = VerifierPool(2, memory_bytes={MEMORY})
    await pool.start()
    busy = asyncio.create_task(pool.verify("1", {ENDLESS!r}, timeout=1000))
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
    await eventually(lambda: not any(map(alive, pids)))


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
