"""The catalogue of attacks on the sandbox, and running it.

    python -m support.attacks      as this user: prints a JSON object, what each attack got by its name

`sandbox_attacks.yaml` beside the tests says what each must get.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from gym_serve.environments.code_gen.running import (
    KILLED,
    PRELUDE,
    RUNTIME_ERROR,
    TIMED_OUT,
    WRONG_ANSWER,
    TestLimits,
    TestReport,
    UnitTests,
    run_tests,
)
from gym_serve.sandbox import Confinement, Limits, SandboxDied, SandboxedPython, find_sandbox
from gym_serve.types.errors import GymError

__all__ = ["ATTACKS", "CATALOGUE", "Attack", "outcomes"]

_FILE = yaml.safe_load(Path(__file__).parents[1].joinpath("sandbox/sandbox_attacks.yaml").read_text())
_ENDS = {KILLED: "killed", WRONG_ANSWER: "wrong answer", TIMED_OUT: "time", RUNTIME_ERROR: "exception"}
_LIMITS = Limits(memory_bytes=512 << 20, file_bytes=32 << 20, disk_bytes=8 << 20)
_SECONDS = 1.0
_TESTS = {
    None: ("", "reached\n"),
    "gcd": ("12\n18", "6"),
    "sorted": ("[2, 1]", "[1, 2]"),
    "factorial": ("3", "6"),
    "": ("1", '"reached"'),
}
"""Input and output by the function that is tested."""
_AT_ONCE = 2


class Attack(NamedTuple):
    """A program and what it must get."""

    name: str
    kind: str
    program: str
    function: str | None
    gets: tuple[str, ...]
    spoils: bool
    machine: str | None

    def got(self, outcome: str) -> bool:
        """Whether an outcome is one that it may get: the same end, and a reason that starts as it should."""
        end, _, reason = outcome.partition(": ")
        wanted = [gets.partition(": ") for gets in self.gets]
        return any(end == want and reason.startswith(start) for want, _, start in wanted)


def _attacks() -> list[Attack]:
    return [
        Attack(
            entry["name"],
            entry["class"],
            f"{_FILE['helpers']}\n{entry['program']}",
            entry.get("function"),
            tuple(entry["gets"]) if isinstance(entry["gets"], list) else (entry["gets"],),
            entry.get("spoils", False),
            entry.get("machine"),
        )
        for entry in _FILE["attacks"]
    ]


CATALOGUE = _attacks()

ATTACKS = [attack for attack in CATALOGUE if attack.machine in (None, os.uname().machine)]
"""Those for this machine's numbers of system calls."""


async def outcomes(sandbox: Confinement, attacks: list[Attack]) -> dict[str, str]:
    """What each attack gets; several share a sandbox, which must survive them all.

    Returns:
        by name, e.g. ``"exception: PermissionError: ..."``; ``"SCORED"`` for one that is passed as right,
        ``"FAILURE: ..."`` for one that makes the verifier fail.
    """
    found: dict[str, str] = {}
    waiting = list(reversed(attacks))

    async def work() -> None:
        python = SandboxedPython(sandbox, _LIMITS, PRELUDE)
        await python.start()
        try:
            await _check_apart(python)
            while waiting:
                attack = waiting.pop()
                found[attack.name] = await _outcome(python, attack)
                if attack.spoils:
                    await python.stop()
                if not python.running:
                    await python.start()
        finally:
            await python.stop()

    await asyncio.gather(*(work() for _ in range(_AT_ONCE)))
    return found


async def _check_apart(python: SandboxedPython) -> None:
    """Attack nothing that is not apart: what follows signals and limits the first process that there is."""
    for name in ("pid", "mnt", "net"):
        link = f"/proc/self/ns/{name}"
        run = await python.run(f"import os; print(os.readlink({link!r}))", timeout=60, output_limit=1000)
        assert run.stdout.strip() not in ("", os.readlink(link)), run


async def _outcome(python: SandboxedPython, attack: Attack) -> str:
    given, expected = _TESTS.get(attack.function, _TESTS[""])
    tests = UnitTests(inputs=[given], outputs=[expected], fn_name=attack.function)
    try:
        report, limits = TestReport(), TestLimits(_SECONDS, budget=10 * _SECONDS, tolerance=0)
        await run_tests(python, attack.program, tests, report, limits=limits, others_wait=lambda: False)
        after = await python.run("print(6 * 7)", timeout=60, output_limit=100)
    except (SandboxDied, GymError) as error:
        return f"FAILURE: {error}"
    if report.fault is None:
        return "SCORED"
    if after.stdout != "42\n" and not attack.spoils:
        return f"FAILURE: the next program gets {after}"
    end, error = _ENDS[report.fault["error_code"]], report.fault["error"]
    return f"{end}: {error}" if error else end


def main() -> None:
    names: Any = sys.argv[1:]
    chosen = [attack for attack in ATTACKS if not names or attack.name in names]
    print(json.dumps(asyncio.run(outcomes(find_sandbox("bubblewrap"), chosen)), indent=1))


if __name__ == "__main__":
    main()
