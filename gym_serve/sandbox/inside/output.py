"""What code writes and raises: captured in files, truncated, and described.

Files rather than pipes or objects: they catch what is written by whatever means, need no reader, and the
kernel bounds their size. They are in memory and have no name, so that code cannot fill or lock a folder. The
methods of an exception may be the code's own, and its text of any size.
"""

from __future__ import annotations

import io
import os
import sys
import traceback

MAX_ERROR = 2_000
MAX_TRACEBACK = 10_000
_MAX_FRAMES = 20


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
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            try:
                stream.flush()  # type: ignore[union-attr]
            except Exception:  # full, closed, or not a stream at all: code may set anything
                continue

    def sizes(self) -> tuple[int, int]:
        out, err = (os.fstat(file.fileno()).st_size for file in self._files)
        return out, err

    def start(self, limit: int) -> tuple[bytes, bytes]:
        out, err = (start_of(file, limit) for file in self._files)
        return out, err

    def end_of_errors(self, limit: int) -> bytes:
        return os.pread(self._files[1].fileno(), limit, max(0, self.sizes()[1] - limit))

    def _empty(self) -> None:
        for file in self._files:
            os.ftruncate(file.fileno(), 0)
            os.lseek(file.fileno(), 0, os.SEEK_SET)


def _working(stream: io.TextIOBase | None, descriptor: int) -> io.TextIOWrapper:
    if isinstance(stream, io.TextIOWrapper) and not stream.closed:
        return stream
    raw = io.BufferedWriter(io.FileIO(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace")


def describe(error: BaseException) -> str:
    """An exception in one line, e.g. ``"ZeroDivisionError: division by zero"``."""
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def text_of(value: object) -> str:
    """``str(value)``, cut; a question mark if that fails."""
    try:
        return str(value)[:MAX_ERROR]
    except BaseException:
        return "?"


def cut(text: str, limit: int) -> str:
    """The first ``limit`` characters of a text, with a note of how many there are."""
    return text if len(text) <= limit else f"{text[:limit]}\n... ({len(text) - limit} more)"


def traceback_of(error: BaseException, file_name: str) -> str:
    """The end of a traceback, from the first frame in ``file_name`` on."""
    try:
        frame = error.__traceback__
        while frame is not None and frame.tb_frame.f_code.co_filename != file_name:
            frame = frame.tb_next
        lines = traceback.format_exception(type(error), error, frame, limit=-_MAX_FRAMES)
        return "".join(lines)[-MAX_TRACEBACK:]
    except BaseException:
        return "(no traceback)\n"
