"""prime-rl's client, that of the verifiers that is installed, and gym_serve's env server.

It runs in a process of the venv that `make interop` builds.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from venvs import INTEROP, needs, printed

pytestmark = [pytest.mark.interop, pytest.mark.timeout(900), needs(INTEROP)]


def test_prime_rls_client_runs_cancels_and_outlives_its_server(tmp_path: Path) -> None:
    found = printed(INTEROP, "run_prime_rl_client.py", tmp_path, folder=tmp_path)
    assert (found["runs"], found["ok"]) == (500, 375)
    ring, refuse, chatter, broken = found["episodes"]
    assert [each["ok"] for each in (ring, refuse, chatter, broken)] == [True, True, True, False]
    assert [each["reward"] for each in (ring, refuse, chatter)] == [1.0, 0.0, 0.0]
    assert (ring["truncated"], chatter["truncated"]) == (False, True)
    [branch] = ring["branches"]
    assert sum(branch["sampled_mask"]) > 0
    assert {
        p for p, is_sampled in zip(branch["logprobs"], branch["sampled_mask"], strict=True) if is_sampled
    } == {-0.25}
    assert (found["after_cancels"], found["after_kill"]) == (True, True)
