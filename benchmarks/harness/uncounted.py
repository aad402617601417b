"""A process in which nothing is counted: what the cost of metrics is compared with."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from gym_serve.deployments.chat_model import ChatModel
from gym_serve.deployments.simple_agent import SimpleAgent
from gym_serve.environments.simple_weather import SimpleWeather
from gym_serve.observe import catalogue
from gym_serve.servers import AgentServer, Operation, Server, runner

_WITHOUT = {
    "    meter = self._meters.get(call.op) or self._meter_of(call.op)\n": "",
    """\
                    left = meter.left = meter.left - 1
                    if MEASURED or not left:
                        reply = await meter.measured(answer)
                    else:
                        reply = await answer
""": "                    reply = await answer\n",
    """\
            if reply.status == 200 and not self._logs_calls:
                meter.answered(time.monotonic() - begun)  # as `_record`, which costs twice as much
            else:
                self._record(meter, call, reply.status, begun)
""": "",
    "self._record(meter, call, CALLER_LEFT, begun)": "pass",
}
"""The statements of `ServerRunner.dispatch` that count, and what is there without them."""


def _dispatch() -> Any:
    """`ServerRunner.dispatch` without these statements.

    Raises:
        ValueError: one of them is not there.
    """
    source = textwrap.dedent(inspect.getsource(runner.ServerRunner.dispatch))
    for counting, without in _WITHOUT.items():
        if source.count(counting) != 1:
            raise ValueError(
                f"ServerRunner.dispatch must have this once, or _WITHOUT be changed:\n{counting}"
            )
        source = source.replace(counting, without)
    made: dict[str, Any] = {}
    exec(source, vars(runner), made)
    return made["dispatch"]


_DISPATCH = _dispatch()


@contextmanager
def uncounted() -> Iterator[None]:
    """Nothing is counted inside: what counts is taken out of the functions that run here."""

    def nothing(*args: Any) -> None:
        pass

    with (
        mock.patch.object(runner.ServerRunner, "dispatch", _DISPATCH),
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
