"""The page of a running graph: its files, and an episode in the form that the page draws."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.local_site import ROOT, local_site
from support.watched import Held
from view.hostile import hostile

from gym_serve.gateway.host import LiveEpisodesOfGraph
from gym_serve.view.facts import top_level
from gym_serve.view.server import CONTENT_POLICY

JSON = dict[str, Any]


@pytest.fixture
def held(tmp_path: Path) -> Held:
    return Held(tmp_path)


@pytest.fixture
async def http(held: Held) -> AsyncIterator[httpx.AsyncClient]:
    async with local_site(held.graph()) as (_, client):
        yield client


async def test_the_page_and_its_files(http: httpx.AsyncClient) -> None:
    asked = await http.get("ui")
    assert (asked.status_code, asked.headers["location"]) == (307, "ui/")
    page = await http.get("ui/")
    assert page.headers["content-type"].startswith("text/html")
    assert 'content="live"' in page.text
    assert page.headers["content-security-policy"] == CONTENT_POLICY
    for name, kind in (
        ("live.js", "text/javascript"),
        ("style.css", "text/css"),
        ("icon.svg", "image/svg+xml"),
    ):
        answer = await http.get(f"ui/static/{name}")
        assert answer.headers["content-type"].startswith(kind)
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = await http.get(f"ui/static/{name}", headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert f'href="{ROOT}/ui"' in (await http.get("")).text


@pytest.mark.parametrize(
    "path",
    [
        "static/..%2fserver.py",
        "static/%2e%2e/server.py",
        "static//etc/passwd",
        "static/",
        "static",
        "api",
        "api/rollout/local.1",
        "api/rollout/local.1/1",
        "api/runs",
        "x",
    ],
)
async def test_nothing_else_is_there(http: httpx.AsyncClient, path: str) -> None:
    answer = await http.get(f"ui/{path}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_only_reading(http: httpx.AsyncClient) -> None:
    for method in ("POST", "PUT", "DELETE"):
        assert (await http.request(method, "ui/api/rollout/local.1/0")).status_code == 405
    assert (await http.get("ui/api/rollout/local.1/0?from=x")).status_code == 400


async def test_an_episode_grows(http: httpx.AsyncClient, held: Held) -> None:
    result = asyncio.ensure_future(http.post("run", json={"prompt": "story", "_ng_rollout_id": "2-0"}))
    await held.until("story", "asked")
    (episode,) = (await http.get("episodes")).json()["episodes"]
    path = f"ui/api/rollout/{episode['id']}/0"

    async def shown(**params: Any) -> JSON:
        found: JSON = (await http.get(path, params=params)).json()
        return found

    first = await shown()
    assert [item["text"] for item in first["items"]] == ["story"]
    assert (first["from"], first["total"], first["live"]["state"]) == (0, 1, "model")
    assert (first["verdict"]["reward"], first["failure"]) == (None, None)
    version = first["live"]["version"]
    assert set(await shown(known=version)) == {"live"}
    held.call("story", 0, "look_up", {"query": "cats"})
    second = await shown(**{"from": 1})
    while second["total"] < 3:
        await asyncio.sleep(0.01)
        second = await shown(**{"from": 1})
    assert [(item["index"], item["kind"], item["turn"]) for item in second["items"]] == [
        (1, "call", 0),
        (2, "result", None),
    ]
    assert [step["kind"] for step in second["timeline"]["steps"]][:3] == ["seed", "model", "tool"]
    assert (await http.get(f"{path}/raw")).json()["_ng_rollout_id"] == "2-0"
    held.say("story", 1, "The end.")
    rollout = (await result).json()
    ended = await shown(known=version, **{"from": 3})
    assert (ended["from"], len(ended["items"]), ended["verdict"]["reward"]) == (0, 4, 1.0)
    assert (await http.get(f"{path}/raw")).json() == rollout


def rollouts() -> dict[str, JSON]:
    """Whatever an agent elsewhere may have made of a rollout."""
    found = {}
    for name, line in hostile(large=False).items():
        with suppress(ValueError):
            found[name] = top_level(line)
    return found


@pytest.mark.parametrize("name", rollouts())
async def test_any_rollout_is_shown(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    rollout = rollouts()[name]
    live = {"id": "local.1", "agent": "reader", "state": "ended", "version": "ended", "task": None}
    counts = {"turns": 1, "input_tokens": 0, "output_tokens": 0, "seconds": None}

    async def look(self: LiveEpisodesOfGraph, id: str, known: str | None = None) -> JSON:
        return {**live, **counts, "rollout": rollout}

    monkeypatch.setattr(LiveEpisodesOfGraph, "look", look)
    for path in ("0", "0/raw", "0?from=0&to=1"):
        answer = await http.get(f"ui/api/rollout/local.1/{path}")
        assert answer.status_code == 200, answer.text[:500]
