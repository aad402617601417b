"""`Server`: what models, resources and agents have in common.

A server is a plain Python object. It knows nothing of Ray, replicas or HTTP: it is constructed
with its settings as keyword arguments and lists its operations; `Host` runs them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from gym_serve.servers.clients import Kind
from gym_serve.servers.transport import Reply

__all__ = ["Operation", "Server", "missing_package", "missing_path"]


@dataclass(frozen=True)
class Operation:
    """One thing that a server can be asked to do, on every transport and over HTTP.

    Attributes:
        handler: takes the decoded body, returns something that JSON can hold, or a `Reply`.
        summary: one line for the API documentation.
        request, response: JSON schemas of the body and the answer.
        method: HTTP method of its route.
    """

    handler: Callable[[Any], Awaitable[Any | Reply]]
    summary: str
    request: Mapping[str, Any] | None = None
    response: Mapping[str, Any] | None = None
    method: str = "POST"


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
