"""`sglang_model` against a server that speaks SGLang's ``/generate`` over a model that really samples."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.bells import CALL, Bell
from support.language import LanguageModel
from support.letters import END, PAIRS, VOCABULARY, Letters, LettersSglang
from support.sglang import SglangServer
from support.waiting import until

from gym_serve import AsyncGym, Gym, OperatorError
from gym_serve.deployments.sglang_model import _joined, _request, read_generation, sampling_params
from gym_serve.deployments.tokenizing import Generation
from gym_serve.training import samples
from gym_serve.types.errors import BadRequest, EndpointMisconfigured, Unavailable
from gym_serve.types.protocols.tokens import VERSIONS_KEY, token_versions

PRINTABLE = Letters.ids("".join(map(chr, range(32, 127))))
MODEL = LanguageModel([END, *PRINTABLE, *range(PAIRS, VOCABULARY)], VOCABULARY)
TOOL = 3
ROW = {"prompt": "ring the bell"}
TEMPERATURE = 0.8


def draws(
    prompt: Sequence[int], random: np.random.Generator, temperature: float
) -> Iterator[tuple[int, float]]:
    """Three drawn tokens, and then a call of the tool; after its output, six drawn tokens."""
    begin: list[int | None] = [None] * (6 if TOOL in prompt else 3)
    said = begin if TOOL in prompt else begin + Letters.ids(CALL)
    return MODEL.samples(prompt, random, temperature, [*said, END])


@pytest.fixture
def server() -> Iterator[SglangServer]:
    with SglangServer(draws, END) as running:
        yield running


def graph(server: SglangServer, **settings: Any) -> dict[str, Any]:
    policy = {
        "type": LettersSglang,
        "base_url": server.url,
        "tokenizer": "letters",
        "sampling_overrides": {"temperature": TEMPERATURE},
        **settings,
    }
    return {
        "models": {"policy": policy},
        "resources": {"bell": {"type": Bell}},
        "agents": {"agent": {"type": "simple_agent", "model": "policy", "resources": "bell"}},
    }


def text_of(rollout: Any) -> str:
    return str(rollout["response"]["output"][-1]["content"][0]["text"])


def check_log_probs(sample: Any) -> None:
    """What was recorded is what the model says of the sequence that is trained on."""
    expected = MODEL.log_probs(sample.input_ids, TEMPERATURE)[len(sample.prompt_ids) :]
    trained = [at for at, mask in enumerate(sample.loss_mask) if mask]
    assert trained
    assert [sample.logprobs[at] for at in trained] == pytest.approx(
        [expected[at] for at in trained], abs=1e-9
    )


def test_what_is_trained_on_is_what_was_sampled_with_its_probabilities(server: SglangServer) -> None:
    with Gym.from_graph(graph(server), ray=False) as gym:
        rollouts = gym.run([ROW], repeats=12)
    first = [request for request in server.requests if TOOL not in request["input_ids"]]
    again = 0
    for rollout in rollouts:
        assert rollout.failure is None
        (sample,) = samples(rollout)
        check_log_probs(sample)
        turns = rollout.tokens
        assert len(turns) == 2
        seen = turns[0]["prompt_token_ids"] + turns[0]["generation_token_ids"]
        assert turns[1]["prompt_token_ids"][: len(seen)] == seen
        made = turns[0]["generation_token_ids"]
        again += [*Letters.ids(Letters().decode(made)), END] != made
        assert "ding ding" in json.dumps(rollout["response"]["output"])
    assert len(first) == 12
    assert again == 12  # encoding the text again would have given other tokens
    assert server.requests[0]["return_logprob"] is True
    assert first[0]["sampling_params"] == {"max_new_tokens": None, "temperature": TEMPERATURE}


def test_a_request_has_an_id_of_its_own_at_every_attempt(server: SglangServer) -> None:
    server.broken = [(503, {"detail": "no capacity"}), (200, {"text": "?"})]
    with Gym.from_graph(graph(server), ray=False) as gym:
        (rollout,) = gym.run([ROW], params={"max_output_tokens": 999})
    failed, malformed, *_ = server.requests
    assert rollout.failure is not None  # a malformed answer fails the attempt, as with every model
    assert "finish_reason" in rollout.failure["detail"]
    assert failed["rid"] != malformed["rid"]
    assert {**failed, "rid": ""} == {**malformed, "rid": ""}
    assert failed["sampling_params"]["max_new_tokens"] == 999


async def test_weights_that_change_in_the_middle_keep_the_tokens_made_before(server: SglangServer) -> None:
    server.version, server.steps = "1", 5
    with Gym.from_graph(graph(server), ray=False) as blocking:
        gym = AsyncGym.of(blocking)
        run = asyncio.ensure_future(gym.run([ROW], params={"max_output_tokens": 400}))
        await until(lambda: server.running == 1)
        await asyncio.sleep(0.05)  # it has made its five tokens
        server.version, server.steps = "2", None
        server.abort_all()
        (rollout,) = await run
    assert rollout.failure is None
    (sample,) = samples(rollout)
    check_log_probs(sample)
    before, after, *_ = server.requests
    assert after["input_ids"][:-5] == before["input_ids"]
    assert after["sampling_params"]["max_new_tokens"] == 395
    produced = [version for version, mask in zip(sample.versions, sample.loss_mask, strict=True) if mask]
    assert produced == ["1"] * 5 + ["2"] * (len(produced) - 5)
    assert rollout["response"]["output"][-1]["weight_version"] == "2"


async def test_an_abort_while_the_engine_has_no_token_yet_costs_nothing(server: SglangServer) -> None:
    server.steps = 0
    with Gym.from_graph(graph(server), ray=False) as blocking:
        gym = AsyncGym.of(blocking)
        run = asyncio.ensure_future(gym.run([ROW]))
        await until(lambda: server.running == 1)
        server.steps = None
        server.abort_all()
        (rollout,) = await run
    assert rollout.failure is None
    check_log_probs(samples(rollout)[0])


async def test_a_cancelled_episode_aborts_its_generation_by_its_id(server: SglangServer) -> None:
    server.steps = 2
    with Gym.from_graph(graph(server), ray=False) as blocking:
        gym = AsyncGym.of(blocking)
        run = asyncio.ensure_future(gym.run([ROW]))
        await until(lambda: server.running == 1)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        await until(lambda: server.running == 0)
    assert server.aborted == [server.requests[0]["rid"]]


async def test_a_pause_that_aborts_ends_it_in_the_engine_too(server: SglangServer) -> None:
    server.steps = 2
    with Gym.from_graph(graph(server), ray=False) as blocking:
        gym = AsyncGym.of(blocking)
        run = asyncio.ensure_future(gym.run([ROW]))
        await until(lambda: server.running == 1)
        await gym.policy.pause("abort")
        await until(lambda: server.running == 0)
        server.steps = None
        await gym.policy.update_weights("policy", "3")
        await gym.policy.resume()
        (rollout,) = await run
        assert await gym.policy.version() == "3"
    assert rollout.failure is None
    (sample,) = samples(rollout)
    check_log_probs(sample)
    assert {v for v, mask in zip(sample.versions, sample.loss_mask, strict=True) if mask} == {"3"}
    assert server.aborted == [server.requests[0]["rid"]]


def test_a_prompt_that_does_not_fit_ends_the_episode() -> None:
    with SglangServer(draws, END, context=100) as server, Gym.from_graph(graph(server), ray=False) as gym:
        (rollout,) = gym.run([ROW])
    assert rollout.failure is None
    assert rollout["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_an_answer_is_as_long_as_the_prompt_leaves_room_for() -> None:
    with SglangServer(draws, END, context=300) as server, Gym.from_graph(graph(server), ray=False) as gym:
        (rollout,) = gym.run([ROW], params={"max_output_tokens": 299})
    assert rollout.failure is None
    assert rollout["response"]["incomplete_details"] is None
    limits = [request["sampling_params"]["max_new_tokens"] for request in server.requests]
    assert limits == [299, None] * (len(limits) // 2)


def test_an_engine_that_cuts_prompts_stops_the_run(server: SglangServer) -> None:
    meta = {
        "finish_reason": {"type": "stop"},
        "prompt_tokens": 3,
        "output_token_logprobs": [[-0.5, 20, None]],
    }
    server.broken = [(200, {"meta_info": meta})] * 20
    with Gym.from_graph(graph(server), ray=False) as gym, pytest.raises(OperatorError, match="auto-truncate"):
        gym.run([ROW], repeats=20)


def test_a_row_brings_its_engine(server: SglangServer) -> None:
    with SglangServer(draws, END) as other:
        settings = {"row_endpoints": True, "api_key": "sk-of-the-server-1234"}
        with Gym.from_graph(graph(server, **settings), ray=False) as gym:
            lease = {"base_url": f"{other.url}/v1", "api_key": "sk-of-the-row-1234", "model": "lease-7"}
            (rollout,) = gym.run([ROW], endpoint=lease)
        assert [headers["authorization"] for headers in other.headers] == ["Bearer sk-of-the-row-1234"] * 2
    assert rollout.failure is None
    assert not server.requests
    assert rollout["response"]["model"] == "lease-7"


def test_usage_is_told(server: SglangServer) -> None:
    with Gym.from_graph(graph(server), ray=False) as gym:
        (rollout,) = gym.run([ROW])
    usage = rollout["response"]["usage"]
    assert usage["output_tokens"] == sum(len(turn["generation_token_ids"]) for turn in rollout.tokens)
    assert usage["input_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ({}, {}),
        (
            {"max_tokens": 7, "min_tokens": 2, "seed": 5},
            {"max_new_tokens": 7, "min_new_tokens": 2, "sampling_seed": 5},
        ),
        ({"top_k": 0}, {"top_k": -1}),
        ({"top_k": 20, "top_p": 0.9, "min_p": 0.1}, {"top_k": 20, "top_p": 0.9, "min_p": 0.1}),
        ({"stop": ["x"], "logit_bias": {"5": 1.0}}, {"stop": ["x"], "logit_bias": {"5": 1.0}}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a.b", "c"]}}, {"regex": r"(a\.b|c)"}),
        ({"structured_outputs": {"json": {"type": "object"}}}, {"json_schema": '{"type":"object"}'}),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, {"ebnf": 'root ::= "a"'}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": '{"type": "object"}'}),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, {"json_schema": "{}"}),
        ({"response_format": {"type": "text"}}, {}),
    ],
)
def test_sampling_parameters_have_sglangs_names(asked: dict[str, Any], sent: dict[str, Any]) -> None:
    assert sampling_params(asked) == {"max_new_tokens": None, **sent}


@pytest.mark.parametrize(
    "asked",
    [
        {"bad_words": ["x"]},
        {"allowed_token_ids": [1]},
        {"structured_outputs": {"lark": "x"}},
        {"response_format": {"type": "grammar"}},
    ],
)
def test_what_sglang_has_not_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=next(iter(asked))):
        sampling_params(asked)


def meta(**fields: Any) -> dict[str, Any]:
    said = {"finish_reason": {"type": "stop"}, "prompt_tokens": 2, "output_token_logprobs": [[-0.5, 7, None]]}
    return {"meta_info": {**said, **fields}}


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {},
        {"meta_info": None},
        meta(finish_reason=None),
        meta(finish_reason={"type": "error"}),
        meta(output_token_logprobs="x"),
        meta(output_token_logprobs=[[-0.5]]),
        meta(output_token_logprobs=[[None, 7, None]]),
        meta(output_token_logprobs=[[-0.5, "7", None]]),
        meta(output_token_logprobs=[[-0.5, -7, None]]),
        meta(output_token_logprobs=None, completion_tokens=4),
    ],
)
def test_a_malformed_answer_is_a_failure_of_the_engine(answer: Any) -> None:
    with pytest.raises(Unavailable):
        read_generation(answer, 2)


def test_versions_of_an_answer_are_checked() -> None:
    two = [[-0.5, 7, None], [-0.5, 8, None]]
    spans = [{"version": "1", "start": 0, "end": 1}, {"version": "default", "start": 1, "end": 2}]
    assert read_generation(meta(output_token_logprobs=two, weight_versions=spans), 2).versions == spans
    older = read_generation(meta(output_token_logprobs=two, weight_version="4"), 2)  # SGLang without spans
    assert older.versions == [{"version": "4", "start": 0, "end": 2}]
    for wrong in (spans[:1], [{"version": "1"}], "x", [{"version": "default", "start": 0, "end": 2}]):
        assert read_generation(meta(output_token_logprobs=two, weight_versions=wrong), 2).versions is None
    with pytest.raises(EndpointMisconfigured, match="2 tokens of a prompt of 3"):
        read_generation(meta(), 3)


def test_what_is_left_of_a_limit() -> None:
    params = {"max_new_tokens": 10, "min_new_tokens": 4}
    left = [_request([1], params, made, ())["sampling_params"] for made in (0, 3, 9)]
    assert [(each["max_new_tokens"], each["min_new_tokens"]) for each in left] == [(10, 4), (7, 1), (1, 0)]


PARTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 999), max_size=5),
        st.sampled_from(["1", "2", None]),
        st.sampled_from(["8", "9"]),
    ),
    min_size=1,
    max_size=6,
)


@given(PARTS)
def test_a_generation_in_parts_is_their_tokens_in_a_row(
    parts: list[tuple[list[int], str | None, str]],
) -> None:
    made = Generation([], [], "length")
    expected: list[str] = []
    for number, (tokens, said, told) in enumerate(parts, 1):
        spans = [{"version": said, "start": 0, "end": len(tokens)}] if said and tokens else None
        finish = "stop" if number == len(parts) else "abort"
        part = Generation(tokens, [-float(token) for token in tokens], finish, spans)
        made = _joined(made, part, told)
        expected += [said or told] * len(tokens)
    assert made.token_ids == [token for tokens, _, _ in parts for token in tokens]
    assert made.logprobs == [-float(token) for token in made.token_ids]
    assert made.finish_reason == "stop"
    for before, after in pairwise(made.versions or []):
        assert before["end"] == after["start"]
    versions = token_versions({VERSIONS_KEY: made.versions, "generation_token_ids": made.token_ids})
    whole = len([tokens for tokens, _, _ in parts if tokens]) == 1 and made.versions is None
    assert versions == (expected or None) or whole
