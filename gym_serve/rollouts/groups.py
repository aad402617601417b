"""`groups`: rollouts of a row as one unit, for algorithms that compare them (GRPO).

The thin shell around `GroupBook`: it runs the same engine as every other collection, cancels the
stragglers of settled groups, asks the environment to compare what is left, and counts what all of it uses.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator

from gym_serve.rollouts.comparing import compare_request, with_comparison, without_comparison
from gym_serve.rollouts.grouping import Group, GroupBook, GroupOptions
from gym_serve.rollouts.runner import RolloutRunner, Run, RunnerOptions
from gym_serve.rollouts.scheduling import Job
from gym_serve.rollouts.spending import Spending
from gym_serve.rollouts.stamps import is_failure
from gym_serve.servers.usage import USAGE_FIELD, UsageMeter
from gym_serve.types.errors import DeadlineExceeded, GymError, OperatorError
from gym_serve.types.requests import JSON

__all__ = ["Compare", "compared", "groups"]

logger = logging.getLogger("gym_serve")

Compare = Callable[[JSON, JSON, UsageMeter], Awaitable[JSON | None]]
"""Takes a group's row, the body of ``POST /compare``, and a meter that counts what models use for it: its
answer; None where the environment has none."""


async def groups(
    jobs: Iterator[list[Job]],
    run: Run,
    options: GroupOptions,
    engine_options: RunnerOptions,
    compare: Compare | None = None,
    *,
    spending: Spending | None = None,
) -> AsyncGenerator[Group, None]:
    """Yield each group as it is settled and compared; a group that cannot be filled says why.

    Leaving it cancels what still runs.

    Raises:
        OperatorError: a setting is wrong that all rollouts need; see `RunnerOptions.max_failures`. That of a
            comparison is raised at once.

    Args:
        jobs: ``size + oversample`` jobs for each group.
        run: one episode.
        options: what makes a group.
        engine_options: how attempts are run.
        compare: the group reward of the environment.
        spending: counts what attempts and comparisons use. Once it is exhausted nothing more is started; what
            runs may end where its group can still be filled, and is compared.
    """
    book = GroupBook(options)
    spending = spending or Spending()
    dropped: list[Job] = []
    ready: list[Group] = []
    comparing = 0

    def commit(row: JSON, rollout: JSON) -> None:
        spend(rollout)

    def spend(used: JSON) -> None:
        spending.add(used)
        if spending.exhausted:
            engine.drain()

    def after(group: Group) -> None:
        nonlocal comparing
        comparing -= 1
        ready.append(group)

    def settle(settled: Iterable[tuple[Group, list[Job]] | None]) -> None:
        nonlocal comparing
        for group, stragglers in filter(None, settled):
            for job in stragglers:
                engine.drop(job)
            if compare is None or not group.usable:
                ready.append(group)
            else:
                comparing += 1
                engine.aside(compared(group, compare, engine_options, spend), after)

    engine = RolloutRunner(
        jobs,
        run,
        engine_options,
        drawn=book.expect,
        started=book.started,
        commit=commit,
        dropped=dropped.append,
    )
    if spending.exhausted:
        engine.drain()
    try:
        while True:
            engine.advance()
            settle(book.dropped(dropped))
            dropped.clear()
            if not ready:
                if not (engine.scheduler.open or comparing):
                    return
                results = await engine.results(until=book.next_deadline())
                settle(book.ended(job, rollout, failed=is_failure(rollout)) for job, rollout in results)
                settle(book.expired(time.monotonic()))
            while ready:
                yield ready.pop(0)
            engine.check()
    finally:
        await engine.close()


async def compared(
    group: Group, compare: Compare, options: RunnerOptions, spend: Callable[[JSON], None]
) -> Group:
    """A settled group with the rewards of ``compare``; where that fails for good, see `without_comparison`.

    Args:
        group: the group.
        compare: asks the environment; tried as often as an attempt at a rollout.
        options: how often, and how long.
        spend: told what models used for it, as ``model_usage``, after every try.

    Raises:
        OperatorError: a setting is wrong, which no retry mends.
    """
    failed = 0
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
            failure = DeadlineExceeded(f"no answer within {options.patience:g} s")
        except Exception as error:
            logger.exception("the group of row %s could not be compared", group.task_index)
            failure = GymError(f"{type(error).__name__}: {error}")
        finally:
            spend({USAGE_FIELD: meter.to_json()})
        failed += 1
        if not failure.retryable or failed == options.attempts:
            return without_comparison(group, failure)
        await asyncio.sleep(options.backoff.seconds(failed))
