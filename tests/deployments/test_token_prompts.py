"""The prompt that continues tokens, with a template and a tokenizer of one character per token."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_serve.deployments.token_model import continued_prompt
from gym_serve.types.errors import BadRequest

_END = "$"
_TEXTS = st.text(alphabet=st.sampled_from("ab$ <\n|"), max_size=6)


def _text(messages: list[dict[str, Any]]) -> str:
    # Like Qwen's: what an assistant said is stripped, and only the last turn shows its reasoning.
    parts = []
    for i, message in enumerate(messages):
        thought = message.get("reasoning_content") if i == len(messages) - 1 else None
        parts.append(f"<{message['role']}>{thought or ''}{message['content'].strip()}{_END}\n")
    return "".join(parts) + "<assistant>"


async def _render(messages: list[dict[str, Any]]) -> list[int]:
    return [ord(character) for character in _text(messages)]


def _turn(prompt: list[int], made: str) -> dict[str, Any]:
    ids = [ord(character) for character in made]
    bundle = {
        "prompt_token_ids": prompt,
        "generation_token_ids": ids,
        "generation_log_probs": [0.0] * len(ids),
    }
    return {"role": "assistant", "content": made.removesuffix(_END), **bundle}


@pytest.mark.parametrize("ends", [(), (ord(_END),)])
@given(
    before=_TEXTS,
    made=_TEXTS,
    after=st.lists(st.tuples(st.sampled_from(["user", "tool"]), _TEXTS), max_size=3),
)
async def test_it_is_what_was_seen_and_made_and_what_came_after(
    ends: tuple[int, ...], before: str, made: str, after: list[tuple[str, str]]
) -> None:
    first = [{"role": "user", "content": before}]
    prompt = await _render(first)
    new = [{"role": role, "content": content} for role, content in after]
    continued = await continued_prompt([*first, _turn(prompt, made), *new], _render, ends)
    end = "" if made.endswith(_END) or (not made and prompt[-1:] == [ord(_END)]) else _END
    assert continued is not None
    assert "".join(map(chr, continued)) == "".join(map(chr, prompt)) + made + end + "\n" + _text(new)


async def test_the_last_turn_with_tokens_counts() -> None:
    turns = [_turn([1], "a$"), {"role": "user", "content": "u"}, _turn([1, 2], "b$")]
    continued = await continued_prompt(turns, _render)
    assert continued is not None
    assert continued[:4] == [1, 2, ord("b"), ord("$")]


async def test_without_tokens_there_is_nothing_to_continue() -> None:
    assert await continued_prompt([{"role": "user", "content": "a"}], _render) is None


@pytest.mark.parametrize("wrong", ["text", [1.5], [-1], [True], {"a": 1}])
async def test_tokens_that_are_none(wrong: Any) -> None:
    turn = {**_turn([1], "a"), "prompt_token_ids": wrong}
    with pytest.raises(BadRequest, match="token ids"):
        await continued_prompt([turn], _render)
