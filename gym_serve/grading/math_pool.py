"""`MathVerifyPool`: math-verify in warm worker processes.

An answer that takes too much CPU time or memory, or that crashes the library, is wrong, and its `Comparison`
says why. A row whose right answer cannot even be compared with itself is `InvalidRequest`.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

from gym_serve.grading.math_text import ask
from gym_serve.grading.math_worker import Comparison
from gym_serve.types.errors import InvalidRequest, VerifierFailed
from gym_serve.workers import WorkerPool, WorkFailed

_WORK = Path(__file__).with_name("math_worker.py")
_KEPT = 1024


class MathVerifyPool(WorkerPool):
    """Workers that compare answers.

    Args:
        num_workers: number of processes, each using one core while it works.
        memory_bytes: address space that one worker may use.
    """

    def __init__(self, num_workers: int, *, memory_bytes: int) -> None:
        super().__init__("math-verify", _WORK, num_workers, memory_bytes=memory_bytes)
        self._sound: OrderedDict[str, None] = OrderedDict()
        """Right answers that can be compared with themselves, the latest ones last."""

    async def start(self) -> None:
        """Start the workers; returns when all are warm, after one to three seconds.

        Raises:
            VerifierFailed: a worker did not start, with its reason (math-verify is not installed, ...).
        """
        try:
            await super().start()
        except VerifierFailed as error:
            if "math_verify" not in error.message:
                raise
            raise VerifierFailed(f"{error.message}; pip install 'gym-serve[math]'") from None

    async def verify(self, gold: str, answer: str, *, timeout: float) -> Comparison:
        r"""Compare an answer with the right one in the next free worker.

        Args:
            gold: the right answer, in ``\\boxed{}``.
            answer: text with the answer in it.
            timeout: seconds of CPU time that the comparison may take.

        Raises:
            InvalidRequest: the right answer cannot be compared, not even with itself.
            VerifierFailed: a worker was killed from outside, or got almost no CPU time.
            Unavailable: the pool is not running.
        """
        await self._check(gold, timeout)
        question = ask(gold, answer)
        if question.difference is not None or not question.pairs:
            written = question.written
            return Comparison(question.difference is None, written, written, difference=question.difference)
        try:
            done = Comparison(**await self.run(question.pairs, cpu_seconds=timeout))
        except WorkFailed as failure:
            return Comparison(False, None, None, str(failure))
        return done if question.written is None else done._replace(written=question.written)

    async def _check(self, gold: str, timeout: float) -> None:
        if gold not in self._sound:
            pairs = ask(gold, gold).pairs
            try:
                if pairs:
                    await self.run(pairs, cpu_seconds=timeout)
            except WorkFailed as failure:
                raise InvalidRequest(
                    f"the expected answer cannot be compared with itself: {failure}: {gold[:200]}"
                ) from None
        self._sound[gold] = None
        self._sound.move_to_end(gold)
        if len(self._sound) > _KEPT:
            self._sound.popitem(last=False)
