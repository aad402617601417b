"""``/ui`` of a running graph: the viewer's page, for the episodes that run now.

It has the files of `gym-serve view` and its rules (`gym_serve.view.server`): a model writes what is shown.
Which episodes run, and what stops one, the page asks the graph itself (``/episodes``, ``/pressure``). Here it
gets one episode in the form that it draws. Below ``/ui/`` are the page, its files in ``static/``,
``api/rollout/{id}/0?known=...&from=...`` (an episode, with the items of its conversation from there on) and
``api/rollout/{id}/0/raw`` (the rollout so far).
"""

from __future__ import annotations

import asyncio

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from gym_serve.gateway.host import LiveEpisodesOfGraph
from gym_serve.gateway.pages import Site
from gym_serve.servers.transport import encode
from gym_serve.types.errors import NotFound
from gym_serve.types.requests import JSON
from gym_serve.view.conversation import shown_rollout
from gym_serve.view.facts import facts_of
from gym_serve.view.server import HEADERS, STATIC, number_of

_FILES = StaticFiles(directory=STATIC)


async def answer(request: Request, path: str, episodes: LiveEpisodesOfGraph) -> Response:
    """Answer a request below ``/ui``. Raises NotFound: there is no such file or episode; BadRequest: ``from``
    or ``to`` is no number; DeadlineExceeded: the replica of the episode does not answer."""
    folder, _, rest = path.partition("/")
    if not path:
        response = _page(request)
    elif folder == "static":
        response = await _file(rest, request)
    elif folder == "api" and rest.startswith("rollout/"):
        response = await _episode(request, rest.removeprefix("rollout/"), episodes)
    else:
        raise NotFound("there is no such page")
    response.headers.update(HEADERS)
    return response


SITE = Site(answer)


def _page(request: Request) -> Response:
    if not request.scope["path"].endswith("/"):  # the page's links are below it
        return RedirectResponse(f"{request.scope['path'].rpartition('/')[2]}/")
    content = (STATIC / "index.html").read_text("utf-8")
    content = content.replace('name="gym-serve" content="server"', 'name="gym-serve" content="live"')
    content = content.replace("static/main.js", "static/live.js")
    return Response(content, media_type="text/html", headers={"cache-control": "no-cache"})


async def _file(name: str, request: Request) -> Response:
    try:
        response = await _FILES.get_response(name, request.scope)
    except HTTPException:
        raise NotFound("there is no such page") from None
    response.headers["cache-control"] = "no-cache"
    return response


async def _episode(request: Request, path: str, episodes: LiveEpisodesOfGraph) -> Response:
    id, _, rest = path.partition("/")
    if rest not in ("0", "0/raw"):
        raise NotFound("there is no such page")
    is_raw = rest == "0/raw"
    begin, end = number_of(request, "from"), number_of(request, "to")
    episode = await episodes.look(id, None if is_raw else request.query_params.get("known"))
    rollout = episode.pop("rollout", None)
    if is_raw:
        return Response(encode(rollout), media_type="text/plain; charset=utf-8")
    content = await asyncio.to_thread(_shown, episode, rollout, begin, end)
    return Response(content, media_type="application/json", headers={"cache-control": "no-store"})


def _shown(live: JSON, rollout: JSON | None, begin: int | None, end: int | None) -> bytes:
    """An episode as the page draws it; without a rollout, what it is doing alone."""
    if rollout is None:
        return orjson.dumps({"live": live})
    if end is None and ("captured_input" in rollout or live["state"] == "ended"):
        begin = None  # a harness may rewrite what was said
    facts = facts_of(encode(rollout))
    tokens = live["input_tokens"] + live["output_tokens"]
    row = {
        "id": facts.id or live["id"],
        "task": "" if live["task"] is None else str(live["task"]),
        "attempt": facts.attempt,
        "reward": facts.reward if live["state"] == "ended" else None,
        "failure": facts.failure,
        "environment": facts.environment,
        "agent": live["agent"],
        "version": facts.version,
        "last_version": facts.last_version,
        "turns": live["turns"],
        "tokens": tokens,
        "seconds": live["seconds"],
    }
    shown = shown_rollout(rollout, row, begin, end)
    return orjson.dumps({"live": live, "from": begin or 0, "run": live["id"], "n": 0, **shown})
