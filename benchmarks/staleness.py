"""Asynchronous training against waiting for all: speed, staleness, and which tasks are trained on.

    python -m benchmarks.staleness [--plot docs/staleness.svg]

A simulation in simulated time, with the scheduler that `Gym.stream` uses. Rows are endless, and some of them
are slow tasks, whose rollouts take longer; all durations have a heavy tail. An engine runs so many rollouts
at a time. A trainer takes a batch of groups, learns for a while and replaces the weights. The ways:

- ``wait for all``: a batch is made, then trained on, then the next one is made: `Gym.stream` with
  ``max_staleness=0``.
- ``continue``, ``restart``, ``cancel``: `Gym.stream` with this ``straddle``.
- ``discard``: what many trainers do. Groups are taken as they get ready; what became too old is thrown away,
  and its row goes to the end of a queue of one batch.

Prints a table; the plot needs matplotlib.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Protocol

from gym_serve.rollouts.grouping import Change, Place, StalenessBook, Straddle, StreamOptions


@dataclass(frozen=True)
class Row:
    """A row."""

    task: str
    size: int
    """Rollouts of its group."""
    length: Callable[[int, int], float]
    """Seconds that a rollout takes, by its index in the group and its attempt."""
    first: int = 0
    """Number of the group's first attempt."""


class Book(Protocol):
    """What decides which group begins and which is taken."""

    version: int
    waiting: int

    @property
    def room(self) -> int: ...
    def begin(self, group: int) -> None: ...
    def scored(self, group: int) -> None: ...
    def complete(self, group: int) -> None: ...
    def ready(self, group: int, *, usable: bool) -> None: ...
    def change(self, version: int) -> Change: ...
    def next(self) -> int | None: ...
    def take(self, group: int) -> Place: ...


class Discard:
    """Groups in the order in which they get ready; what is too old is thrown away."""

    def __init__(self, max_staleness: int, batch: int) -> None:
        self.version = self.waiting = 0
        self._most = max_staleness
        self._room = (max_staleness + 1) * batch
        self._begun: dict[int, int] = {}
        self._ready: list[int] = []

    @property
    def room(self) -> int:
        return self._room - len(self._begun)

    def begin(self, group: int) -> None:
        self._begun[group] = self.version

    def scored(self, group: int) -> None: ...

    def complete(self, group: int) -> None: ...

    def ready(self, group: int, *, usable: bool) -> None:
        self._ready.append(group)

    def change(self, version: int) -> Change:
        self.version = version
        stale = [group for group, begun in self._begun.items() if version - begun > self._most]
        for group in stale:
            del self._begun[group]
        self._ready = [group for group in self._ready if group in self._begun]
        return Change(stale, [], [])

    def next(self) -> int | None:
        return self._ready[0] if self._ready else None

    def take(self, group: int) -> Place:
        self._ready.remove(group)
        return Place(self._begun.pop(group), self.version)


@dataclass(frozen=True)
class Trained:
    """A group that was trained on."""

    number: int
    task: str
    begun: int
    """Version at which it began, first."""
    version: int
    """Version at which it was taken."""
    staleness: int
    lengths: list[float]
    """Seconds that its rollouts took."""


@dataclass
class Outcome:
    """What a simulation came to."""

    trained: list[Trained] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    """Rollouts that were thrown away, by reason."""
    seconds: float = 0.0
    learned: float = 0.0
    """Seconds in which the trainer learned."""
    ran: float = 0.0
    """Seconds of all rollouts."""
    wasted: float = 0.0
    """Seconds of those that were thrown away."""


@dataclass
class _Group:
    row: Row
    begun: int
    attempts: list[int]
    ended: set[int] = field(default_factory=set)

    @property
    def lengths(self) -> list[float]:
        return [self.row.length(index, attempt) for index, attempt in enumerate(self.attempts)]


