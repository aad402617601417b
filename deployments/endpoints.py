"""The endpoints of a model: which of them gets a call, how many there may be, and what follows a failure.

- `EndpointPool`: the calls of an episode go to one endpoint, whose prefix cache holds their conversation.
  A new episode goes to the one with the fewest calls in progress; a rendezvous hash of the episode's key
  breaks ties, so that all replicas choose alike, and only the episodes of an endpoint that goes move.
- `Breaker`: skips an endpoint that failed, until its pause is over (M. Nygard, *Release It!*, 2007).
- `hedged`: sends a slow call a second time (J. Dean and L. A. Barroso, "The Tail at Scale", CACM 56(2)).

Pool, breaker and buckets are pure: they own no task and no connection, and the clock is an argument.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, SecretStr

from gym_serve.deployments.http_client import BaseUrl, HeaderSecret
from gym_serve.servers import ModelServer
from gym_serve.types.errors import Retryable
from gym_serve.types.model_endpoint import ModelEndpoint


def as_list(value: Any) -> Any:
    """A text as a list of it, for pydantic."""
    return [value] if isinstance(value, str) else value


Urls = Annotated[list[BaseUrl], BeforeValidator(as_list), Field(min_length=1)]
"""One base URL, or a list of them."""


class EndpointConfig(ModelServer.Config):
    """Settings of the endpoints."""

    base_url: Urls
    """The endpoint, e.g. ``http://host:8000/v1``, or a list of them: the calls of one episode
    go to one of them, and to another when it is gone."""
    model: str
    """Name of the model at the endpoint; it replaces the request's."""
    api_key: HeaderSecret = SecretStr("EMPTY")
    """The key of the API, sent as a bearer token."""
    api_key_header: str = Field("Authorization", pattern=r"^[A-Za-z0-9-]+$")
    """The header that carries the key; one of another name has the key alone, without ``Bearer``
    (Azure's is ``api-key``)."""
    headers: dict[str, HeaderSecret] = Field(default_factory=dict)
    """Further headers of every request."""
    query: dict[str, str] = Field(default_factory=dict)
    """Query of every request, e.g. Azure's ``{api-version: 2024-10-21}``. A key has its place in ``api_key``
    or ``headers``: what is here is shown."""
    timeout: float = Field(600.0, gt=0)
    """Seconds for one call, its retries included."""
    max_retries: int = Field(3, ge=0)
    """Further attempts after a 429, a 5xx or a broken connection. Where the endpoint asks to wait for over a
    minute, the run waits instead, and says so."""
    max_answer_mb: int = Field(256, ge=1)
    """Megabytes of an answer at most, tokens and log-probabilities included. A longer answer is a failure,
    so set this above the longest answer of the model, which is 1 KB a token at most, times
    1 + ``top_logprobs``."""
    hedge_after: float | None = Field(None, gt=0)
    """Seconds after which a call that has no answer is made at another endpoint as well; the first answer
    counts. By default no call is made twice."""
    health_interval: float | None = Field(None, gt=0)
    """Seconds between health checks of each endpoint (``GET {base_url}/models``), so that no call has to find
    out that it is gone. By default a call finds out, and goes to another one."""
    requests_per_minute: float | None = Field(None, gt=0)
    """Limit of each endpoint: further calls wait. Each replica of this server counts for itself: with
    ``num_replicas: n``, give an n-th of what the endpoint allows."""
    tokens_per_minute: float | None = Field(None, gt=0)
    """Likewise for tokens, prompt and answer together."""


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
        return self._until is None or self._until <= now

    def began(self, now: float) -> None:
        """A call begins; if it is the trial of an open breaker, the others wait for its outcome."""
        if self._until is not None and self._until <= now:
            self._until = now + self._pause
            self._trial = True

    def succeeded(self) -> None:
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
        """A call failed on the endpoint's side; ``gone``: nobody is there, so one failure is enough."""
        self._failures += 1
        self._gone = gone
        if self._until is None:
            if gone or self._failures >= _FAILURES:
                self._until = now + self._pause
        elif self._trial:  # else it is a call from before it opened
            self._trial = False
            self._pause = min(2 * self._pause, _MAX_PAUSE)
            self._until = now + self._pause


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
    """The limits of one endpoint per minute; None for no limit."""

    def __init__(self, requests: float | None, tokens: float | None) -> None:
        self._requests = None if requests is None else _Bucket(requests)
        self._tokens = None if tokens is None else _Bucket(tokens)
        self._first = asyncio.Lock()  # that of the queue; others get it in the order of their coming
        self._queued = 0
        self._queued_tokens = 0.0

    @property
    def counts_tokens(self) -> bool:
        return self._tokens is not None

    def expected(self, now: float, tokens: float) -> float:
        """About how long a call that comes now has to wait."""
        return self._wait(now, tokens, self._queued, self._queued_tokens)

    @asynccontextmanager
    async def turn(self, tokens: float) -> AsyncIterator[None]:
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


