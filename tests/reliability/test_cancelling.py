"""Whoever stops waiting for a rollout ends its model request, its running tool and its session."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

import aiohttp
import pytest
from support.hanging import HangingEndpoint, HangingEnvironment, Notes
from support.processes import replicas_of

from gym_serve import AsyncGym, Gym

PATIENCE = 60.0  # seconds; how long it took is printed, and is well below one
LIMIT = 4.0  # seconds in which an episode comes to where it hangs; both kinds of it wait side by side
JSON = dict[str, Any]

_number = count()


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Notes:
    return Notes(tmp_path_factory.mktemp("notes"))


@pytest.fixture(scope="module")
def gym(deploy: Callable[..., Gym], notes: Notes) -> Iterator[Gym]:
    with HangingEndpoint(notes) as endpoint:
        agent = {"type": "simple_agent", "model": "policy", "resources": "env"}
        graph = {
            "models": {"policy": {"type": "chat_model", "base_url": endpoint.url, "model": "m"}},
            "resources": {"env": {"type": HangingEnvironment, "notes": str(notes._folder)}},
            "agents": {
                "agent": agent,
                "inline": {**agent, "inline": ["policy", "env"]},
                "hurried": {**agent, "episode_timeout": LIMIT},
            },
        }
        yield deploy(graph, name="cancelling")


async def until(notes: Notes, key: str, *events: str) -> dict[str, float]:
    """The events of an episode, once they have all happened."""
    give_up = time.monotonic() + PATIENCE
    while not set(events) <= (seen := notes.read(key)).keys():
        assert time.monotonic() < give_up, f"{set(events) - seen.keys()} did not happen; {seen}"
        await asyncio.sleep(0.01)
    return seen


@asynccontextmanager
async def hanging(notes: Notes, key: str, work: Awaitable[Any]) -> AsyncIterator[asyncio.Task[Any]]:
    """Runs ``work`` until its episode hangs; then it is up to the body of the statement."""
    task = asyncio.ensure_future(work)
    try:
        await until(notes, key, "hangs")
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def row(what: str, key: str, agent: str = "agent") -> JSON:
    tools = [{"type": "function", **spec, "strict": False} for spec in TOOLS]
    params = {"input": f"{what} {key}", "tools": tools}
    return {"responses_create_params": params, "agent_ref": {"name": agent}, "key": key}


TOOLS = [{"name": name, "parameters": {"type": "object", "properties": {}}} for name in ("hang", "block")]


def new_key() -> str:
    return f"e{next(_number)}"


async def collected(gym: Gym, rows: list[JSON], **options: Any) -> list[JSON]:
    return [rollout async for rollout in gym.rollouts(rows, **options)]


async def posted(gym: Gym, path: str, body: JSON, **headers: str) -> JSON:
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{gym.url}/{path}", json=body, headers=headers) as answer,
    ):
        rollout: JSON = await answer.json()
        return rollout


async def check(notes: Notes, key: str, since: float, *events: str) -> None:
    """Everything of the episode has ended; prints how long it took."""
    seen = await until(notes, key, *events)
    print(f"  ended after {', '.join(f'{event} {1000 * (seen[event] - since):.0f} ms' for event in events)}")


def check_ending(rollout: JSON, what: str) -> None:
    """A model that hangs is the machine's failure. A tool that does is the policy's choice, and is graded."""
    if what == "model":
        assert rollout["_ng_failure_class"] == "model_timeout"
        assert rollout["failure"]["retryable"]
    else:
        assert (rollout["reward"], rollout["stopped_by"]) == (1.0, "episode_deadline")


@pytest.mark.parametrize("agent", ["agent", "inline"])
@pytest.mark.parametrize("what", ["model", "hang"])
async def test_a_cancelled_driver(gym: Gym, notes: Notes, what: str, agent: str) -> None:
    key = new_key()
    async with hanging(notes, key, collected(gym, [row(what, key, agent)])) as task:
        since = time.time()
        task.cancel()
        await check(notes, key, since, "cancelled", "closed")


@pytest.mark.parametrize("agent", ["agent", "inline"])
@pytest.mark.parametrize("what", ["model", "hang"])
async def test_an_http_client_that_disconnects(gym: Gym, notes: Notes, what: str, agent: str) -> None:
    key = new_key()
    async with hanging(notes, key, posted(gym, "run", row(what, key, agent))) as task:
        since = time.time()
        task.cancel()
        await check(notes, key, since, "cancelled", "closed")


async def test_the_deadline_of_the_driver(gym: Gym, notes: Notes) -> None:
    async def late(what: str) -> None:
        key = new_key()
        async with hanging(notes, key, collected(gym, [row(what, key)], timeout=LIMIT)) as task:
            (rollout,) = await task
            since = time.time()
            check_ending(rollout, what)
            await check(notes, key, since, "cancelled", "closed")

    await asyncio.gather(late("model"), late("hang"))


async def test_the_deadline_of_an_http_client(gym: Gym, notes: Notes) -> None:
    async def late(what: str) -> None:
        key = new_key()
        headers = {"x-request-timeout": str(LIMIT)}
        async with hanging(notes, key, posted(gym, "run", row(what, key), **headers)) as task:
            answer = await task
            since = time.time()
            if "responses_create_params" in answer:  # a rollout
                check_ending(answer, what)
            else:  # the gateway's time is over at the same moment, and it may be heard first
                assert answer["error"]["code"] == "deadline_exceeded"
            await check(notes, key, since, "cancelled", "closed")

    await asyncio.gather(late("model"), late("hang"))


async def test_the_deadline_of_the_agent(gym: Gym, notes: Notes) -> None:
    async def late(what: str) -> None:
        key = new_key()
        async with hanging(notes, key, collected(gym, [row(what, key, "hurried")])) as task:
            (rollout,) = await task
            since = time.time()
            check_ending(rollout, what)
            await check(notes, key, since, "cancelled", "closed")

    await asyncio.gather(late("model"), late("hang"))


async def test_a_model_call_over_http(gym: Gym, notes: Notes) -> None:
    """A trainer that asks the model itself, and goes away."""
    key = new_key()
    body = {"model": "m", "messages": [{"role": "user", "content": f"model {key}"}]}
    async with hanging(notes, key, posted(gym, "policy/v1/chat/completions", body)) as task:
        since = time.time()
        task.cancel()
        await check(notes, key, since, "cancelled")


async def test_a_plain_function_runs_to_its_end(gym: Gym, notes: Notes) -> None:
    """Python cannot interrupt a thread: the episode ends at once, its session when the tool has returned."""
    key = new_key()
    async with hanging(notes, key, collected(gym, [row("block", key)])) as task:
        since = time.time()
        task.cancel()
        await check(notes, key, since, "cancelled", "closed")


async def sessions(gym: Gym) -> int:
    """How many sessions of the environment count."""
    servers = (await AsyncGym.of(gym).pressure())["servers"]
    return int(servers["env"]["sessions"])


async def test_sessions_of_an_agent_that_died_do_not_count(gym: Gym, notes: Notes) -> None:
    """They expire a minute later; an environment kept replicas for them for an hour."""
    key, before = new_key(), await sessions(gym)
    async with hanging(notes, key, collected(gym, [row("model", key)])):
        assert await sessions(gym) == before + 1
        (pid,) = replicas_of("cancelling")["agent"]
        os.kill(pid, signal.SIGKILL)
    give_up = time.monotonic() + PATIENCE  # what was tried again meanwhile has ended with its driver
    while await sessions(gym) != before:
        assert time.monotonic() < give_up
        await asyncio.sleep(0.2)
