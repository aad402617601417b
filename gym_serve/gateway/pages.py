"""Pages and sites that packages add to every graph: entry points of the group ``gym_serve.pages``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gym_serve.gateway.live_episodes import LiveEpisodesOfGraph
from gym_serve.graph.spec import Node

_GROUP = "gym_serve.pages"


@dataclass(frozen=True)
class Page:
    """A page that a package adds to every graph, as ``GET /{name}``: an entry point of ``gym_serve.pages``.
    ``summary``: one line for the API documentation; ``response``: JSON schema of the answer; ``answer``:
    makes the answer, any JSON value, from the request and the outlines of the servers by name."""

    summary: str
    response: Mapping[str, Any]
    answer: Callable[[Request, Mapping[str, Node]], Any]


@dataclass(frozen=True)
class Site:
    """A site that a package adds to every graph, below ``/{name}/``: another entry point of that group.
    ``answer``: makes the answer, from the request, its path below the site, and the graph's episodes. It may
    raise a `GymError`."""

    answer: Callable[[Request, str, LiveEpisodesOfGraph], Awaitable[Response]]


async def added_pages() -> Mapping[str, Page | Site]:
    """All of them, by name."""
    return await asyncio.to_thread(_load_pages)  # imports foreign code


@lru_cache
def _load_pages() -> Mapping[str, Page | Site]:
    return {point.name: point.load() for point in entry_points(group=_GROUP)}
