"""Running untrusted code: a sandbox, Python processes in it, and a pool of warm ones.

    sandbox = find_sandbox("bubblewrap")
    pool = SandboxPool(sandbox, Limits(), size=2)
    await pool.start()
    python = await pool.take()
    print(await python.execute("1 + 1", timeout=10, output_limit=10_000))
    await python.stop()

It is a library below the servers, because every environment and agent that runs code needs it. `inside` runs
in the sandbox and uses the standard library alone.
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
