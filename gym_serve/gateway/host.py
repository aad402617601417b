"""`Host`: the process that a gateway answers in, and what that one knows of the graph around it.

A gateway itself is HTTP over transports. What runs, how loaded it is, and how a policy is changed, it asks
its host: a replica on a cluster (`gym_serve.cluster.ingress`), or a process with a graph of its own
(`gym_serve.assembly.ingress`).
"""

from __future__ import annotations

from typing import Protocol

from gym_serve.servers.model import HoldMode
from gym_serve.servers.transport import Call, Reply
from gym_serve.types.requests import JSON


class Processes(Protocol):
    """The processes of a graph that may run agents."""

    async def ask(self, call: Call) -> tuple[list[tuple[str, JSON]], list[str]]:
        """What all of them answer, each after its name, and the names of silent ones.

        A name has the form ``{server}.{replica}``.
        """
        ...

    async def tell(self, name: str, call: Call) -> Reply:
        """What one of them answers. Raises NotFound: there is no such process; DeadlineExceeded: it does not
        answer."""
        ...


class Steering(Protocol):
    """Changes the policy of a graph: one model."""

    async def hold(self, mode: HoldMode) -> None:
        """Hold its calls."""
        ...

    async def release(self) -> None:
        """Let them begin again."""
        ...

    async def set_version(self, version: str) -> None:
        """Tell all of its replicas the version of the weights that they have."""
        ...

    async def change(self, changes: JSON) -> None:
        """Change settings of it while it runs."""
        ...


class Host(Processes, Protocol):
    """See the module. What a host cannot do raises `NotFound`."""

    async def states(self) -> dict[str, JSON]:
        """State of every server, by name, as in ``/health``."""
        ...

    async def reports(self, op: str) -> dict[str, list[JSON]]:
        """What the replicas of each server answer to ``pressure`` or ``stats``."""
        ...

    def leaving(self) -> bool:
        """Whether this gateway is being stopped. That waits for open responses, so they must end."""
        ...

    async def updates(self, model: str) -> int | None:
        """How often the weights of a model were replaced; None where the model has counted them itself."""
        ...

    def steering(self, model: str) -> Steering:
        """Changes a policy. Raises NotFound, BadRequest: it cannot be changed here; says why."""
        ...
