"""Costs by kind of process of a Ray that this process has started, Ray's own processes and ours.

`Census` of `processes` is for the costs of rollouts and sums Ray up; here Ray is what is looked into.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar

import psutil

from gym_serve.cli import local_ray

T = TypeVar("T")

__all__ = ["count_by_kind", "cpu_by_kind", "kind_of", "pss_mb_by_kind"]

# By a part of the command line. Workers give themselves a title once they know what they are for.
_KINDS = {
    "ray::ServeController": "Serve controller",
    "ray::ProxyActor": "Serve proxy",
    "ray::HAProxyManager": "HAProxy",
    "bin/haproxy": "HAProxy",
    "ray::ServeReplica:": "replicas",
    "ray::IDLE": "idle workers",
    "default_worker.py": "idle workers",
    "gcs_server": "GCS",
    "dashboard/dashboard.py": "dashboard",
    "ray-dashboard-": "dashboard",
    "multiprocessing.forkserver": "dashboard",
    "multiprocessing.resource_tracker": "dashboard",
    "ray::DashboardAgent": "dashboard agent",
    "ray::RuntimeEnvAgent": "runtime_env agent",
    "autoscaler/_private/monitor.py": "autoscaler monitor",
    "log_monitor.py": "log monitor",
}


def cpu_by_kind() -> dict[str, float]:
    """CPU seconds so far, with those of children that have ended."""
    return _summed(lambda process: sum(process.cpu_times()[:4]))


def pss_mb_by_kind() -> dict[str, float]:
    """Memory in MB; pages that processes share count once in all."""
    return _summed(lambda process: process.memory_full_info().pss / 1e6)


def count_by_kind() -> dict[str, int]:
    """How many processes there are."""
    return dict(Counter(kind for kind, _ in _read(lambda process: 0.0)))


def kind_of(command: str) -> str:
    """The kind of a process by its command line."""
    # The raylet's holds the command lines of all that it may start.
    if command.split(" ", 1)[0].endswith("raylet"):
        return "raylet"
    return next((kind for part, kind in _KINDS.items() if part in command), "other")


def _summed(read: Callable[[psutil.Process], float]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for kind, value in _read(read):
        sums[kind] += value
    return dict(sums)


def _read(read: Callable[[psutil.Process], T]) -> Iterator[tuple[str, T]]:
    own = psutil.Process()
    for process in (own, *own.children(recursive=True), *_of_up()):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):  # it has just ended
            kind = "driver" if process == own else kind_of(" ".join(process.cmdline()))
            yield kind, read(process)


def _of_up() -> Iterator[psutil.Process]:
    """The processes of the Ray that ``gym-serve up`` has started, which is no child of the command."""
    if (ray := local_ray.started()) is not None and ray.pid not in _children():
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(ray.pid)
            yield from (process, *process.children(recursive=True))


def _children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}
