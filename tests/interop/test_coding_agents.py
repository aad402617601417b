"""Coding agents in boxes, by the settings of the graph `workspace`: a scripted model, exact tokens.

The first run installs them from PyPI and npm.
"""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
from support.environments import called, said
from support.sandboxes import needs_bubblewrap

from gym_serve import Gym
from gym_serve.training import samples

pytestmark = [pytest.mark.interop, needs_bubblewrap]

needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm")

# By agent: the call of its own tool, and what the model says in the end.
CALLS: dict[str, tuple[str, str, list[dict[str, Any]]]] = {
    "mini_swe_agent": (
        "bash",
        "command",
        [called("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}, "call_2")],
    ),
    "claude_code": ("Bash", "command", said("Done.")),
    "codex": ("exec_command", "cmd", said("Done.")),
}


@pytest.mark.parametrize(
    "agent", ["mini_swe_agent", *(pytest.param(name, marks=needs_npm) for name in ("claude_code", "codex"))]
)
def test_a_coding_agent_in_a_box(agent: str) -> None:
    tool, argument, last = CALLS[agent]
    script = [[called(tool, {argument: "sort names.txt > sorted.txt; cat sorted.txt"})], last]
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
