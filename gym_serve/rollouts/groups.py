"""Groups of rollouts at run time: `groups` streams them (GRPO), the thin shell around `GroupBook`;
`GroupStage` compares those of a collection's files once all its rollouts have ended.

The answer for a group is appended to ``out_comparisons.jsonl`` first, so no group is compared twice unless it
has grown. When all are there, ``out.jsonl`` is replaced as a whole by one with the new rewards.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Iterator

from gym_serve.metrics import failure_class
from gym_serve.observe.logs import admits
from gym_serve.rollouts.files import RecordFile, read_records, replace_records, run_in_threads
from gym_serve.rollouts.grouping import (
    VERIFY_REWARD,
    Group,
    GroupBook,
    GroupOptions,
    compare_request,
    with_comparison,
    without_comparison,
)
from gym_serve.rollouts.journal import Outputs
from gym_serve.rollouts.progress import Spending, Waiting
from gym_serve.rollouts.rows import RUN_ID, Problems, rollout_index, rollout_key, task_index
from gym_serve.rollouts.runner import RolloutRunner, Run, RunnerOptions, TaskPool, too_long
from gym_serve.rollouts.scheduling import MAX_PROBES, Job
from gym_serve.rollouts.tables import FloatTable, IntTable, TaskMeans
from gym_serve.servers.usage import USAGE_FIELD, UsageMeter
from gym_serve.types.endings import is_failure
from gym_serve.types.errors import DeadlineExceeded, GymError, OperatorError, Overloaded, Unavailable
from gym_serve.types.requests import JSON
from gym_serve.types.rows import Rollout

logger = logging.getLogger("gym_serve")

Compare = Callable[[JSON, JSON, UsageMeter], Awaitable[JSON | None]]
"""Compares a group, given its row, the body of ``POST /compare``, and a meter for the model calls of the
comparison. Returns the answer; None if the environment has no ``compare``."""


async def groups(
    jobs: Iterator[list[Job]],
    run: Run,
    options: GroupOptions,
    runner_options: RunnerOptions,
    compare: Compare | None = None,
    *,
    spending: Spending | None = None,
) -> AsyncGenerator[Group, None]:
    """Yield each group when it is settled and compared; closing it cancels running rollouts.

    Once the budget of ``spending`` is spent, no further attempt starts; running ones may end if their group
    can still be filled, and are compared. Raises `OperatorError` (`RunnerOptions.max_failures`), that of a
    comparison at once.
    """
    book = GroupBook(options)
    spending = spending or Spending()
    dropped: list[Job] = []
    ready: list[Group] = []
    comparing = 0

    def spend(used: JSON) -> None:
        spending.add(used)
        if spending.exhausted:
            runner.drain()

    def after(group: Group) -> None:
        nonlocal comparing
        comparing -= 1
        ready.append(group)

    def settle(settled: Iterable[tuple[Group, list[Job]] | None]) -> None:
        nonlocal comparing
        for group, stragglers in filter(None, settled):
            for job in stragglers:
                runner.drop(job)
            if compare is None or not group.usable:
                ready.append(group)
            else:
                comparing += 1
                runner.run_in_background(compared(group, compare, runner_options, spend), after)

    runner = RolloutRunner(
        jobs,
        run,
        runner_options,
        on_draw=book.expect,
        on_start=book.started,
        on_result=lambda row, rollout: spend(rollout),
        on_drop=dropped.append,
    )
    if spending.exhausted:
        runner.drain()
    try:
        while True:
            runner.advance()
            settle(book.dropped(dropped))
            dropped.clear()
            if not ready:
                if not (runner.scheduler.open or comparing):
                    return
                results = await runner.results(until=book.next_deadline())
                settle(book.ended(job, rollout, failed=is_failure(rollout)) for job, rollout in results)
                settle(book.expired(time.monotonic()))
            while ready:
                yield ready.pop(0)
            runner.check()
    finally:
        await runner.close()


async def compared(
    group: Group,
    compare: Compare,
    options: RunnerOptions,
    spend: Callable[[JSON], None],
    waits: Callable[[Waiting], None] = lambda waiting: None,
) -> Group:
    """A settled group with the rewards of ``compare``; if its last attempt fails, see `without_comparison`.

    A judge that is busy or away is waited for as in an episode (`gym_serve.rollouts.scheduling`). Raises
    `OperatorError`, also where the wait would be too long.
    """
    failed = away = pushed = 0
    until = time.monotonic() + options.patience
    while True:
        meter = UsageMeter()
        try:
            comparing = compare(group.row, compare_request(group), meter)
            answer = await asyncio.wait_for(comparing, options.patience)
            return group if answer is None else with_comparison(group, answer)
        except OperatorError:
            raise
        except GymError as error:
            failure = error
        except (asyncio.TimeoutError, TimeoutError):
            failure = DeadlineExceeded(f"compare did not answer within {options.patience:g} s")
        except Exception as error:
            kind = type(error).__name__
            if (more := admits("compare", kind)) is not None:
                logger.exception("the group of row %s could not be compared%s", group.task_index, more)
            failure = GymError(f"{kind}: {error}")
        finally:
            spend({USAGE_FIELD: meter.to_json()})
        wait = (failure.retry_after or 0.0) if failure.retryable else 0.0
        if isinstance(failure, Overloaded) or wait:
            if time.monotonic() + wait > until:
                raise too_long(failure.server, failure.stage, failure.message, wait, options.patience)
            pushed += 1
        elif isinstance(failure, Unavailable) and options.attempts > 1 and away < MAX_PROBES:
            away += 1
        else:
            failed += 1
            if not failure.retryable or failed >= options.attempts:
                return without_comparison(group, failure)
        pause = max(wait, options.backoff.seconds(failed + away + pushed))
        if away or pushed:
            waits(Waiting.of(failure.server, failure.message, pause))
        await asyncio.sleep(pause)


Progressing = Callable[[int, Waiting | None], None]
"""Called with the number of groups that are left, and with what one of them waits for, if it does."""

_REWARDS, _ROLLOUTS = "rewards", "rollouts"


class GroupStage:
    """The comparisons of a run whose rollouts have all ended, until ``spending`` is exhausted."""

    def __init__(
        self,
        outputs: Outputs,
        run: str,
        options: RunnerOptions,
        spending: Spending,
        stop: asyncio.Event | None = None,
    ) -> None:
        self.problems = Problems()  # the groups that could not be compared, and why
        self.mean_reward: float | None = None  # see `Progress`, if the stage has changed their rewards
        self.operator_error: OperatorError | None = None  # the error that ended the stage; None if none did
        self._outputs = outputs
        self._run = run
        self._options = options
        self._spending = spending
        self._stop = stop
        self._sizes = IntTable()  # scored rollouts by task
        self._compared = IntTable()  # of these, compared with one another
        self._rewards = FloatTable()
        self._stale = False  # whether out.jsonl lacks known rewards

    async def run(self, compare: Compare, on_progress: Progressing) -> bool:
        """Compare the groups that are not compared yet; returns whether all are compared, and ``out.jsonl``
        has their rewards. Raises as `RecordFile` does."""
        with RecordFile(self._outputs.comparisons) as file:
            await run_in_threads(self._recalled(file))
            await run_in_threads(self._counted())
            await self._compare_all(compare, file, on_progress)
            file.sync()
        if self._left():
            return False
        if self._stale:
            await run_in_threads(self._replaced())
        return True

    def _recalled(self, file: RecordFile) -> Generator[None, None, None]:
        for record in file.recover():
            if record.get(RUN_ID) != self._run:
                file.clear()
                return
            self._take(record)
            self._spending.add(record)
            yield

    def _counted(self) -> Generator[None, None, None]:
        for record in read_records(self._outputs.rollouts):
            task = task_index(record)
            self._sizes[task] = (self._sizes.get(task) or 0) + 1
            reward = self._rewards.get(rollout_key(record))
            self._stale |= reward is not None and (VERIFY_REWARD not in record or reward != record["reward"])
            yield

    def _groups(self) -> Generator[Group, None, None]:
        """The groups that are left, each when its last rollout has been read: few are open at a time."""
        open_groups: dict[int, list[JSON]] = {}
        for record in read_records(self._outputs.rollouts):
            task = task_index(record)
            size = self._sizes.get(task)
            if self._compared.get(task) == size:
                continue
            group = open_groups.setdefault(task, [])
            group.append(record)
            if len(group) == size:
                group.sort(key=rollout_index)
                yield Group(group[0], [Rollout(rollout) for rollout in group], [], usable=True)
                del open_groups[task]

    def _left(self) -> int:
        return sum(size != self._compared.get(task) for task, size in self._sizes.items())

    async def _compare_all(self, compare: Compare, file: RecordFile, on_progress: Progressing) -> None:
        def waits(waiting: Waiting) -> None:
            on_progress(left, waiting)

        groups, left = self._groups(), self._left()
        pool: TaskPool[int, tuple[Group, UsageMeter]] = TaskPool()
        running, group = 0, await _next(groups)
        try:
            on_progress(left, None)
            while running or (group is not None and not self._stopping):
                while group is not None and running < self._options.concurrency and not self._stopping:
                    pool.spawn(group.task_index, self._compare(group, compare, waits))
                    running += 1
                    group = await _next(groups)
                for _, task in await pool.wait(None):
                    running, left = running - 1, left - 1
                    self._settle(*task.result(), file)
                on_progress(left, None)
        finally:
            groups.close()
            await pool.close()

    @property
    def _stopping(self) -> bool:
        stopped = self._stop is not None and self._stop.is_set()
        return stopped or self.operator_error is not None or self._spending.exhausted is not None

    async def _compare(
        self, group: Group, compare: Compare, waits: Callable[[Waiting], None]
    ) -> tuple[Group, UsageMeter]:
        used = UsageMeter()

        def spend(record: JSON) -> None:
            self._spending.add(record)
            used.merge(record[USAGE_FIELD])

        try:
            return await compared(group, compare, self._options, spend, waits), used
        except OperatorError as error:
            self.operator_error = error
            return without_comparison(group, error), used

    def _settle(self, group: Group, used: UsageMeter, file: RecordFile) -> None:
        if not group.usable:
            self.problems.add(f"task {group.task_index}: {group.reason}")
            return
        self._stale |= group.comparison is not None
        record = {
            "_ng_task_index": group.task_index,
            _ROLLOUTS: [rollout_index(rollout) for rollout in group.rollouts],
            _REWARDS: [rollout["reward"] for rollout in group.rollouts] if group.comparison else None,
            "comparison": group.comparison,
            USAGE_FIELD: used.to_json(),
            RUN_ID: self._run,
        }
        file.append(record)
        self._take(record)

    def _take(self, record: JSON) -> None:
        task = task_index(record)
        self._compared[task] = len(record[_ROLLOUTS])
        for index, reward in zip(record[_ROLLOUTS], record[_REWARDS] or (), strict=False):
            self._rewards[rollout_key({"_ng_task_index": task, "_ng_rollout_index": index})] = reward

    def _replaced(self) -> Generator[None, None, None]:
        path, means = self._outputs.rollouts, TaskMeans()

        def rewarded() -> Iterator[JSON]:
            for record in read_records(path):
                reward = self._rewards.get(rollout_key(record))
                if reward is not None:
                    record |= {"reward": reward, VERIFY_REWARD: record.get(VERIFY_REWARD, record["reward"])}
                if failure_class(record) is None:
                    means.add(task_index(record), record["reward"])
                yield record

        yield from replace_records(path, rewarded())
        self.mean_reward = means.mean


async def _next(groups: Iterator[Group]) -> Group | None:
    """The next group, read in another thread; a cancelled read is awaited, because it cannot be stopped."""
    reading = asyncio.ensure_future(asyncio.to_thread(next, groups, None))
    try:
        return await asyncio.shield(reading)
    except asyncio.CancelledError:
        await asyncio.wait([reading])
        raise
