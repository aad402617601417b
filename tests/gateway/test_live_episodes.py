"""The episodes of a graph while they run: which there are, what they have done, and how one is stopped."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from support.local_site import local_site
from support.watched import Held

from gym_serve.cluster.reports import AgentReplicas
from gym_serve.cluster.routing.admission import Admission
from gym_serve.cluster.routing.rpc import Address, Listener
from gym_serve.gateway.host import LiveEpisodesOfGraph
from gym_serve.graph.spec import Node
from gym_serve.servers import live as live_module
from gym_serve.servers.transport import Call, Reply
from gym_serve.types.errors import DeadlineExceeded, NotFound, Stopped

JSON = dict[str, Any]


@pytest.fixture
def held(tmp_path: Path) -> Held:
    return Held(tmp_path)


@pytest.fixture
async def http(held: Held) -> AsyncIterator[httpx.AsyncClient]:
    async with local_site(held.graph()) as (_, client):
        yield client


def run(http: httpx.AsyncClient, prompt: str, **more: Any) -> asyncio.Task[httpx.Response]:
    return asyncio.ensure_future(http.post("run", json={"prompt": prompt, **more}))


async def until(http: httpx.AsyncClient, path: str, holds: Callable[[JSON], bool]) -> JSON:
    """What a path answers, once that is as expected."""
    while True:
        found: JSON = (await http.get(path)).json()
        if holds(found):
            return found
        await asyncio.sleep(0.01)


async def only(http: httpx.AsyncClient, **fields: Any) -> JSON:
    """The episode that runs, once it is as these fields say."""
    expected = fields.items()
    listed = await until(
        http, "episodes", lambda all: [expected <= e.items() for e in all["episodes"]] == [True]
    )
    episode: JSON = listed["episodes"][0]
    return episode


async def test_nothing_runs(http: httpx.AsyncClient) -> None:
    nothing = {"running": 0, "queued": 0, "episodes": [], "ended": [], "silent": []}
    assert (await http.get("episodes")).json() == nothing
    load = await http.get("pressure")
    assert (load.status_code, load.json()["error"]["code"]) == (404, "not_found"), "without Ray there is none"


async def test_an_episode_is_seen_turn_by_turn_and_after_its_end(http: httpx.AsyncClient, held: Held) -> None:
    result = run(http, "story of   a\ncat", _ng_rollout_id="7-1", _ng_task_index=7, _ng_rollout_index=1)
    await held.until("story", "asked")
    episode = await only(http, state="model")
    assert episode["prompt"] == "story of a cat"
    assert {key: episode[key] for key in ("agent", "rollout_id", "task", "attempt", "turns", "tools")} == {
        **{"agent": "reader", "rollout_id": "7-1", "task": 7, "attempt": 1, "turns": 0, "tools": []}
    }
    first = (await http.get(f"episodes/{episode['id']}")).json()
    assert first["rollout"]["responses_create_params"]["input"] == "story of   a\ncat"
    assert "response" not in first["rollout"]
    same = (await http.get(f"episodes/{episode['id']}", params={"known": first["version"]})).json()
    assert (same["version"], "rollout" in same) == (first["version"], False)

    held.call("story", 0, "look_up", {"query": "cat"})
    path = f"episodes/{episode['id']}"
    seen = await until(
        http, path, lambda one: len(one["rollout"].get("response", {"output": []})["output"]) > 1
    )
    items = seen["rollout"]["response"]["output"]
    assert [item["type"] for item in items] == ["function_call", "function_call_output"]
    assert (seen["input_tokens"], seen["output_tokens"]) == (10, 5)
    assert seen["version"] != first["version"]
    assert [step[0] for step in seen["rollout"]["_ng_timeline"]["steps"]][:2] == ["seed", "model"]

    held.say("story", 1, "The end.")
    rollout = (await result).json()
    assert rollout["reward"] == 1.0
    listed = await until(http, "episodes", lambda all: not all["running"])
    (ended,) = listed["ended"]
    assert (ended["id"], ended["state"], ended["reward"]) == (episode["id"], "ended", 1.0)
    assert (ended["turns"], ended["output_tokens"], ended["prompt"]) == (2, 10, "story of a cat")
    assert (await http.get(f"episodes/{ended['id']}")).json()["rollout"] == rollout


async def test_a_stopped_episode_is_a_failure_and_leaves_nothing_behind(
    http: httpx.AsyncClient, held: Held
) -> None:
    result = run(http, "long story")
    held.call("long", 0, "look_up", {"query": "cat"})
    episode = await only(http, turns=1, state="model")
    assert (await http.delete(f"episodes/{episode['id']}")).json() == {"id": episode["id"], "stopped": True}
    answer = await result
    assert answer.status_code == 200
    rollout = answer.json()
    assert (rollout["_ng_failure_class"], rollout["_ng_failure_terminal"]) == ("stopped", True)
    assert (rollout["mask_sample"], rollout["failure"]["stage"]) == (True, "model")
    assert len(rollout["response"]["output"]) == 2, "what it had done so far"
    assert held.has("long", "cancelled")
    assert held.has("long", "closed")
    assert (await http.get("episodes")).json()["ended"][0]["failure"] == "stopped"
    again = await http.delete(f"episodes/{episode['id']}")
    assert (again.status_code, again.json()["error"]["code"]) == (409, "conflict")


async def test_a_stopped_episode_of_a_batch(http: httpx.AsyncClient, held: Held) -> None:
    body = {"rows": [{"prompt": "first"}, {"prompt": "second"}]}
    result = asyncio.ensure_future(http.post("rollouts", json=body))
    await held.until("first", "asked")
    await held.until("second", "asked")
    listed = (await http.get("episodes")).json()["episodes"]
    await http.delete(f"episodes/{next(one['id'] for one in listed if one['prompt'] == 'first')}")
    held.say("second", 0, "done")
    *lines, end = map(orjson.loads, (await result).text.splitlines())
    by_row = {line["row"]: line for line in lines}
    classes = {row: line["rollout"].get("_ng_failure_class") for row, line in by_row.items()}
    assert classes == {0: "stopped", 1: None}
    assert end == {"end": {"rollouts": 2, "errors": 0}}


async def test_an_episode_as_an_answer_is_stopped_too(http: httpx.AsyncClient, held: Held) -> None:
    for op, body in {
        "responses": {"input": "answer"},
        "chat/completions": {"messages": [{"role": "user", "content": "answer"}]},
    }.items():
        result = asyncio.ensure_future(http.post(f"reader/v1/{op}", json=body))
        episode = await only(http, state="model")
        assert episode["prompt"] == "answer"
        await http.delete(f"episodes/{episode['id']}")
        answer = await result
        assert (answer.status_code, answer.json()["error"]["code"]) == (410, "stopped")
    assert (await http.get("episodes")).json()["ended"] == [], "it made no rollout"


PROGRAM = """
import json, os, sys, time, urllib.request
body = {"model": "policy", "messages": [{"role": "user", "content": "talk to me"}]}
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
with open(sys.argv[1] + ".new", "w") as file:
    file.write(str(os.getpid()))
