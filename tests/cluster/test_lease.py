"""When a graph ends without its owner."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray import serve
from ray.exceptions import RaySystemError

from gym_serve.cluster import ownership
from gym_serve.cluster.ownership import Claim, Lease, Ownership, Terms, watch


def claim(id: str = "1", *, lease_s: float = 10.0, detached: bool = False, owner: str | None = None) -> Claim:
    return Claim(id, Terms(owner, lease_s, detached), "worker", "node", "process 7 on host")


class Look(NamedTuple):
    claim: Claim | None
    alive: bool
    now: float


CLAIMS = st.sampled_from([None, claim("a"), claim("b"), claim("c", lease_s=3.0), claim("d", detached=True)])


@st.composite
def looks(draw: st.DrawFn) -> list[Look]:
    now, found = 0.0, []
    for _ in range(draw(st.integers(1, 30))):
        now += draw(st.floats(0.01, 4.0))
        found.append(Look(draw(CLAIMS), draw(st.booleans()), now))
    return found


@given(looks())
def test_a_lease_is_over_when_one_holder_was_gone_all_the_time(found: list[Look]) -> None:
    lease = Lease()
    for index, look in enumerate(found):
        over = lease.is_over(look.claim, look.alive, look.now)
        since = None
        for before in reversed(found[: index + 1]):
            if before.claim != look.claim or before.alive:
                break
            since = before.now
        assert over == (
            look.claim is not None
            and not look.claim.terms.detached
            and since is not None
            and look.now - since >= look.claim.terms.lease_s
        )


def test_a_holder_that_is_back_has_the_whole_lease_again() -> None:
    lease = Lease()
    assert not lease.is_over(claim("a"), False, 0.0)
    assert not lease.is_over(claim("a"), False, 9.9)
    assert not lease.is_over(claim("b"), True, 9.95)
    assert not lease.is_over(claim("b"), False, 20.0)
    assert not lease.is_over(claim("b"), False, 29.9)
    assert lease.is_over(claim("b"), False, 30.0)


class World:
    """What `watch` sees, step by step, and what it did."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], tuple[Claim | None, bool]]
    ) -> None:
        self.now = 0.0
        self.deleted: list[str] = []
        self.forgotten: list[float] = []
        self._steps = list(steps)
        self._alive = True
        monkeypatch.setattr(ownership.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(Ownership, "claim", lambda _: self._claim())
        monkeypatch.setattr(Ownership, "forget", lambda _: self.forgotten.append(self.now))
        monkeypatch.setattr(ownership, "worker_is_alive", lambda worker, node: self._alive)
        monkeypatch.setattr(serve, "delete", lambda name, _blocking: self.deleted.append(name))
        watch("math", self)  # type: ignore[arg-type]

    def wait(self, seconds: float) -> bool:
        """As of the event that ends `watch`."""
        if not self._steps:
            return True
        self.now += seconds
        self._step = self._steps.pop(0)
        return False

    def _claim(self) -> Claim | None:
        found, self._alive = self._step()
        return found


def test_the_graph_is_deleted_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at least four times within a lease, and every five seconds."""
    world = World(monkeypatch, lambda: (claim(lease_s=8.0), True), *[lambda: (claim(lease_s=8.0), False)] * 5)
    assert world.deleted == ["math"]
    assert world.forgotten == [10.0] == [world.now]


def test_a_graph_that_is_taken_over_at_the_last_moment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [claim("a", lease_s=8.0)] * 5 + [claim("b", lease_s=8.0)]
    world = World(monkeypatch, *[lambda: (seen.pop(0), False)] * 5)
    assert seen == []
    assert world.deleted == []


def test_nothing_ends_while_ray_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> tuple[Claim | None, bool]:
        raise RaySystemError("the GCS is away")

    world = World(
        monkeypatch, lambda: (claim(lease_s=2.0), True), *[fails] * 3, lambda: (claim(lease_s=2.0), False)
    )
    assert world.deleted == []
    assert caplog.text.count("math: its owner cannot be looked up") == 3


def test_nobodys_graph_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert World(monkeypatch, *[lambda: (None, False)] * 9).deleted == []
