"""A process of gym_serve's own takes the open files that it may have."""

from __future__ import annotations

import subprocess
import sys

_CODE = """
import resource
from gym_serve.servers.runner import tune_process
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
tune_process()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 1 << 20) or hard == resource.RLIM_INFINITY)
"""


def test_the_soft_limit_of_open_files_is_raised() -> None:
    told = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=True)
    assert told.stdout == "True\n"
