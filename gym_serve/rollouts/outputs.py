"""The files of a run, their lock, and what is said when they cannot be written.

One process writes a run at a time: it holds an advisory lock on the main file, which the system releases
however the process ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gym_serve.rollouts.compression import compressed, split_name
from gym_serve.types.errors import BadRequest, Conflict, Unavailable

__all__ = ["Outputs", "check_folder", "lock", "replacing", "sync_directory", "writing"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Outputs:
    """The files of ``collect``, next to each other.

    Attributes:
        rollouts: the scored rollouts, ``out.jsonl``.
        failures: one line per failed attempt, ``out_failures.jsonl``.
        inputs: every stamped row, ``out_materialized_inputs.jsonl``.
        metrics: ``out_aggregate_metrics.json``.
        header: what the run is made of, ``out_run.json``.
    """

    rollouts: Path
    failures: Path
    inputs: Path
    metrics: Path
    header: Path

    @property
    def comparisons(self) -> Path:
        """What ``compare`` answered, a line per group, ``out_comparisons.jsonl``; see `group_stage`."""
        stem, suffix = split_name(self.rollouts)
        return self.rollouts.with_name(f"{stem}_comparisons{suffix}")

    @classmethod
    def of(cls, path: str | Path) -> Outputs:
        """The files of the run whose main file is ``path``."""
        path = Path(path)
        stem, suffix = split_name(path)
        return cls(
            path,
            path.with_name(f"{stem}_failures{suffix}"),
            path.with_name(f"{stem}_materialized_inputs{suffix}"),
            path.with_name(f"{stem}_aggregate_metrics.json"),
            path.with_name(f"{stem}_run.json"),
        )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the system says about writing ``path`` into a `GymError`.

    Raises:
        Unavailable: there is no space left.
        BadRequest: the path cannot be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise Unavailable(
                f"no space left for {path} ({error.strerror}); every rollout reported so far is in it: free "
                "some space, then resume"
            ) from error
        check_folder(path)
        raise BadRequest(f"cannot write {path}: {error.strerror or error}") from error


def check_folder(path: Path) -> None:
    """Check that the folder of a file exists. None is created: its name may be misspelt.

    Raises:
        BadRequest: it does not.
    """
    if not path.parent.is_dir():
        raise BadRequest(f"cannot write {path}: there is no folder {path.parent}; create it first")


def lock(file: BinaryIO, path: Path) -> None:
    """Make this process the only writer of a run, until ``file`` is closed.

    Raises:
        Conflict: another one is.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise BadRequest(f"cannot lock {path}: {error.strerror}") from error
        raise Conflict(f"{path} is being written by another process; write to another file") from None


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a file all at once: whenever the process dies, either the old or the new one is there.

    What is written is compressed, if the name says so.

    Raises:
        Unavailable, BadRequest: see `writing`.
    """
    partial = path.with_name(f".partial.{path.name}")
    with writing(path):
        try:
            with open(partial, "wb") as raw:
                with compressed(raw, path) as file:
                    yield file
                raw.flush()
                os.fsync(raw.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make new names in a directory survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
