"""`gym-serve logs` reads the files of nodes that share no disk."""

from pathlib import Path

import pytest
from support.processes import RAY_TOKEN, can_mount, run_module

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not can_mount(), reason="a mount namespace is not permitted here"),
]


def test_logs_of_both_nodes_are_found_and_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RAY_TOKEN.items():  # of both nodes, the driver and the command
        monkeypatch.setenv(name, value)
    said = run_module("support.two_machines", str(tmp_path))
    assert said["here"] == []  # the policy's file is on the other node
    at = f"rollout={said['rollout']}"
    servers = [line.split()[3] for line in said["found"] if at in line]
    assert servers.count("policy") == 2
    assert {"weather", "weather_agent"} <= set(servers)
    assert any(" policy v1/responses" in line and at in line for line in said["followed"])
    assert any(" weather_agent run" in line and at in line for line in said["followed"])
