"""``/episodes``: the episodes that run on a graph, and the last ones that have ended.

| request | does |
|---|---|
| ``GET /episodes`` | which episodes run or wait, on all replicas, and which have ended lately |
| ``GET /episodes/{id}`` | one of them, with its rollout so far |
| ``DELETE /episodes/{id}`` | stops it: its rollout is the failure ``stopped``, which nothing tries again |

The replicas know their episodes (`gym_serve.servers.live`), and are asked when somebody looks. Each has some
seconds to answer; one that does not is named, and holds up nobody. An id names the replica, so any gateway of
the graph finds the episode.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from gym_serve.graph import wire
from gym_serve.graph.spec import Node
from gym_serve.routing.admission import Admission, QueuedCall
from gym_serve.routing.rpc import (
    Address,
    Channel,
    ConnectError,
    ConnectionLostError,
    ConnectTimeoutError,
    Directory,
    NotDeliveredError,
)
from gym_serve.servers.agent import AgentServer
from gym_serve.servers.live import EndedEpisode, identity
from gym_serve.servers.protocols import PROTOCOLS
from gym_serve.servers.runner import ServerRunner
from gym_serve.servers.transport import Call, Reply, encode
from gym_serve.types.errors import (
    Conflict,
    DeadlineExceeded,
    GymError,
    NotFound,
    Stopped,
)
from gym_serve.types.exact import exact_json
from gym_serve.types.requests import JSON

EPISODES = "episodes"
"""The route, and the first part of the names of its operations."""

LIST, LOOK, STOP = (f"{EPISODES}/{op}" for op in ("list", "look", "stop"))
"""Operations that every replica answers at once."""

_MOST = 500  # episodes in an answer, and on a replica
_MOST_ENDED = 100  # in an answer
_MOST_QUEUED = 50  # calls in a queue that are read
_SECONDS = 2.0  # for a replica to answer
_FRESH_SECONDS = 0.5  # for which the list is remembered: many may look
_OPERATIONS = frozenset({"run", *PROTOCOLS})  # of agents, each of which is an episode
_QUEUED = "q"  # begins the number of a call that waits


async def answer_here(call: Call, runners: Sequence[ServerRunner], admission: Admission | None) -> Reply:
    """Answer `LIST`, `LOOK` or `STOP` for the agents of this process.

    Args:
        call: the call.
        runners: all servers of this process.
        admission: the queue before the last one of them, if there is one.
    """
    agents = [runner.server for runner in runners if isinstance(runner.server, AgentServer)]
    try:
        if call.op == LIST:
            queued = [] if admission is None else [c for c in admission.queued() if c.call.op in _OPERATIONS]
            return Reply.of(_listed(agents, queued if agents else []))
        asked = exact_json(call.body)
        if call.op == STOP:
            return Reply.of(_stopped(agents, admission, asked["number"]))
        return Reply.of(await _looked(agents, asked["number"], asked["known"]))
    except GymError as error:
        return Reply.failed(error)


def _listed(agents: Sequence[AgentServer], queued: Sequence[QueuedCall]) -> JSON:
    running = [
        {"number": str(live.number), "agent": agent.name, **live.summary()}
        for agent in agents
        for live in agent.live.running(_MOST)
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


def _stopped(agents: Sequence[AgentServer], admission: Admission | None, number: str) -> JSON:
    if number.startswith(_QUEUED):
        refusal = Stopped("a person stopped the episode while it waited for its turn")
        if admission is not None and admission.refuse(_number(number[1:]), refusal):
            return {"stopped": True}
        raise Conflict("the episode waits no more; look for it among those that run")
    for agent in agents:
        if (found := agent.live.get(_number(number))) is not None:
            if isinstance(found, EndedEpisode):
                raise Conflict("the episode has ended already")
            found.stop()
            return {"stopped": True}
    raise _gone()


async def _looked(agents: Sequence[AgentServer], number: str, known: str | None) -> JSON:
    for agent in agents:
        found = agent.live.get(_number(number))
        if found is None:
            continue
        summary = {"agent": agent.name, **found.summary()}
        if isinstance(found, EndedEpisode):
            return {**summary, "version": "ended", "rollout": exact_json(found.body)}
        if (version := found.version) == known:
            return {**summary, "version": version}
        return {**summary, "version": version, "rollout": await found.so_far(agent.name)}
    raise _gone()


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else 0


def _gone() -> NotFound:
    return NotFound("the episode is gone: its caller has left it, or it ended a while ago")


class Replicas(Protocol):
    """The processes of a graph, as its gateway asks them."""

    async def ask(self, call: Call) -> tuple[list[tuple[str, JSON]], list[str]]:
        """What all that may run agents answer, each after its name, and the names of those that are silent.

        A name has the form ``{server}.{replica}``.
        """
        ...

    async def tell(self, name: str, call: Call) -> Reply:
        """What one of them answers.

        Raises:
            NotFound: there is no such process.
            DeadlineExceeded: it does not answer.
        """
        ...


class ReplicasOfCluster:
    """The replicas of the application that this process is a gateway of.

    Args:
        nodes: the servers.
    """

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        agents = {name for name, node in nodes.items() if node.kind == "agent"}
        # A server may have the agents that it calls in its own replicas.
        self._servers = [
            name
            for name, node in nodes.items()
            if node.url is None and (name in agents or agents & set(node.references.values()))
        ]

    async def ask(self, call: Call) -> tuple[list[tuple[str, JSON]], list[str]]:
        """See `Replicas.ask`."""
        found = await asyncio.gather(*map(self._addresses, self._servers))
        places = {f"{server}.{replica}": a for server, all in found for replica, a in all.items()}
        answers = await asyncio.gather(*(self._answer(address, call) for address in places.values()))
        told = [(name, reply.json()) for name, reply in zip(places, answers, strict=True) if _is_reply(reply)]
        silent = [name for name, reply in zip(places, answers, strict=True) if reply == _SILENT]
        return told, silent

    async def tell(self, name: str, call: Call) -> Reply:
        """See `Replicas.tell`."""
        server, _, replica = name.partition(".")
        address = await self._directory(server).get(replica) if server in self._servers else None
        reply = _LEFT if address is None else await self._answer(address, call)
        if reply == _LEFT:
            raise _gone()
        if reply == _SILENT:
            raise DeadlineExceeded(
                f"a replica of {server} did not answer within {_SECONDS:g} s", server=server
            )
        return reply

    def _directory(self, server: str) -> Directory:
        return Directory(serve.get_replica_context().app_name, server)

    async def _addresses(self, server: str) -> tuple[str, dict[str, Address]]:
        return server, await self._directory(server).all()

    async def _answer(self, address: Address, call: Call) -> Reply:
        try:
            return await asyncio.wait_for(self._call(address, call), _SECONDS)
        except (asyncio.TimeoutError, ConnectTimeoutError):
            return _SILENT
        except (ConnectError, NotDeliveredError, ConnectionLostError):
            return _LEFT

    async def _call(self, address: Address, call: Call) -> Reply:
        channel = await Channel.open(address)
        try:
            return await channel.call(call)
        finally:
            await channel.close()


_SILENT, _LEFT = Reply(0, b"silent"), Reply(0, b"left")


def _is_reply(reply: Reply) -> bool:
    return reply.status != 0


class ThisProcess:
    """The servers of a graph without Ray.

    Args:
        runners: of its servers.
    """

    def __init__(self, runners: Iterable[ServerRunner]) -> None:
        self._runners = list(runners)

    async def ask(self, call: Call) -> tuple[list[tuple[str, JSON]], list[str]]:
        """See `Replicas.ask`."""
        return [("local", (await answer_here(call, self._runners, None)).json())], []

    async def tell(self, name: str, call: Call) -> Reply:
        """See `Replicas.tell`."""
        if name != "local":
            raise _gone()
        return await answer_here(call, self._runners, None)


class LiveEpisodesOfGraph:
    """All episodes of a graph.

    Args:
        replicas: where they run.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._listing: asyncio.Task[JSON] | None = None
        self._listed = 0.0

    async def answer(self, request: Request, path: str) -> Response:
        """Answer a request.

        Args:
            request: the request.
            path: its path below the graph's, which begins with ``episodes``.

        Raises:
            GymError: it is refused.
        """
        _, _, id = path.partition("/")
        if not id:
            return wire.wrong_method(request, "GET") or wire.answer(Reply.of(await self.list()))
        if wrong := wire.wrong_method(request, "GET", "DELETE"):
            return wrong
        if request.method == "DELETE":
            return wire.answer(Reply.of(await self.stop(id)))
        known = request.query_params.get("known")
        return wire.answer(Reply.of(await self.look(id, known)))

    async def list(self) -> JSON:
        """The episodes that run and those that wait, the oldest first, and those that have ended lately.

        The replicas are asked twice a second at most.
        """
        old = time.monotonic() > self._listed + _FRESH_SECONDS
        if self._listing is None or (self._listing.done() and old):
            self._listing, self._listed = asyncio.create_task(self._list()), time.monotonic()
        return await asyncio.shield(self._listing)

    async def look(self, id: str, known: str | None = None) -> JSON:
        """One episode: what it is doing, and under ``rollout`` what there is of it, with a ``version``.

        Args:
            id: its id.
            known: a version that the caller has; that one is left out.

        Raises:
            NotFound: it is gone.
            DeadlineExceeded: its replica does not answer.
        """
        found: JSON = (await self._tell(id, LOOK, known=known)).json()
        return {"id": id, **found}

    async def stop(self, id: str) -> JSON:
        """Stop an episode.

        Raises:
            NotFound: it is gone.
            Conflict: it has ended, or waits no more.
            DeadlineExceeded: its replica does not answer.
        """
        found: JSON = (await self._tell(id, STOP)).json()
        self._listed = 0.0
        return {"id": id, **found}

    async def _tell(self, id: str, op: str, **more: Any) -> Reply:
        name, _, number = id.rpartition(".")
        return await self._replicas.tell(name, Call(op, encode({"number": number, **more})))

    async def _list(self) -> JSON:
        told, silent = await self._replicas.ask(Call(LIST))
        found: JSON = {"running": 0, "queued": 0, "episodes": [], "ended": [], "silent": silent}
        for name, listed in told:
            found["running"] += listed["running"]
            found["queued"] += listed["queued"]
            for kind in ("episodes", "ended"):
                found[kind] += [{"id": f"{name}.{one.pop('number')}", **one} for one in listed[kind]]
        found["episodes"].sort(key=lambda one: -one["seconds"])
        found["ended"].sort(key=lambda one: one["ended_seconds"])
        del found["episodes"][_MOST:], found["ended"][_MOST_ENDED:]
        return found
