"""The pure parts of an endpoint pool: breaker, rate limits, choice of endpoint."""

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gym_serve.deployments.endpoints import Breaker, EndpointPool, RateLimit

URLS = [f"http://host{i}:8000/v1" for i in range(4)]
KEYS = st.lists(st.text(), min_size=1, max_size=20)
GAPS = st.floats(0, 60)


@given(st.text())
def test_replicas_agree_on_an_idle_pool(affinity):
    assert len({EndpointPool(order).pick(affinity, 0.0).url for order in (URLS, URLS[::-1])}) == 1


def test_episodes_spread():
    pool = EndpointPool(URLS)
    counts = Counter(pool.pick(str(i), 0.0).url for i in range(400))
    assert set(counts) == set(URLS)
    assert min(counts.values()) > 60
    assert {pool.pick(None, 0.0).url for _ in range(200)} == set(URLS)


@given(KEYS, st.data())
def test_an_episode_stays_whatever_the_load(keys, data):
    pool = EndpointPool(URLS)
    homes = {}
    for key in keys * 2:
        for endpoint in pool.endpoints:
            endpoint.calls = data.draw(st.integers(0, 3))
        endpoint = pool.pick(key, 0.0)
        if key not in homes:
            assert endpoint.calls == min(e.calls for e in pool.endpoints)
        assert homes.setdefault(key, endpoint) is endpoint


@given(KEYS)
def test_only_the_episodes_of_a_lost_endpoint_move(keys):
    pool = EndpointPool(URLS)
    before = {key: pool.pick(key, 0.0).url for key in keys}
    next(e for e in pool.endpoints if e.url == URLS[0]).breaker.failed(0.0, gone=True)
    after = {key: pool.pick(key, 0.0).url for key in keys}
    assert URLS[0] not in after.values()
    assert {key for key in keys if before[key] != after[key]} == {k for k in keys if before[k] == URLS[0]}
    assert {key: pool.pick(key, 1e6).url for key in keys} == after


@given(KEYS, st.lists(st.sampled_from(URLS), min_size=1, unique=True))
def test_membership_changes(keys, urls):
    pool = EndpointPool(URLS)
    before = {key: pool.pick(key, 0.0) for key in keys}
    pool.set(urls)
    assert [e.url for e in pool.endpoints] == urls
    for key, endpoint in before.items():
        assert pool.pick(key, 0.0).url in urls
        if endpoint.url in urls and len(urls) > 1:
            assert pool.pick(key, 0.0) is endpoint


def test_when_all_failed_the_one_that_may_be_back_first_is_tried():
    pool = EndpointPool(URLS[:2])
    first, second = pool.endpoints
    first.breaker.failed(0.0, gone=True)
    assert pool.other(second, 0.0) is None
    second.breaker.failed(1.0, gone=True)
    assert {pool.pick(str(i), 2.0) for i in range(20)} == {first}
    assert {pool.pick(str(i), 60.0) for i in range(50)} == {first, second}


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr("gym_serve.deployments.endpoints._EPISODES", 5)
    pool = EndpointPool(URLS)
    for i in range(100):
        pool.pick(str(i), 0.0)
    assert len(pool._homes) == 5


@given(st.lists(st.tuples(st.sampled_from(["ok", "fail", "gone", "cancel"]), GAPS)))
def test_a_breaker(steps):
    """It opens for failures only, lets one call at a time through while open, and never shuts for good."""
    breaker, now, failures = Breaker(), 0.0, 0
    for outcome, gap in steps:
        now += gap
        if not breaker.allows(now):
            assert failures
            assert breaker.until - now <= 120.0 + 1e-6
            now = breaker.until
            assert breaker.allows(now)
        was_open = breaker.until > float("-inf")
        breaker.began(now)
        assert breaker.allows(now) is not was_open
        if outcome == "ok":
            breaker.succeeded()
            failures = 0
            assert breaker.allows(now)
        elif outcome != "cancel":
            breaker.failed(now, gone=outcome == "gone")
            failures += 1
            assert breaker.allows(now) is not (outcome == "gone" or was_open or failures >= 5)


