"""examples/slurm.sh, with a Slurm whose nodes are all this machine.

Slow: it starts a Ray of two nodes, a graph, and a trainer.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "slurm.sh"
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
echo "srun: $*" >>"$SLURM_LOG"
if [[ $1 == hostname ]]; then echo 127.0.0.1; else exec "$@"; fi
"""
TRAINER = """
import ray
from gym_serve import Gym
with Gym.attach("weather") as gym:
    rollouts = gym.run("environments/simple_weather/data/example.jsonl", limit=3)
    print("nodes", sum(node["Alive"] for node in ray.nodes()))
    print("rewards", [rollout.reward for rollout in rollouts])
"""


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="apt-get install shellcheck")
def test_shellcheck_finds_nothing() -> None:
    done = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_job_has_a_cluster_a_graph_and_a_trainer(tmp_path: Path) -> None:
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/sh\necho node-a\necho node-b\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_LOG": str(tmp_path / "srun.log"),
        "RAY_PORT": "6479",
    }
    command = ["bash", SCRIPT, "graphs/weather.yaml", sys.executable, "-c", TRAINER]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "nodes 2\nrewards [1.0, 1.0, 1.0]" in done.stdout
    started = (tmp_path / "srun.log").read_text()
    assert started.count("ray start") == 2
    assert "gym-serve up graphs/weather.yaml" in started
