"""A task as Harbor's own tool writes it: ``harbor init --task demo/pytested`` of 0.26, unchanged.

Its tests have a box of their own, made by uv from PyPI.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.sandboxes import needs_bubblewrap

from gym_serve import Gym
from gym_serve.environments.workspace.rows import HarborRows

pytestmark = [pytest.mark.interop, needs_bubblewrap]

WRITTEN = {
    "task.toml": """\
schema_version = "1.4"
artifacts = []

[task]
name = "demo/pytested"
version = "1.0.0"
description = "x"
authors = []
keywords = []

[metadata]

[verifier]
timeout_sec = 600.0
environment_mode = "separate"
collect = []

[verifier.env]

[agent]
timeout_sec = 600.0

[environment]
network_mode = "public"
build_timeout_sec = 600.0
os = "linux"
mcp_servers = []

[environment.env]

[solution.env]
""",
    "instruction.md": """\
""",
    "environment/Dockerfile": """\
FROM ubuntu:24.04

# Install or copy over any environment dependencies here.

WORKDIR /app""",
    "solution/solve.sh": """\
#!/bin/bash

# Use this file to solve the task.""",
    "tests/Dockerfile": """\
FROM python:3.12-slim

COPY --from=ghcr.io/astral-sh/uv:0.9.7 /uv /usr/local/bin/uv

RUN uv pip install --system pytest==8.4.1 pytest-json-ctrf==0.3.5

WORKDIR /app

COPY . /tests/
""",
    "tests/test.sh": """\
#!/bin/bash

# Install test dependencies in tests/Dockerfile.
# This script runs from the working directory and writes the reward.

# CTRF produces a standard test report in JSON format which is useful for logging.
if pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
""",
    "tests/test_outputs.py": """\
\"\"\"
Use this file to define pytest tests that verify the outputs of the task.

This file will be copied to /tests/test_outputs.py and run by the /tests/test.sh file
from the working directory.
\"\"\"


def test_outputs():
    \"\"\"Test that the outputs are correct.\"\"\"
    pass
""",
}


def test_the_template_of_harbor_runs_unchanged(tmp_path: Path) -> None:
    for name, text in WRITTEN.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "instruction.md").write_text("Nothing is to be done.")  # which the template leaves empty
    with Gym.from_graph("workspace", ray=False) as gym:
        (rollout,) = gym.run(list(HarborRows().rows(tmp_path)), agent="oracle")
    assert rollout["reward"] == 1.0, json.dumps(rollout)[-3000:]
    assert "1 passed" in rollout["test_output"]
