"""`Episodes`: the trainer's engine and tokenizer take the place of the agents' model."""

import asyncio

import numpy as np
import orjson
import pytest
from support.bells import CALL, LOGPROB, answered, bell_graph
from support.letters import END, Letters
from support.waiting import until

from gym_serve import GraphError, InvalidRequest, PolicyAnswer, PolicyRequest
from gym_serve.training import samples
from gym_serve.training.episodes import Episodes, row_of

ROW = {"prompt": "ring"}


async def test_the_trainers_engine_generates_every_turn_of_an_episode() -> None:
    asked: list[PolicyRequest] = []
    contexts: list[object] = []
    loops = set()

    async def generate(request: PolicyRequest, context: object) -> PolicyAnswer:
        asked.append(request)
        contexts.append(context)
        loops.add(asyncio.get_running_loop())
        return await answered(request)

    episodes = Episodes(bell_graph(chat_template_kwargs={"style": "terse"}), Letters(), generate)
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "max_tokens": 300}
    (rollout,) = await episodes.run_all([ROW], sampling, "theirs")
    assert rollout.reward == 1.0
    [sample] = samples(rollout)
    said = [*Letters.ids(CALL), END]
    first, second = asked
    assert second.prompt_ids[: len(first.prompt_ids) + len(said)] == first.prompt_ids + said
    assert sample.input_ids == [*second.prompt_ids, *Letters.ids("done"), END]
    assert {logprob for logprob, mask in zip(sample.logprobs, sample.loss_mask, strict=True) if mask} == {
        LOGPROB
    }
    assert set(sample.versions) == {"7", None}
    assert first.sampling == {"temperature": 0.5, "top_p": 0.9, "max_tokens": 300}
    assert contexts == ["theirs"] * 2
    assert loops == {asyncio.get_running_loop()}
    assert episodes.name(first) == episodes.name(second)
    await asyncio.to_thread(episodes.close)


async def test_rows_of_a_batch_keep_their_order_and_are_tasks_of_their_own() -> None:
    episodes = Episodes(bell_graph(), Letters(), answered)
    rows = [{"prompt": word, "_ng_task_index": 3} for word in ("ring", "refuse", "break", "ring")]
    rollouts = await episodes.run_all(rows, attempts=1)
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.0, 0.0, 1.0]
    assert [rollout.failure is not None for rollout in rollouts] == [False, False, True, False]
    assert len({rollout.task_index for rollout in rollouts}) == 4
    await asyncio.to_thread(episodes.close)


async def test_a_failure_is_tried_again_and_a_cancelled_episode_cancels_its_generation() -> None:
    tries = 0
    cancelled = asyncio.Event()

    async def generate(request: PolicyRequest, context: object) -> PolicyAnswer:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise RuntimeError("the engine restarts")
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    episodes = Episodes(bell_graph(), Letters(), generate)
    run = asyncio.ensure_future(episodes.run_all([ROW]))
    await until(lambda: tries == 2)  # of a generation in another task
    run.cancel()
    await cancelled.wait()
    await asyncio.to_thread(episodes.close)


async def test_a_graph_whose_agents_name_no_model_needs_one_named() -> None:
    graph = bell_graph()
    graph["agents"]["ringer"] = {"type": "remote_agent", "url": "http://127.0.0.1:9"}
    with pytest.raises(GraphError, match="give `models`"):
        Episodes(graph, Letters(), answered)


def test_the_row_of_a_sample() -> None:
    row = {"responses_create_params": {"input": "x"}, "cities": ["Oslo"]}
    assert row_of({"row": orjson.dumps(row).decode(), "index": 3}, "ignored") == row
    assert row_of({"row": row}) == row
    prompt = np.array([{"role": "user", "content": "x"}], dtype=object)
    assert row_of({"index": np.int64(3), "row": None}, prompt, expected_answer="4", hint=None) == {
        "index": 3,
        "expected_answer": "4",
        "responses_create_params": {"input": [{"role": "user", "content": "x"}]},
    }
    for wrong in ({}, {"row": "["}, {"row": "[]"}):
        with pytest.raises(InvalidRequest):
            row_of(wrong)
