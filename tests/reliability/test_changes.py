"""A graph that is scaled, changed and replaced under live sessions loses and misroutes none of them."""

from __future__ import annotations

import pytest
from support.processes import run_module

SESSIONS = 120  # `python -m support.changes` alone takes 500


@pytest.mark.timeout(600)
def test_no_session_is_lost_or_misrouted() -> None:
    result = run_module("support.changes", "--sessions", str(SESSIONS), "--pause", "1", "--calls", "3")
    changes = result["changes"]
    assert [(change["started"], change["ended"]) for change in changes] == [
        ({"env": 2}, {}),
        ({}, {"env": 2}),
        ({"env": 3}, {"env": 3}),
        ({"agent": 1, "gateway": 1, "other": 1}, {"agent": 1, "gateway": 1}),
    ]
    assert all(change["live"] > SESSIONS / 2 for change in changes)
    assert result["counts"].keys() == {"calls", "sessions"}, result["problems"]
    assert result["episodes"].keys() == {"reward 10"}
