"""The next prompt of a conversation, in tokens: what the engine saw and made, then what came after.

Decoding a generation and encoding it again does not give the same tokens, so a turn that came from an engine
is never rendered again: only the messages after it are, in their place of the whole conversation. Where they
begin is found without knowing the template: the conversation is rendered with two different words in the
place of the turn. What both renderings end in comes after it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from gym_serve.types.errors import BadRequest
from gym_serve.types.protocols import TOKEN_KEYS
from gym_serve.types.requests import JSON

Render = Callable[[list[JSON]], Awaitable[list[int]]]
"""Token ids of a conversation, the opening of the next turn included."""

_PROMPT, _GENERATION, _ = TOKEN_KEYS
_WORDS = ("A", "B")


async def continued_prompt(
    messages: Sequence[JSON], render: Render, ends: Collection[int] = ()
) -> list[int] | None:
    """The prompt that begins with exactly the tokens of the last turn that carries them (docs/formats.md,
    Training tokens); None where no message does. ``ends`` are the tokens that end a turn; by default the one
    with which the template ends an assistant's. Raises BadRequest: the tokens are no lists of integers.
    """
    turn = next((i for i in reversed(range(len(messages))) if messages[i].get(_PROMPT) is not None), None)
    if turn is None:
        return None
    context = [*_ids(messages[turn], _PROMPT, turn), *_ids(messages[turn], _GENERATION, turn)]
    stand_ins = [{"role": "assistant", "content": word} for word in _WORDS]
    both = [without_tokens([*messages[:turn], one, *messages[turn + 1 :]]) for one in stand_ins]
    tail = _common_end(*[await render(conversation) for conversation in both])
    end = next((i for i, token in enumerate(tail) if token in ends), 0)
    # A turn that was cut off lacks the token that ends it.
    ended = bool(context and tail) and (context[-1] in ends or context[-1] == tail[end])
    return context + tail[end + ended :]


def without_tokens(messages: Sequence[JSON]) -> list[JSON]:
    """The messages without their token bundles."""
    return [{key: value for key, value in m.items() if key not in TOKEN_KEYS} for m in messages]


def _common_end(one: list[int], other: list[int]) -> list[int]:
    length = 0
    while length < min(len(one), len(other)) and one[-1 - length] == other[-1 - length]:
        length += 1
    return one[len(one) - length :]


def _ids(message: JSON, key: str, turn: int) -> list[int]:
    ids: Any = message.get(key)
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise BadRequest(f"messages[{turn}].{key} must be a list of token ids")
    return ids
