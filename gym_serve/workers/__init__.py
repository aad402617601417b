"""A pool of warm processes that work on hostile input, with limits of CPU time and memory.

    pool = WorkerPool("math-verify", Path("worker.py"), 2, memory_bytes=1 << 30)
    await pool.start()
    try:
        result = await pool.run(["1/2", "0.5"], cpu_seconds=20)
    except WorkFailed as failure:  # the input is at fault: score it 0, with `str(failure)` as the reason
        ...

The pool does not confine code: programs that a model wrote run in `gym_serve.sandbox`.
"""

from gym_serve.workers.pool import WorkerPool, WorkFailed, give_up_at

__all__ = ["WorkFailed", "WorkerPool", "give_up_at"]
