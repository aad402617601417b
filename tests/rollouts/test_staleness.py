"""`StalenessBook`: nothing too old is trained on, nothing is lost, and slow tasks are not starved."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from benchmarks.staleness import Row, simulate
from gym_serve.rollouts.grouping import Place, StalenessBook, Straddle, StreamOptions
from gym_serve.types.errors import InvalidRequest

UNTRAINED = 10**9
STRADDLES = st.sampled_from(["continue", "restart", "cancel"])


@dataclass
class Made:
    """What a group really consists of: the version at which each rollout began, and whether it ended."""

    begun: list[int]
    ended: list[bool] = field(default_factory=list)
    settled: bool = False
    usable: bool = True


class AnyTrainer(RuleBasedStateMachine):
    """A trainer that takes, updates and gives up as it likes."""

    @initialize(
        k=st.integers(0, 4),
        straddle=STRADDLES,
        batch=st.none() | st.integers(1, 5),
        first=st.integers(1, 5),
        ahead=st.integers(0, 4),
    )
    def opened(self, k: int, straddle: Straddle, batch: int | None, first: int, ahead: int) -> None:
        self.k, self.straddle, self.batch = k, straddle, batch
        self.book = StalenessBook(StreamOptions(k, straddle, batch, min(ahead, k)), first)
        self.made: dict[int, Made] = {}
        self.taken: list[int] = []
        self.last: tuple[int, Place, int, Made] | None = None
        self.number = 0

    def running(self) -> list[int]:
        return [group for group, made in self.made.items() if not all(made.ended)]

    @precondition(lambda self: self.book.room > 0)
    @rule(size=st.integers(1, 3))
    def begin(self, size: int) -> None:
        if self.batch is not None:
            assert len(self.book) < (self.k + 1) * self.batch
        self.book.begin(self.number)
        self.made[self.number] = Made([self.book.version] * size, [False] * size)
        self.number += 1

    @precondition(lambda self: self.running())
    @rule(data=st.data(), failed=st.booleans())
    def end(self, data: st.DataObject, failed: bool) -> None:
        group = data.draw(st.sampled_from(self.running()))
        made = self.made[group]
        index = made.ended.index(False)
        made.ended[index] = True
        if failed:
            made.begun[index] = UNTRAINED
        else:
            self.book.scored(group)
        if all(made.ended):
            self.book.complete(group)

    @precondition(lambda self: any(all(made.ended) and not made.settled for made in self.made.values()))
    @rule(data=st.data(), usable=st.integers(0, 9).map(bool))
    def settle(self, data: st.DataObject, usable: bool) -> None:
        group = data.draw(
            st.sampled_from([g for g, made in self.made.items() if all(made.ended) and not made.settled])
        )
        self.made[group].settled, self.made[group].usable = True, usable
        self.book.ready(group, usable=usable)

    @rule(waits=st.booleans())
    def ask(self, waits: bool) -> None:
        self.book.waiting = int(waits)

    @precondition(lambda self: self.book.waiting and self.book.next() is not None)
    @rule()
    def take(self) -> None:
        group = self.book.next()
        assert group is not None
        made = self.made.pop(group)
        assert made.settled
        if made.usable:
            assert self.book.version - min(made.begun) <= self.k
        place = self.book.take(group)
        assert self.book.version - place.oldest >= self.book.version - min(made.begun)  # never told too young
        self.taken.append(group)
        self.last = (group, place, self.book.version, made)

    @precondition(lambda self: self.last is not None)
    @rule()
    def give_back(self) -> None:
        assert self.last is not None
        group, place, version, made = self.last
        self.last = None
        self.taken.remove(group)
        self.made[group] = made
        self.book.give_back(group, place, version)
        self.changed(self.book.version)

    @rule(count=st.integers(1, 3))
    def update(self, count: int) -> None:
        self.changed(self.book.version + count)
        assert self.book.change(self.book.version - 1) == ([], [], [])

    def changed(self, version: int) -> None:
        change = self.book.change(version)
        if self.straddle != "restart":
            assert not change.restart
        if self.straddle != "cancel":
            assert not change.cancel
        for group in change.restart:
            made = self.made[group]
            made.begun = [old if end else version for old, end in zip(made.begun, made.ended, strict=True)]
        for group in (*change.stale, *change.cancel):
            size = len(self.made[group].begun)
            self.made[group] = Made([version] * size, [False] * size)

    @invariant()
    def nothing_is_lost_and_the_trainer_never_waits_for_nothing(self) -> None:
        if not hasattr(self, "book"):
            return
        assert sorted([*self.taken, *self.made]) == list(range(self.number))
        assert len(self.book) == len(self.made)
        if self.book.waiting and all(made.settled for made in self.made.values()):
            assert self.book.room > 0 or self.book.next() is not None

    @invariant()
    def what_is_of_one_version_is(self) -> None:
        for made in self.made.values() if hasattr(self, "book") else ():
            if self.straddle == "cancel":
                assert len({*made.begun} - {UNTRAINED}) <= 1


TestAnyTrainer = AnyTrainer.TestCase


@dataclass(frozen=True)
class Speeds:
    """How fast engine and trainer are."""

    size: int
    places: int
    batch: int
    train: int


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    speeds=st.builds(Speeds, st.integers(1, 3), st.integers(1, 20), st.integers(1, 6), st.integers(0, 20)),
    k=st.integers(0, 4),
    ahead=st.integers(0, 4),
    straddle=STRADDLES,
)
def test_a_trainer_that_keeps_its_word_loses_nothing_and_starves_nobody(
    lengths: list[int], speeds: Speeds, k: int, ahead: int, straddle: Straddle
) -> None:
    rows = [Row(f"task {n % 7}", speeds.size, lasting(float(length))) for n, length in enumerate(lengths)]
    book = StalenessBook(StreamOptions(k, straddle, speeds.batch, min(ahead, k)))
    outcome = simulate(
        iter(rows), book, places=speeds.places, batch=speeds.batch, train=speeds.train, most=len(rows)
    )
    trained = outcome.trained
    assert sorted(one.number for one in trained) == list(range(len(rows)))
    assert Counter(one.task for one in trained) == Counter(row.task for row in rows)
    assert outcome.dropped["stale"] == 0
    for at, one in enumerate(trained):
        assert one.version == at // speeds.batch
        assert 0 <= one.staleness <= k
        assert one.version <= one.begun + k  # in its turn, although others were ready before it
    if straddle == "cancel":
        assert outcome.dropped["restarted"] == 0


def lasting(seconds: float) -> Callable[[int, int], float]:
    """Rollouts of this length; each one of a group takes a second longer than the one before."""
    return lambda index, attempt: seconds + index


def test_a_group_that_is_due_is_waited_for() -> None:
    book = StalenessBook(StreamOptions(1, "continue", 2))
    for group in range(4):
        book.begin(group)
    assert book.room == 0
    book.waiting = 1
    for group in (1, 2, 3):
        book.complete(group)
        book.ready(group, usable=True)
    assert book.next() == 1  # due at version 1, as all four are: two at each version
    book.take(1)
    assert book.next() == 2
    book.take(2)
    assert book.change(1) == ([], [], [])
    assert book.next() == 3
    book.take(3)
    assert book.room == 2
    book.begin(4)
    book.complete(4)
    book.ready(4, usable=True)
    assert book.next() is None  # group 0 is due, and this is the last place before it would be too old
    book.complete(0)
    book.ready(0, usable=True)
    assert book.next() == 0


def test_an_on_policy_stream_makes_nothing_while_the_trainer_learns() -> None:
    book = StalenessBook(StreamOptions(0, "continue", 1))
    assert book.room == 1
    book.begin(0)
    book.complete(0)
    book.ready(0, usable=True)
    book.waiting = 1
    assert book.next() == 0
    book.take(0)
    book.waiting = 0
    assert book.room == 0
    book.change(1)
    assert book.room == 1


def test_the_batch_is_learned_from_the_version_before() -> None:
    book = StalenessBook(StreamOptions(1), batch=8)
    assert book.room == 16
    for group in range(3):
        book.begin(group)
        book.ready(group, usable=group != 1)
        book.waiting = 1
        book.take(group)
    book.change(1)
    assert book.room == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_staleness": -1}, "`max_staleness` must be at least 0, got -1"),
        ({"max_staleness": 1, "straddle": "go"}, "`straddle` must be continue, restart or cancel, got 'go'"),
        ({"max_staleness": 1, "batch": 0}, "`batch` must be at least 1, got 0"),
        ({"max_staleness": 1, "ahead": 2}, "`ahead` must be 0 to 1, got 2"),
    ],
)
def test_options_out_of_their_range(options: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        StreamOptions(**options)  # type: ignore[arg-type]


@settings(max_examples=20)
@given(k=st.integers(1, 4), straddle=STRADDLES, slow=st.integers(2, 30), seed=st.integers(0, 99))
def test_what_is_trained_on_is_distributed_as_what_was_asked_for(
    k: int, straddle: Straddle, slow: int, seed: int
) -> None:
    """After any number of steps, every task was trained on as often as it was asked for: the rows that have
    begun and are not taken are all the difference."""
    lengths = {"fast": 1.0, "slow": float(slow)}
    tasks = ["slow" if (n * 7 + seed) % 5 == 0 else "fast" for n in range(400)]
    book = StalenessBook(StreamOptions(k, straddle, 4))
    rows = (Row(task, 2, lasting(lengths[task])) for task in tasks)
    outcome = simulate(rows, book, places=12, batch=4, train=3.0, most=160)
    for at in range(4, 161, 4):
        trained = Counter(one.task for one in outcome.trained[:at])
        asked = Counter(tasks[: at + 4 * k])
        assert all(0 <= asked[task] - trained[task] <= 4 * k for task in lengths)
