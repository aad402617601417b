"""The log of a run, against a list: whatever breaks, every line comes once, and memory stays bounded."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_serve.graph.run_log import RunLog
from gym_serve.types.errors import Conflict, InvalidRequest

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 60)),
        st.tuples(st.just("read"), st.integers(1, 200)),
        st.tuples(st.just("break"), st.integers(0, 5)),
    ),
    max_size=80,
)


@given(STEPS)
def test_a_client_whose_connections_break_gets_every_line_once(steps: list[tuple[str, int]]) -> None:
    log = RunLog(window=500)
    added = 0
    kept: list[int] = []  # what the client has for good
    arrived: list[int] = []  # what came on the present connection; of that, a break loses the end
    for step, amount in steps:
        if step == "add":
            log.add(b'"text":"%s"' % (b"x" * amount))
            added += 1
        elif step == "read":
            before = arrived[-1] if arrived else (kept[-1] if kept else 0)
            lines, cursor = log.after(before, amount)
            cursors = [orjson.loads(line)["cursor"] for line in lines.splitlines()]
            assert cursors == list(range(before + 1, cursor + 1))
            arrived += cursors
        else:
            kept += arrived[: max(0, len(arrived) - amount)]
            arrived = []
            log.acknowledge(kept[-1] if kept else 0)
            assert log.acknowledged == (kept[-1] if kept else 0)
        assert log.last == added
        assert log.size == len(log.after(log.acknowledged, 10**9)[0])
        assert log.full == (log.size >= 500)
    kept += arrived
    lines, _ = log.after(kept[-1] if kept else 0, 10**9)
    kept += [orjson.loads(line)["cursor"] for line in lines.splitlines()]
    assert kept == list(range(1, added + 1))


@given(st.integers(0, 30), st.integers(-1, 40), st.integers(-1, 40))
def test_cursors_that_cannot_be(added: int, first: int, second: int) -> None:
    log = RunLog(window=10)
    for _ in range(added):
        log.add(b'"a":1')
    for cursor in (first, second):
        before = log.acknowledged
        if cursor > added:
            with pytest.raises(InvalidRequest, match=f"at most {added}, got {cursor}"):
                log.acknowledge(cursor)
        elif cursor < before:
            with pytest.raises(Conflict, match=f"after={before}"):
                log.acknowledge(cursor)
        else:
            log.acknowledge(cursor)
            assert log.acknowledged == cursor


def test_one_line_is_read_however_long_it_is() -> None:
    log = RunLog(window=10)
    log.add(b'"text":"%s"' % (b"x" * 1000))
    log.add(b'"end":{}', last=True)
    lines, cursor = log.after(0, 1)
    assert (len(lines.splitlines()), cursor, log.ended) == (1, 1, True)
    assert orjson.loads(log.after(1, 1)[0]) == {"cursor": 2, "end": {}}
