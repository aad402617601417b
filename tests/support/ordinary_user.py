"""Running this Python as an ordinary user, where the tests themselves run as root."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

__all__ = ["as_ordinary_user", "why_not"]

_USER = 12345  # nobody's, and not `nobody`: that is who programs are in the sandboxes of root


def as_ordinary_user(*arguments: str) -> list[str]:
    """A command that runs Python with arguments as a user without any rights; this process is root's.

    Python may lie in root's home, which only root may enter: a mount namespace shows it there in a folder
    that all may enter. Nothing changes outside of that namespace.
    """
    needed = [Path(sys.base_prefix), Path(sys.prefix), Path(__file__).parents[2]]
    script = ["set -e", "keep=$(mktemp -d)", 'mount -t tmpfs -o mode=700 none "$keep"']
    for number, (locked, paths) in enumerate(_behind(needed).items()):
        for place, path in enumerate(paths):
            script += [f'mkdir "$keep/{number}-{place}"', f'mount --bind {_q(path)} "$keep/{number}-{place}"']
        script.append(f"mount -t tmpfs -o mode=755 none {_q(locked)}")
        for place, path in enumerate(paths):
            script += [f"mkdir -p {_q(path)}", f'mount --bind "$keep/{number}-{place}" {_q(path)}']
    user = f"setpriv --reuid {_USER} --regid {_USER} --clear-groups --inh-caps=-all"
    script.append(f'umount -R "$keep"; rmdir "$keep"; exec {user} "$@"')
    return ["unshare", "--mount", "sh", "-c", "\n".join(script), "sh", sys.executable, *arguments]


def _behind(paths: Sequence[Path]) -> dict[Path, list[Path]]:
    """The paths by the topmost folder on the way to them that only its owner may enter."""
    found: dict[Path, list[Path]] = {}
    for path in dict.fromkeys(paths):
        locked = [folder for folder in reversed(path.parents) if not folder.stat().st_mode & 1]
        if locked:
            found.setdefault(locked[0], []).append(path)
    return found


def _q(path: Path) -> str:
    return shlex.quote(str(path))


@cache
def why_not() -> str | None:
    """Why it cannot be done here, or None if it can."""
    if os.geteuid() != 0:
        return "these tests run as an ordinary user already"
    probe = as_ordinary_user("-c", "import os, gym_serve; print(os.getuid())")
    try:
        done = subprocess.run(probe, capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        return str(error)
    return None if done.stdout == f"{_USER}\n" else done.stderr[-300:] or done.stdout
