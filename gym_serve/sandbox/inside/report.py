"""What is told of exceptions and output; their methods may be anybody's, and their texts of any size."""

from __future__ import annotations

import traceback

__all__ = ["MAX_ERROR", "MAX_TRACEBACK", "cut", "describe", "text_of", "traceback_of"]

MAX_ERROR = 2_000
MAX_TRACEBACK = 10_000
_MAX_FRAMES = 20


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
