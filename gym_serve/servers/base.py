"""`Server`: what models, environments and agents have in common.

A server is a plain Python object. It knows nothing of Ray, replicas or HTTP: it is constructed with its
settings as keyword arguments and lists its operations; `ServerRunner` runs them. `author_error` turns an
exception in an author's method into a typed failure that names the file and line of their code.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import sys
import traceback
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from gym_serve.servers.clients import Kind
from gym_serve.servers.context import current
from gym_serve.servers.transport import Reply
from gym_serve.types.errors import AuthorError, GymError, Unavailable

__all__ = [
    "Operation",
    "Server",
    "author_error",
    "missing_package",
    "missing_path",
    "place_of",
    "place_of_class",
]

logger = logging.getLogger("gym_serve")

_OF_A_SERVICE = (asyncio.TimeoutError, TimeoutError, ConnectionError)
"""What an author did not catch, but a service or the network caused."""

_INSTALLED = f"{os.sep}site-packages{os.sep}"


@dataclass(frozen=True)
class Operation:
    """One thing that a server can be asked to do, on every transport and over HTTP.

    Attributes:
        handler: takes the decoded body, returns something that JSON can hold, or a `Reply`.
        summary: one line for the API documentation.
        request, response: JSON schemas of the body and the answer.
        method: HTTP method of its route.
        stream: takes the decoded body, yields the answer as server-sent events; None where the answer is
            always whole.
    """

    handler: Callable[[Any], Awaitable[Any | Reply]]
    summary: str
    request: Mapping[str, Any] | None = None
    response: Mapping[str, Any] | None = None
    method: str = "POST"
    stream: Callable[[Any], AsyncIterator[bytes]] | None = None


def missing_package(module: str, package: str) -> Iterator[str]:
    """A sentence for `Server.preflight` if a module cannot be imported here.

    Args:
        module: its name.
        package: what to install for it.
    """
    if find_spec(module) is None:
        yield f"{module} is not installed where its replicas run: pip install '{package}'"


def missing_path(setting: str, path: str | Path) -> Iterator[str]:
    """A sentence for `Server.preflight` if a setting names a file or a folder that is not here."""
    if not Path(path).exists():
        yield f"{setting}: there is no {path} where its replicas run"


class Server:
    """Base class of `ModelServer`, `ResourcesServer` and `AgentServer`.

    Args:
        name: name in the graph; the class's name by default.
        **settings: the fields of `Config`.

    Raises:
        pydantic.ValidationError: settings that do not fit `Config`.
    """

    kind: ClassVar[Kind]

    class Config(BaseModel):
        """Settings of the server: the keys of its entry in the graph file."""

        model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    config: Any
    """The settings, an object of `Config`. A class with settings of its own annotates it: ``config: Config``.

    (Annotated here, type checkers would refuse that: an attribute that can be set is invariant.)"""

    def __init__(self, *, name: str | None = None, **settings: Any) -> None:
        self.name = name or type(self).__name__
        self.config = type(self).Config(**settings)

    requires: ClassVar[Mapping[str, str]] = {}
    """Modules that it imports when it starts, with what to install: ``{"math_verify": "gym-serve[math]"}``.
    Those that its own module imports need not be named."""

    @classmethod
    def preflight(cls, config: Any) -> Iterable[str]:
        """What this machine lacks to run a server with these settings: packages, programs, files.

        Called before a graph is deployed, where replicas would run, so that what cannot start takes the place
        of nothing that runs. It only looks; by default for `requires`.

        Args:
            config: the settings, an object of `Config`.

        Returns:
            a sentence for each thing, with the next step.
        """
        for module, package in cls.requires.items():
            yield from missing_package(module, package)

    @classmethod
    def deployment_options(cls, settings: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """Serve options that follow from the settings: they replace those that are given.

        Args:
            settings: of the server, as in the graph file; those that are not given are missing.
            options: Serve options, gym_serve's defaults included.
        """
        return {}

    async def start(self) -> None:
        """Acquire what the server needs (connections, worker processes); called before any call."""

    async def stop(self) -> None:
        """Release it; called once, after the last call."""

    async def check_health(self) -> None:
        """Raise where the server cannot recover by itself: its replica is then replaced."""

    @property
    def live_sessions(self) -> int:
        """Sessions that the server holds."""
        return 0

    def reconfigure(self, settings: dict[str, Any]) -> None:
        """Change settings while running.

        Args:
            settings: a part of `Config`'s fields; the others keep their values.

        Raises:
            pydantic.ValidationError: settings that do not fit `Config`; nothing is changed.
        """
        fields = {name: getattr(self.config, name) for name in self.config.model_fields_set}
        self.config = type(self).Config(**{**fields, **settings})

    def operations(self) -> dict[str, Operation]:
        """The operations by path, e.g. ``{"v1/responses": Operation(...)}``."""
        raise NotImplementedError

    def operation(self, op: str) -> Operation | None:
        """An operation that is not listed, as its name is known only when it is called; None for none."""
        return None


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


def place_of(method: Callable[..., Any]) -> str:
    """Where a method is defined: ``"file:line"``."""
    code = _code_of(method)
    return f"{_shown(code.co_filename)}:{code.co_firstlineno}"


def place_of_class(cls: type) -> str:
    """Where a class that is being defined stands: ``"file:line"``."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") != cls.__module__:
        frame = frame.f_back
    return f"{_shown(frame.f_code.co_filename)}:{frame.f_lineno}"


def _code_of(method: Callable[..., Any]) -> types.CodeType:
    code: types.CodeType = inspect.unwrap(getattr(method, "__func__", method)).__code__
    return code


def _place(method: Callable[..., Any], error: Exception) -> str:
    """The last line of the author's own code that ran; else where the method begins."""
    folder = os.path.dirname(_code_of(method).co_filename)
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_of(folder, frame.filename)]
    return f"{_shown(own[-1].filename)}:{own[-1].lineno} in {own[-1].name}" if own else place_of(method)


def _is_of(folder: str, file: str) -> bool:
    """Whether a file stands in the author's folder; packages that are installed below it do not."""
    inside = file.startswith(folder + os.sep)
    return inside and _INSTALLED not in file[len(folder) :]


def _shown(file: str) -> str:
    shorter = os.path.relpath(file)
    return file if shorter.startswith(os.pardir) else shorter
