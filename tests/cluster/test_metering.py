"""How busy a replica was of late."""

from hypothesis import given, settings
from hypothesis import strategies as st

from gym_serve.cluster.routing.admission import LoadMeter


class Clocks:
    now = 100.0
    cpu = 5.0

    def meter(self) -> LoadMeter:
        return LoadMeter(lambda: self.now, lambda: self.cpu)

    def pass_time(self, seconds: float, cpu: float = 0.0) -> None:
        self.now += seconds
        self.cpu += cpu


def test_an_idle_replica_is_not_busy() -> None:
    meter = Clocks().meter()
    assert (meter.refused(), meter.cpu()) == (0.0, 0.0)


def test_the_share_of_refused_calls_is_that_of_the_last_seconds() -> None:
    clocks = Clocks()
    meter = clocks.meter()
    for _ in range(4):
        meter.answered(refused=True)
    clocks.pass_time(5.0)
    for refused in (False, False, True, False):
        meter.answered(refused=refused)
    assert meter.refused() == 5 / 8
    clocks.pass_time(5.5)
    assert meter.refused() == 1 / 4
    clocks.pass_time(5.5)
    assert meter.refused() == 0.0


def test_cpu_is_that_since_the_first_answer() -> None:
    clocks = Clocks()
    meter = clocks.meter()
    for _ in range(6):
        meter.answered()
        clocks.pass_time(1.0, cpu=0.75)
    assert meter.cpu() == 0.75
    clocks.pass_time(60.0)
    assert meter.cpu() == 0.0


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.floats(0, 3), st.floats(0, 1)), max_size=60))
def test_shares_are_shares(events: list[tuple[bool, float, float]]) -> None:
    clocks = Clocks()
    meter = clocks.meter()
    for refused, seconds, share in events:
        meter.answered(refused=refused)
        clocks.pass_time(seconds, cpu=seconds * share)
        assert 0.0 <= meter.refused() <= 1.0
        assert 0.0 <= meter.cpu() <= 1.0 + 1e-9
