"""Reading stored rollouts and the failures beside them; a line that is no rollout is a problem, not the end.

Two runs number their tasks alike only where they read the same rows in the same order, so a task may be
named by a field of the rows instead (`TaskKey`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from gym_serve.metrics.records import TASK_INDEX
from gym_serve.rollouts.digests import digest
from gym_serve.rollouts.int_table import IntTable
from gym_serve.rollouts.outputs import Outputs
from gym_serve.rollouts.problems import Problems
from gym_serve.rollouts.rows import located
from gym_serve.rollouts.stamps import is_failure, key_of
from gym_serve.types.errors import GymError, InvalidRequest
from gym_serve.types.requests import JSON
from gym_serve.types.rows import agent_name, check_reward

__all__ = ["TaskKey", "agent_of", "read_rollouts"]


class TaskKey:
    """What names a task: the task index of its run, or a field of the rows.

    One object numbers the tasks of all files that are read with it.

    Args:
        field: name of a top-level field that every rollout has.
    """

    def __init__(self, field: str = TASK_INDEX) -> None:
        self.field = field
        self._numbers = IntTable()

    def stamped(self, rollout: JSON) -> JSON:
        """The rollout with the stamps of the task that it belongs to by this key.

        Raises:
            InvalidRequest: it has no stamps, or not the field.
        """
        rollout_key = key_of(rollout)
        if self.field == TASK_INDEX:
            return rollout
        value = rollout.get(self.field)
        if value is None:
            raise InvalidRequest(f"{self.field}: the field that names the task is missing")
        # The row's own index keeps the rollouts apart of two rows with the same key.
        return {**rollout, TASK_INDEX: self._number(digest(value)), "_ng_rollout_index": rollout_key}

    def _number(self, key: int) -> int:
        number = self._numbers.get(key)
        if number is None:
            self._numbers[key] = number = len(self._numbers)
        return number


def read_rollouts(paths: Iterable[Path], key: TaskKey, problems: Problems) -> Iterator[JSON]:
    """The rollouts of runs, scored and failed, one at a time.

    Args:
        paths: the main files; the failures beside each are read with it.
        key: names the tasks.
        problems: takes the lines that are no rollouts.

    Raises:
        InvalidRequest: a file cannot be opened.
    """
    for path in paths:
        failures = Outputs.of(path).failures
        for file in [path, *([failures] if failures.exists() else [])]:
            for where, line, problem in located(file):
                try:
                    if line is None:
                        raise InvalidRequest(str(problem))
                    yield _checked(key.stamped(line))
                except GymError as error:
                    problems.add(f"{where}: {error.message}")


def agent_of(rollout: JSON) -> str:
    """Name of the agent that made a rollout; ``-`` if it does not say."""
    return agent_name(rollout) or "-"


def _checked(rollout: JSON) -> JSON:
    if is_failure(rollout):
        return rollout
    check_reward(rollout.get("reward"))
    return rollout
