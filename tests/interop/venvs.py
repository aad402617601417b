"""The virtual environments of `make interop`, and the scripts of this folder that run in them.

They are apart because their pins collide with each other's and with ours. A script prints JSON last.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.processes import environment

__all__ = ["FOREIGN", "INTEROP", "ROOT", "needs", "printed"]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOREIGN = Path(os.environ.get("FOREIGN_VENV", ROOT / ".venv-foreign"))
INTEROP = Path(os.environ.get("INTEROP_VENV", ROOT / ".venv-interop"))


def needs(venv: Path, module: str = ".") -> pytest.MarkDecorator:
    """Skips tests where the environment has no gym_serve, or no such module beside it."""
    packages = venv.glob("lib/python*/site-packages")
    found = any(any(site.glob("*gym_serve*")) and (site / module).exists() for site in packages)
    return pytest.mark.skipif(not found, reason=f"{venv} is not as `make interop` builds it")


def printed(venv: Path, script: str, *arguments: object, folder: Path | None = None) -> Any:
    """What a script prints.

    Args:
        venv: `FOREIGN` or `INTEROP`.
        script: name of the file.
        arguments: those of its command line.
        folder: where a library of a trainer runs, without a GPU, a hub or a service that logs.
    """
    env = {**environment(tests=True), "PYTHONWARNINGS": "ignore"}
    if folder is not None:
        env |= {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [str(venv / "bin/python"), str(HERE / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith(('{"', '[{"'))]
    return json.loads(lines[-1])