def test_a_look_tells_whether_somebody_is_there_and_no_more():
    breaker = Breaker()
    breaker.looked(0.0, there=True)
    assert breaker.allows(0.0)
    breaker.looked(1.0, there=False)
    assert breaker.until == 11.0
    breaker.looked(6.0, there=False)
    assert breaker.until == 16.0  # no call has to find out
    breaker.looked(7.0, there=True)
    assert breaker.allows(7.0)
    for _ in range(5):
        breaker.looked(8.0, there=True)  # it answers looks, and fails calls
        breaker.failed(8.0)
    assert not breaker.allows(8.0)
    breaker.looked(9.0, there=True)
    assert not breaker.allows(9.0)
    breaker.began(18.0)
    breaker.succeeded()
    assert breaker.allows(18.0)


def test_pauses_double():
    breaker, now, pauses = Breaker(), 0.0, []
    breaker.failed(now, gone=True)
    for _ in range(6):
        pauses.append(breaker.until - now)
        now = breaker.until
        breaker.began(now)
        breaker.failed(now)
        breaker.failed(now)  # a call from before
    assert pauses == [10.0, 20.0, 40.0, 80.0, 120.0, 120.0]


@given(
    st.floats(1, 6000),
    st.floats(60, 1e6),
    st.lists(st.tuples(st.floats(0, 20), st.floats(0, 2000), st.floats(0, 3000)), min_size=1, max_size=30),
)
def test_rates_hold(requests, tokens, calls):
    """In any span of time no more begins than the rates and one burst allow, in the order of coming."""
    limit, now, begun, comes = RateLimit(requests, tokens), 0.0, [], 0.0
    for gap, expected, used in calls:
        comes += gap
        now = max(now, comes)
        while wait := limit.begin(now, expected):
            now += wait
        begun.append((now, max(expected, used)))
        limit.settle(expected, max(expected, used))
    moments = [moment for moment, _ in begun]
    for i, first in enumerate(moments):
        for j in range(i, len(moments)):
            span = moments[j] - first
            assert j - i <= max(1.0, requests / 10) + span * requests / 60 + 1e-6
    largest = max(size for _, size in begun)
    total = sum(size for _, size in begun[:-1])
    span = max(moments)
    assert total <= max(1.0, tokens / 10) + span * tokens / 60 + largest + 1e-3


def test_a_call_that_took_less_gives_the_rest_back():
    limit = RateLimit(None, 600)
    assert limit.begin(0.0, 60) == 0.0
    limit.settle(60, 10)
    assert limit.begin(0.0, 50) == 0.0
    assert limit.begin(0.0, 10) == 1.0
    assert limit.begin(1.0, 10) == 0.0


def test_a_call_larger_than_the_limit_begins_at_last():
    limit = RateLimit(None, 60)
    assert limit.begin(0.0, 1000) == 0.0
    assert limit.begin(0.0, 6) == 1000.0


async def test_who_waits_for_a_limit_is_served_in_turn_and_may_leave():
    limit, order = RateLimit(60, 600), []

    async def call(name, tokens):
        async with limit.turn(tokens):
            order.append(name)

    async with limit.turn(60):
        waiting = [asyncio.create_task(call(i, 30)) for i in range(4)]
        await asyncio.sleep(0)
        assert limit.expected(0.0, 10) == 13.0  # 60 + 4 * 30 + 10 tokens, 60 of them at once, 10 a second
        waiting[1].cancel()
        await asyncio.wait([waiting[1]])
        assert limit.expected(0.0, 10) == 10.0
    await asyncio.gather(waiting[0], *waiting[2:])
    assert order == [0, 2, 3]
    assert limit.expected(0.0, 10) == 0.0
