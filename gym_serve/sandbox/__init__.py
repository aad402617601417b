"""Running code that nobody has read: a sandbox, Python processes in it, and a pool of warm ones.

    sandbox = find_sandbox("bubblewrap")
    pool = SandboxPool(sandbox, Limits(), size=2)
    await pool.start()
    python = await pool.take()
    print(await python.execute("1 + 1", timeout=10, output_limit=10_000))
    await python.stop()

It stands beside the servers, not in an environment, as environments and agents may import nothing
else, and each that runs code needs the same one.
"""

from gym_serve.sandbox.process import Execution, ProgramRun, SandboxDied, SandboxedPython, SandboxPool
from gym_serve.sandbox.providers import (
    Bubblewrap,
    Limits,
    PlainProcess,
    Sandbox,
    SandboxName,
    find_sandbox,
    sandbox_problems,
)

__all__ = [
    "Bubblewrap",
    "Execution",
    "Limits",
    "PlainProcess",
    "ProgramRun",
    "Sandbox",
    "SandboxDied",
    "SandboxName",
    "SandboxPool",
    "SandboxedPython",
    "find_sandbox",
    "sandbox_problems",
]
