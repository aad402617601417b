"""docs/tutorial-nemo-gym.md, by the environment that it asks for: `make interop` builds it."""

import os
import re
import subprocess

import pytest
from support.docs import ROOT, blocks_of, matches
from venvs import FOREIGN, needs

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600), needs(FOREIGN, "nemo_gym")]


def test_the_tutorial(tmp_path):
    (tmp_path / "venv").symlink_to(FOREIGN)
    printed = ""
    for block in blocks_of(ROOT / "docs" / "tutorial-nemo-gym.md"):
        if block.file is not None:
            (tmp_path / block.file).write_text(block.text)
        elif block.language == "console":
            commands = re.findall(r"^\$ (.+)", block.text, re.MULTILINE)
            if not any("pip install" in command for command in commands):  # the environment is there
                done = subprocess.run(
                    ["bash", "-ec", "\n".join(["source venv/bin/activate", *commands])],
                    cwd=tmp_path,
                    env=os.environ | {"PYTHONWARNINGS": "ignore"},
                    capture_output=True,
                    text=True,
                    check=False,
                )
                assert done.returncode == 0, done.stderr[-4000:]
                printed = done.stdout
        elif block.language == "text":
            assert matches(block.text, printed), printed
    assert (tmp_path / "calendar.yaml").exists()
