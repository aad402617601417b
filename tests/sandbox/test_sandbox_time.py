"""Whose time it is: what a program is charged with, on a busy machine and with many threads."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from support.sandboxes import AVAILABLE, sandbox_of

from gym_serve.sandbox import Limits, SandboxedPython
from gym_serve.sandbox.inside import watch
from gym_serve.sandbox.inside.watch import Excess, Watch

pytestmark = pytest.mark.alone

CORES = len(os.sched_getaffinity(0))
WORK = """
import time
while time.process_time() < {seconds}: pass
print("done")
"""


@pytest_asyncio.fixture
async def python() -> AsyncIterator[SandboxedPython]:
    python = SandboxedPython(sandbox_of(AVAILABLE), Limits())
    await python.start()
    yield python
    await python.stop()


@pytest.fixture
def load() -> Iterator[None]:
    """Four times as many processes as there are cores, each of which wants one."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4 * CORES)]
    yield
    for burner in burners:
        burner.kill()
        burner.wait()


# On a real machine


@pytest.mark.usefixtures("load")
async def test_waiting_for_a_busy_machine_costs_nothing(python: SandboxedPython) -> None:
    """It needs more than half of its time, and several times that by the clock."""
    run = await python.run(WORK.format(seconds=0.5), timeout=0.9, output_limit=100)
    assert (run.stdout, run.timed_out, run.starved) == ("done\n", False, False)
    cell = f"import time; start = time.process_time()\n{WORK.format(seconds='start + 0.5')}"
    done = await python.execute(cell, timeout=0.9, output_limit=100)
    assert (done.stdout, done.error) == ("done\n", None)


async def test_all_threads_count(python: SandboxedPython) -> None:
    """Ten threads with a tenth of the time each use it up together; that is no busy machine."""
    program = """
import hashlib, threading, time
def work():
    while time.thread_time() < 0.2: hashlib.pbkdf2_hmac("sha256", b"x", b"y", 1000)
for _ in range(10): threading.Thread(target=work).start()
"""
    run = await python.run(program, timeout=1, output_limit=100)
    assert (run.timed_out, run.starved) == (True, False)
    run = await python.run(program, timeout=20, output_limit=100)
    assert (run.status, run.timed_out, run.starved) == (0, False, False)


@pytest.mark.skipif(CORES < 2, reason="there is one core")
async def test_threads_share_a_core(python: SandboxedPython) -> None:
    program = """
import os, threading, time
before = len(os.sched_getaffinity(0))
threading.Thread(target=time.sleep, args=(99,), daemon=True).start()
while len(os.sched_getaffinity(0)) > 1: time.sleep(0.001)
print(before > 1)
"""
    assert (await python.run(program, timeout=10, output_limit=100)).stdout == "True\n"


# As the kernel's numbers would have it


class Machine:
    """What a kernel says of one process.

    Attributes:
        now: seconds by the clock.
        ran: seconds that all of its threads ran, those that have ended included.
        threads: by number, for how long each ran and wanted to run.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.ran = 100.0, 0.0
        self.threads: dict[int, tuple[float, float]] = {1: (0.0, 0.0)}
        monkeypatch.setattr(watch, "_LINUX", False)  # no files to look at
        monkeypatch.setattr(watch.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(watch, "_processor_seconds", lambda process: self.ran)
        monkeypatch.setattr(watch, "_threads", lambda process: set(self.threads))
        monkeypatch.setattr(watch, "_times", lambda process, thread: self.threads[thread])

    def after(self, seconds: float, ran: float, **threads: tuple[float, float]) -> None:
        self.now, self.ran = 100 + seconds, ran
        self.threads = {int(name[1:]): times for name, times in threads.items()}


@pytest.mark.parametrize(
    ("seconds", "ran", "threads", "expected"),
    [
        (0.9, 0.9, {"t1": (0.9, 0.0)}, None),
        (1.1, 1.1, {"t1": (1.1, 0.0)}, "time"),
        (1.1, 0.0, {"t1": (0.0, 0.0)}, "time"),  # it slept
        (5.0, 0.9, {"t1": (0.9, 4.1)}, None),  # it waited for the machine
        (5.0, 0.5, {"t1": (0.5, 3.0)}, "time"),  # for a part of it: it slept for the rest
        (9.9, 0.9, {"t1": (0.9, 9.0)}, None),
        (10.1, 0.9, {"t1": (0.9, 9.2)}, "machine"),
        (0.5, 1.1, {"t1": (0.3, 0.0), "t2": (0.8, 0.0)}, "time"),  # on two cores
        (0.9, 0.9, {f"t{n}": (0.0225, 0.8775) for n in range(1, 41)}, None),
        (1.2, 1.2, {f"t{n}": (0.03, 1.17) for n in range(1, 41)}, "time"),  # they wait for one another
        (1.2, 0.3, {"t1": (0.15, 1.05), "t2": (0.15, 1.05)}, None),  # for one another, and for others
        (1.2, 0.3, {"t1": (0.15, 0.15), "t2": (0.15, 0.15)}, "time"),  # for one another, and slept
        (1.2, 1.1, {"t9": (0.1, 1.1)}, "time"),  # those that it waited for have ended
    ],
)
def test_what_counts(
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    ran: float,
    threads: dict[str, tuple[float, float]],
    expected: Excess | None,
) -> None:
    machine = Machine(monkeypatch)
    clock = Watch(0)
    machine.after(seconds, ran, **threads)
    assert clock.excess(1.0) == expected


def test_what_was_before_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session's process is older than the call, and has waited before."""
    machine = Machine(monkeypatch)
    machine.after(50, 7.0, t1=(7.0, 40.0))
    clock = Watch(0)
    machine.after(51.1, 8.05, t1=(8.05, 40.05))
    assert clock.excess(1.0) == "time"
    machine.after(51.1, 7.6, t1=(7.6, 40.6))
    assert clock.excess(1.0) is None


def test_it_looks_often_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    clock = Watch(0)
    naps = []
    for seconds in (0, 0.05, 0.1, 60):
        machine.now = 100 + seconds
        naps.append(round(clock.nap, 6))
    assert naps == [0.0005, 0.005, 0.01, 0.02]