os.replace(sys.argv[1] + ".new", sys.argv[1])  # whole, once it is there
time.sleep(600)
"""


async def test_an_external_harness_is_seen_and_stopped(held: Held) -> None:
    command = [sys.executable, "-c", PROGRAM, str(held.folder / "talk.pid")]
    async with local_site(held.graph(type="harness_agent", command=command)) as (_, http):
        result = run(http, "talk to the program")
        held.say("talk", 0, "Hello!")
        await held.until("talk", "pid")
        episode = await only(http, state="harness")
        for _ in range(2):  # a look takes nothing away
            seen = (await http.get(f"episodes/{episode['id']}")).json()["rollout"]
            assert [item["content"] for item in seen["captured_input"]] == ["talk to me"]
            assert [item["content"][0]["text"] for item in seen["response"]["output"]] == ["Hello!"]
        await http.delete(f"episodes/{episode['id']}")
        rollout = (await result).json()
    assert rollout["_ng_failure_class"] == "stopped"
    assert rollout["response"]["output"][0]["content"][0]["text"] == "Hello!"
    assert [step[0] for step in rollout["_ng_timeline"]["steps"]] == ["seed", "model"]
    pid = int((held.folder / "talk.pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_caller_that_leaves_takes_its_episode_along(http: httpx.AsyncClient, held: Held) -> None:
    result = run(http, "left")
    episode = await only(http, state="model")
    result.cancel()
    await held.until("left", "closed")
    listed = await until(http, "episodes", lambda all: not all["running"])
    assert listed["ended"] == []
    for method in ("GET", "DELETE"):
        answer = await http.request(method, f"episodes/{episode['id']}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    "id", ["x", "local.x", "local.-1", "local.q1", "reader.abc.1", "local.1e9", "..x", "a" * 999]
)
async def test_ids_that_are_none(http: httpx.AsyncClient, id: str) -> None:
    for method in ("GET", "DELETE"):
        answer = await http.request(method, f"episodes/{id}")
        assert answer.status_code in (404, 409)
        assert set(answer.json()["error"]) >= {"code", "message"}
    assert (await http.post("episodes")).status_code == 405


async def test_without_the_token_nothing_is_shown_or_stopped(held: Held) -> None:
    async with local_site(held.graph(), ["secret"]) as (_, http):
        for method, path in (
            ("GET", "episodes"),
            ("GET", "episodes/local.1"),
            ("DELETE", "episodes/local.1"),
        ):
            assert (await http.request(method, path)).status_code == 401
        await http.post("sign-in", data={"token": "secret"})
        assert (await http.get("episodes")).status_code == 200
        assert (await http.delete("episodes/local.1")).status_code == 403
        own = {"x-gym-serve": "1"}
        assert (await http.delete("episodes/local.1", headers=own)).status_code == 404
        foreign = await http.delete("episodes/local.1", headers={**own, "origin": "http://127.0.0.1:1"})
        assert foreign.status_code == 403


async def test_what_is_kept_is_bounded(
    http: httpx.AsyncClient, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_module, "_KEPT", 3)
    for number in range(5):
        held.say(f"n{number}", 0, "x")
        await run(http, f"n{number}")
    listed = (await http.get("episodes")).json()["ended"]
    assert [one["prompt"] for one in listed] == ["n4", "n3", "n2"]
    monkeypatch.setattr(live_module, "_KEPT_BYTES", 10_000)
    held.say("big", 0, "x" * 9_300)
    held.say("huge", 0, "x" * 11_000)
    await run(http, "big")
    await run(http, "huge")
    await asyncio.sleep(0.6)  # the list is remembered for half a second
    assert [one["prompt"] for one in (await http.get("episodes")).json()["ended"]] == ["big"]
    monkeypatch.setattr(live_module, "_KEPT_SECONDS", 0.0)
    await asyncio.sleep(0.6)
    assert (await http.get("episodes")).json()["ended"] == []


class Addresses:
    """Where the replicas of a server listen."""

    def __init__(self, **addresses: Address) -> None:
        self._addresses = addresses

    async def all(self) -> dict[str, Address]:
        return self._addresses

    async def get(self, replica: str) -> Address | None:
        return self._addresses.get(replica)


async def test_a_replica_that_is_silent_is_named_and_one_that_is_gone_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def answers(call: Call) -> Reply:
        return Reply.of({"running": 0, "queued": 0, "episodes": [], "ended": []})

    async def hangs(call: Call) -> Reply:
        await asyncio.Event().wait()
        raise AssertionError

    listeners = [Listener(dispatch, lambda call: aiter_nothing(), lambda: 0) for dispatch in (answers, hangs)]
    well, silent = [await listener.start("127.0.0.1") for listener in listeners]
    addresses = Addresses(well=well, silent=silent, gone=Address("127.0.0.1", 1, "token"))
    monkeypatch.setattr(AgentReplicas, "_directory", lambda self, server: addresses)
    monkeypatch.setattr("gym_serve.cluster.reports._SECONDS", 0.3)
    nodes = {"reader": Node("reader", "agent", "x:X"), "policy": Node("policy", "model", "x:X")}
    episodes = LiveEpisodesOfGraph(AgentReplicas("app", nodes))
    assert (await episodes.list())["silent"] == ["reader.silent"]
    with pytest.raises(DeadlineExceeded, match="reader"):
        await episodes.stop("reader.silent.1")
    for id in ("reader.gone.1", "reader.never.1", "policy.well.1"):
        with pytest.raises(NotFound):
            await episodes.look(id)
    await asyncio.gather(*(listener.stop() for listener in listeners))


async def test_a_call_in_the_queue_is_refused() -> None:
    ends = asyncio.Event()

    async def dispatch(call: Call) -> Reply:
        await ends.wait()
        return Reply.of({})

    admission = Admission(dispatch, lambda call: aiter_nothing(), lambda: (1, -1))
    first, second, third = (asyncio.ensure_future(admission.dispatch(Call(op))) for op in "abc")
    await asyncio.sleep(0)
    assert [queued.call.op for queued in admission.queued()] == ["b", "c"]
    number = next(iter(admission.queued())).number
    assert admission.refuse(number, Stopped("no"))
    assert not admission.refuse(number, Stopped("no"))
    refused = await second
    assert refused.status == 410
    ends.set()
    assert {(await first).status, (await third).status} == {200}
    assert (admission.running, admission.waiting, admission.unbound) == (0, 0, 0)


async def aiter_nothing() -> AsyncIterator[bytes]:
    return
    yield b""
