"""Fixtures, examples, and sessions that do not share their counter."""

from __future__ import annotations

from typing import Any

import pytest
from support.environments import Bench, examples

from gym_serve.environments.session_counter import SessionCounter
from gym_serve.types.errors import InvalidRequest, SessionNotFound


@pytest.mark.parametrize("row", examples(SessionCounter), ids=lambda row: row["initial_count"])
async def test_example_row(row: dict[str, Any]) -> None:
    offered = [spec.openai() for spec in SessionCounter.tools.values()]
    assert row["responses_create_params"]["tools"] == offered
    bench = Bench(SessionCounter())
    await bench.call("seed_session", row)
    assert await bench.tool("get_counter_value") == {"count": row["initial_count"]}
    step = row["expected_count"] - row["initial_count"]
    assert await bench.tool("increment_counter", count=step) == {"success": True}
    assert await bench.verify(row, []) == {"reward": 1.0, "final_count": row["expected_count"]}


async def test_episodes_do_not_share_a_counter() -> None:
    first, second = Bench(SessionCounter()), Bench(SessionCounter())
    second.host = first.host
    await first.call("seed_session", {"initial_count": 1})
    await second.call("seed_session", {"initial_count": 10})
    await first.tool("increment_counter", count=5)
    assert await first.tool("get_counter_value") == {"count": 6}
    assert await second.tool("get_counter_value") == {"count": 10}


async def test_a_tool_without_a_seeded_session_starts_at_zero() -> None:
    bench = Bench(SessionCounter())
    assert await bench.tool("get_counter_value") == {"count": 0}
    assert (await bench.verify({"expected_count": 0}, []))["reward"] == 1.0


async def test_nothing_happened() -> None:
    verdict = await Bench(SessionCounter()).verify({"expected_count": 0}, [])
    reason = "the counter should be 0, and is None"
    assert verdict == {"reward": 0.0, "reason": reason, "final_count": None}


async def test_a_closed_session_has_no_counter() -> None:
    bench = Bench(SessionCounter())
    await bench.call("seed_session", {"initial_count": 1})
    session = bench.session
    await bench.call("close_session")
    bench.session = session
    with pytest.raises(SessionNotFound):
        await bench.tool("get_counter_value")


@pytest.mark.parametrize("start", [None, "x", 1.5, [1]])
async def test_a_row_without_a_start_opens_no_session(start: Any) -> None:
    bench = Bench(SessionCounter())
    with pytest.raises(InvalidRequest, match="initial_count"):
        await bench.call("seed_session", {"initial_count": start})
    assert isinstance(bench.host.server, SessionCounter)
    assert len(bench.host.server.sessions) == 0
