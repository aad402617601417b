"""Episodes on a cluster: every gateway shows those of all replicas, and stops any of them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from support.watched import Held

from gym_serve import Gym

JSON = dict[str, Any]
PROMPTS = [f"story{number}" for number in range(6)]


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Held:
    return Held(tmp_path_factory.mktemp("held"))


@pytest.fixture(scope="module")
def gym(deploy: Callable[..., Gym], held: Held) -> Gym:
    graph = {**held.graph(num_replicas=2), "gateway": {"num_replicas": 2}}
    inline = {
        "type": "simple_agent",
        "model": "policy",
        "resources": "library",
        "inline": ["library", "policy"],
    }
    graph["agents"]["alone"] = inline
    graph["agents"]["narrow"] = {**graph["agents"]["reader"], "num_replicas": 1, "max_ongoing_requests": 1}
    graph["default_agent"] = "reader"
    gym: Gym = deploy(graph, name="live")
    return gym


@pytest.fixture
async def http(gym: Gym) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"{gym.url}/", timeout=120) as client:
        yield client


async def until(http: httpx.AsyncClient, holds: Callable[[JSON], bool]) -> JSON:
    """What ``/episodes`` answers, once that is as expected and all replicas have answered in time."""
    while True:
        found: JSON = (await http.get("episodes")).json()
        print({key: found[key] for key in ("running", "queued", "silent")})  # of a test that fails
        if not found["silent"] and holds(found):
            return found
        await asyncio.sleep(0.1)


async def ask(http: httpx.AsyncClient, method: str, path: str) -> httpx.Response:
    """Ask for one episode; again where a replica of a busy machine did not answer in time."""
    while True:
        answer = await http.request(method, path)
        if answer.status_code != 504:
            return answer


async def test_episodes_of_all_replicas_are_seen_and_stopped(
    gym: Gym, held: Held, http: httpx.AsyncClient
) -> None:
    rows = [{"prompt": prompt} for prompt in PROMPTS]

    async def collect() -> list[JSON]:
        return [dict(rollout) async for rollout in gym.rollouts(rows, attempts=3)]

    collecting = asyncio.ensure_future(collect())
    over_http = asyncio.ensure_future(http.post("alone/run", json={"prompt": "inlined"}))
    listed = await until(http, lambda all: all["running"] == 7 and all["queued"] == 0)
    places = {one["id"].rpartition(".")[0] for one in listed["episodes"]}
    assert len(places) == 3, "two replicas of one agent, and one of the other"
    assert {one["agent"] for one in listed["episodes"]} == {"reader", "alone"}
    for _ in range(6):  # both gateways say the same; each remembers what it has heard for half a second
        again = await until(http, lambda all: all["running"] == 7)
        assert {one["id"] for one in again["episodes"]} == {one["id"] for one in listed["episodes"]}

    chosen = {one["prompt"]: one["id"] for one in listed["episodes"]}
    for prompt in ("story1", "story4", "inlined"):
        await held.until(prompt, "asked")
        seen = (await ask(http, "GET", f"ui/api/rollout/{chosen[prompt]}/0")).json()
        assert [item["text"] for item in seen["items"]] == [prompt]
        assert (await ask(http, "DELETE", f"episodes/{chosen[prompt]}")).status_code in (200, 409)
        await held.until(prompt, "cancelled")
        await held.until(prompt, "closed")
    stopped = (await over_http).json()
    assert (stopped["_ng_failure_class"], stopped["mask_sample"]) == ("stopped", True)
    for prompt in PROMPTS:
        held.say(prompt, 0, "The end.")
    rollouts = await collecting
    ends = {
        rollout["responses_create_params"]["input"]: rollout.get("_ng_failure_class") for rollout in rollouts
    }
    assert ends == {prompt: "stopped" if prompt in ("story1", "story4") else None for prompt in PROMPTS}
    assert len(rollouts) == len(PROMPTS), "none is tried again"
    listed = await until(http, lambda all: all["running"] == 0)
    assert len(listed["ended"]) == 7
    load = (await http.get("pressure")).json()["servers"]
    assert load["library"]["sessions"] == 0


async def test_an_episode_in_the_queue_is_seen_and_stopped(
    gym: Gym, held: Held, http: httpx.AsyncClient
) -> None:
    prompts = [f"queue{number}" for number in range(3)]  # of which one runs
    asked = [asyncio.ensure_future(http.post("narrow/run", json={"prompt": prompt})) for prompt in prompts]
    listed = await until(http, lambda all: (all["running"], all["queued"]) == (1, 2))
    first, second = (one for one in listed["episodes"] if one["state"] == "queued")
    assert (await ask(http, "DELETE", f"episodes/{first['id']}")).status_code in (200, 409)
    refused = await asked[prompts.index(first["prompt"])]
    assert (refused.status_code, refused.json()["error"]["code"]) == (410, "stopped")
    for prompt in prompts:
        held.say(prompt, 0, "Done.")
    done = await asyncio.gather(*asked)
    assert sorted(answer.status_code for answer in done) == [200, 200, 410]
    gone = await ask(http, "DELETE", f"episodes/{second['id']}")
    assert gone.json()["error"]["code"] == "conflict"


async def test_the_page_is_there(http: httpx.AsyncClient) -> None:
    page = await http.get("ui/")
    assert 'content="live"' in page.text
    assert (await http.get("ui/static/live.js")).status_code == 200
    assert (await http.get("ui", follow_redirects=True)).url.path.endswith("/live/ui/")
