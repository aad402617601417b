"""`Host`: the process that a gateway answers in, and what that one knows of the graph around it.

A gateway itself is HTTP over transports. What runs, how loaded it is, and how a policy is changed, it asks
its host: a replica on a cluster (`gym_serve.cluster.ingress`), or a process with a graph of its own
(`gym_serve.assembly.local`).

``/episodes``: the episodes that run on a graph, and the last ones that have ended (docs/http.md).

The replicas know their episodes (`gym_serve.servers.live`), and are asked when somebody looks. Each has some
seconds to answer; one that does not is named, and holds up nobody. An id names the replica, so any gateway of
the graph finds the episode.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Protocol

import httpx
from starlette.requests import Request
from starlette.responses import Response

from gym_serve.gateway import wire
from gym_serve.graph.spec import Node
from gym_serve.servers.model import HoldMode
from gym_serve.servers.transport import Call, Reply, encode
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


_SECONDS = 5.0
_GONE = frozenset({502, 503, 504})  # what a proxy answers for a server that is not there


async def reached(remote: Mapping[str, Node]) -> dict[str, dict[str, Any]]:
    """The states of servers of ``type: http``, by name."""
    if not remote:
        return {}
    async with httpx.AsyncClient() as client:
        states = await asyncio.gather(*(_reach(client, node) for node in remote.values()))
    return dict(zip(remote, states, strict=True))


async def _reach(client: httpx.AsyncClient, node: Node) -> dict[str, Any]:
    """The state of a remote server; any answer is fine, as its base URL need not be a route."""
    try:
        request = client.stream("GET", str(node.url), headers=node.sent_headers(), timeout=_SECONDS)
        async with request as answer:
            status = answer.status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return {"state": "unreachable", "url": node.url, "message": f"{type(error).__name__}: {error}"}
    if status in _GONE:
        return {"state": "unreachable", "url": node.url, "message": f"HTTP {status}"}
    return {"state": "ready", "url": node.url}


EPISODES = "episodes"
"""The route, and the first part of the names of its operations."""

LIST, LOOK, STOP = (f"{EPISODES}/{op}" for op in ("list", "look", "stop"))
"""Operations that every replica answers at once."""

MOST = 500  # episodes in an answer, and of a process
_MOST_ENDED = 100  # in an answer
_FRESH_SECONDS = 0.5  # for which the list is remembered: many may look


class LiveEpisodesOfGraph:
    """All episodes of a graph."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._listing: asyncio.Task[JSON] | None = None
        self._listed = 0.0

    async def answer(self, request: Request, path: str) -> Response:
        """Answer a request. ``path``: its path below the graph's, which begins with ``episodes``. Raises
        GymError: it is refused."""
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
        Raises NotFound: it is gone; DeadlineExceeded: its replica does not answer."""
        episode: JSON = (await self._tell(id, LOOK, known=known)).json()
        return {"id": id, **episode}

    async def stop(self, id: str) -> JSON:
        """Stop an episode. Raises NotFound: it is gone; Conflict: it has ended, or waits no more;
        DeadlineExceeded: its replica does not answer."""
        episode: JSON = (await self._tell(id, STOP)).json()
        self._listed = 0.0
        return {"id": id, **episode}

    async def _tell(self, id: str, op: str, **more: Any) -> Reply:
        name, _, number = id.rpartition(".")
        return await self._processes.tell(name, Call(op, encode({"number": number, **more})))

    async def _list(self) -> JSON:
        answers, silent = await self._processes.ask(Call(LIST))
        listing: JSON = {"running": 0, "queued": 0, "episodes": [], "ended": [], "silent": silent}
        for name, listed in answers:
            listing["running"] += listed["running"]
            listing["queued"] += listed["queued"]
            for kind in ("episodes", "ended"):
                listing[kind] += [{"id": f"{name}.{one.pop('number')}", **one} for one in listed[kind]]
        listing["episodes"].sort(key=lambda one: -one["seconds"])
        listing["ended"].sort(key=lambda one: one["ended_seconds"])
        del listing["episodes"][MOST:], listing["ended"][_MOST_ENDED:]
        return listing
