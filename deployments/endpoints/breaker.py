"""`Breaker`: whether calls may go to an endpoint, by how its last ones ended.

    closed ──(several failures in a row, or nobody there)──> open
    open ──(its pause is over: one call is let through)──> half open
    half open ──(it was answered)──> closed
    half open ──(it failed)──> open, for twice as long

A look at the endpoint (a health check) tells whether somebody is there, and no more: for one that answers
looks but fails calls it stays open.

Pure: it owns no clock and no task. A trial whose caller gave up blocks nothing: after another pause the next
one is let through. (M. Nygard, *Release It!*, 2007, names the pattern.)
"""

from __future__ import annotations

__all__ = ["Breaker"]

_FAILURES = 5  # in a row
_PAUSE, _MAX_PAUSE = 10.0, 120.0  # seconds


class Breaker:
    """The state of one endpoint; moments are seconds of any one clock that does not run backwards."""

    def __init__(self) -> None:
        self._failures = 0
        self._pause = _PAUSE
        self._until: float | None = None
        self._trial = False
        self._gone = False

    @property
    def until(self) -> float:
        """When the next call may try; in the past for a closed one."""
        return float("-inf") if self._until is None else self._until

    def allows(self, now: float) -> bool:
        """Whether a call may begin."""
        return self._until is None or self._until <= now

    def began(self, now: float) -> None:
        """A call begins; if it is the trial of an open breaker, the others wait for its outcome."""
        if self._until is not None and self._until <= now:
            self._until = now + self._pause
            self._trial = True

    def succeeded(self) -> None:
        """The endpoint answered."""
        if self._failures or self._until is not None:
            self._failures = 0
            self._pause = _PAUSE
            self._until = None
            self._trial = False
            self._gone = False

    def looked(self, now: float, *, there: bool) -> None:
        """A look at the endpoint, which is no call, found somebody there, or nobody."""
        if not there:
            self._gone = True
            self._until = max(self.until, now + self._pause)
        elif self._gone:
            self.succeeded()

    def failed(self, now: float, *, gone: bool = False) -> None:
        """A call failed on the endpoint's side.

        Args:
            gone: nobody is there; no need to wait for more failures.
        """
        self._failures += 1
        self._gone = gone
        if self._until is None:
            if gone or self._failures >= _FAILURES:
                self._until = now + self._pause
        elif self._trial:  # else it is a call from before it opened
            self._trial = False
            self._pause = min(2 * self._pause, _MAX_PAUSE)
            self._until = now + self._pause
