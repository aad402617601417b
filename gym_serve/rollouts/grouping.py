"""When a group of rollouts is settled, with which of them (GRPO), and with which rewards. Pure functions.

A group starts ``size`` + ``oversample`` rollouts, and is settled as soon as

- ``size`` of them are scored, or too few can still be scored for its ``quorum``, or all have ended, or
- its deadline has passed, counted from the start of its first attempt, or
- the run ends before all of its rollouts were started (its budget is spent), unless ``size`` of them are.

The rollouts that still run then are stragglers, which the caller cancels.

Which rows begin, and which group a trainer takes next, while its policy changes. Pure: no clock, no task.

The *version* is the number of times that the policy's weights were replaced. The *staleness* of a group is
the version at which the trainer takes it, less the version at which the oldest rollout in it began. For each
version the trainer takes ``batch`` groups. With a bound k (``max_staleness``), `StalenessBook` guarantees:

- No group is taken whose staleness exceeds k.
- Every group that begins is taken, and once. What is thrown away of it begins again, at its old place.
- At most (k + 1) * ``batch`` groups have begun and are not taken; with ``ahead`` below k there are fewer.
- While the trainer takes ``batch`` groups for each version, no group becomes too old, however long it takes.

The last one keeps slow tasks in the training data. A group that begins at version v is *due* at v + k. The
trainer takes groups as they become ready, as long as it can still take all others when they are due; else it
waits for those (earliest deadline first). A new version means for a group in progress (``straddle``):

- ``continue``: its running rollouts go on; the group is as old as its first rollout's beginning.
- ``restart``: its running rollouts begin anew, so each rollout is of one version. Those that have ended stay.
- ``cancel``: all of it begins anew, so the group is of one version.

It keeps its place and its due version in all three, so that a slow one ends at last.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, get_args

from gym_serve.rollouts.scheduling import Job
from gym_serve.types.errors import GymError, InvalidRequest, VerifierFailed
from gym_serve.types.requests import JSON, input_items
from gym_serve.types.rows import Rollout

Straddle = Literal["continue", "restart", "cancel"]
"""What becomes of rollouts that run while the policy changes; see `Gym.stream`."""


@dataclass(frozen=True)
class StreamOptions:
    """How far rollouts may run ahead of the trainer.

    Attributes:
        max_staleness: largest staleness of a group, in versions; with 0 nothing is made while the trainer
            learns.
        batch: groups that the trainer takes for each version; None to learn it from the version before.

    Raises:
        InvalidRequest: a value is out of its range.
    """

    max_staleness: int
    straddle: Straddle = "continue"  # what becomes of rollouts that run while the policy changes
    batch: int | None = None
    ahead: int | None = None  # for how many versions groups are made ahead; None for ``max_staleness``

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise InvalidRequest(f"`max_staleness` must be at least 0, got {self.max_staleness}")
        if self.straddle not in get_args(Straddle):
            raise InvalidRequest(
                f"`straddle` must be continue, restart or cancel, got {str(self.straddle)[:40]!r}"
            )
        if self.batch is not None and self.batch < 1:
            raise InvalidRequest(f"`batch` must be at least 1, got {self.batch}")
        if self.ahead is not None and not 0 <= self.ahead <= self.max_staleness:
            raise InvalidRequest(f"`ahead` must be 0 to {self.max_staleness}, got {self.ahead}")

    @property
    def depth(self) -> int:
        return self.max_staleness if self.ahead is None else self.ahead


@dataclass
class Place:
    """A group that has begun and is not taken."""

    oldest: int
    due: int  # version at which it must be taken
    scored: bool = False  # whether it has a rollout that ended with a reward
    complete: bool = False
    ready: bool = False
    usable: bool = True


class Change(NamedTuple):
    """What a new version means for the groups that are not taken, by their numbers."""

    stale: list[int]  # they are too old: all of it begins again
    restart: list[int]  # their running rollouts begin again
    cancel: list[int]  # they straddle the versions: all of it begins again


class StalenessBook:
    """The groups that have begun and are not taken.

    Args:
        batch: groups that the trainer takes for the first version, if the options do not say it.
    """

    def __init__(self, options: StreamOptions, batch: int = 1) -> None:
        self.version = 0
        self.waiting = 0
        self._options = options
        self._batch = options.batch or batch
        self._taken = 0  # at this version
        self._places: dict[int, Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    @property
    def room(self) -> int:
        return max(0, self._slots + self._options.depth * self._batch - len(self._places))

    def begin(self, group: int) -> None:
        """A group begins. Numbers of groups are those of their places: earlier ones are taken first."""
        self._places[group] = Place(self.version, self.version + self._options.max_staleness)

    def scored(self, group: int) -> None:
        self._places[group].scored = True

    def complete(self, group: int) -> None:
        self._places[group].complete = True

    def ready(self, group: int, *, usable: bool) -> None:
        """A group may be taken. One that the trainer cannot learn from does not count, nor become too old."""
        place = self._places[group]
        place.ready, place.usable = True, usable

    def change(self, version: int) -> Change:
        """The policy has another version, or a group was given back; an older version changes nothing."""
        if is_new := version > self.version:
            self.version = version
            if self._options.batch is None:
                self._batch = self._taken or self._batch
            self._taken = 0
        change = Change([], [], [])
        for group, place in sorted(self._places.items()):
            if place.usable and version - place.oldest > self._options.max_staleness:
                change.stale.append(group)
                self._renew(place)
            elif is_new and not place.complete and self._options.straddle == "cancel":
                change.cancel.append(group)
                self._renew(place)
            elif is_new and not place.complete and self._options.straddle == "restart":
                change.restart.append(group)
                if not place.scored:
                    self._renew(place)
        return change

    def next(self) -> int | None:
        ready = [(place.usable, place.due, group) for group, place in self._places.items() if place.ready]
        if not ready:
            return None
        usable, due, group = min(ready)
        if not usable:
            return group
        dues = Counter(max(place.due, self.version) for place in self._places.values() if place.usable)
        earlier, places = 0, self._slots
        for version in range(self.version, due):
            earlier += dues[version]
            if 0 < earlier >= places:
                return None  # one of those that are due by then would not be taken in time
            places += self._batch
        return group

    def take(self, group: int) -> Place:
        place = self._places.pop(group)
        self._taken += place.usable
        return place

    def give_back(self, group: int, place: Place, version: int) -> None:
        """A group was taken at ``version`` and has not arrived. `change` says whether it is too old now."""
        self._places[group] = place
        if version == self.version:
            self._taken -= place.usable

    @property
    def _slots(self) -> int:
        """How many groups the trainer goes on to take at this version: the rest of its batch."""
        left = -self._taken % self._batch
        return left or (self._batch if self.waiting or not self._taken else 0)

    def _renew(self, place: Place) -> None:
        place.oldest = self.version
        place.scored = place.complete = place.ready = False


@dataclass(frozen=True)
class GroupOptions:
    """How groups are made.

    Attributes:
        deadline: seconds after which a group is settled with the rollouts that it has; None for no limit.
    """

    size: int
    oversample: int = 0
    quorum: int | None = None  # the fewest rollouts of a usable group; by default ``size``
    deadline: float | None = None

    def __post_init__(self) -> None:
        if self.size < 1 or self.oversample < 0:
            raise InvalidRequest(
                f"`size` must be at least 1 and `oversample` at least 0, got {self.size}, {self.oversample}"
            )
        if self.quorum is not None and not 1 <= self.quorum <= self.size:
            raise InvalidRequest(f"`quorum` must be 1 to {self.size}, got {self.quorum}")

    @property
    def needed(self) -> int:
        return self.size if self.quorum is None else self.quorum


@dataclass(frozen=True)
class Group:
    """The rollouts of one row, settled."""

    row: JSON
    """The materialized row of its first rollout."""
    rollouts: list[Rollout]
    """The scored rollouts, by rollout index; at most ``size``."""
    failures: list[Rollout]
    """The rollouts whose last attempt failed, by rollout index."""
    usable: bool
    """Whether it has at least the quorum of rollouts, and ``compare`` did not fail."""
    reason: str | None = None
    """Why there are fewer rollouts than ``size``, or why the group is not usable."""
    comparison: JSON | None = None
    """The answer of the environment's ``compare``, which gave the rewards; None if it has no ``compare``."""
    staleness: int | None = None
    """How often the policy changed from the beginning of its oldest rollout until it was taken, where
    `Gym.stream` gave it."""

    @property
    def task_index(self) -> int:
        return int(self.row["_ng_task_index"])


