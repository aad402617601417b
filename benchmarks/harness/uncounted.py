"""A process in which nothing is counted: what the cost of metrics is compared with."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from gym_serve.deployments.chat_model import ChatModel
from gym_serve.deployments.simple_agent import SimpleAgent
from gym_serve.environments.simple_weather import SimpleWeather
from gym_serve.observe import catalogue
from gym_serve.servers import Server, runner

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
        ValueError: it has none of them any more.
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


class _Uncounted(Server):
    """A server in a replica of its own, in which nothing is counted."""

    async def start(self) -> None:
        self._nothing_counted = uncounted()
        self._nothing_counted.__enter__()  # until the process ends
        await super().start()


class UncountedModel(_Uncounted, ChatModel): ...


class UncountedWeather(_Uncounted, SimpleWeather): ...


class UncountedAgent(_Uncounted, SimpleAgent): ...
