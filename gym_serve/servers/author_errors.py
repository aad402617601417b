"""An exception in an author's code as a typed failure that names the file and line of that code."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import traceback
from collections.abc import Callable
from typing import Any

from gym_serve.servers.context import current
from gym_serve.types.errors import AuthorError, GymError, Unavailable

__all__ = ["author_error"]

logger = logging.getLogger("gym_serve")

_OF_A_SERVICE = (asyncio.TimeoutError, TimeoutError, ConnectionError)
"""What an author did not catch, but a service or the network caused."""

_INSTALLED = f"{os.sep}site-packages{os.sep}"


def author_error(
    cls: type[AuthorError], server: str, method: Callable[..., Any], error: Exception
) -> GymError:
    """The failure of an author's method, which is also logged with its traceback.

    It is terminal, unless a time-out or a lost connection caused it: that is a service's, and `Unavailable`.

    Args:
        cls: what has failed.
        server: name of the server in the graph.
        method: the method that raised, or whose result is wrong.
        error: what it raised, or what is wrong with its result.
    """
    name = getattr(method, "__name__", str(method))
    message = f"`{name}` of {server} failed at {_place(method, error)}: {type(error).__name__}: {error}"
    logger.error("%s [%s]", message, current().request_id, exc_info=error)
    return (Unavailable if isinstance(error, _OF_A_SERVICE) else cls)(message, server=server)


def _place(method: Callable[..., Any], error: Exception) -> str:
    """The last line of the author's own code that ran; else where the method begins."""
    code = inspect.unwrap(getattr(method, "__func__", method)).__code__
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if _is_of(os.path.dirname(code.co_filename), frame.filename)
    ]
    if own:
        return f"{_shown(own[-1].filename)}:{own[-1].lineno} in {own[-1].name}"
    return f"{_shown(code.co_filename)}:{code.co_firstlineno}"


def _is_of(folder: str, file: str) -> bool:
    """Whether a file stands in the author's folder; packages that are installed below it do not."""
    inside = file.startswith(folder + os.sep)
    return inside and _INSTALLED not in file[len(folder) :]


def _shown(file: str) -> str:
    shorter = os.path.relpath(file)
    return file if shorter.startswith(os.pardir) else shorter
