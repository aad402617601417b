"""``python -m gym_serve.interop.verifiers TASKSET [SETTINGS]``: the tasks of a taskset as rows, on stdout.

SETTINGS is a JSON object, the fields of the taskset's config.
"""

from __future__ import annotations

import json
import sys

from gym_serve.interop.verifiers.tasks import Tasks
from gym_serve.servers.transport import encode


def main(taskset: str, settings: str = "{}") -> None:
    """Write the rows of a taskset."""
    for row in Tasks(taskset, json.loads(settings)).rows():
        sys.stdout.buffer.write(encode(row) + b"\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
