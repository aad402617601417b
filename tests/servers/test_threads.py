"""Plain functions in threads: one that never returns keeps none from the others, and no process alive."""

import asyncio
import contextvars
import subprocess
import sys
import threading
from functools import partial

import pytest

from gym_serve.servers.threads import _MOST, Threads


async def test_functions_that_wait_do_so_at_once() -> None:
    threads, together = Threads(), threading.Barrier(_MOST, timeout=20)
    await asyncio.gather(*(threads.run(together.wait) for _ in range(_MOST)))


async def test_quick_functions_share_a_thread() -> None:
    threads = Threads()
    for _ in range(50):
        await threads.run(int)
    assert len({await threads.run(threading.get_ident) for _ in range(50)}) == 1


async def test_functions_that_never_return_leave_the_others_their_threads() -> None:
    threads, never = Threads(), threading.Event()
    for _ in range(3):
        hanging = [asyncio.create_task(threads.run(never.wait)) for _ in range(_MOST)]
        await asyncio.sleep(0.3)  # each has a thread
        for task in hanging:
            task.cancel()
        await asyncio.wait(hanging)
        assert await asyncio.wait_for(threads.run(partial(int, "7")), 20) == 7
    never.set()


async def test_a_call_that_was_given_up_while_it_waited_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_serve.servers.threads._MOST", 1)
    threads, free, calls = Threads(), threading.Event(), list[int]()
    busy = threads.call(free.wait)
    task = asyncio.create_task(threads.run(partial(calls.append, 1)))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    free.set()
    await busy.result
    await threads.run(partial(calls.append, 2))
    assert calls == [2]


@pytest.mark.parametrize(
    ("error", "raised"),
    [(ValueError("no"), ValueError), (StopIteration(3), RuntimeError), (SystemExit(3), RuntimeError)],
)
async def test_what_a_function_raises(error: BaseException, raised: type[BaseException]) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(raised):
        await Threads().run(fail)


async def test_a_function_sees_the_context_of_its_caller() -> None:
    name = contextvars.ContextVar("name", default="nobody")
    name.set("caller")
    assert await Threads().run(name.get) == "caller"


async def test_idle_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_serve.servers.threads._IDLE_SECONDS", 0.01)
    threads = Threads()
    for _ in range(3):
        thread = await threads.run(threading.current_thread)
        await asyncio.to_thread(thread.join, 20)
        assert not thread.is_alive()


def test_the_process_ends_while_a_function_runs() -> None:
    program = (
        "import asyncio, time\n"
        "from functools import partial\n"
        "from gym_serve.servers.threads import Threads\n"
        "async def main(): await asyncio.wait_for(Threads().run(partial(time.sleep, 3600)), 0.1)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.stderr.endswith("TimeoutError\n")
