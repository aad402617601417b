"""OpenRLHF's executor without OpenRLHF: what it is given and what it returns. `make interop` has OpenRLHF."""

import asyncio
import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from support.bells import LOGPROB, bell_graph, tokens
from support.letters import END, Letters

from gym_serve import InvalidRequest
from gym_serve.training.openrlhf import Executor


@dataclass
class Sampling:
    """vLLM's ``SamplingParams``."""

    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = -1
    max_tokens: int | None = None
    min_tokens: int = 1
    logprobs: int | None = 1
    skip_special_tokens: bool = False


class Engine:
    """OpenRLHF's engine."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], Sampling]] = []

    async def generate(self, prompt_token_ids: list[int], sampling_params: Sampling) -> Any:
        self.asked.append((prompt_token_ids, sampling_params))
        ids, finish = tokens(prompt_token_ids, sampling_params.max_tokens)
        logprobs = [{token: SimpleNamespace(logprob=LOGPROB)} for token in ids]
        return SimpleNamespace(
            outputs=[SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason=finish)]
        )


async def execute(executor: Executor, engine: Engine, word: str, label: str = "x", **given: Any) -> Any:
    given = {"sampling_params": Sampling(), "max_length": 300, **given}
    return await executor.execute(
        word, label, given.pop("sampling_params"), given.pop("max_length"), Letters(), engine, **given
    )


async def test_an_episode_with_a_tool_has_a_range_of_actions_for_each_turn() -> None:
    engine = Engine()
    found = await execute(Executor(bell_graph(), attempts=1), engine, "ring")
    (first, sampling), (second, _) = engine.asked
    assert found["observation_tokens"] == [*second, *Letters.ids("done"), END]
    (begin, end), last = found["action_ranges"]
    assert found["observation_tokens"][:begin] == first
    assert found["observation_tokens"][begin:end] == tokens(first)[0]
    assert last == (len(second), len(second) + 5)
    masked = [0.0] * len(found["observation_tokens"])
    for a, b in found["action_ranges"]:
        masked[a:b] = [LOGPROB] * (b - a)
    assert found["rollout_log_probs"] == masked
    assert (found["reward"], found["scores"], found["truncated"]) == (1.0, 1.0, False)
    assert (found["prompt"], found["label"], found["extra_logs"]) == ("ring", "x", {"failed": 0.0})
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.7, 0.9, 300 - len(first))


async def test_a_failure_has_one_action_without_an_advantage() -> None:
    executor, engine, sampling = Executor(bell_graph(), attempts=1), Engine(), Sampling(logprobs=None)
    rows = ["ring", "break", "refuse"]
    label = "x"
    executor_calls = [
        executor.execute("p", json.dumps({"prompt": word}), sampling, 300, Letters(), engine) for word in rows
    ]
    found = await asyncio.gather(*executor_calls)
    assert [result["rollout_log_probs"] for result in found] == [None] * 3
    same = await asyncio.gather(
        *(execute(executor, engine, "break", label, sampling_params=sampling) for _ in range(2))
    )
    assert [result["reward"] for result in same] == [0.0, 0.0]
    broken = found[1]
    [(begin, end)] = broken["action_ranges"]
    assert end == begin + 1 == len(broken["observation_tokens"])
    assert broken["observation_tokens"][-1] == END
    assert [result["extra_logs"]["failed"] for result in found] == [0.0, 1.0, 0.0]


async def test_a_failure_has_the_mean_reward_of_its_siblings() -> None:
    class Breaking(Engine):
        async def generate(self, prompt_token_ids: list[int], sampling_params: Sampling) -> Any:
            if len(self.asked) % 3 == 2:
                self.asked.append((prompt_token_ids, sampling_params))
                raise RuntimeError("the engine is gone")
            return await super().generate(prompt_token_ids, sampling_params)

    executor, engine, sampling = Executor(bell_graph(), attempts=1), Breaking(), Sampling()
    found = await asyncio.gather(
        *(execute(executor, engine, "refuse", sampling_params=sampling) for _ in range(3))
    )
    assert sorted(result["extra_logs"]["failed"] for result in found) == [0.0, 0.0, 1.0]
    assert {result["reward"] for result in found} == {0.0}


async def test_a_cut_answer_is_truncated_and_images_are_refused() -> None:
    engine = Engine()
    found = await execute(Executor(bell_graph()), engine, "chatter", max_length=60)
    assert (len(found["observation_tokens"]), found["truncated"]) == (60, True)
    with pytest.raises(InvalidRequest, match="text only"):
        await execute(Executor(bell_graph()), engine, "ring", images=["a.png"])


async def test_the_label_is_a_row_or_the_expected_answer() -> None:
    executor, engine = Executor(bell_graph()), Engine()
    for label, reward in ((json.dumps({"prompt": "refuse"}), 0.0), ("4", 1.0), ("{4}", 1.0)):
        assert (await execute(executor, engine, "ring", label))["reward"] == reward
    with pytest.raises(InvalidRequest, match="neither"):
        await execute(executor, engine, "", "4")
