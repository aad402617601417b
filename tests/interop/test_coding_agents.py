"""Coding agents in boxes, by the settings of the graph `workspace`: a scripted model, exact tokens.

The first run installs them from PyPI and npm.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.environments import called, said
from support.sandboxes import needs_bubblewrap
from venvs import INTEROP, needs, printed

from gym_serve import Gym
from gym_serve.training import samples

pytestmark = [pytest.mark.interop, needs_bubblewrap]

needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm")


def _system_python() -> tuple[int, ...]:
    """Version of the Python that boxes have."""
    told = subprocess.run(["/usr/bin/python3", "-V"], capture_output=True, text=True, check=False).stdout
    return tuple(map(int, re.findall(r"\d+", told)))


needs_new_python = pytest.mark.skipif(_system_python() < (3, 12), reason="OpenHands needs Python 3.12")

# By agent: its own tool, the call of it, and what the model says in the end.
COMMAND = "sort names.txt > sorted.txt; cat sorted.txt"
CALLS: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "mini_swe_agent": (
        "bash",
        {"command": COMMAND},
        [called("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}, "call_2")],
    ),
    "claude_code": ("Bash", {"command": COMMAND}, said("Done.")),
    "codex": ("exec_command", {"cmd": COMMAND}, said("Done.")),
    "openhands": ("terminal", {"command": COMMAND}, [called("finish", {"message": "Done."}, "call_2")]),
    "qwen_code": ("run_shell_command", {"command": COMMAND, "is_background": False}, said("Done.")),
}


@pytest.mark.parametrize(
    "agent",
    [
        "mini_swe_agent",
        *(pytest.param(name, marks=needs_npm) for name in ("claude_code", "codex", "qwen_code")),
        pytest.param("openhands", marks=needs_new_python),
    ],
)
def test_a_coding_agent_in_a_box(agent: str) -> None:
    tool, arguments, last = CALLS[agent]
    script = [[called(tool, arguments)], last]
    row = {
        "responses_create_params": {"input": "Sort names.txt into sorted.txt."},
        "files": {"names.txt": "Cleo\nAda\n"},
        "test_command": "test \"$(cat sorted.txt | tr '\\n' ' ')\" = 'Ada Cleo '",
    }
    overrides = {"models.policy": {"type": "scripted_model", "script": script}}
    with Gym.from_graph("workspace", ray=False, overrides=overrides) as gym:
        (rollout,) = gym.run([row], agent=agent)
    assert rollout["reward"] == 1.0, json.dumps(rollout)[-3000:]
    assert rollout["harness"]["ended"] == "exit"
    assert "Ada" in json.dumps(rollout["response"]["output"])
    assert rollout["branches"] == []
    (sample,) = samples(rollout)  # one conversation: each prompt goes on with the tokens of the call before
    spoken = [item for item in rollout["response"]["output"] if "generation_token_ids" in item]
    assert sum(sample.loss_mask) == sum(len(item["generation_token_ids"]) for item in spoken)
    assert [item["type"] for item in spoken] == ["function_call", last[0]["type"]]


TASK = {
    "task.toml": 'schema_version = "1.4"\n[environment]\nnetwork_mode = "no-network"\n',
    "instruction.md": "Write the lines of names.txt, sorted, to sorted.txt.\n",
    "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\nRUN printf 'Cleo\\nAda\\n' > names.txt\n",
    "tests/test.sh": '#!/bin/sh\nif [ "$(head -n 1 sorted.txt)" = Ada ]; then echo 1; else echo 0; fi '
    "> /logs/verifier/reward.txt\n",
}


@pytest.mark.timeout(900)
@needs(INTEROP, "trl")
def test_a_coding_agent_learns_from_a_folder_of_tasks(tmp_path: Path) -> None:
    """Two steps of TRL's `GRPOTrainer`: what it trains on is what its engine sampled, call by call."""
    for name, text in TASK.items():
        path = tmp_path / "tasks" / "sort-names" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "trained").mkdir()
    ran = printed(INTEROP, "run_coding_agent.py", tmp_path / "tasks", tmp_path / "trained", folder=tmp_path)
    assert (len(ran["samples"]), len(ran["asked"])) == (4, 8)
    for step in range(2):
        samples, asked = ran["samples"][2 * step :][:2], ran["asked"][4 * step :][:4]
        assert sorted(sample["reward"] for sample in samples) == [0.0, 1.0]
        for sample in samples:
            assert (sample["advantage"] > 0) == (sample["reward"] == 1.0)
            whole = sample["prompt"] + sample["response"]
            told = [(call["prompt"] + call["ids"], call) for call in asked]
            first, second = (call for tokens, call in told if whole[: len(tokens)] == tokens)
            assert (first["prompt"], second["prompt"] + second["ids"]) == (sample["prompt"], whole)
            assert sample["trained"] == first["ids"] + second["ids"]
            assert sample["logprobs"] == pytest.approx(first["logprobs"] + second["logprobs"], abs=1e-5)
    assert (ran["steps"], ran["updates"], ran["changed"]) == (2, 2, True)
