"""Which rows begin, and which group a trainer takes next, while its policy changes. Pure: no clock, no task.

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

from collections import Counter
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from gym_serve.types.errors import InvalidRequest

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
