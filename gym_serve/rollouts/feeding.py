"""`GroupFeed`: groups are made ahead of a trainer, which takes one at a time while its policy changes.

The version is asked for, not told: another process may have replaced the weights. It is asked before every
group that is taken, so that the bound holds then, and at least once a second.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from gym_serve.rollouts.grouping import Group, GroupBook, GroupOptions, Place, StalenessBook, StreamOptions
from gym_serve.rollouts.groups import Compare, compared
from gym_serve.rollouts.runner import RolloutRunner, Run, RunnerOptions
from gym_serve.rollouts.scheduling import Job
from gym_serve.servers.context import wait_until
from gym_serve.servers.threads import Threads
from gym_serve.types.endings import is_failure
from gym_serve.types.errors import Retryable

logger = logging.getLogger("gym_serve")

_LOOK_SECONDS = 1.0  # between two looks at the version


@dataclass
class StreamCounts:
    """Counts of the groups and rollouts of a stream."""

    begun: int = 0
    """Groups that have begun."""
    taken: int = 0
    """Groups that the trainer has taken, those included that are not usable."""
    ready: int = 0
    """Groups that have ended and wait for the trainer."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Rollouts that were thrown away, by reason. ``stale``: their group became older than ``max_staleness``.
    ``restarted``, ``cancelled``: they ran while the policy changed, with this ``straddle``. ``straggler``:
    their group was settled without them (``oversample``, ``deadline``). All but the last are made again."""


@dataclass
class Handover:
    """A group on its way to the trainer, for `GroupFeed.give_back`."""

    number: int = -1
    version: int = 0
    place: Place | None = None
    group: Group | None = None
    jobs: list[Job] = field(default_factory=list)


class GroupFeed:
    """Groups of rollouts of one row each: `run` makes them, `take` hands them out, both on one event loop.

    ``version`` tells how often the policy's weights were replaced, counted from anywhere.
    """

    def __init__(
        self,
        draw: Callable[[], Awaitable[Iterator[list[Job]]]],
        run: Run,
        *,
        options: GroupOptions,
        stream: StreamOptions,
        runner_options: RunnerOptions,
        version: Callable[[], Awaitable[int]],
        compare: Compare | None = None,
    ) -> None:
        self._draw = draw
        self._version = version
        self._compare = compare
        self._options = runner_options
        self._most_staleness = stream.max_staleness
        fitting = runner_options.concurrency // (options.size + options.oversample)
        self._fresh = StalenessBook(stream, max(1, fitting))
        self._book = GroupBook(options)
        self._runner = RolloutRunner(iter(()), run, runner_options, on_start=self._book.started)
        self._rows: Iterator[list[Job]] = iter(())
        self._threads = Threads()
        self._drawing = self._drained = False
        self._jobs: dict[int, list[Job]] = {}  # of each group that has begun and is not taken
        self._comparing: dict[int, Group] = {}
        self._ready: dict[int, Group] = {}
        self._seen: int | None = None  # what `version` told last
        self._looking = asyncio.Lock()
        self._to_look = asyncio.Event()
        self._woken = asyncio.Event()  # for `run`
        self._told = asyncio.Event()  # for `take`
        self._ended = False
        self._error: Exception | None = None
        self._begun = self._taken = 0
        self._dropped: Counter[str] = Counter()

    @property
    def counts(self) -> StreamCounts:
        return StreamCounts(self._begun, self._taken, len(self._ready), dict(+self._dropped))

    async def run(self) -> None:
        """Make groups until it is cancelled; `take` raises what went wrong."""
        try:
            self._rows = await self._draw()
            await self._look()
            self._runner.run_in_background(self._watch(), _nothing)
            self._listen()
            while True:
                self._start()
                ended = await self._runner.results(until=self._book.next_deadline())
                for job, rollout in ended:
                    self._end(job, rollout)
                for group, late in self._book.expired(time.monotonic()):
                    self._settle(late[0].group, group, late)
                self._runner.check()
        except Exception as error:
            self._error = error
        finally:
            self._ended = True
            self._told.set()
            await self._runner.close()

    async def take(self, handover: Handover) -> Group | None:
        """The next group, once there is one that may be taken; None when all have been taken.

        ``handover`` remembers it; where this call is cancelled, pass it to `give_back`. Raises
        `InvalidRequest` for rows that cannot be used, and `OperatorError` (`RunnerOptions.max_failures`).
        """
        self._fresh.waiting += 1
        self._woken.set()
        try:
            while not self._ended:
                if self._fresh.next() is not None:
                    await self._look()
                    if (number := self._fresh.next()) is not None:
                        return self._hand_over(number, handover)
                elif self._drained and not self._jobs:
                    return None
                else:
                    self._told.clear()
                    await self._told.wait()
            if self._error is not None:
                raise self._error
            return None
        finally:
            self._fresh.waiting -= 1

    async def give_back(self, handover: Handover) -> None:
        """Take back a group that did not arrive, because the call for it was cancelled."""
        if handover.place is None or handover.group is None:
            return
        self._jobs[handover.number] = handover.jobs
        self._ready[handover.number] = handover.group
        self._taken -= 1
        self._fresh.give_back(handover.number, handover.place, handover.version)
        self._change(self._fresh.version)

    def look(self) -> None:
        """Ask for the version now: it has changed."""
        self._to_look.set()

    def _start(self) -> None:
        self._runner.advance()
        may_begin = self._runner.scheduler.hungry and self._fresh.room > 0
        if may_begin and not (self._drawing or self._drained):
            self._drawing = True
            # Rows may come from a generator that waits.
            drawing = self._threads.run(partial(next, self._rows, None))
            self._runner.run_in_background(drawing, self._begin)

    def _begin(self, jobs: list[Job] | None) -> None:
        self._drawing = False
        if jobs is None:
            self._drained = True
            self._told.set()
            return
        number = jobs[0].group
        self._begun += 1
        self._jobs[number] = jobs
        self._fresh.begin(number)
        self._book.expect(jobs)
        for job in jobs:
            self._runner.scheduler.add(job)

    def _end(self, job: Job, rollout: Any) -> None:
        if not (failed := is_failure(rollout)):
            self._fresh.scored(job.group)
        if (settled := self._book.ended(job, rollout, failed=failed)) is not None:
            self._settle(job.group, *settled)

    def _settle(self, number: int, group: Group, stragglers: Iterable[Job]) -> None:
        for job in stragglers:
            self._runner.drop(job)
            self._dropped["straggler"] += 1
        self._fresh.complete(number)
        if self._compare is None or not group.usable:
            self._put(number, group)
            return
        self._comparing[number] = group
        comparing = compared(group, self._compare, self._options, _nothing)
        self._runner.run_in_background(comparing, partial(self._after_compare, number, group))

    def _after_compare(self, number: int, before: Group, after: Group) -> None:
        if self._comparing.get(number) is before:  # else it has begun again meanwhile
            del self._comparing[number]
            self._put(number, after)

    def _put(self, number: int, group: Group) -> None:
        self._ready[number] = group
        self._fresh.ready(number, usable=group.usable)
        self._told.set()

    def _hand_over(self, number: int, handover: Handover) -> Group:
        place, version = self._fresh.take(number), self._fresh.version
        group, jobs = self._ready.pop(number), self._jobs.pop(number)
        handover.number, handover.version, handover.place = number, version, place
        handover.group, handover.jobs = group, jobs
        self._taken += 1
        self._woken.set()  # there is room for another one
        self._told.set()
        return replace(group, staleness=version - place.oldest)

    async def _watch(self) -> None:
        while True:
            await wait_until(self._to_look, _LOOK_SECONDS)
            self._to_look.clear()
            await self._look()

    async def _look(self) -> None:
        async with self._looking:
            try:
                version = await self._version()
            except Retryable as error:  # it cannot be asked just now; at the next look it can
                logger.debug("the version of the policy is not known: %s", error)
                return
            if self._seen is None:
                self._seen = version
            # A count that begins again, as the cluster has lost it, means new weights as well.
            changes = version - self._seen if version >= self._seen else 1
            self._seen = version
            if changes:
                self._change(self._fresh.version + changes)

    def _change(self, version: int) -> None:
        change = self._fresh.change(version)
        for reason, groups in (("stale", change.stale), ("cancelled", change.cancel)):
            for number in groups:
                self._dropped[reason] += self._begin_again(number)
        for number in change.restart:
            self._dropped["restarted"] += sum(map(self._runner.restart, self._book.open_jobs(number)))
        if change.stale:
            logger.warning(
                "%s groups became older than max_staleness=%s versions, and begin again: for each version, "
                "take `batch` groups, and take them when they are learned from",
                len(change.stale),
                self._most_staleness,
            )
        self._woken.set()
        self._told.set()

    def _begin_again(self, number: int) -> int:
        """Begin all rollouts of a group anew; returns how many were thrown away."""
        group = self._ready.pop(number, None) or self._comparing.pop(number, None)
        held = self._book.forget(number) if group is None else len(group.rollouts) + len(group.failures)
        jobs = self._jobs[number]
        cancelled = sum([self._runner.restart(job) for job in jobs])
        self._book.expect(jobs)
        return held + cancelled

    def _listen(self, _: object = None) -> None:
        self._woken.clear()
        self._runner.run_in_background(self._woken.wait(), self._listen)


def _nothing(_: object) -> None:
    """For background work that ends without a result."""