class _Simulation:
    def __init__(self, rows: Iterator[Row], book: Book, places: int, batch: int, train: float) -> None:
        self.outcome = Outcome()
        self._rows = rows
        self._book = book
        self._places = places
        self._batch = batch
        self._train = train
        self._now = 0.0
        self._begun = 0
        self._groups: dict[int, _Group] = {}
        self._again: deque[tuple[int, Row]] = deque()  # of `Discard`: when it may begin, in groups
        self._waiting: list[tuple[int, int]] = []  # rollouts: group and index, a heap
        self._running: dict[tuple[int, int], float] = {}  # when they began
        self._events: list[tuple[float, int, tuple[int, int, int] | None]] = []
        self._order = count()
        self._in_batch = 0

    def run(self, most: int) -> Outcome:
        """Until so many groups were trained on, or all."""
        self._book.waiting = 1
        while len(self.outcome.trained) < most:
            self._start()
            self._take(most)
            if not self._events:
                break
            self._now, _, ended = heapq.heappop(self._events)
            if ended is None:
                self._changed()
            else:
                self._ended(*ended)
        self.outcome.seconds = self._now
        return self.outcome

    def _start(self) -> None:
        while len(self._running) < self._places:
            if not self._waiting:
                if self._book.room <= 0 or (row := self._next_row()) is None:
                    return
                number = self._begun
                self._begun += 1
                self._groups[number] = _Group(row, self._book.version, [row.first] * row.size)
                self._book.begin(number)
                self._waiting = [(number, index) for index in range(row.size)]
            number, index = heapq.heappop(self._waiting)
            group = self._groups[number]
            self._running[number, index] = self._now
            attempt = group.attempts[index]
            self._at(self._now + group.row.length(index, attempt), (number, index, attempt))

    def _next_row(self) -> Row | None:
        if self._again and self._again[0][0] <= self._begun:
            return self._again.popleft()[1]
        return next(self._rows, None)

    def _take(self, most: int) -> None:
        while self._book.waiting and (number := self._book.next()) is not None:
            group, place = self._groups.pop(number), self._book.take(number)
            version = self._book.version
            self.outcome.trained.append(
                Trained(number, group.row.task, group.begun, version, version - place.oldest, group.lengths)
            )
            self._in_batch += 1
            if self._in_batch == self._batch or len(self.outcome.trained) == most:
                self._in_batch = self._book.waiting = 0
                self.outcome.learned += self._train
                self._at(self._now + self._train, None)
            self._start()

    def _ended(self, number: int, index: int, attempt: int) -> None:
        group = self._groups.get(number)
        if group is None or group.attempts[index] != attempt:
            return  # it was cancelled
        self.outcome.ran += self._now - self._running.pop((number, index))
        group.ended.add(index)
        self._book.scored(number)
        if len(group.ended) == len(group.attempts):
            self._book.complete(number)
            self._book.ready(number, usable=True)

    def _changed(self) -> None:
        change = self._book.change(self._book.version + 1)
        self._book.waiting = 1
        for number in change.stale:
            self._drop(number, "stale", range(len(self._groups[number].attempts)))
            if isinstance(self._book, Discard):
                self._waiting = sorted(one for one in self._waiting if one[0] != number)
                gone = self._groups.pop(number)
                row = replace(gone.row, first=max(gone.attempts) + 1)
                self._again.append((self._begun + self._batch, row))
        for number in change.cancel:
            self._drop(number, "cancelled", range(len(self._groups[number].attempts)))
        for number in change.restart:
            self._drop(number, "restarted", [i for n, i in list(self._running) if n == number])

    def _drop(self, number: int, reason: str, indices: range | list[int]) -> None:
        group = self._groups[number]
        for index in indices:
            begun = self._running.pop((number, index), None)
            if begun is None and index not in group.ended:
                continue  # it waits
            spent = group.lengths[index] if begun is None else self._now - begun
            self.outcome.ran += 0.0 if begun is None else spent
            self.outcome.wasted += spent
            self.outcome.dropped[reason] += 1
            group.ended.discard(index)
            group.attempts[index] += 1
            heapq.heappush(self._waiting, (number, index))

    def _at(self, time: float, what: tuple[int, int, int] | None) -> None:
        heapq.heappush(self._events, (time, next(self._order), what))


def simulate(rows: Iterator[Row], book: Book, *, places: int, batch: int, train: float, most: int) -> Outcome:
    """Train on rows.

    Args:
        rows: the rows, in the order in which they are asked for.
        book: decides which group begins and which is taken.
        places: rollouts that run at a time.
        batch: groups that the trainer takes for each version.
        train: seconds that it learns.
        most: groups to train on.
    """
    return _Simulation(rows, book, places, batch, train).run(most)


SLOW = 0.2
"""Share of the rows that are slow."""


def tasks(arguments: argparse.Namespace) -> Iterator[Row]:
    """Endless rows, the same for each way."""
    for number in count():
        is_slow = random.Random(f"{arguments.seed}-{number}").random() < SLOW
        median = arguments.fast * (arguments.slower if is_slow else 1.0)

        def length(index: int, attempt: int, number: int = number, median: float = median) -> float:
            draw = random.Random(f"{arguments.seed}-{number}-{index}-{attempt}")
            return median * draw.lognormvariate(0.0, arguments.tail)

        yield Row("slow" if is_slow else "fast", arguments.size, length)


