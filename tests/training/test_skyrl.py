"""SkyRL's generator without SkyRL: what it is given and what it returns. `make interop` has SkyRL."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from support.bells import LOGPROB, bell_graph, tokens
from support.letters import END, Letters

from gym_serve.training.skyrl import Generator

SAMPLING = {"temperature": 1.0, "top_p": 0.9, "top_k": -1, "max_tokens": 300, "logprobs": 1, "stop": None}
LISTS = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs")


class Engines:
    """SkyRL's client of its engines, whose weights change within every generation."""

    weight_version = 3

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def generate(self, batch: dict[str, Any], model: str | None = None) -> Any:
        self.asked.append({**batch, "model": model})
        [prompt] = batch["prompt_token_ids"]
        ids, finish = tokens(prompt, batch["sampling_params"]["max_tokens"])
        self.weight_version += 1
        return {"response_ids": [ids], "stop_reasons": [finish], "response_logprobs": [[LOGPROB] * len(ids)]}


def batch(*words: str, **sampling: Any) -> dict[str, Any]:
    return {
        "prompts": [[{"role": "user", "content": "in the row"}] for _ in words],
        "env_classes": ["gym"] * len(words),
        "env_extras": [{"row": json.dumps({"prompt": word})} for word in words],
        "sampling_params": {**SAMPLING, **sampling},
        "trajectory_ids": [SimpleNamespace(instance_id="a", repetition_id=i) for i in range(len(words))],
        "batch_metadata": None,
    }


async def test_a_batch_in_its_order() -> None:
    engines = Engines()
    generator = Generator(bell_graph(), engines, Letters(), model_name="m", max_model_len=400, attempts=1)
    given = batch("ring", "break", "refuse", "chatter")
    output = await generator.generate(given)
    assert {len(output[key]) for key in LISTS} == {4}
    assert output["trajectory_ids"] is given["trajectory_ids"]
    assert output["rewards"] == [1.0, pytest.approx(1 / 3), 0.0, 0.0]
    assert output["stop_reasons"] == ["stop", "error", "stop", "length"]
    assert [sum(mask) > 0 for mask in output["loss_masks"]] == [True, False, True, True]
    assert output["rollout_metrics"] == {"generate/gym_failed": 0.25, "generate/gym_truncated": 0.25}
    for ids, mask, logprobs in zip(
        output["response_ids"], output["loss_masks"], output["rollout_logprobs"], strict=True
    ):
        assert len(ids) == len(mask) == len(logprobs) > 0
    assert output["response_ids"][0][-5:] == [*Letters.ids("done"), END]
    asked = next(
        asked for asked in engines.asked if asked["prompt_token_ids"] == output["prompt_token_ids"][:1]
    )
    assert (asked["model"], asked["sampling_params"]["top_k"]) == ("m", -1)
    assert len({asked["session_ids"][0] for asked in engines.asked}) == 4


async def test_log_probabilities_are_there_where_skyrl_asks_for_them() -> None:
    generator = Generator(bell_graph(), Engines(), Letters(), attempts=1)
    output = await generator.generate(batch("ring", logprobs=None))
    assert output["rollout_logprobs"] is None


async def test_an_aborted_generation_is_a_failure() -> None:
    class Aborting(Engines):
        async def generate(self, batch: dict[str, Any], model: str | None = None) -> Any:
            return {**await super().generate(batch), "stop_reasons": ["abort"]}

    output = await Generator(bell_graph(), Aborting(), Letters(), attempts=1).generate(batch("ring"))
    assert output["stop_reasons"] == ["error"]
    assert output["rewards"] == [0.0]
