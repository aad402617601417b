"""slime's function: what it fills slime's samples with. `make interop` has slime."""

import asyncio
import enum
import json
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.bells import LOGPROB, bell_graph, tokens
from support.eyes import PROMPT, SHOWN, Eyes, seen_graph, seen_row
from support.letters import END, Letters

from gym_serve import InvalidRequest
from gym_serve.training.slime import answer_of, generator, group_rewards

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 200, "no_stop_trim": True}
ARGS = SimpleNamespace(sglang_router_ip="10.0.0.1", sglang_router_port=3000, rollout_max_context_len=500)


@dataclass
class Sample:
    """slime's sample."""

    prompt: Any = "ring"
    group_index: int | None = 0
    index: int | None = 0
    label: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    multimodal_inputs: Any = None
    multimodal_train_inputs: Any = None
    session_id: str | None = "s"
    tokens: list[int] = field(default_factory=list)
    response_length: int = 0
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    weight_versions: list[str] = field(default_factory=list)
    reward: float | None = None
    remove_sample: bool = False
    rollout_id: int | None = None
    status: Any = None

    def get_reward_value(self, args: Any) -> float | None:
        return self.reward

    Status = enum.Enum("Status", ["COMPLETED", "TRUNCATED", "FAILED", "ABORTED"])


@pytest.fixture
def slime(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The two modules of slime that are asked."""
    state = SimpleNamespace(tokenizer=Letters(), processor=Eyes(), aborted=False, asked=[])

    async def post(url: str, payload: dict[str, Any], headers: Any = None) -> Any:
        state.asked.append((url, payload, headers))
        ids, finish = tokens(payload["input_ids"], payload["sampling_params"]["max_new_tokens"])
        found = [[LOGPROB, token, None] for token in ids]
        return {
            "meta_info": {
                "output_token_logprobs": found,
                "finish_reason": {"type": finish},
                "weight_version": str(len(state.asked)),
            }
        }

    modules = {
        "rollout.sglang_rollout": {"GenerateState": lambda args: state},
        "utils.http_utils": {"post": post},
    }
    for name in ("slime", "slime.rollout", "slime.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, members in modules.items():
        module = ModuleType(f"slime.{name}")
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, f"slime.{name}", module)
    return state


async def test_an_episode_with_a_tool_fills_a_sample(slime: Any) -> None:
    sample = Sample(metadata={"row": json.dumps({"prompt": "ring"})})
    found = await generator(bell_graph())(ARGS, sample, dict(SAMPLING))
    (url, first, headers), (_, second, _) = slime.asked
    assert (url, headers) == ("http://10.0.0.1:3000/generate", {"X-SMG-Routing-Key": "s"})
    assert {key: first["sampling_params"][key] for key in SAMPLING} == SAMPLING
    assert found is sample
    assert sample.tokens == [*second["input_ids"], *Letters.ids("done"), END]
    assert sample.tokens[: -sample.response_length] == first["input_ids"]
    assert len(sample.loss_mask or []) == len(sample.rollout_log_probs or []) == sample.response_length
    assert (sample.reward, sample.weight_versions) == (1.0, ["1", "2"])
    assert (sample.status, sample.remove_sample) == (Sample.Status.COMPLETED, False)


async def test_pictures_go_to_the_engine_and_into_the_sample(slime: Any) -> None:
    sample = Sample(metadata={"row": json.dumps(seen_row())})
    await generator(seen_graph())(ARGS, sample, dict(SAMPLING))
    urls = [PROMPT["image_url"], SHOWN["image_url"]]
    assert [payload["image_data"] for _, payload, _ in slime.asked] == [urls[:1], urls]
    assert sample.reward == 1.0
    grid = [[1, 4, 4], [1, 4, 4]]
    assert sample.multimodal_train_inputs == {
        "pixel_values": [(255, 0, 0), (0, 0, 255)],
        "image_grid_thw": grid,
    }


async def test_a_failure_is_removed_and_leaves_the_baseline_of_its_group(slime: Any) -> None:
    generate = generator(bell_graph(), attempts=1)
    words = ("ring", "break", "refuse", "chatter")
    samples = [Sample(metadata={"row": {"prompt": word}}, index=i) for i, word in enumerate(words)]
    found = await asyncio.gather(*(generate(ARGS, sample, dict(SAMPLING)) for sample in samples))
    assert [sample.reward for sample in found] == [1.0, pytest.approx(1 / 3), 0.0, 0.0]
    assert [sample.remove_sample for sample in found] == [False, True, False, False]
    statuses = Sample.Status
    assert [sample.status for sample in found] == [
        statuses.COMPLETED,
        statuses.FAILED,
        statuses.COMPLETED,
        statuses.TRUNCATED,
    ]
    assert [sample.rollout_id for sample in found] == [0, 1, 2, 3]


def test_groups_are_those_of_prompts_and_a_branch_counts_once() -> None:
    rollouts = [(0, 0, 1.0), (0, 0, 1.0), (0, 1, 0.0), (0, 2, 0.5), (1, 3, 3.0)]  # the first has a branch
    samples = [Sample(group_index=group, rollout_id=id_, reward=reward) for group, id_, reward in rollouts]
    samples[3].remove_sample = True
    rewards = [reward for _, _, reward in rollouts]
    args = SimpleNamespace(rewards_normalization=True, grpo_std_normalization=False)
    assert group_rewards(args, samples) == (rewards, [0.5, 0.5, -0.5, 0.0, 0.0])
    args.grpo_std_normalization = True
    assert group_rewards(args, samples)[1] == pytest.approx(
        [0.5**0.5] * 2 + [-(0.5**0.5), 0.0, 0.0], abs=1e-5
    )
    args.rewards_normalization = False
    assert group_rewards(args, samples) == (rewards, rewards)


async def test_a_sample_that_slime_aborts_is_begun_anew(slime: Any) -> None:
    slime.aborted = True
    sample = await generator(bell_graph(), attempts=1)(ARGS, Sample(), dict(SAMPLING))
    assert (sample.status, sample.tokens, slime.asked) == (Sample.Status.ABORTED, [], [])
    with pytest.raises(InvalidRequest, match="pictures must be in the row"):
        await generator(bell_graph())(ARGS, Sample(multimodal_inputs={"images": [1]}), {})
    with pytest.raises(RuntimeError, match="aborted"):
        answer_of({"meta_info": {"finish_reason": {"type": "abort"}}})