def figures(outcome: Outcome, arguments: argparse.Namespace) -> dict[str, float]:
    """What is printed and drawn."""
    trained = outcome.trained
    stale = [one.staleness for one in trained]
    return {
        "groups per minute": 60 * len(trained) / outcome.seconds,
        "trainer busy": outcome.learned / outcome.seconds,
        "engine busy": outcome.ran / (outcome.seconds * arguments.places),
        "staleness, mean": sum(stale) / len(stale),
        "staleness, largest": max(stale),
        "thrown away": outcome.wasted / outcome.ran,
        "length": statistics.fmean(seconds for one in trained for seconds in one.lengths),
        "slow tasks": sum(one.task == "slow" for one in trained) / len(trained),
    }


def run(arguments: argparse.Namespace) -> dict[tuple[str, int], dict[str, float]]:
    """The figures of each way at each bound."""
    ways = [("wait for all", 0), *((way, k) for way in _STYLES for k in arguments.bounds)]
    found = {}
    for way, k in ways:
        book: Book
        if way == "discard":
            book = Discard(k, arguments.batch)
        else:
            straddle = _STRADDLES.get(way, "continue")
            ahead = min(AHEAD, k) if way == _AHEAD else None
            book = StalenessBook(StreamOptions(k, straddle, arguments.batch, ahead))
        outcome = simulate(
            tasks(arguments),
            book,
            places=arguments.places,
            batch=arguments.batch,
            train=arguments.train,
            most=arguments.steps * arguments.batch,
        )
        found[way, k] = figures(outcome, arguments)
    return found


AHEAD = 2
"""Versions ahead, of one of the ways."""
_AHEAD = f"continue, ahead={AHEAD}"
_STRADDLES: dict[str, Straddle] = {"restart": "restart", "cancel": "cancel"}  # the other ways continue
_STYLES = {"continue": "C0o-", _AHEAD: "C4D-", "restart": "C2s-", "cancel": "C1^-", "discard": "C3x--"}


def table(found: dict[tuple[str, int], dict[str, float]]) -> str:
    """As Markdown."""
    base = found["wait for all", 0]
    heads = ["speed", "trainer busy", "staleness: mean, largest", "thrown away", "slow tasks", "length"]
    lines = [f"| way | `max_staleness` | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"]
    for (way, k), of in found.items():
        lines.append(
            f"| {way} | {k} | {of['groups per minute'] / base['groups per minute']:.2f} "
            f"| {of['trainer busy']:.0%} | {of['staleness, mean']:.1f}, {of['staleness, largest']:.0f} "
            f"| {of['thrown away']:.0%} | {of['slow tasks']:.1%} | {of['length'] / base['length']:.2f} |"
        )
    return "\n".join(lines)


def plot(found: dict[tuple[str, int], dict[str, float]], path: Path) -> None:
    """Speed, staleness, slow tasks and the length of rollouts, by bound."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "gym_serve", "font.size": 9}
    base = found["wait for all", 0]
    panels: dict[str, Callable[[dict[str, float]], float]] = {
        "speed, against waiting for all": lambda of: of["groups per minute"] / base["groups per minute"],
        "mean staleness, in versions": lambda of: of["staleness, mean"],
        "slow tasks, as asked for: 1": lambda of: of["slow tasks"] / base["slow tasks"],
        "length of rollouts, as asked for: 1": lambda of: of["length"] / base["length"],
    }
    figure, axes = plt.subplots(1, 4, figsize=(12, 2.9), layout="constrained")
    for axis, (title, value) in zip(axes, panels.items(), strict=True):
        for way, style in _STYLES.items():
            bounds = sorted(k for name, k in found if name == way)
            values = [value(found[way, k]) for k in bounds]
            axis.plot(bounds, values, style, label=way, markersize=4, linewidth=1.2)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("max_staleness")
        axis.set_xticks(bounds)
        axis.set_ylim(*((0.7, 1.05) if "as asked for" in title else (0, None)))
        axis.grid(alpha=0.3)
        if "1" in title or "against" in title:
            axis.axhline(1.0, color="gray", linewidth=1, label="wait for all")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="versions")
    parser.add_argument("--batch", type=int, default=16, help="groups of a version")
    parser.add_argument("--size", type=int, default=8, help="rollouts of a group")
    parser.add_argument("--places", type=int, default=256, help="rollouts that run at a time")
    parser.add_argument("--train", type=float, default=30.0, help="seconds of a training step")
    parser.add_argument("--fast", type=float, default=15.0, help="median seconds of a rollout of a fast task")
    parser.add_argument("--slower", type=float, default=5.0, help="how much longer those of slow tasks take")
    parser.add_argument("--tail", type=float, default=0.5, help="sigma of the log-normal durations")
    parser.add_argument("--bounds", type=int, nargs="+", default=[1, 2, 4, 8], help="values of max_staleness")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="where to write the SVG")
    arguments = parser.parse_args()
    found = run(arguments)
    print(table(found))
    if arguments.plot is not None:
        plot(found, arguments.plot)


if __name__ == "__main__":
    main()
