"""A process in which nothing is counted: what the cost of metrics is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from gym_serve.deployments.chat_model import ChatModel
from gym_serve.deployments.simple_agent import SimpleAgent
from gym_serve.environments.simple_weather import SimpleWeather
from gym_serve.observe import catalogue, cpu
from gym_serve.servers import AgentServer, Operation, Server, observing


@contextmanager
def uncounted() -> Iterator[None]:
    """Nothing is counted inside: what counts does nothing."""

    def nothing(*args: Any) -> None:
        pass

    with (
        mock.patch.object(cpu.CallMeter, "record", nothing),
        mock.patch.object(observing.ObservedCall, "measured", lambda self, work: work),
        mock.patch.object(catalogue.TokenMeter, "record", nothing),
        mock.patch.object(catalogue.RolloutMeter, "record", nothing),
    ):
        yield


class _Switched(Server):
    """A server whose process begins and ends to count when it is told to, by the operation ``measure``."""

    _uncounted: AbstractContextManager[None] | None = None

    def operations(self) -> dict[str, Operation]:
        return {**super().operations(), "measure": Operation(self._measure, "Count, or not")}

    async def _measure(self, body: Any) -> dict[str, Any]:
        if self._uncounted is not None:
            self._uncounted.__exit__(None, None, None)
        self._uncounted = None if body["counted"] else uncounted()
        if self._uncounted is not None:
            self._uncounted.__enter__()
        if isinstance(self, AgentServer):
            self.config = self.config.model_copy(update={"timeline": body["timeline"]})
        return {}


class SwitchedModel(_Switched, ChatModel): ...


class SwitchedWeather(_Switched, SimpleWeather): ...


class SwitchedAgent(_Switched, SimpleAgent): ...
