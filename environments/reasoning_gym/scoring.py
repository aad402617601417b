"""Scoring by the package's verifiers, in a process of its own.

None of them runs an answer: in the package's modules ``eval``, ``exec`` and SymPy's ``parse_expr`` refuse
(five families get a reader of literals for ``eval``). As a second barrier, an audit hook refuses to run code
that is made of text, to start programs and to connect, from the moment that an answer is there. Each answer
is scored in a child that is forked for it, and can be killed.
"""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, NamedTuple

from gym_serve.environments.reasoning_gym.families import LITERALS
from gym_serve.sandbox import Confinement, Limits, ProgramRun, SandboxDied, SandboxedPython
from gym_serve.types.errors import InvalidRequest, VerifierFailed

PRELUDE = (
    f"_LITERALS = {sorted(LITERALS)!r}"
    + '''
import ast
import sys

import sympy

import reasoning_gym
from reasoning_gym.factory import DATASETS

_parse_expr = sympy.parse_expr


def _refuse(*args, **kwargs):
    raise ValueError("an answer is not run")


for _name, _module in list(sys.modules.items()):
    if _name.startswith("reasoning_gym."):
        _module.eval = _module.exec = _refuse
        if getattr(_module, "parse_expr", None) is _parse_expr:
            _module.parse_expr = _refuse
for _name in _LITERALS:
    sys.modules[DATASETS[_name][0].__module__].eval = ast.literal_eval
sympy.parse_expr = sympy.sympify = _refuse

_answered = []
_REFUSED = {
    "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.system", "socket.connect", "subprocess.Popen"
}


def _barrier(event, args):
    if _answered and (
        event in _REFUSED or (event == "exec" and args[0].co_filename in ("<string>", "<unknown>", ""))
    ):
        raise ValueError("an answer is not run")


sys.addaudithook(_barrier)


class Given(dict):
    """A part of the row, which remembers what a verifier looked for in vain."""

    missing = []

    def __missing__(self, key):
        self.missing.append(key)
        raise KeyError(key)
'''
)  # run once in each process; `score` below finds its names

_SCORE = """
def score(task, answer, entry):
    if task not in DATASETS or task == "composite":  # an item of which names the family that it is of
        return {"unknown": True}
    metadata = entry["metadata"] = Given(entry["metadata"])
    if task in ("arc_agi", "rearc"):  # their boards are tuples of tuples, which JSON makes lists of
        for board in {"input", "output"} & metadata.keys():
            metadata[board] = tuple(map(tuple, metadata[board]))
    entry = Given(entry)
    score_answer = reasoning_gym.get_score_answer_fn(task)
    _answered.append(True)
    try:
        score, reason = float(score_answer(answer=answer, entry=entry)), None
    except Exception as error:
        score, reason = 0.0, f"{type(error).__name__}: {error}"[:500]
    return {"score": score, "reason": reason, "missing": Given.missing[:1]}
"""

_OUTPUT_LIMIT = 10_000


class Scored(NamedTuple):
    """The library's score of an answer; 0.0 with a reason if there is none."""

    score: float
    reason: str | None


class ScoringPool:
    """A fixed number of warm processes, each using one core while it works."""

    def __init__(self, sandbox: Confinement, limits: Limits, *, size: int) -> None:
        self._processes = [SandboxedPython(sandbox, limits, PRELUDE) for _ in range(size)]
        self._free: asyncio.Queue[SandboxedPython] = asyncio.Queue()

    async def start(self) -> None:
        try:
            await asyncio.gather(*(process.start() for process in self._processes))
        except BaseException:
            await self.stop()
            raise
        for process in self._processes:
            self._free.put_nowait(process)

    async def stop(self) -> None:
        await asyncio.gather(*(process.stop() for process in self._processes))

    async def score(self, task: str, answer: str, entry: dict[str, Any], *, timeout: float) -> Scored:
        """The library's score of an answer to an item; 0.0 with a reason if it cannot be scored, or not in
        time. Raises InvalidRequest: there is no such family, or the item lacks what it needs; VerifierFailed:
        the process died, or the machine is too busy to tell.
        """
        process = await self._free.get()
        try:
            run = await self._run(process, [task, answer, entry], timeout)
        finally:
            self._free.put_nowait(process)
        if run.starved:
            raise VerifierFailed("the machine is overloaded: scoring got less than a tenth of a processor")
        if run.timed_out:
            return Scored(0.0, f"it takes more than {timeout:g} s to score")
        if run.value is None:
            how = run.stderr.strip().rpartition("\n")[2][:500] or f"its process ended with {run.status}"
            return Scored(0.0, f"the verifier fails on it: {how}")
        result = json.loads(run.value)
        if "unknown" in result:
            raise InvalidRequest(f"metadata.source_dataset: reasoning-gym has no task {task[:100]!r}")
        if result["missing"]:
            raise InvalidRequest(f"the row lacks {str(result['missing'][0])[:100]!r}, which {task} needs")
        if result["reason"] is not None:
            return Scored(0.0, f"the verifier fails on it: {result['reason']}")
        score = float(result["score"])
        if not math.isfinite(score):
            return Scored(0.0, f"the verifier scores it {score}")
        return Scored(score, None)

    async def _run(self, process: SandboxedPython, arguments: list[Any], timeout: float) -> ProgramRun:
        for _ in range(2):
            if not process.running:
                await process.start()
            try:
                return await process.run(
                    _SCORE, timeout=timeout, output_limit=_OUTPUT_LIMIT, function="score", arguments=arguments
                )
            except SandboxDied as error:
                end = error  # not by the answer, which has a process of its own
        raise VerifierFailed(f"two scoring processes died: {end}")
