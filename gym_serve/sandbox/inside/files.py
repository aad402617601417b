"""Files without a name, and those that stand in for standard output and error while code runs.

Files rather than pipes or objects: they catch what is written by whatever means, need no reader, and
the kernel bounds their size. In memory and not in a folder, which code could fill or lock.
"""

from __future__ import annotations

import io
import os
import sys

__all__ = ["Output", "nameless_file", "replace", "start_of"]


def nameless_file() -> io.FileIO:
    """An empty file that nobody finds by a name."""
    if sys.platform == "linux":
        return io.FileIO(os.memfd_create("file"), "r+")  # without seals: nobody can make it read-only
    name = os.urandom(16).hex()  # `tempfile` takes long to import
    file = io.FileIO(name, "x+")
    os.unlink(name)
    return file


def replace(file: io.FileIO, data: bytes) -> None:
    """Make data the whole content of a file."""
    os.ftruncate(file.fileno(), 0)
    os.pwrite(file.fileno(), data, 0)


def start_of(file: io.FileIO, limit: int) -> bytes:
    """The first ``limit`` bytes of a file."""
    return os.pread(file.fileno(), limit, 0)


class Output:
    """Standard output and error, as files that are emptied for each piece of code."""

    def __init__(self) -> None:
        self._files = (nameless_file(), nameless_file())

    def close(self) -> None:
        """Give them up."""
        for file in self._files:
            file.close()

    def capture(self) -> None:
        """Empty both, and make them file descriptors 1 and 2, whatever code has done to those."""
        for descriptor, file in enumerate(self._files, 1):
            os.dup2(file.fileno(), descriptor)
        self._empty()
        sys.stdout = _working(sys.__stdout__, 1)
        sys.stderr = _working(sys.__stderr__, 2)
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]
        self.flush()
        self._empty()  # of what was left in a buffer when its file was full

    def flush(self) -> None:
        """Write out what is in buffers, of the present streams and of the first ones."""
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            try:
                stream.flush()  # type: ignore[union-attr]
            except Exception:  # full, closed, or not a stream at all: code may set anything
                continue

    def sizes(self) -> tuple[int, int]:
        """Bytes in each."""
        out, err = (os.fstat(file.fileno()).st_size for file in self._files)
        return out, err

    def start(self, limit: int) -> tuple[bytes, bytes]:
        """The first ``limit`` bytes of each."""
        out, err = (start_of(file, limit) for file in self._files)
        return out, err

    def end_of_errors(self, limit: int) -> bytes:
        """The last ``limit`` bytes of standard error."""
        return os.pread(self._files[1].fileno(), limit, max(0, self.sizes()[1] - limit))

    def _empty(self) -> None:
        for file in self._files:
            os.ftruncate(file.fileno(), 0)
            os.lseek(file.fileno(), 0, os.SEEK_SET)


def _working(stream: io.TextIOBase | None, descriptor: int) -> io.TextIOWrapper:
    if isinstance(stream, io.TextIOWrapper) and not stream.closed:
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(descriptor, "w", closefd=False)),
        encoding="utf-8",
        errors="backslashreplace",
    )
