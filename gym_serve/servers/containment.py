"""`contained`: an author's code ends its call, and nothing more.

``sys.exit()`` would end the replica or the command, and a cancellation that nobody asked for would be told as
one of the caller. Both are exceptions of the code that raised them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def contained(work: Awaitable[T]) -> T:
    """Await an author's code. Raises `RuntimeError` for what it raised that is no `Exception`."""
    try:
        return await work
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and _is_asked_to_end():
            raise
        raise as_exception(error) from None


def as_exception(error: BaseException) -> Exception:
    """An exception that stands for one which a task or a thread cannot pass on, with its traceback."""
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    return RuntimeError(f"it raised {text}").with_traceback(error.__traceback__)


def _is_asked_to_end() -> bool:
    task = asyncio.current_task()
    requests = getattr(task, "cancelling", None)  # since Python 3.11
    return requests is None or requests() > 0
