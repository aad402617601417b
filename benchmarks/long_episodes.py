"""What a turn costs as the history grows: bytes and CPU at turns 1, 10 and 50, with token ids.

    python -m benchmarks.long_episodes [--turns 50] [--calls 2] [--tokens 200]

One agent, one model server and one environment stand in this process, connected as in a graph, with every
body encoded and decoded on the way; the backend of the model is a process of its own. So what is measured
is what the servers do, whatever carries their calls, and nothing else. CPU is the median over episodes.
A turn reaches from one model call to the next, and holds the tool calls in between; the first one opens the
connection to the backend as well.

Writes benchmarks/results/long_episodes.json, and prints a table.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from benchmarks.harness.reports import machine, save, table
from benchmarks.harness.work import ROOT, model_behaviour, rows
from benchmarks.loopback import RunningModelServer, run_model_server
from gym_serve.deployments.chat_model import ChatModel
from gym_serve.deployments.simple_agent import SimpleAgent
from gym_serve.environments.simple_weather import SimpleWeather
from gym_serve.servers import Call, EnvironmentClient, ModelClient, Reply, ServerRunner
from gym_serve.servers.transport import encode
from gym_serve.transports import InlineTransport


@dataclass
class Turn:
    """What one turn took and moved; sizes are in KB."""

    cpu_ms: float = 0.0
    agent_to_model: float = 0.0
    model_to_agent: float = 0.0
    model_to_backend: float = 0.0
    backend_to_model: float = 0.0
    tools: float = 0.0


class Recorder:
    """Keeps a `Turn` for every model call of an episode.

    Args:
        backend: counts its bytes as well, which itself takes CPU; None for an episode whose CPU counts.
    """

    def __init__(self, backend: RunningModelServer | None) -> None:
        self.turns: list[Turn] = []
        self._backend = backend
        self._before = backend.stats() if backend else {}
        self._since = 0.0

    def starts(self, call: Call) -> None:
        """A call starts; a model call and the verifier's end the turn before it."""
        if call.op in ("v1/responses", "verify"):
            now = time.process_time()
            if self.turns:
                self.turns[-1].cpu_ms = 1000 * (now - self._since)
            self._since = now
        if call.op == "v1/responses":
            self.turns.append(Turn())

    def ended(self, call: Call, reply: Reply) -> None:
        """It has ended."""
        if call.op.startswith("tools/"):
            self.turns[-1].tools += (len(call.body) + len(reply.body)) / 1e3
        elif call.op == "v1/responses":
            turn = self.turns[-1]
            turn.agent_to_model, turn.model_to_agent = len(call.body) / 1e3, len(reply.body) / 1e3
            if self._backend:
                before, self._before = self._before, self._backend.stats()
                turn.model_to_backend = (self._before["received"] - before["received"]) / 1e3
                turn.backend_to_model = (self._before["sent"] - before["sent"]) / 1e3


class RecordedEdge(InlineTransport):
    """An inline transport that tells a recorder what crosses it."""

    def __init__(self, host: ServerRunner, recorder: Recorder) -> None:
        super().__init__(host)
        self._recorder = recorder

    async def call(self, call: Call) -> Reply:
        """See `Transport.call`."""
        self._recorder.starts(call)
        reply = await super().call(call)
        self._recorder.ended(call, reply)
        return reply


async def episode(backend: RunningModelServer, max_steps: int, recorder: Recorder) -> dict[str, Any]:
    """The rollout of one episode."""
    settings = {"base_url": f"{backend.url}/v1", "model": "loopback", "return_token_ids": True}
    model, environment = (
        ServerRunner(ChatModel(name="policy", **settings)),
        ServerRunner(SimpleWeather(name="weather")),
    )
    agent = SimpleAgent(
        name="agent",
        model=ModelClient(RecordedEdge(model, recorder)),
        resources=EnvironmentClient(RecordedEdge(environment, recorder)),
        max_steps=max_steps,
    )
    hosts = (model, environment, ServerRunner(agent))
    for host in hosts:
        await host.start()
    rollout = await agent.run({**rows(1)[0], "_ng_rollout_id": "0-0"})
    for host in reversed(hosts):
        await host.stop()
    assert rollout["reward"] == 1.0, rollout
    return rollout


def measure(backend: RunningModelServer, max_steps: int, episodes: int) -> dict[str, Any]:
    """Every turn, and the size of the rollout in KB."""
    sizes = Recorder(backend)
    rollout = asyncio.run(episode(backend, max_steps, sizes))
    timed = [Recorder(None) for _ in range(episodes)]
    for recorder in timed:
        asyncio.run(episode(backend, max_steps, recorder))
    turns = [
        replace(turn, cpu_ms=statistics.median(recorder.turns[number].cpu_ms for recorder in timed))
        for number, turn in enumerate(sizes.turns)
    ]
    return {"rollout_kb": len(encode(rollout)) / 1e3, "turns": [asdict(turn) for turn in turns]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--turns", type=int, default=50, help="turns that call tools; one more answers")
    parser.add_argument("--calls", type=int, default=2, help="tool calls in each")
    parser.add_argument("--tokens", type=int, default=200, help="tokens generated in each, and as many read")
    parser.add_argument("--episodes", type=int, default=7, help="episodes for the medians of CPU")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "long_episodes.json")
    arguments = parser.parse_args()
    behaviour = replace(
        model_behaviour(), turns=arguments.turns, calls_per_turn=arguments.calls, tokens=arguments.tokens
    )
    with run_model_server(behaviour) as backend:
        measured = measure(backend, arguments.turns + 1, arguments.episodes)
    settings = {key: value for key, value in vars(arguments).items() if key != "output"}
    save(arguments.output, {"machine": machine(), "settings": settings, **measured})
    shown = [number for number in (1, 10, 25, 50, 100, 200) if number <= arguments.turns]
    lines = [(number, *measured["turns"][number - 1].values()) for number in shown]
    print(table(("turn", *(field.name for field in fields(Turn))), lines))


if __name__ == "__main__":
    main()
