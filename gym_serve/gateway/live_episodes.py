"""``/episodes``: the episodes that run on a graph, and the last ones that have ended (docs/http.md).

The replicas know their episodes (`gym_serve.servers.live`), and are asked when somebody looks. Each has some
seconds to answer; one that does not is named, and holds up nobody. An id names the replica, so any gateway of
the graph finds the episode.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gym_serve.gateway import wire
from gym_serve.gateway.host import Processes
from gym_serve.servers.transport import Call, Reply, encode
from gym_serve.types.requests import JSON

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
