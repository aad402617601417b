"""Running untrusted code: boxes for whole tasks, and Python processes for single programs.

    provider = find_provider("bubblewrap")
    box = await provider.create(SandboxSpec(workdir="/app"))
    print((await box.exec("make test", timeout=60)).text)
    await box.close()

    pool = SandboxPool(find_sandbox("bubblewrap"), Limits(), size=2)
    await pool.start()
    python = await pool.take()
    print(await python.execute("1 + 1", timeout=10, output_limit=10_000))
    await python.stop()

It is a library below the servers. `inside` runs in the sandbox and uses the standard library alone.
"""

from gym_serve.sandbox.boxes import (
    BuildsImages,
    ExecResult,
    Keeps,
    Listens,
    Sandbox,
    SandboxProvider,
    SandboxRefused,
    SandboxSpec,
    find_provider,
    provider_problems,
)
from gym_serve.sandbox.pools import BoxPool
from gym_serve.sandbox.process import Execution, ProgramRun, SandboxDied, SandboxedPython, SandboxPool
from gym_serve.sandbox.providers import (
    Bubblewrap,
    Confinement,
    Limits,
    PlainProcess,
    SandboxName,
    find_sandbox,
    sandbox_problems,
)

__all__ = [
    "BoxPool",
    "Bubblewrap",
    "BuildsImages",
    "Confinement",
    "ExecResult",
    "Execution",
    "Keeps",
    "Limits",
    "Listens",
    "PlainProcess",
    "ProgramRun",
    "Sandbox",
    "SandboxDied",
    "SandboxName",
    "SandboxPool",
    "SandboxProvider",
    "SandboxRefused",
    "SandboxSpec",
    "SandboxedPython",
    "find_provider",
    "find_sandbox",
    "provider_problems",
    "sandbox_problems",
]