@dataclass
class _Open:
    jobs: dict[int, Job]  # not ended
    row: JSON
    rollouts: dict[int, JSON] = field(default_factory=dict)
    failures: dict[int, JSON] = field(default_factory=dict)
    dropped: int = 0  # before they were started
    started: bool = False
    deadline: float = math.inf


class GroupBook:
    """The groups that are not settled."""

    def __init__(self, options: GroupOptions) -> None:
        self._options = options
        self._open: dict[int, _Open] = {}
        self._deadlines: list[tuple[float, int]] = []

    def expect(self, jobs: list[Job]) -> None:
        self._open[jobs[0].group] = _Open({job.number: job for job in jobs}, jobs[0].row)

    def started(self, job: Job, now: float) -> None:
        group = self._open[job.group]
        if self._options.deadline is not None and not group.started:
            group.deadline = now + self._options.deadline
            heapq.heappush(self._deadlines, (group.deadline, job.group))
        group.started = True

    def ended(self, job: Job, rollout: JSON, *, failed: bool) -> tuple[Group, list[Job]] | None:
        """A job has its result, which counts unless its group is settled already. Returns the group and its
        stragglers, if this result settles it."""
        group = self._open.get(job.group)
        if group is None or job.number not in group.jobs:
            return None
        del group.jobs[job.number]
        (group.failures if failed else group.rollouts)[job.number] = rollout
        return self._settled(job.group) if self._is_decided(group) else None

    def dropped(self, jobs: list[Job]) -> list[tuple[Group, list[Job]]]:
        """Jobs are dropped without a result, because the run ends. Returns the groups that this settles, with
        their stragglers; groups that were not started are discarded."""
        for job in jobs:
            group = self._open.get(job.group)
            if group is not None and group.jobs.pop(job.number, None) is not None:
                group.dropped += 1
        settled = []
        for number in dict.fromkeys(job.group for job in jobs if job.group in self._open):
            group = self._open[number]
            if not group.started:
                del self._open[number]
            elif self._is_decided(group):
                settled.append(self._settled(number))
        return settled

    def expired(self, now: float) -> list[tuple[Group, list[Job]]]:
        settled = []
        while self.next_deadline() <= now:
            settled.append(self._settled(self._deadlines[0][1], late=True))
        return settled

    def next_deadline(self) -> float:
        while self._deadlines:
            deadline, number = self._deadlines[0]
            if number in self._open and self._open[number].deadline == deadline:
                return deadline
            heapq.heappop(self._deadlines)
        return math.inf

    def open_jobs(self, number: int) -> list[Job]:
        """The jobs of a group, not settled, that have not ended."""
        return list(self._open[number].jobs.values())

    def forget(self, number: int) -> int:
        """Forget a group, if it is not settled; returns how many results it had."""
        group = self._open.pop(number, None)
        return 0 if group is None else len(group.rollouts) + len(group.failures)

    def _is_decided(self, group: _Open) -> bool:
        possible = len(group.rollouts) + len(group.jobs)
        return len(group.rollouts) == self._options.size or not group.jobs or possible < self._options.needed

    def _settled(self, number: int, *, late: bool = False) -> tuple[Group, list[Job]]:
        group = self._open.pop(number)
        rollouts = [Rollout(group.rollouts[key]) for key in sorted(group.rollouts)]
        failures = [Rollout(group.failures[key]) for key in sorted(group.failures)]
        reason = None if len(rollouts) == self._options.size else self._reason(group, late)
        usable = len(rollouts) >= self._options.needed
        return Group(group.row, rollouts, failures, usable, reason), list(group.jobs.values())

    def _reason(self, group: _Open, late: bool) -> str:
        parts, failures, unfinished = [], list(group.failures.values()), len(group.jobs)
        if late:
            parts.append(f"the deadline of {self._options.deadline:g} s passed with {unfinished} unfinished")
        kinds = Counter(str(failure["_ng_failure_class"]) for failure in failures)
        parts += [f"{n} failed with {kind}: {_detail(failures, kind)}" for kind, n in kinds.most_common()]
        if group.dropped:
            parts.append(f"{group.dropped} not started because the run ended")
        if unfinished and not late:
            parts.append(f"{unfinished} cancelled because {self._options.needed} could not be reached")
        return f"{len(group.rollouts)} of {self._options.size} rollouts: {'; '.join(parts)}"


