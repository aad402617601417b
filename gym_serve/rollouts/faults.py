"""`Faults`: when a run ends because only its operator can help (a refused key, a wrong address). Pure.

Such a failure says nothing about the rollout that met it, and the next one will meet it as well. So it counts
as no attempt, and the rollout stays open. A refused key or account ends the run at once: it is not mended by
itself, and asking on can lock it. Anything else may be a restart of what stands before the endpoint, so it
takes several in a row.
"""

from __future__ import annotations

from gym_serve.types.errors import EndpointAccessDenied, OperatorError, Unauthorized

__all__ = ["MAX_FAILURES", "Faults"]

MAX_FAILURES = 5
"""How many in a row end a run, by default."""

_AT_ONCE = (Unauthorized, EndpointAccessDenied)


class Faults:
    """Counts operator errors.

    Args:
        limit: how many of them without a scored rollout in between end the run.

    Attributes:
        last: the last one; None if there was none.
        ends: whether the run ends.
    """

    def __init__(self, limit: int = MAX_FAILURES) -> None:
        self.last: OperatorError | None = None
        self.ends = False
        self._limit = limit
        self._in_a_row = 0

    def add(self, error: OperatorError) -> None:
        """An attempt ended with an operator error."""
        self.last = error
        self._in_a_row += 1
        self.ends |= self._in_a_row >= self._limit or isinstance(error, _AT_ONCE)

    def scored(self) -> None:
        """A rollout was scored."""
        self._in_a_row = 0
