"""`Server`: what models, environments and agents have in common.

A server is a plain Python object that knows nothing of Ray, replicas or HTTP; `ServerRunner` runs its
operations. `author_error` turns an exception in an author's method into a typed failure with file and line.
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
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from pydantic import BaseModel, ConfigDict

from gym_serve.observe.logs import admits
from gym_serve.servers.clients import Kind
from gym_serve.servers.transport import Reply
from gym_serve.types.errors import AuthorError, EndpointMisconfigured, GymError, Unavailable
from gym_serve.types.model_endpoint import MODEL_FIELD, ModelEndpoint

logger = logging.getLogger("gym_serve")

# Exceptions that a service or the network caused, although the author did not catch them.
_OF_A_SERVICE = (asyncio.TimeoutError, TimeoutError, ConnectionError)
_INSTALLED = f"{os.sep}site-packages{os.sep}"


@dataclass(frozen=True)
class Operation:
    """An operation of a server, available on every transport and over HTTP.

    ``handler`` takes the decoded body and returns a value that JSON can hold, or a `Reply`; ``stream`` yields
    the answer as server-sent events, where it is not always whole.
    """

    handler: Callable[[Any], Awaitable[Any | Reply]]
    summary: str
    request: Mapping[str, Any] | None = None
    response: Mapping[str, Any] | None = None
    method: str = "POST"
    stream: Callable[[Any], AsyncIterator[bytes]] | None = None


def missing_package(module: str, package: str) -> Iterator[str]:
    """A problem for `Server.preflight` if a module is not installed here."""
    if find_spec(module) is None:
        yield f"{module} is not installed where its replicas run: pip install '{package}'"


def missing_path(setting: str, path: str | Path) -> Iterator[str]:
    """A problem for `Server.preflight` if a setting names a file or folder that does not exist here."""
    if not Path(path).exists():
        yield f"{setting}: {path} does not exist where its replicas run"


class Part(Protocol):
    """What a server starts and stops together with itself: a pool of processes, an HTTP client, a cache."""

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """Also called if `start` failed."""


@runtime_checkable
class _Boxes(Protocol):
    """A `BoxPool`, without its module: that takes 30 ms to import, and few servers have boxes."""

    most: int

    @property
    def counts(self) -> dict[str, int]: ...


P = TypeVar("P", bound=Part)


class Server:
    """Base class of `ModelServer`, `ResourcesServer` and `AgentServer`. Its name in the graph is the class's
    by default. Raises `pydantic.ValidationError` if the settings do not fit `Config`."""

    kind: ClassVar[Kind]

    class Config(BaseModel):
        """Settings of the server: the keys of its entry in the graph file."""

        model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    config: Any
    """The settings. A class with settings of its own annotates it: ``config: Config``. (Annotated here, type
    checkers would refuse that: an attribute that can be set is invariant.)"""

    def __init__(self, *, name: str | None = None, **settings: Any) -> None:
        self.name = name or type(self).__name__
        self.config = type(self).Config(**settings)
        self._parts: list[Part] = []

    def manage(self, part: P) -> P:
        """Start ``part`` with this server and stop it with this server; returns ``part``.

        Call it before ``super().start()``. Parts start in this order and stop in reverse.
        """
        self._parts.append(part)
        return part

    requires: ClassVar[Mapping[str, str]] = {}
    """Modules that the server imports when it starts, with the requirement that brings each:
    ``{"math_verify": "gym-serve[math]"}``. Modules that its own module imports need no entry."""

    @classmethod
    def preflight(cls, config: Any) -> Iterable[str]:
        """Problems that would keep the server from starting here: missing packages, programs or files, each a
        sentence with the next step. It changes nothing; by default it checks `requires`.

        It is called before a graph is deployed, where replicas would run, so that a graph that cannot start
        does not replace one that runs.
        """
        for module, package in cls.requires.items():
            yield from missing_package(module, package)

    def check_endpoint(self, endpoint: ModelEndpoint) -> None:
        """Raise `EndpointMisconfigured` or `BadRequest` if a call may not be answered by this endpoint of a
        row (`Call.endpoint`)."""
        raise EndpointMisconfigured(
            f"{self.name} cannot use the endpoint that a row names (`{MODEL_FIELD}`): the model must be a "
            "chat_model or sglang_model with `row_endpoints`"
        )

    @classmethod
    def deployment_options(cls, settings: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """Options of Ray Serve that follow from the settings; they replace the given ones and defaults."""
        return {}

    async def start(self) -> None:
        """Start what the server manages; called before any other call."""
        async with AsyncExitStack() as started:
            for part in self._parts:
                started.push_async_callback(part.stop)
                await part.start()
            started.pop_all()

    async def stop(self) -> None:
        """Stop what the server manages; called once, after the last call."""
        async with AsyncExitStack() as started:
            for part in self._parts:
                started.push_async_callback(part.stop)

    def observe(self) -> None:
        """Set the server's gauges (`gym_serve.observe.catalogue`); called before they are published."""

    async def check_health(self) -> None:
        """Raise an exception if the server cannot recover by itself; its replica is then replaced."""

    @property
    def live_sessions(self) -> int:
        return 0

    @property
    def boxes(self) -> dict[str, int] | None:
        """Boxes of the server's pools (`BoxPool.counts`), with the ``most`` that there may be; None without
        one."""
        pools = [part for part in self._parts if isinstance(part, _Boxes)]
        if not pools:
            return None
        counts = [{**pool.counts, "most": pool.most} for pool in pools]
        return {state: sum(each[state] for each in counts) for state in counts[0]}

    def traceparent(self, session: str) -> str | None:
        """The span in which a session was opened; None if there is none."""
        return None

    def reconfigure(self, settings: dict[str, Any]) -> None:
        """Change settings while running; nothing changes where they do not fit `Config`."""
        fields = {name: getattr(self.config, name) for name in self.config.model_fields_set}
        self.config = type(self).Config(**{**fields, **settings})

    def operations(self) -> dict[str, Operation]:
        """The operations by path, e.g. ``{"v1/responses": Operation(...)}``."""
        raise NotImplementedError

    def operation(self, op: str) -> Operation | None:
        """An operation that `operations` cannot list, because only the call names it; None if unknown."""
        return None

    def failure(self, op: str, error: Exception) -> GymError | None:
        """The failure that an unforeseen exception of an operation is; None for `Unavailable`."""
        return None


