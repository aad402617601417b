"""The episodes of the servers in this process, for ``/episodes`` (`gym_serve.gateway.live_episodes`)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from gym_serve.gateway.live_episodes import LIST, MOST, STOP
from gym_serve.servers.agent import AgentServer
from gym_serve.servers.live import EndedEpisode, identity
from gym_serve.servers.protocols import PROTOCOLS
from gym_serve.servers.runner import ServerRunner
from gym_serve.servers.transport import Call, Reply
from gym_serve.types.errors import Conflict, GymError, NotFound, Stopped
from gym_serve.types.exact import exact_json
from gym_serve.types.requests import JSON

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
