"""Reports what a program in a sandbox can reach and should not.

`find_sandbox` runs this file before it trusts a sandbox: a `bwrap` that merely starts programs, or that was
built without a part, would otherwise pass. It opens and reports; it writes nothing and ends nobody. It is
passed as text and not imported, so it runs even if the sandbox does not show the package.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

_READ_ONLY = (os.__file__, "/proc/sys/kernel/core_pattern", "/proc/self/oom_score_adj")
_RIGHTS = ("CapPrm", "CapEff", "CapAmb")


def main() -> None:
    """Read the configuration from standard input, print the problems as a list of JSON."""
    config = json.load(sys.stdin)
    problems = []
    sys.path.append("/sandbox")
    try:
        from inside.confinement import confine, protect  # type: ignore[import-not-found]
    except ImportError:
        problems.append("the package that confines is not where it should be")
    else:
        protect()
        if child := os.fork():
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        confine(config)
    print(json.dumps(problems + list(_problems(config))))


def _problems(config: dict[str, Any]) -> Iterator[str]:
    for name, outside in config["namespaces"].items():
        if _namespace(name) == outside:
            yield f"its {name} namespace is this machine's"
    for path in filter(os.path.exists, config["hidden"]):
        yield f"it sees {path}"
    for path in filter(_opens_for_writing, _READ_ONLY):
        yield f"it may write to {path}"
    for path in (os.__file__, *config["path"]):
        if not os.access(path, os.R_OK):
            yield f"its user ({os.getuid()}) cannot read {path}"
    if os.getuid() == 0 or os.stat("/proc/uptime").st_uid == os.getuid():
        yield "its user is root"
    with open("/proc/self/status") as file:
        status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    if any(int(status[name], 16) for name in _RIGHTS):
        yield "it has capabilities"
    if (status.get("NoNewPrivs"), status.get("Seccomp")) != ("1", "2"):
        yield "no system call is refused"
    if unknown := set(os.environ) - set(config["variables"]):
        yield f"it has variables of this process: {', '.join(sorted(unknown))[:100]}"
    with suppress(PermissionError):
        os.kill(os.getppid(), 0)
        yield "its supervisor is within reach"


def _namespace(name: str) -> str | None:
    try:
        return os.readlink(f"/proc/self/ns/{name}")
    except OSError:
        return None


def _opens_for_writing(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
