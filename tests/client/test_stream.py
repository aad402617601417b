"""`Gym.stream`: groups for a trainer whose policy changes while they are made."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest
from support.held import HeldEndpoint, graph_of, row
from support.letters import END, Letters, LettersModel
from support.waiting import until, wait_until

from gym_serve import (
    AsyncGym,
    Gym,
    InvalidRequest,
    OperatorError,
    PolicyAnswer,
    PolicyRequest,
    ResourcesServer,
    Verdict,
)
from gym_serve.training import samples


class Longest(ResourcesServer):
    """Wants long answers."""

    async def verify(self, request: Any) -> Verdict:
        return Verdict(reward=len(str(request.response.output)) / 1000)


def letters_graph() -> dict[str, Any]:
    return {
        "models": {"policy": {"type": LettersModel, "tokenizer": "letters"}},
        "resources": {"longest": {"type": Longest}},
        "agents": {"agent": {"type": "simple_agent", "model": "policy", "resources": "longest"}},
    }


class Engine:
    """The trainer's engine: a token takes a tick, and says which version made it.

    Attributes:
        version: of its weights.
        cancelled: how many generations were cancelled.
    """

    def __init__(self) -> None:
        self.version = 0
        self.cancelled = 0

    async def generate(self, requests: list[PolicyRequest]) -> list[PolicyAnswer]:
        (request,) = requests
        length = 20 if "slow" in Letters().decode(request.prompt_ids) else 3
        versions = []
        try:
            for _ in range(length + 1):
                versions.append(str(self.version))
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return [PolicyAnswer([*Letters.ids("a" * length), END], [-0.5] * (length + 1), versions=versions)]


@pytest.mark.parametrize("straddle", ["continue", "restart", "cancel"])
async def test_the_tokens_of_a_group_are_at_most_so_old(straddle: Any) -> None:
    engine, k, batch = Engine(), 2, 3
    rows = [{"prompt": "slow" if number % 4 == 0 else "fast", "number": number} for number in range(30)]
    found = []
    mixed = 0
    with Gym.from_graph(letters_graph(), ray=False) as blocking:
        gym = AsyncGym.of(blocking)
        await gym.policy.serve("policy", engine.generate, max_batch=1)
        stream = gym.stream(
            rows, size=2, max_staleness=k, batch=batch, straddle=straddle, concurrency=12, attempts=1
        )
        async with stream:
            async for group in stream:
                assert group.usable
                cut = [sample for rollout in group.rollouts for sample in samples(rollout)]
                tokens = [{int(v) for v in sample.versions if v is not None} for sample in cut]
                mixed += any(len(versions) > 1 for versions in tokens)
                assert group.staleness is not None
                assert engine.version - min(map(min, tokens)) <= group.staleness <= k
                if straddle == "restart":
                    assert all(len(versions) == 1 for versions in tokens)
                if straddle == "cancel":
                    assert len(set.union(*tokens)) == 1
                found.append(group.row["number"])
                if len(found) % batch == 0:
                    await gym.policy.pause("keep")
                    engine.version += 1
                    await gym.policy.update_weights("policy", str(engine.version))
                    await gym.policy.resume()
        text = gym.metrics()
    assert sorted(found) == list(range(30))
    assert [stream.counts.begun, stream.counts.taken, stream.counts.ready] == [30, 30, 0]
    assert "stale" not in stream.counts.dropped
    assert f'gym_serve_staleness_count{{graph="{gym.name}"}} 30' in text
    assert f'gym_serve_staleness_bucket{{graph="{gym.name}",le="{k}"}} 30' in text.replace('"2.0"', '"2"')
    if straddle == "continue":
        assert mixed > 0
        assert engine.cancelled == 0
    else:
        reason = "restarted" if straddle == "restart" else "cancelled"
        assert 0 < engine.cancelled <= stream.counts.dropped[reason]


async def test_what_is_too_old_is_cancelled_at_the_endpoint_and_made_again() -> None:
    with HeldEndpoint() as endpoint, Gym.from_graph(graph_of(endpoint), ray=False) as blocking:
        gym = AsyncGym.of(blocking)
        stream = gym.stream([row("slow?"), row("fast?")], size=2, max_staleness=1, batch=1)
        async with aclosing(stream):
            assert (await anext(stream)).row["prompt"] == "fast?"
            await until(lambda: endpoint.held == 2)
            await gym.policy.update_weights("policy", "1")
            await gym.policy.update_weights("policy", "2")
            await until(lambda: endpoint.cancelled == 2)
            await until(lambda: endpoint.held == 2)
            endpoint.let()
            group = await anext(stream)
            assert (group.usable, group.staleness) == (True, 0)
            assert [rollout.rollout_id for rollout in group.rollouts] == ["0-0-a1", "0-1-a1"]
            assert stream.counts.dropped == {"stale": 2}
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


def test_groups_are_made_while_the_trainers_thread_learns() -> None:
    with HeldEndpoint() as endpoint, Gym.from_graph(graph_of(endpoint), ray=False) as gym:
        rows = (row(f"question {number}") for number in range(6))
        with gym.stream(rows, size=2, max_staleness=1, batch=2) as stream:
            for count, group in enumerate(stream, 1):
                assert group.usable
                # This thread is busy. The rest of the batch is made, and the next one.
                made = min(2 + count % 2, 6 - count)
                wait_until(lambda made=made: stream.counts.ready == made)
                if count % 2 == 0:
                    gym.policy.update_weights("policy", str(count))
        assert count == 6


async def test_a_taker_that_is_cancelled_loses_nothing() -> None:
    with HeldEndpoint() as endpoint, Gym.from_graph(graph_of(endpoint), ray=False) as gym:
        rows = [row(f"question {number}") for number in range(20)]
        found = []
        stream = gym.stream(rows, size=1, max_staleness=3, batch=4)
        while len(found) < 20:
            taking = asyncio.ensure_future(anext(stream))
            for _ in range(len(found) % 7):
                await asyncio.sleep(0)
            if not taking.cancel():
                found.append(taking.result())
                continue
            try:
                found.append(await taking)
            except asyncio.CancelledError:
                found.append(await anext(stream))
        assert len({group.task_index for group in found}) == 20
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


@pytest.mark.parametrize("how", ["left", "closed", "shut down"])
async def test_what_runs_is_cancelled_in_the_end(how: str) -> None:
    with HeldEndpoint() as endpoint:
        gym = Gym.from_graph(graph_of(endpoint), ray=False)
        stream = gym.stream([row("fast"), row("slow")], size=2, max_staleness=1)
        async for group in stream:
            assert group.row["prompt"] == "fast"
            break
        await until(lambda: endpoint.held == 2)
        if how == "left":
            del stream
            gc.collect()
        elif how == "closed":
            await stream.aclose()
            await stream.aclose()
        else:
            gym.shutdown()
        await until(lambda: endpoint.cancelled == 2)
        gym.shutdown()


def test_a_stream_that_is_never_read_makes_nothing() -> None:
    with HeldEndpoint() as endpoint, Gym.from_graph(graph_of(endpoint), ray=False) as gym:
        with gym.stream([row("fast")], size=2, max_staleness=1) as stream:
            assert stream.counts.begun == 0
        assert list(stream) == []
    assert endpoint.requests == []


def test_errors_are_raised_where_the_groups_are_taken() -> None:
    with HeldEndpoint() as endpoint, Gym.from_graph(graph_of(endpoint), ray=False) as gym:
        with pytest.raises(InvalidRequest, match="`max_staleness` must be at least 0, got -1"):
            gym.stream([], size=2, max_staleness=-1)
        with pytest.raises(InvalidRequest, match="a group's size and oversample"):
            gym.stream([], size=2, max_staleness=1, repeats=3)
        with pytest.raises(TypeError, match="no option speed"):
            gym.stream([], size=2, max_staleness=1, speed=3)  # type: ignore[call-arg]
        with pytest.raises(InvalidRequest, match="cannot read no-such-file"):
            list(gym.stream("no-such-file.jsonl", size=2, max_staleness=1))
        endpoint.refuses = 401
        with pytest.raises(OperatorError):
            list(gym.stream([row("fast")], size=2, max_staleness=1))


def test_two_trainers_share_a_stream() -> None:
    with HeldEndpoint() as endpoint, Gym.from_graph(graph_of(endpoint), ray=False) as gym:
        stream = gym.stream((row(f"question {n}") for n in range(30)), size=1, max_staleness=1, batch=4)
        found: list[int] = []

        def take(groups: Iterator[Any]) -> None:
            found.extend(group.task_index for group in groups)

        threads = [threading.Thread(target=take, args=(stream,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(found) == list(range(30))