def author_error(
    cls: type[AuthorError], server: str, method: Callable[..., Any], error: Exception
) -> GymError:
    """The failure of an author's ``method``, which raised or whose result is wrong; it is also logged.

    It is terminal, unless a time-out or a lost connection caused it: then a service failed (`Unavailable`).
    """
    name = getattr(method, "__name__", str(method))
    try:
        text = str(error)
    except Exception as broken:  # the class is an author's too
        text = f"its text cannot be made ({type(broken).__name__})"
    message = f"`{name}` of {server} failed at {_place(method, error)}: {type(error).__name__}: {text}"
    if (more := admits(server, message.partition(": ")[0])) is not None:
        logger.error("%s%s", message, more, exc_info=error, extra={"server": server})
    return (Unavailable if isinstance(error, _OF_A_SERVICE) else cls)(message, server=server)


def place_of(method: Callable[..., Any]) -> str:
    """Where a method is defined: ``"file:line"``."""
    code = _code_of(method)
    return f"{_shown(code.co_filename)}:{code.co_firstlineno}"


def place_of_class(cls: type) -> str:
    """Where a class is being defined: ``"file:line"``."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") != cls.__module__:
        frame = frame.f_back
    return f"{_shown(frame.f_code.co_filename)}:{frame.f_lineno}"


def _code_of(method: Callable[..., Any]) -> types.CodeType:
    code: types.CodeType = inspect.unwrap(getattr(method, "__func__", method)).__code__
    return code


def _place(method: Callable[..., Any], error: Exception) -> str:
    """The last line of the author's own code that ran; by default, where the method begins."""
    folder = os.path.dirname(_code_of(method).co_filename) + os.sep

    def is_own(file: str) -> bool:  # and not of a package that is installed below it
        return file.startswith(folder) and _INSTALLED not in file[len(folder) - 1 :]

    own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own(frame.filename)]
    return f"{_shown(own[-1].filename)}:{own[-1].lineno} in {own[-1].name}" if own else place_of(method)


def _shown(file: str) -> str:
    shorter = os.path.relpath(file)
    return file if shorter.startswith(os.pardir) else shorter