def _detail(failures: list[JSON], kind: str) -> str:
    failure = next(f.get("failure") for f in failures if f["_ng_failure_class"] == kind)
    return str(failure.get("detail") if isinstance(failure, dict) else "no detail")[:300]


VERIFY_REWARD = "verify_reward"  # field of a compared rollout with the reward that ``verify`` gave it


def compare_request(group: Group) -> JSON:
    """The body of ``POST /compare`` for a settled group."""
    request = {
        "conversation_history": input_items(group.row["responses_create_params"].get("input") or []),
        "response_objs": [rollout.get("response") for rollout in group.rollouts],
    }
    principle = group.row.get("principle")
    return request if principle is None else {**request, "principle": principle}


def with_comparison(group: Group, answer: JSON) -> Group:
    """The group with the rewards of a ``compare`` answer.

    Raises `VerifierFailed` if the answer does not have one finite reward for each rollout.
    """
    rewards = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(rewards, list) or len(rewards) != len(group.rollouts):
        raise VerifierFailed(f"`compare` must answer {len(group.rollouts)} rewards, got {str(answer)[:200]}")
    if not all(isinstance(reward, int | float) and math.isfinite(reward) for reward in rewards):
        raise VerifierFailed(f"the rewards of `compare` must be finite numbers, got {str(rewards)[:200]}")
    rollouts = [
        Rollout({**rollout, "reward": float(reward), VERIFY_REWARD: rollout["reward"]})
        for rollout, reward in zip(group.rollouts, rewards, strict=True)
    ]
    return replace(group, rollouts=rollouts, comparison=answer)


def without_comparison(group: Group, error: GymError) -> Group:
    """The group when ``compare`` failed: not usable, because its rollouts have no reward to train on."""
    failed = f"compare failed: {error.message}"
    return replace(group, usable=False, reason=f"{group.reason}; {failed}" if group.reason else failed)
