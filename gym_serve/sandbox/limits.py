"""`Limits`: what sandboxed code may use of the machine."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True)
class Limits:
    """Limits of one sandbox. All are sizes in bytes, except the number of open files.

    Attributes:
        memory_bytes: address space of each process; confined code has one process.
        file_bytes: size of any file that is written, the standard output included.
        disk_bytes: all files together (in memory); ``process`` does not limit them.
        open_files: number of files open at once.
    """

    memory_bytes: int = 1 << 30
    file_bytes: int = 16 << 20
    disk_bytes: int = 64 << 20
    open_files: int = 64
