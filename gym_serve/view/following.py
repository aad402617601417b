"""The process that indexes: ``python -m gym_serve.view.following CACHE FILE...``.

It is a process of its own, so that the server answers at once while it works. It ends when its standard
input is closed, however the server ended.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from gym_serve.view.index import Indexer
from gym_serve.view.sources import find_runs, shown

_IDLE = 0.5  # seconds between two looks at files that do not grow


def start_following(paths: Iterable[Path], cache: Path) -> subprocess.Popen[bytes]:
    """Begin to index the runs below some paths, and follow them. To end it, close its ``stdin``."""
    command = [sys.executable, "-m", "gym_serve.view.following", str(cache), *map(str, paths)]
    # In a session of its own: Ctrl-C is for the server, which then ends it.
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def follow(paths: list[Path], cache: Path) -> None:
    """Index until standard input is closed. New files of a folder are found within some seconds."""
    indexers: dict[str, Indexer] = {}
    looked = 0.0
    os.nice(5)  # who waits for a page comes first
    while True:
        if time.monotonic() > looked + 2.0:
            for files in find_runs([path for path in paths if path.exists()]):
                if files.id not in indexers:
                    indexers[files.id] = Indexer(files, cache)
            looked = time.monotonic()
        busy = [_step(indexer) for indexer in indexers.values()]
        readable, _, _ = select.select([sys.stdin], [], [], 0.0 if any(busy) else _IDLE)
        if readable and not os.read(sys.stdin.fileno(), 1):
            return


def _step(indexer: Indexer) -> bool:
    try:
        return indexer.index_for()
    except Exception as error:  # the other runs are indexed
        name = shown(indexer.files.main)
        sys.stderr.write(f"gym-serve view cannot index {name} in {indexer.folder}: {error}\n")
        indexer.close()
        return False


if __name__ == "__main__":
    follow([Path(name) for name in sys.argv[2:]], Path(sys.argv[1]))
