"""verl's agent loop, without verl: what it is given, and the outputs that it makes. `make interop` has
verl."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from support.bells import LOGPROB, bell_graph, tokens
from support.letters import END, Letters

from gym_serve import InvalidRequest
from gym_serve.training.verl import AgentLoop, answer_of

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


class Servers:
    """verl's client of its engines."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def generate(self, **asked: Any) -> Any:
        self.asked.append(asked)
        ids, finish = tokens(asked["prompt_ids"], asked["sampling_params"]["max_tokens"])
        steps = {"min_global_steps": 3, "max_global_steps": 4}
        reason = "length" if finish == "length" else "completed"
        return SimpleNamespace(
            token_ids=ids, log_probs=[LOGPROB] * len(ids), stop_reason=reason, extra_fields=steps
        )


def loop_of(servers: Any, prompt_length: int = 100, response_length: int = 300, **settings: Any) -> AgentLoop:
    rollout = SimpleNamespace(
        prompt_length=prompt_length, response_length=response_length, calculate_log_probs=True
    )
    config = SimpleNamespace(config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)))
    data = SimpleNamespace(config={"apply_chat_template_kwargs": {}})
    further = {
        "processor": None,
        "dataset_cls": object,
        "hf_model_type": "qwen3",
        "name": "gym",
        "tools": None,
    }
    settings = {"graph": bell_graph(), "attempts": 1, **settings}
    return AgentLoop(config, servers, Letters(), data_config=data, **further, **settings)


def columns(word: str, **further: Any) -> dict[str, Any]:
    return {"raw_prompt": [{"role": "user", "content": word}], **further}


async def test_an_episode_with_a_tool_is_one_output_of_exact_tokens() -> None:
    servers = Servers()
    [output] = await loop_of(servers).outputs(SAMPLING, **columns("ring", uid="a"))
    first, second = servers.asked
    assert output["prompt_ids"] == first["prompt_ids"]
    assert output["prompt_ids"] + output["response_ids"] == [*second["prompt_ids"], *Letters.ids("done"), END]
    lengths = {len(output[key]) for key in ("response_ids", "response_mask", "response_logprobs")}
    assert lengths == {len(output["response_ids"])}
    assert 0 < sum(output["response_mask"]) < len(output["response_mask"])
    assert (output["reward_score"], output["num_turns"]) == (1.0, 3)
    extra = output["extra_fields"]
    assert (extra["min_global_steps"], extra["max_global_steps"]) == (3, 4)
    assert extra["reward_extra_info"] == {"score": 1.0, "failed": 0.0, "truncated": 0.0}
    assert first["request_id"] == second["request_id"]
    given = first["sampling_params"]
    assert {key: given[key] for key in SAMPLING} == SAMPLING
    assert given["max_tokens"] == 300


async def test_a_failure_of_v0_is_masked_and_leaves_the_baseline_of_its_group() -> None:
    loop = loop_of(Servers())
    words = ("ring", "break", "refuse", "ring", "break")
    outputs = await asyncio.gather(*(loop.outputs(SAMPLING, **columns(word, uid="a")) for word in words))
    rewards = [output["reward_score"] for [output] in outputs]
    assert rewards == [1.0, pytest.approx(2 / 3), 0.0, 1.0, pytest.approx(2 / 3)]
    assert [sum(output["response_mask"]) > 0 for [output] in outputs] == [True, False, True, True, False]
    assert [output["extra_fields"]["reward_extra_info"]["failed"] for [output] in outputs] == [0, 1, 0, 0, 1]
    assert len({tuple(output["extra_fields"]["reward_extra_info"]) for [output] in outputs}) == 1
    assert all(output["prompt_ids"] and output["response_ids"] for [output] in outputs)


async def test_a_group_of_failures_and_a_sample_without_a_group_score_zero() -> None:
    loop = loop_of(Servers())
    outputs = await asyncio.gather(*(loop.outputs(SAMPLING, **columns("break", uid="a")) for _ in range(2)))
    outputs += await asyncio.gather(*(loop.outputs(SAMPLING, **columns(word)) for word in ("ring", "break")))
    assert [output["reward_score"] for [output] in outputs] == [0.0, 0.0, 1.0, 0.0]


async def test_a_failure_of_v1_has_no_output() -> None:
    loop = loop_of(Servers())
    assert await loop.outputs(SAMPLING, **columns("break", uid="a", session_id=0)) == []
    assert len(await loop.outputs(SAMPLING, **columns("ring", uid="a", session_id=1))) == 1


async def test_limits_cut_the_response_and_fail_a_longer_prompt() -> None:
    [cut] = await loop_of(Servers(), response_length=30).outputs(SAMPLING, **columns("chatter", uid="a"))
    assert (len(cut["response_ids"]), cut["extra_fields"]["reward_extra_info"]["truncated"]) == (30, 1.0)
    [long] = await loop_of(Servers(), prompt_length=20).outputs(SAMPLING, **columns("ring " * 30, uid="b"))
    assert (len(long["prompt_ids"]), sum(long["response_mask"])) == (20, 0)
    assert long["extra_fields"]["reward_extra_info"]["failed"] == 1.0


async def test_a_generation_that_verl_aborts_is_a_failure() -> None:
    class Aborting(Servers):
        async def generate(self, **asked: Any) -> Any:
            answer = await super().generate(**asked)
            answer.stop_reason = "aborted"
            return answer

    [output] = await loop_of(Aborting()).outputs(SAMPLING, **columns("ring", uid="a"))
    assert output["extra_fields"]["reward_extra_info"]["failed"] == 1.0


async def test_the_row_is_in_extra_info_or_made_of_verls_columns() -> None:
    loop = loop_of(Servers())
    [output] = await loop.outputs(SAMPLING, extra_info={"row": '{"prompt": "refuse"}'}, raw_prompt=[])
    assert output["reward_score"] == 0.0
    with pytest.raises(InvalidRequest):
        await loop.outputs(SAMPLING, extra_info={"row": "["})


def test_an_answer_tells_the_versions_that_verl_tells() -> None:
    output = SimpleNamespace(
        token_ids=[5, 6, 7], log_probs=[-1.0] * 3, stop_reason="completed", extra_fields={}
    )
    assert (answer_of(output, 9).versions, answer_of(output, 9).finish_reason) == (None, "stop")
    output.extra_fields = {"min_global_steps": 4, "max_global_steps": 5}
    assert answer_of(output, 3).versions == ["4", "4", "5"]
    assert answer_of(output, 3).finish_reason == "length"
