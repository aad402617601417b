"""Where the graph runs, seen from the trainer: the examples, and what each topology survives."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve
from support.processes import run_module

ROOT = Path(__file__).parents[2]


def run_example(name: str, *arguments: str, **variables: str) -> str:
    """What an example prints."""
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py", *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(400)
def test_on_the_trainers_cluster(cluster: str) -> None:
    """Driver, asynchronous and synchronous actor and task; the trainer's actor and the models share a GPU.

    It attaches by the cluster's address, takes its own graph down, and leaves all else alone.
    """
    before = serve.status().applications.keys()
    printed = run_example("on_the_trainers_cluster", ray.get_runtime_context().gcs_address)
    assert printed.count("step ") == 2
    assert printed.count("evaluation: ") == 1
    assert "3 rollouts in a task\nin use: 1 gpu_share\n" in printed
    assert serve.status().applications.keys() == before


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_on_its_own_cluster() -> None:
    assert run_example("on_its_own_cluster").count("rewards [") == 3


def test_over_http(cluster: str, deploy: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYM_TOKEN", "a-secret-of-both-sides")
    graph = ROOT / "graphs" / "mcqa.yaml"
    gym = deploy(graph, name="guarded", overrides={"auth_token": "${GYM_TOKEN}"})
    assert run_example("over_http", gym.url).count("rewards [") == 3
    refused = subprocess.run(
        [sys.executable, ROOT / "examples" / "over_http.py", gym.url],
        env={**os.environ, "GYM_TOKEN": "another"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "Unauthorized" in refused.stderr


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_each_topology_survives(tmp_path: Path) -> None:
    happened = run_module("support.topologies", str(tmp_path))
    placed = happened.pop("placement")
    assert (placed["nodes"], placed["left"]) == (2, 0.0)
    assert "3 rollouts in a task\nin use: 1 gpu_share\n" in placed["printed"]
    faults = {topology: set(found) for topology, found in happened.items()}
    assert faults == {
        "inside": {"driver", "actor", "node", "controller", "abandoned"},
        "own": {"driver", "node", "controller", "abandoned"},
        "http": {"driver", "node", "controller"},
    }
    for topology, found in happened.items():
        for fault, result in found.items():
            if fault == "abandoned":
                continue
            assert result["failed"] == 0, (topology, fault, result)
            kept = 4 if fault == "node" else 8
            assert (result["same"], result["replicas"]) == (kept, 8), (topology, fault, result)
