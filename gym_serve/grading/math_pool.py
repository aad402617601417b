"""`MathVerifyPool`: math-verify in warm worker processes.

An answer that takes too much CPU time or memory, or that crashes the library, is wrong, and its `Comparison`
says why. A row whose right answer cannot even be compared with itself is `InvalidRequest`.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_serve.grading.answers import ending, excerpt
from gym_serve.grading.math_text import ask
from gym_serve.grading.math_worker import Comparison
from gym_serve.types.errors import InvalidRequest, VerifierFailed
from gym_serve.workers import WorkerPool, WorkFailed

_WORK = Path(__file__).with_name("math_worker.py")
_KEPT = 1024
_LONG = 10_000  # characters that take longer to read than another thread to be called


@dataclass
class _Flight:
    work: asyncio.Future[Any]
    passengers: int = 0


class MathVerifyPool(WorkerPool):
    """Workers that compare answers, each using one core while it works."""

    def __init__(self, num_workers: int, *, memory_bytes: int) -> None:
        super().__init__("math-verify", _WORK, num_workers, memory_bytes=memory_bytes)
        self._sound: OrderedDict[str, None] = OrderedDict()  # right answers that equal themselves
        self._failed: OrderedDict[str, str] = OrderedDict()  # comparisons that failed, with the reason
        self._flights: dict[str, _Flight] = {}  # comparisons that are waited for

    async def start(self) -> None:
        """Start the workers; returns when all are warm, after one to three seconds. Raises VerifierFailed: a
        worker did not start, with its reason (math-verify is not installed, ...).
        """
        try:
            await super().start()
        except VerifierFailed as error:
            if "math_verify" not in error.message:
                raise
            raise VerifierFailed(f"{error.message}; pip install 'gym-serve[math]'") from None

    async def verify(
        self, gold: str, answer: str, *, timeout: float, until: float | None = None
    ) -> Comparison:
        r"""Compare the answer in a text with the right one, in ``\\boxed{}``; see `WorkerPool.run` for
        ``until``. Raises InvalidRequest: the right answer cannot be compared, not even with itself;
        VerifierFailed: a worker was killed from outside, or got almost no CPU time; Unavailable: the pool is
        not running.
        """
        question = await asyncio.to_thread(ask, gold, answer) if len(answer) > _LONG else ask(gold, answer)
        written = question.written
        if gold not in self._sound:
            await self._check(gold, timeout)
            self._sound[gold] = None
            while len(self._sound) > _KEPT:
                self._sound.popitem(last=False)
        else:
            self._sound.move_to_end(gold)
        if not question.pairs:
            return Comparison(question.difference is None, written, written)
        try:
            done = Comparison(**await self._shared(question.pairs, timeout, until))
        except WorkFailed as failure:
            return Comparison(False, None, None, str(failure))
        return done if written is None or done.reason else done._replace(written=written)

    async def _check(self, gold: str, timeout: float) -> None:
        """Compare a right answer with itself, before all answers that wait: they depend on it."""
        try:
            if pairs := ask(gold, gold).pairs:
                await self.run(pairs, cpu_seconds=timeout, urgent=True)
        except WorkFailed as failure:
            what = f"{failure}: {gold[:200]}"
            raise InvalidRequest(f"the expected answer cannot be compared with itself: {what}") from None

    async def _shared(self, pairs: list[tuple[str, str]], timeout: float, until: float | None) -> Any:
        """The result of a comparison, which all who ask for the same at the same time wait for together."""
        key = json.dumps([pairs, timeout])
        if key in self._failed:
            raise WorkFailed(self._failed[key])
        flight = self._flights.get(key)
        if flight is None:
            flight = _Flight(asyncio.ensure_future(self.run(pairs, cpu_seconds=timeout, until=until)))
            self._flights[key] = flight
        flight.passengers += 1
        try:
            return await asyncio.shield(flight.work)
        except WorkFailed as failure:
            self._failed[key] = str(failure)
            if len(self._failed) > _KEPT:
                self._failed.popitem(last=False)
            raise
        finally:
            flight.passengers -= 1
            if flight.passengers == 0 or flight.work.done():
                flight.work.cancel()
                if self._flights.get(key) is flight:
                    del self._flights[key]


def why_unequal(gold: str, answer: str, comparison: Comparison) -> str:
    r"""Why an answer was not found equal, in a sentence for people."""
    if comparison.reason is not None:
        return comparison.reason
    question = ask(gold, answer)
    expected = excerpt(gold.removeprefix(r"\boxed{").removesuffix("}"))
    if comparison.written is None:
        return f"expected {expected}, but no box, no line 'Answer: X' and no formula found: {ending(answer)}"
    detail = f" ({question.difference})" if question.difference else ""
    return f"expected {expected}, got {excerpt(comparison.written)}{detail}"
