"""A process in which nothing is counted: what the cost of metrics is compared with."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from gym_serve.deployments.chat_model import ChatModel
from gym_serve.deployments.simple_agent import SimpleAgent
from gym_serve.environments.simple_weather import SimpleWeather
from gym_serve.observe import catalogue, cpu
from gym_serve.observe.logs import ACCESS
from gym_serve.servers import Server, runner


@contextmanager
def uncounted() -> Iterator[None]:
    """Nothing is counted inside: the functions that record are replaced by empty ones."""

    def nothing(*args: Any) -> None:
        pass

    def only_logged(*args: Any) -> None:
        ACCESS.isEnabledFor(logging.INFO)

    with (
        mock.patch.object(runner.ServerRunner, "_record", only_logged),
        mock.patch.object(catalogue.TokenMeter, "record", nothing),
        mock.patch.object(catalogue.RolloutMeter, "record", nothing),
        mock.patch.object(cpu.StageMeter, "measured", lambda stage, work: work),
    ):
        yield


class _Uncounted(Server):
    """A server in a replica of its own, in which nothing is counted."""

    async def start(self) -> None:
        self._nothing_counted = uncounted()
        self._nothing_counted.__enter__()  # until the process ends
        await super().start()


class UncountedModel(_Uncounted, ChatModel): ...


class UncountedWeather(_Uncounted, SimpleWeather): ...


class UncountedAgent(_Uncounted, SimpleAgent): ...
