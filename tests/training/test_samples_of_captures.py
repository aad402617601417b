"""Samples of a harness's calls: whatever it does with its conversations, each token is trained on once."""

import random
from collections import Counter
from collections.abc import Mapping
from itertools import count
from typing import Any, ClassVar

from hypothesis import given, settings
from hypothesis import strategies as st
from support.letters import END, PAIRS, Letters

from gym_serve.deployments.tokenizing import Generation, TokenizingModel
from gym_serve.servers.runner import ServerRunner
from gym_serve.servers.transport import Call, encode
from gym_serve.training import samples

MOVES = ("begin", "go on", "again", "compact", "rewrite", "tool")


class Distinct(TokenizingModel):
    """Says a token to every prompt that it says to no other one, so that each can be found again."""

    requires: ClassVar[Mapping[str, str]] = {}

    def __init__(self, **settings: Any) -> None:
        super().__init__(name="policy", tokenizer="letters", **settings)
        self.numbers = count(PAIRS)
        self.calls: list[tuple[list[int], list[int]]] = []

    def load_tokenizer(self) -> Any:
        return Letters()

    async def generate(self, prompt: list[int], sampling: dict[str, Any], pictures: Any) -> Generation:
        made = [next(self.numbers), next(self.numbers), *Letters.ids("  "), END]
        self.calls.append((prompt, made))
        return Generation(made, [-0.5] * len(made), "stop", [{"version": "3", "start": 0, "end": len(made)}])


@given(st.integers(0, 2**32), st.lists(st.sampled_from(MOVES), min_size=1, max_size=14))
@settings(max_examples=60)
async def test_each_token_is_in_one_sample_and_each_sample_was_seen(seed: int, moves: list[str]) -> None:
    choice = random.Random(seed)
    model = Distinct()
    runner = ServerRunner(model)
    await runner.start()
    try:
        opened = await runner.dispatch(Call("rollouts", b"{}"))
        conversations: list[list[dict[str, Any]]] = []
        for number, move in enumerate(moves):
            messages: list[dict[str, Any]] = [{"role": "user", "content": f"task {number}"}]
            if conversations and move != "begin":
                before = choice.choice(conversations)
                if move == "go on":
                    messages = [*before, {"role": "user", "content": f"and {number}?"}]
                elif move == "again":
                    messages = before[:-1]
                elif move == "compact":
                    messages = [{"role": "user", "content": "In short: x"}, *before[-1:], messages[0]]
                elif move == "rewrite":
                    said = {**before[-1], "content": f"{before[-1]['content']}!"}
                    messages = [*before[:-1], said, messages[0]]
                else:
                    messages = [*before, {"role": "system", "content": "be quick"}, messages[0]]
            body = encode({"model": "policy", "messages": messages})
            answer = (
                await runner.dispatch(Call("rollouts/v1/chat/completions", body, opened.session))
            ).json()
            said = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
            conversations.append([*messages, said])
        held = await runner.dispatch(Call("rollouts/trajectories", b"", opened.session))
        main, *branches = held.json()["trajectories"]
    finally:
        await runner.stop()
    found = samples(
        {
            "_ng_rollout_id": "0-0",
            "_ng_task_index": 0,
            "responses_create_params": {"input": "a task"},
            "response": main["response"],
            "captured_input": main["input"],
            "captured_context": main["context"],
            "branches": branches,
            "reward": 1.0,
        }
    )
    trained = Counter(
        token
        for sample in found
        for token, mask in zip(sample.response_ids, sample.loss_mask, strict=True)
        if mask and token >= PAIRS
    )
    assert trained == Counter(token for _, made in model.calls for token in made if token >= PAIRS)
    seen = [prompt + made for prompt, made in model.calls]
    for sample in found:
        assert sample.input_ids in seen
        assert sample.failure is None
        versions = {version for version, mask in zip(sample.versions, sample.loss_mask, strict=True) if mask}
        assert versions == {"3"}
    assert {sample.rollout_id for sample in found} == {"0-0"}
    assert {sample.branch for sample in found} == set(range(len(branches) + 1))
