"""What a node of a graph becomes: its server, with a client for each that it calls, and its runner; its
episodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from gym_serve.gateway.host import LIST, MOST, STOP
from gym_serve.graph.spec import Node
from gym_serve.servers.agent import AgentServer
from gym_serve.servers.base import Server
from gym_serve.servers.clients import CLIENTS, Client
from gym_serve.servers.live import EndedEpisode, identity
from gym_serve.servers.model import ModelServer
from gym_serve.servers.protocols import PROTOCOLS
from gym_serve.servers.resources import ResourcesServer
from gym_serve.servers.runner import ServerRunner
from gym_serve.servers.transport import Call, Reply, Transport
from gym_serve.types.errors import Conflict, GymError, NotFound, Stopped
from gym_serve.types.exact import exact_json
from gym_serve.types.requests import JSON


def constructed(
    node: Node,
    client: Callable[[str], Client],
    *,
    tracing: float | None,
    replica: str | None = None,
    lasting: bool = True,
    **settings: Any,
) -> ServerRunner:
    """The runner of a node's server. It is not started. ``tracing``: see `Graph.tracing`; ``lasting``:
    whether its sessions may outlive this process, on another replica."""
    assert node.cls is not None  # a remote server runs elsewhere
    settings = {**node.connected(client), **settings}
    if replica is not None and issubclass(node.cls, ResourcesServer | ModelServer):
        settings["replica"] = replica
    server = node.cls(name=node.name, **settings)
    if isinstance(server, ResourcesServer) and not lasting:
        server.takes_snapshots = False
    return ServerRunner(server, replica, tracing=tracing)


def client_of(node: Node, transport: Transport) -> Client:
    """The client of a server, for those that call it."""
    return CLIENTS[node.kind](transport)


def remote_transport(node: Node) -> Transport:
    """The transport to a server of ``type: http``, by its URL."""
    # Imported here: its HTTP client takes longer to import than a small graph to start, and few need it.
    from gym_serve.transports import HttpTransport

    return HttpTransport(node.name, str(node.url), node.sent_headers(), node.unavailable_tools)


async def states_of(runners: Iterable[ServerRunner]) -> dict[str, JSON]:
    """State of every server of this process, by name, as in ``/health``."""
    return {runner.server.name: await _state(runner.server) for runner in runners}


async def _state(server: Server) -> JSON:
    try:
        await server.check_health()
    except Exception as error:  # a server may raise anything to say that it is broken
        return {"state": "unhealthy", "message": f"{type(error).__name__}: {error}"}
    return {"state": "ready"}


GONE = "the episode is gone: its caller has left it, or it ended a while ago"

_MOST_QUEUED = 50  # calls in a queue that are read
_OPERATIONS = frozenset({"run", *PROTOCOLS})  # of agents, each of which is an episode
_QUEUED = "q"  # begins the number of a call that waits


class QueuedCall(NamedTuple):
    """A call that waits. ``number``: of all calls that have waited there; ``call``: the call; ``since``:
    `time.monotonic` moment from which it waits."""

    number: int
    call: Call
    since: float


class Queue(Protocol):
    """The calls that wait for their turn at a replica."""

    def queued(self) -> Iterable[QueuedCall]: ...

    def refuse(self, number: int, error: GymError) -> bool:
        """End one of them with an error; whether it waits."""
        ...


async def answer_here(call: Call, runners: Sequence[ServerRunner], queue: Queue | None) -> Reply:
    """Answer `LIST`, `LOOK` or `STOP` for the agents of this process."""
    agents = [runner.server for runner in runners if isinstance(runner.server, AgentServer)]
    try:
        if call.op == LIST:
            queued = [] if queue is None else [c for c in queue.queued() if c.call.op in _OPERATIONS]
            return Reply.of(_listed(agents, queued if agents else []))
        body = exact_json(call.body)
        if call.op == STOP:
            return Reply.of(_stopped(agents, queue, body["number"]))
        return Reply.of(await _looked(agents, body["number"], body["known"]))
    except GymError as error:
        return Reply.failed(error)


def _listed(agents: Sequence[AgentServer], queued: Sequence[QueuedCall]) -> JSON:
    running = [
        {"number": str(live.number), "agent": agent.name, **live.summary()}
        for agent in agents
        for live in agent.live.running(MOST)
    ]
    ended = [
        {"number": str(one.number), "agent": agent.name, **one.summary()}
        for agent in agents
        for one in agent.live.ended()
    ]
    waiting = [_waits(agents[-1].name, one) for one in queued[:_MOST_QUEUED]]
    return {
        "running": sum(len(agent.live) for agent in agents),
        "queued": len(queued),
        "episodes": running + waiting,
        "ended": ended,
    }


def _waits(agent: str, queued: QueuedCall) -> JSON:
    try:
        row = exact_json(queued.call.body)
    except ValueError:  # the agent says what is wrong with it
        row = {}
    seconds = time.monotonic() - queued.since
    return {
        "number": f"{_QUEUED}{queued.number}",
        "agent": agent,
        **identity(row if isinstance(row, dict) else {}),
        "state": "queued",
        "tools": [],
        "state_seconds": seconds,
        "seconds": seconds,
        "turns": 0,
        "input_tokens": 0,
        "output_tokens": 0,
    }


def _stopped(agents: Sequence[AgentServer], queue: Queue | None, number: str) -> JSON:
    if number.startswith(_QUEUED):
        refusal = Stopped("a person stopped the episode while it waited for its turn")
        if queue is not None and queue.refuse(_number(number[1:]), refusal):
            return {"stopped": True}
        raise Conflict("the episode waits no more; look for it among those that run")
    for agent in agents:
        if (episode := agent.live.get(_number(number))) is not None:
            if isinstance(episode, EndedEpisode):
                raise Conflict("the episode has ended already")
            episode.stop()
            return {"stopped": True}
    raise NotFound(GONE)


async def _looked(agents: Sequence[AgentServer], number: str, known: str | None) -> JSON:
    for agent in agents:
        episode = agent.live.get(_number(number))
        if episode is None:
            continue
        summary = {"agent": agent.name, **episode.summary()}
        if isinstance(episode, EndedEpisode):
            return {**summary, "version": "ended", "rollout": exact_json(episode.body)}
        if (version := episode.version) == known:
            return {**summary, "version": version}
        return {**summary, "version": version, "rollout": await episode.so_far(agent.name)}
    raise NotFound(GONE)


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else 0
