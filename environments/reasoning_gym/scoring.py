"""Scoring by the library, in a process of its own.

Some families of reasoning-gym call ``eval`` or SymPy's ``parse_expr`` on the answer, which runs whatever a
model writes. In the prelude these are replaced: ``eval`` by a reader of literals, ``parse_expr`` by one that
refuses names of builtins, attributes and strings. What is left is work without bounds (``9**9**9``), and
a process can be killed. Processes stay warm: each answer is scored in a child that is forked for it.
"""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, NamedTuple

from gym_serve.sandbox import Limits, ProgramRun, Sandbox, SandboxDied, SandboxedPython
from gym_serve.types.errors import InvalidRequest, VerifierFailed

PRELUDE = '''
import ast
import builtins
import re
import sys

import sympy

import reasoning_gym
from reasoning_gym.factory import DATASETS

_REFUSED = (set(dir(builtins)) - {"abs", "complex", "float", "int", "max", "min", "pow", "round", "sum"}) | {
    "lambdify", "parse_expr", "plot", "preview", "source", "sympify",
}
_CODE = re.compile(r"""["'\\[\\]{}:;=@\\\\`]|\\.\\s*[A-Za-z_]""")
_parse_expr = sympy.parse_expr


def _safe_parse_expr(text, *args, **kwargs):
    if _CODE.search(text) or any(
        name.startswith("_") or name in _REFUSED for name in re.findall(r"[^\\W\\d]\\w*", text)
    ):
        raise ValueError("not a mathematical expression")
    return _parse_expr(text, *args, **kwargs)


# These evaluate expressions of the item, never the answer.
_TRUSTED = re.compile(r"\\.(basic_arithmetic|bitwise_arithmetic|gsm_symbolic)\\b")
for _name, _module in list(sys.modules.items()):
    if _name.startswith("reasoning_gym."):
        if not _TRUSTED.search(_name):
            _module.eval = ast.literal_eval
        if getattr(_module, "parse_expr", None) is _parse_expr:
            _module.parse_expr = _safe_parse_expr
sympy.parse_expr = _safe_parse_expr
'''
"""Run once in each process; `score` below finds its names."""

_SCORE = """
def score(task, answer, entry):
    if task not in DATASETS:
        return {"unknown": True}
    metadata = entry["metadata"]
    if task in ("arc_agi", "rearc"):  # their boards are tuples of tuples, which JSON makes lists of
        for board in {"input", "output"} & metadata.keys():
            metadata[board] = tuple(map(tuple, metadata[board]))
    return {"score": float(reasoning_gym.get_score_answer_fn(task)(answer=answer, entry=entry))}
"""

_OUTPUT_LIMIT = 10_000


class Scored(NamedTuple):
    """The result of scoring an answer.

    Attributes:
        score: the library's score; 0.0 if there is none.
        reason: why there is none.
    """

    score: float
    reason: str | None


class ScoringPool:
    """A fixed number of warm processes.

    Args:
        sandbox: how they are confined.
        limits: what each may use.
        size: how many there are, each using one core while it works.
    """

    def __init__(self, sandbox: Sandbox, limits: Limits, *, size: int) -> None:
        self._processes = [SandboxedPython(sandbox, limits, PRELUDE) for _ in range(size)]
        self._free: asyncio.Queue[SandboxedPython] = asyncio.Queue()

    async def start(self) -> None:
        """Start the processes; returns when the library is imported in all of them.

        Raises:
            Unavailable: one does not start, with its reason.
        """
        try:
            await asyncio.gather(*(process.start() for process in self._processes))
        except BaseException:
            await self.stop()
            raise
        for process in self._processes:
            self._free.put_nowait(process)

    async def stop(self) -> None:
        """End the processes. Safe to call twice."""
        await asyncio.gather(*(process.stop() for process in self._processes))

    async def score(self, task: str, answer: str, entry: dict[str, Any], *, timeout: float) -> Scored:
        """The library's score of an answer; 0.0 with a reason if it cannot be scored, or not in time.

        Args:
            task: the family.
            answer: the answer.
            entry: the item: ``question``, ``answer``, ``metadata``.
            timeout: seconds, waiting for a processor not included.

        Raises:
            InvalidRequest: there is no such family.
            VerifierFailed: the process died, or the machine is too busy to tell.
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
                    _SCORE,
                    timeout=timeout,
                    output_limit=_OUTPUT_LIMIT,
                    function="score",
                    arguments=arguments,
                )
            except SandboxDied as error:
                end = error  # not by the answer, which has a process of its own
        raise VerifierFailed(f"two scoring processes died: {end}")