T = TypeVar("T")

Work = Coroutine[Any, Any, T]


async def hedged(first: Work[T], second: Callable[[], Work[T] | None], after: float) -> T:
    """The first answer of two calls; the other one is cancelled. The second begins ``after`` seconds, if
    there is a place for it. Raises GymError: what both raised last, or one that is no use to try again.
    """
    tasks = [asyncio.ensure_future(first)]
    try:
        await asyncio.wait(tasks, timeout=after)
        if not tasks[0].done() and (other := second()) is not None:
            tasks.append(asyncio.ensure_future(other))
        waiting = set(tasks)
        while True:
            ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            best = min(ended, key=lambda task: task.exception() is not None)
            if not waiting or not isinstance(best.exception(), Retryable):
                return best.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_EPISODES = 65_536  # whose endpoints are remembered; a longer silence costs a prefix cache at most


class Endpoint:
    """One endpoint. Calls may go there unless its ``breaker`` is open, or it ``refuses_until`` a moment.
    ``named`` is what a row said of it, ``answered`` whether its key is known to be a good one.
    """

    def __init__(self, url: str, limit: RateLimit | None = None, named: ModelEndpoint | None = None) -> None:
        self.url = url
        self.named = named
        self.calls = 0
        self.answered = False
        self.breaker = Breaker()
        self.refuses_until = float("-inf")
        self.limit = limit


class EndpointPool:
    """The endpoints in use, by their base URLs."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._limits: tuple[float | None, float | None] = (None, None)
        self._endpoints: dict[str, Endpoint] = {}
        self._homes: OrderedDict[str, Endpoint] = OrderedDict()
        self.set(urls)

    @property
    def endpoints(self) -> list[Endpoint]:
        return list(self._endpoints.values())

    def set(
        self,
        urls: Sequence[str],
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
    ) -> None:
        """Change the members, and what they may take; calls in progress end where they began."""
        limits = (requests_per_minute, tokens_per_minute)
        if limits != self._limits:
            self._limits = limits
            for endpoint in self._endpoints.values():
                endpoint.limit = self._limit()
        before = self._endpoints
        self._endpoints = {url: before.get(url) or Endpoint(url, self._limit()) for url in urls}
        if any(url not in self._endpoints for url in before):
            kept = ((key, home) for key, home in self._homes.items() if home.url in self._endpoints)
            self._homes = OrderedDict(kept)

    def pick(self, affinity: str | None, now: float) -> Endpoint:
        """The endpoint for a call of an episode; for any call if ``affinity`` is None."""
        if len(self._endpoints) == 1:
            return next(iter(self._endpoints.values()))
        home = None if affinity is None else self._homes.get(affinity)
        if home is None or not home.breaker.allows(now):
            usable = [endpoint for endpoint in self._endpoints.values() if endpoint.breaker.allows(now)]
            if not usable:
                return min(self._endpoints.values(), key=lambda endpoint: endpoint.breaker.until)
            home = _least_loaded(usable, affinity)
        if affinity is not None:
            self._homes[affinity] = home
            self._homes.move_to_end(affinity)
            if len(self._homes) > _EPISODES:
                self._homes.popitem(last=False)
        return home

    def other(self, than: Endpoint, now: float) -> Endpoint | None:
        """Another endpoint that may take a call at once; None if there is none."""
        others = [e for e in self._endpoints.values() if e is not than and e.breaker.allows(now)]
        return _least_loaded(others, None) if others else None

    def _limit(self) -> RateLimit | None:
        return None if self._limits == (None, None) else RateLimit(*self._limits)


def _least_loaded(endpoints: Sequence[Endpoint], affinity: str | None) -> Endpoint:
    fewest = min(endpoint.calls for endpoint in endpoints)
    equals = [endpoint for endpoint in endpoints if endpoint.calls == fewest]
    if affinity is None:
        return random.choice(equals)
    return max(equals, key=lambda endpoint: blake2b(f"{affinity}\n{endpoint.url}".encode()).digest())
