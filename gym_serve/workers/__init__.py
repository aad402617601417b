"""Work on hostile input, in warm processes with a limit of CPU time and memory.

    pool = WorkerPool("math-verify", Path("worker.py"), 2, memory_bytes=1 << 30)
    await pool.start()
    try:
        result = await pool.run(["1/2", "0.5"], cpu_seconds=20)
    except WorkFailed as failure:  # the input is at fault: a score of 0, with `str(failure)` as the reason
        ...

A thread cannot be stopped, and holds the interpreter's lock inside C code; a process can be killed. It
does not confine code: programs that a model wrote run in `gym_serve.sandbox`.
"""

from gym_serve.workers.pool import WorkerPool, WorkFailed

__all__ = ["WorkFailed", "WorkerPool"]
