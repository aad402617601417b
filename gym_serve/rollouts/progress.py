"""How far a collection is: `Progress`, a snapshot, and `Tally`, which keeps count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from gym_serve.rollouts.stamps import is_failure
from gym_serve.types.requests import JSON

__all__ = ["Progress", "Tally"]


@dataclass(frozen=True)
class Progress:
    """The counts of a collection at one moment.

    Attributes:
        total: rollouts to make.
        finished: those that are scored or have failed for good.
        scored: those that have a reward.
        earlier: those that had finished before this process began, in a run that was resumed.
        running: attempts in flight.
        failed_attempts: failed attempts by class, those made good by a later one included.
        mean_reward: mean of the scored ones' rewards; None if there is none.
        comparing: groups whose comparison has not ended; 0 until all rollouts have, and where there is none.
        stopping: what only the operator can mend, once it ends the run: nothing more is started.
    """

    total: int
    finished: int
    scored: int
    earlier: int
    running: int
    failed_attempts: Mapping[str, int]
    mean_reward: float | None
    comparing: int = 0
    stopping: str | None = None

    @property
    def failed(self) -> int:
        """Rollouts that have failed for good."""
        return self.finished - self.scored

    @property
    def remaining(self) -> int:
        """Rollouts that are not finished."""
        return self.total - self.finished


class Tally:
    """Keeps count.

    Args:
        total: rollouts to make.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._finished = 0
        self._scored = 0
        self._earlier = 0
        self._failed_attempts: Counter[str] = Counter()
        self._rewards = 0.0

    def add(self, record: JSON) -> None:
        """Count a record of the journal."""
        if is_failure(record):
            self._failed_attempts[str(record["_ng_failure_class"])] += 1
        else:
            self._scored += 1
            self._rewards += record["reward"]

    def finish(self, rollouts: int) -> None:
        """Count rollouts whose last attempt has been made."""
        self._finished += rollouts

    def begin(self) -> None:
        """What is counted so far happened earlier."""
        self._earlier = self._finished

    def progress(self, running: int = 0, stopping: str | None = None) -> Progress:
        """The counts now."""
        return Progress(
            total=self._total,
            finished=self._finished,
            scored=self._scored,
            earlier=self._earlier,
            running=running,
            failed_attempts=dict(self._failed_attempts),
            mean_reward=self._rewards / self._scored if self._scored else None,
            stopping=stopping,
        )
