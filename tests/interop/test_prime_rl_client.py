"""prime-rl's client, that of the verifiers that is installed, and gym_serve's env server.

It runs in a process of the venv that `make interop` builds.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
VENV = Path(os.environ.get("INTEROP_VENV", ROOT / ".venv-interop"))

pytestmark = [
    pytest.mark.interop,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (VENV / "bin/python").exists(), reason=f"{VENV} is not there: run `make interop`"),
]


def run(script: str, folder: Path) -> Any:
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "WANDB_MODE": "disabled",
    }
    command = [str(VENV / "bin/python"), str(Path(__file__).with_name(script)), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def test_prime_rls_client_runs_cancels_and_outlives_its_server(tmp_path: Path) -> None:
    found = run("run_prime_rl_client.py", tmp_path)
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
