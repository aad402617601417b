"""The group stage of `collect`: rewards that come from comparing the rollouts of a row.

It comes when every rollout has ended, as no group grows any more then (docs/formats.md, Groups). The answer
for a group is appended to ``out_comparisons.jsonl`` before anything else happens, so no group is compared
twice, whatever interrupts the run; when all of them are there, ``out.jsonl`` is replaced, as a whole, by one
with the new rewards. Until then it has those of ``verify``. A group that has grown since (a resume with more
attempts) is compared again.
"""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import Callable, Generator, Iterator

from gym_serve.rollouts.comparing import VERIFY_REWARD, without_comparison
from gym_serve.rollouts.grouping import Group
from gym_serve.rollouts.groups import Compare, compared
from gym_serve.rollouts.header import RUN_ID
from gym_serve.rollouts.int_table import IntTable
from gym_serve.rollouts.outputs import Outputs, sync_directory, writing
from gym_serve.rollouts.pool import Pool
from gym_serve.rollouts.problems import Problems
from gym_serve.rollouts.records import RecordFile, read_records
from gym_serve.rollouts.runner import RunnerOptions
from gym_serve.rollouts.spending import Spending
from gym_serve.rollouts.stamps import key_of, rollout_index, task_index
from gym_serve.rollouts.steps import in_steps
from gym_serve.servers.usage import USAGE_FIELD, UsageMeter
from gym_serve.types.errors import OperatorError
from gym_serve.types.requests import JSON

__all__ = ["GroupStage"]

_REWARDS, _ROLLOUTS = "rewards", "rollouts"


class GroupStage:
    """The comparisons of a run whose rollouts have all ended.

    Args:
        outputs: the files of the run.
        run: its id; comparisons of another one are removed.
        options: how many groups are compared at once, and how often one is tried.
        spending: counts what is used, and says when to stop.
        stop: once set, nothing more is started.

    Attributes:
        problems: the groups that could not be compared, and why.
        mean_reward: of all rollouts, where the stage has changed their rewards.
        fault: what only the operator can mend, that ended it; None if nothing did.
    """

    def __init__(
        self,
        outputs: Outputs,
        run: str,
        options: RunnerOptions,
        spending: Spending,
        stop: asyncio.Event | None = None,
    ) -> None:
        self.problems = Problems()
        self.mean_reward: float | None = None
        self.fault: OperatorError | None = None
        self._outputs = outputs
        self._run = run
        self._options = options
        self._spending = spending
        self._stop = stop
        self._sizes = IntTable()  # scored rollouts by task
        self._compared = IntTable()  # of these, compared with one another
        self._rewards = _Rewards()
        self._stale = False  # whether out.jsonl lacks rewards that are known

    async def run(self, compare: Compare, told: Callable[[int], None]) -> bool:
        """Compare what is not compared yet.

        Args:
            compare: compares a group.
            told: of the number of groups that are left, whenever it changes.

        Returns:
            whether all groups are compared, and ``out.jsonl`` has their rewards.

        Raises:
            Conflict: a file is damaged.
            Unavailable, BadRequest: a file cannot be written.
        """
        with RecordFile(self._outputs.comparisons) as file:
            await in_steps(self._recalled(file))
            await in_steps(self._counted())
            await self._compare_all(compare, file, told)
            file.sync()
        if self._left():
            return False
        if self._stale:
            await in_steps(self._replaced())
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
            reward = self._rewards.get(key_of(record))
            self._stale |= reward is not None and (VERIFY_REWARD not in record or reward != record["reward"])
            yield

    def _groups(self) -> Generator[Group, None, None]:
        """The groups that are left, each once its last rollout is read: few are open at a time."""
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
                yield Group(group[0], group, [], usable=True)
                del open_groups[task]

    def _left(self) -> int:
        return sum(size != self._compared.get(task) for task, size in self._sizes.items())

    async def _compare_all(self, compare: Compare, file: RecordFile, told: Callable[[int], None]) -> None:
        groups, left = self._groups(), self._left()
        pool: Pool[int, tuple[Group, UsageMeter]] = Pool()
        running, group = 0, await _next(groups)
        try:
            told(left)
            while running or (group is not None and not self._stopping):
                while group is not None and running < self._options.concurrency and not self._stopping:
                    pool.spawn(group.task_index, self._compare(group, compare))
                    running += 1
                    group = await _next(groups)
                for _, task in await pool.wait(None):
                    running, left = running - 1, left - 1
                    self._settle(*task.result(), file)
                told(left)
        finally:
            groups.close()
            await pool.close()

    @property
    def _stopping(self) -> bool:
        stopped = self._stop is not None and self._stop.is_set()
        return stopped or self.fault is not None or self._spending.exhausted is not None

    async def _compare(self, group: Group, compare: Compare) -> tuple[Group, UsageMeter]:
        used = UsageMeter()

        def spend(record: JSON) -> None:
            self._spending.add(record)
            used.merge(record[USAGE_FIELD])

        try:
            return await compared(group, compare, self._options, spend), used
        except OperatorError as error:
            self.fault = error
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
            self._rewards[key_of({"_ng_task_index": task, "_ng_rollout_index": index})] = reward

    def _replaced(self) -> Generator[None, None, None]:
        path, total, count = self._outputs.rollouts, 0.0, 0
        partial = path.with_name(f".partial.{path.name}")
        with RecordFile(partial) as file:
            file.clear()
            for record in read_records(path):
                reward = self._rewards.get(key_of(record))
                if reward is not None:
                    record |= {"reward": reward, VERIFY_REWARD: record.get(VERIFY_REWARD, record["reward"])}
                file.append(record)
                total, count = total + record["reward"], count + 1
                yield
            file.sync()
        with writing(path):
            os.replace(partial, path)
            sync_directory(path.parent)
        self.mean_reward = total / count


async def _next(groups: Iterator[Group]) -> Group | None:
    """The next group, read in another thread; one that reads is waited for, as it cannot be closed."""
    reading = asyncio.ensure_future(asyncio.to_thread(next, groups, None))
    try:
        return await asyncio.shield(reading)
    except asyncio.CancelledError:
        await asyncio.wait([reading])
        raise


class _Rewards:
    """A reward by key, in 44 bytes."""

    def __init__(self) -> None:
        self._places = IntTable()
        self._values = array("d")

    def get(self, key: int) -> float | None:
        place = self._places.get(key)
        return None if place is None else self._values[place]

    def __setitem__(self, key: int, reward: float) -> None:
        self._places[key] = len(self._values)
        self._values.append(reward)
