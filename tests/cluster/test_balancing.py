"""Which replica takes a call."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gym_serve.cluster.routing.balancing import Balancer

names = st.sets(st.sampled_from("abcdefgh"), min_size=1)


@given(names, st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 100)))
def test_one_of_those_that_are_there(replicas: set[str], loads: dict[str, int]) -> None:
    chosen = Balancer(lambda name: loads.get(name, 0)).choose(replicas)
    assert chosen in replicas
    if len(replicas) > 1:
        assert loads.get(chosen or "", 0) < max(loads.get(r, 0) for r in replicas) or len(
            {loads.get(r, 0) for r in replicas}
        ) < len(replicas)


def test_none_where_there_are_none() -> None:
    assert Balancer(lambda _: 0).choose([], "key") is None


@given(st.lists(names, min_size=1, max_size=20))
def test_an_episode_moves_only_when_its_replica_goes(changes: list[set[str]]) -> None:
    balancer = Balancer(lambda _: 0)
    before = None
    for replicas in changes:
        now = balancer.choose(replicas, "episode")
        assert now in replicas
        assert now == before or before not in replicas
        before = now


def test_calls_spread_evenly() -> None:
    loads: Counter[str] = Counter()
    balancer = Balancer(loads.__getitem__)
    for number in range(4000):
        loads[balancer.choose("abcd", str(number)) or ""] += 1
    assert max(loads.values()) - min(loads.values()) < 40


def test_the_memory_of_episodes_is_bounded(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("gym_serve.cluster.routing.balancing._KEPT", 10)
    balancer = Balancer(lambda _: 0)
    for number in range(100):
        balancer.choose("ab", str(number))
    assert len(balancer._kept) == 10
