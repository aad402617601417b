"""The scheduler, against a model of what it promises."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gym_serve.rollouts.scheduling import Backoff, Failure, Job, Scheduler

ATTEMPTS = 3
CONCURRENCY = 3


def job(number: int) -> Job:
    return Job(number, number // 2, {})


BACKOFF = Backoff(first=1.0, largest=8.0, spread=lambda: 1.0)
AGAIN = Failure(retryable=True)


def scheduler(concurrency: int = CONCURRENCY, backoff: Backoff = BACKOFF) -> Scheduler:
    return Scheduler(concurrency, ATTEMPTS, backoff)


def test_back_off_doubles_up_to_its_largest() -> None:
    backoff = Backoff(first=1.0, largest=5.0, spread=lambda: 1.0)
    assert [backoff.seconds(n) for n in (1, 2, 3, 4, 50)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert Backoff(first=1.0, spread=lambda: 0.0).seconds(2) == 1.0


def test_a_retry_goes_before_later_jobs() -> None:
    machine = scheduler(concurrency=1)
    for number in range(3):
        machine.add(job(number))
    assert machine.start(0.0) == job(0)
    assert machine.finish(0, 0, now=0.0, failure=AGAIN) == "retry"
    assert machine.start(0.0) == job(1)
    machine.finish(1, 0, now=0.5)
    assert machine.next_due() == 1.0
    started = machine.start(1.0)
    assert started is not None
    assert (started.number, started.attempt) == (0, 1)


def test_a_superseded_attempt_is_late() -> None:
    machine = scheduler(backoff=Backoff(first=0.0))
    machine.add(job(0))
    machine.start(0.0)
    machine.finish(0, 0, now=0.0, failure=AGAIN)
    assert machine.finish(0, 0, now=0.0) == "late"
    machine.start(0.0)
    assert machine.finish(0, 0, now=0.0) == "late"
    assert machine.finish(0, 1, now=0.0) == "done"
    assert machine.finish(0, 1, now=0.0) == "late"


def test_attempts_of_an_earlier_process_count() -> None:
    machine = scheduler()
    machine.add(Job(0, 0, {}, attempt=2))
    machine.start(0.0)
    assert machine.finish(0, 2, now=0.0, failure=AGAIN) == "done"


def test_a_dropped_job_is_late_and_never_tried_again() -> None:
    machine = scheduler()
    for number in range(3):
        machine.add(job(number))
        machine.start(0.0)
    machine.finish(2, 0, now=0.0, failure=AGAIN)
    assert [machine.drop(number) for number in (0, 2, 9)] == [True, False, False]
    assert machine.finish(0, 0, now=0.0) == "late"
    assert machine.next_due() == float("inf")
    assert machine.start(9.0) is None
    assert (machine.open, machine.running) == (1, 1)


def test_draining_keeps_what_runs() -> None:
    machine = scheduler(concurrency=1)
    for number in range(3):
        machine.add(job(number))
    machine.start(0.0)
    machine.drop_idle()
    assert machine.open == 1
    assert machine.finish(0, 0, now=0.0, failure=AGAIN) == "retry"


class SchedulerModel(RuleBasedStateMachine):
    """Every job is tried until it is scored, has failed for good, or is dropped; in order."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = scheduler()
        self.now = 0.0
        self.added = 0
        self.running: dict[int, int] = {}
        self.waiting: dict[int, float] = {}
        self.ready: set[int] = set()
        self.failures: dict[int, int] = {}

    @rule()
    def add(self) -> None:
        self.machine.add(job(self.added))
        self.ready.add(self.added)
        self.added += 1

    @rule(seconds=st.floats(0, 4))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def start(self) -> None:
        for number in [n for n, due in self.waiting.items() if due <= self.now]:
            del self.waiting[number]
            self.ready.add(number)
        started = self.machine.start(self.now)
        if len(self.running) == CONCURRENCY or not self.ready:
            assert started is None
            return
        assert started is not None
        assert started.number == min(self.ready)
        assert started.attempt == self.failures.get(started.number, 0)
        self.ready.remove(started.number)
        self.running[started.number] = started.attempt

    @precondition(lambda self: self.running)
    @rule(data=st.data(), failed=st.booleans(), retryable=st.booleans())
    def finish(self, data: st.DataObject, failed: bool, retryable: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.running)))
        attempt = self.running.pop(number)
        failure = Failure(retryable) if failed else None
        verdict = self.machine.finish(number, attempt, self.now, failure)
        if failed and retryable and attempt + 1 < ATTEMPTS:
            assert verdict == "retry"
            self.failures[number] = attempt + 1
            self.waiting[number] = self.now + BACKOFF.seconds(attempt + 1)
        else:
            assert verdict == "done"

    @precondition(lambda self: self.added)
    @rule(data=st.data(), attempt=st.integers(0, 3))
    def report_what_is_not_current(self, data: st.DataObject, attempt: int) -> None:
        number = data.draw(st.integers(0, self.added))
        if self.running.get(number) != attempt:
            assert self.machine.finish(number, attempt, now=self.now) == "late"

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, self.added))
        assert self.machine.drop(number) == (number in self.running)
        for state in (self.running, self.waiting):
            state.pop(number, None)
        self.ready.discard(number)

    @invariant()
    def counts_agree(self) -> None:
        assert self.machine.running == len(self.running) <= CONCURRENCY
        assert self.machine.open == len(self.running) + len(self.waiting) + len(self.ready)
        assert self.machine.next_due() >= min(self.waiting.values(), default=float("inf"))


SchedulerModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerModel.TestCase
