"""A process whose parent is killed ends by itself."""

from __future__ import annotations

import subprocess
import sys

import psutil
from support.waiting import until

CHILD = """
import asyncio, os
from gym_serve.workers.pool import end_with_parent

async def main():
    watching = asyncio.ensure_future(end_with_parent(os.getppid()))
    print(os.getpid(), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


async def test_a_process_whose_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE)  # noqa: ASYNC220
    assert parent.stdout is not None
    with parent.stdout:
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.is_running()
        parent.kill()
        parent.wait()
        assert await until(lambda: not child.is_running()) < 20
