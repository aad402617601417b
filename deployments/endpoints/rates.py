"""`RateLimit`: requests and tokens per minute, as two token buckets.

Calls begin one after another, in the order in which they came: only the first in the queue looks at the
buckets, so that what a call takes counts from the moment at which it begins, and one that gives up while it
waits has taken nothing. How many tokens a call takes is known when it was answered; up to then its estimate
is taken, as providers do it themselves. The clock is given; seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["RateLimit"]

_BURST_SECONDS = 6.0  # a tenth of a minute's worth may begin at once after a pause
_NOW = 1e-6  # seconds; less is the rounding of floats


class _Bucket:
    def __init__(self, per_minute: float) -> None:
        self.rate = per_minute / 60
        self.capacity = max(1.0, self.rate * _BURST_SECONDS)
        self.level = self.capacity
        self.filled: float | None = None

    def wait(self, now: float, amount: float, ahead: float = 0.0) -> float:
        if self.filled is not None:
            self.level = min(self.capacity, self.level + max(0.0, now - self.filled) * self.rate)
        self.filled = now
        # A call larger than the bucket begins when that is full, and leaves a debt.
        return max(0.0, (ahead + min(amount, self.capacity) - self.level) / self.rate)

    def give_back(self, amount: float) -> None:
        self.level = min(self.capacity, self.level + amount)


class RateLimit:
    """The limits of one endpoint.

    Args:
        requests: per minute, None for no limit.
        tokens: per minute, prompt and answer together; None for no limit.
    """

    def __init__(self, requests: float | None, tokens: float | None) -> None:
        self._requests = None if requests is None else _Bucket(requests)
        self._tokens = None if tokens is None else _Bucket(tokens)
        self._first = asyncio.Lock()  # that of the queue; others get it in the order of their coming
        self._queued = 0
        self._queued_tokens = 0.0

    @property
    def counts_tokens(self) -> bool:
        """Whether there is a limit of tokens."""
        return self._tokens is not None

    def expected(self, now: float, tokens: float) -> float:
        """About how long a call that comes now has to wait."""
        return self._wait(now, tokens, self._queued, self._queued_tokens)

    @asynccontextmanager
    async def turn(self, tokens: float) -> AsyncIterator[None]:
        """Be the first in the queue."""
        self._queued += 1
        self._queued_tokens += tokens
        try:
            async with self._first:
                yield
        finally:
            self._queued -= 1
            self._queued_tokens -= tokens

    def begin(self, now: float, tokens: float) -> float:
        """Begin a call of about ``tokens`` tokens; else, how long to wait before asking again."""
        wait = self._wait(now, tokens)
        if wait > _NOW:
            return wait
        if self._requests is not None:
            self._requests.level -= 1.0
        if self._tokens is not None:
            self._tokens.level -= tokens
        return 0.0

    def settle(self, expected: float, used: float) -> None:
        """Tell how many tokens a call took of which some were expected."""
        if self._tokens is not None:
            self._tokens.give_back(expected - used)

    def _wait(self, now: float, tokens: float, calls: float = 0.0, ahead: float = 0.0) -> float:
        requests_wait = 0.0 if self._requests is None else self._requests.wait(now, 1.0, calls)
        tokens_wait = 0.0 if self._tokens is None else self._tokens.wait(now, tokens, ahead)
        return max(requests_wait, tokens_wait)
