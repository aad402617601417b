"""`Policy.serve`: the trainer generates; tokens go out, tokens come back."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from support.bells import CALL, Bell
from support.letters import END, Letters, LettersModel
from support.waiting import until

from gym_serve import AsyncGym, Gym, InvalidRequest, NotFound, PolicyAnswer, PolicyRequest
from gym_serve.deployments.callback_model import PolicyQueue
from gym_serve.training import samples


def graph(**settings: Any) -> dict[str, Any]:
    return {
        "models": {"policy": {"type": LettersModel, "tokenizer": "letters", **settings}},
        "resources": {"bell": {"type": Bell}},
        "agents": {"agent": {"type": "simple_agent", "model": "policy", "resources": "bell"}},
    }


def answer(text: str, **fields: Any) -> PolicyAnswer:
    ids = [*Letters.ids(text), END]
    return PolicyAnswer(ids, [-0.25] * len(ids), **fields)


class Policy:
    """Calls the tool in its first turn, with spaces that no template keeps; then it is done."""

    def __init__(self) -> None:
        self.batches: list[list[PolicyRequest]] = []
        self.threads: set[int] = set()

    def __call__(self, requests: list[PolicyRequest]) -> list[PolicyAnswer]:
        self.batches.append(requests)
        self.threads.add(threading.get_ident())
        return [answer("done" if 3 in each.prompt_ids else CALL) for each in requests]


ROW = {"prompt": "ring the bell"}


def test_an_episode_with_a_tool_has_exact_tokens_from_turn_to_turn() -> None:
    policy = Policy()
    with Gym.from_graph(graph(), ray=False) as gym:
        gym.policy.serve("policy", policy)
        (rollout,) = gym.run([ROW], params={"temperature": 0.7, "max_output_tokens": 99}, seed=5)
    first, second = (request for batch in policy.batches for request in batch)
    said = [*Letters.ids(CALL), END]
    assert second.prompt_ids[: len(first.prompt_ids) + len(said)] == first.prompt_ids + said
    assert first.sampling == {"temperature": 0.7, "max_tokens": 99, "seed": 5}
    assert first.episode == second.episode == "0-0"
    assert "ding ding" in json.dumps(rollout["response"]["output"])
    assert rollout.failure is None
    (sample,) = samples(rollout)
    assert sample.prompt_ids == first.prompt_ids
    assert sample.input_ids == [*second.prompt_ids, *Letters.ids("done"), END]
    assert sum(sample.loss_mask) == len(said) + 5
    assert threading.get_ident() not in policy.threads


def test_requests_are_batched_and_every_rollout_gets_its_own_answer() -> None:
    sizes: list[int] = []

    def echo(requests: list[PolicyRequest]) -> list[PolicyAnswer]:
        sizes.append(len(requests))
        return [answer(Letters().decode(each.prompt_ids).removesuffix("\n")) for each in requests]

    rows = [{"prompt": f"row {number:03}"} for number in range(60)]
    with Gym.from_graph(graph(), ray=False) as gym:
        gym.policy.serve("policy", echo, max_batch=16)
        rollouts = gym.run(rows)
    texts = [rollout["response"]["output"][-1]["content"][0]["text"] for rollout in rollouts]
    assert texts == [row["prompt"] for row in rows]
    assert max(sizes) == 16
    assert len(sizes) < 20


async def test_an_asynchronous_function_runs_on_the_loop_of_the_trainer() -> None:
    loops: set[asyncio.AbstractEventLoop] = set()
    running = most = 0

    async def generate(requests: list[PolicyRequest]) -> list[PolicyAnswer]:
        nonlocal running, most
        loops.add(asyncio.get_running_loop())
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return [answer("ok", versions="7") for _ in requests]

    with Gym.from_graph(graph(), ray=False) as blocking:
        gym = AsyncGym.of(blocking)
        await gym.policy.serve("policy", generate, max_batch=1)
        rollouts = await gym.run([ROW], repeats=8)
    assert loops == {asyncio.get_running_loop()}
    assert most > 1
    assert {rollout["response"]["output"][-1]["weight_version"] for rollout in rollouts} == {"7"}


async def test_versions_of_tokens_and_what_the_trainer_said() -> None:
    said: list[Any] = [["1", "1", "2"], None]

    async def generate(requests: list[PolicyRequest]) -> list[PolicyAnswer]:
        return [answer("ok", versions=said.pop(0)) for _ in requests]

    with Gym.from_graph(graph(), ray=False) as blocking:
        gym = AsyncGym.of(blocking)
        await gym.policy.serve("policy", generate)
        (one,) = await gym.run([ROW])
        await gym.policy.update_weights("policy", "3")
        (other,) = await gym.run([ROW])
        assert await gym.policy.version() == "3"
    assert samples(one)[0].versions == ["1", "1", "2"]
    assert samples(other)[0].versions == ["3"] * 3


async def test_a_cancelled_episode_cancels_its_generation() -> None:
    begun = asyncio.Event()
    cancelled = asyncio.Event()

    async def generate(requests: list[PolicyRequest]) -> list[PolicyAnswer]:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return []

    with Gym.from_graph(graph(), ray=False) as blocking:
        gym = AsyncGym.of(blocking)
        await gym.policy.serve("policy", generate, max_batch=1)
        run = asyncio.ensure_future(gym.run([ROW]))
        await begun.wait()
        run.cancel()
        await cancelled.wait()


async def test_another_trainer_gets_what_the_first_one_left() -> None:
    taken = asyncio.Event()

    async def never(requests: list[PolicyRequest]) -> list[PolicyAnswer]:
        taken.set()
        await asyncio.Event().wait()
        return []

    with Gym.from_graph(graph(), ray=False) as blocking:
        gym = AsyncGym.of(blocking)
        await gym.policy.serve("policy", never)
        run = asyncio.ensure_future(gym.run([ROW], repeats=3))
        await taken.wait()
        await gym.policy.serve("policy", Policy())
        rollouts = await run
    assert [rollout.failure for rollout in rollouts] == [None] * 3


async def test_an_answered_request_is_not_given_out_again() -> None:
    queue = PolicyQueue(patience=60)
    asking = asyncio.ensure_future(queue.ask({"prompt_ids": [1], "sampling": {}}))
    taken = await queue.take("trainer", [], most=1, wait=60)
    assert [request["id"] for request in taken["requests"]] == ["1"]
    queue.answer([{"id": "1", "token_ids": [2]}])
    # The trainer asks for more before the caller has read its answer.
    assert await queue.take("trainer", [], most=1, wait=0) == {"requests": [], "cancelled": []}
    assert (await asking)["token_ids"] == [2]


async def test_a_pause_that_aborts_makes_the_calls_again() -> None:
    prompts: list[int] = []
    go = asyncio.Event()

    async def generate(requests: list[PolicyRequest]) -> list[PolicyAnswer]:
        prompts.extend(len(each.prompt_ids) for each in requests)
        await go.wait()
        return [answer("ok") for _ in requests]

    with Gym.from_graph(graph(), ray=False) as blocking:
        gym = AsyncGym.of(blocking)
        await gym.policy.serve("policy", generate, max_batch=1)
        run = asyncio.ensure_future(gym.run([ROW]))
        await until(lambda: len(prompts) == 1)
        await gym.policy.pause("abort")
        go.set()
        await gym.policy.resume()
        (rollout,) = await run
    assert rollout.failure is None
    assert len(prompts) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        lambda requests: [],
        lambda requests: "abc",
        lambda requests: ["text" for _ in requests],
        lambda requests: [PolicyAnswer([1, 2], [-0.5]) for _ in requests],
        lambda requests: [PolicyAnswer([-1], [-0.5]) for _ in requests],
        lambda requests: [PolicyAnswer([11], [float("nan")]) for _ in requests],
        lambda requests: [PolicyAnswer([11], [0.0], finish_reason="abort") for _ in requests],  # type: ignore[arg-type]
        lambda requests: [PolicyAnswer([11], [0.0], versions=["1", "2"]) for _ in requests],
        lambda requests: 1 / 0,
    ],
)
def test_a_policy_that_fails_is_a_failure_and_never_a_zero(wrong: Any) -> None:
    with Gym.from_graph(graph(), ray=False) as gym:
        gym.policy.serve("policy", wrong)
        (rollout,) = gym.run([ROW])
    assert rollout.failure is not None
    assert rollout.failure["retryable"]
    assert "the trainer's policy failed" in rollout.failure["detail"]


def test_what_cannot_be_served_is_refused() -> None:
    with Gym.from_graph(graph(policy_timeout=0.2), ray=False) as gym:
        with pytest.raises(NotFound, match="no model 'other'"):
            gym.policy.serve("other", Policy())
        with pytest.raises(InvalidRequest, match="`generate` must be"):
            gym.policy.serve("policy", 7)
        with pytest.raises(InvalidRequest, match="at least 1"):
            gym.policy.serve("policy", Policy(), max_batch=0)
        (rollout,) = gym.run([ROW])  # nobody serves it
    assert rollout.failure is not None
    assert "policy.serve" in rollout.failure["detail"]


def test_a_prompt_beyond_the_context_ends_the_episode_and_answers_may_be_cut() -> None:
    policy = Policy()
    with Gym.from_graph(graph(max_model_len=60), ray=False) as gym:
        gym.policy.serve("policy", policy)
        (rollout,) = gym.run([ROW])
    assert rollout.failure is None
    assert len(policy.batches) == 1  # the second prompt does not fit
    assert policy.batches[0][0].sampling["max_tokens"] == 60 - len(policy.batches[0][0].prompt_ids)
    assert rollout["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
