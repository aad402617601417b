"""A tokenizer of letters, with what `callback_model` and `sglang_model` use of one of ``transformers``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

from gym_serve import PolicyAnswer, PolicyRequest
from gym_serve.deployments.callback_model import CallbackModel
from gym_serve.deployments.sglang_model import SglangModel

END = 1
_SPECIAL = {END: "<end>", 2: "<user>", 3: "<tool>", 4: "<assistant>", 5: "<system>"}
_OPENING = {"user": 2, "tool": 3, "assistant": 4, "system": 5}
_FIRST = 10
PAIRS = 200
VOCABULARY = PAIRS + 26 * 26


def _text(token: int) -> str:
    if token < PAIRS:
        return chr(token - _FIRST)
    first, second = divmod(token - PAIRS, 26)
    return chr(ord("a") + first) + chr(ord("a") + second)


class Letters:
    """Every character is a token. Spaces at the end of a turn are lost, as with many templates.

    From `PAIRS` on, a token is two small letters: a model may say these, but texts are not written with them.
    """

    eos_token_id = END
    pad_token_id = 0

    def apply_chat_template(
        self, conversation: list[Any], tools: Any = None, tokenize: bool = True, **arguments: Any
    ) -> str:
        text = "".join(f"{m['role']}\t{(m['content'] or '').strip()}\n" for m in conversation)
        return f"{'T' if tools else ''}{text}assistant\t"

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids: list[int] = []
        if text.startswith("T"):
            ids, text = [6], text[1:]
        for turn in text.split("\n"):
            role, _, said = turn.partition("\t")
            ids += [_OPENING[role], *self.ids(said)]
            ids += [END] if turn != text.rsplit("\n", 1)[-1] or not text.endswith("\t") else []
        return {"input_ids": ids}

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(_text(token) for token in ids if token >= _FIRST)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [_SPECIAL.get(token) or _text(token) for token in ids]

    @staticmethod
    def ids(text: str) -> list[int]:
        return [ord(letter) + _FIRST for letter in text]


class LettersModel(CallbackModel):
    """A `callback_model` that needs no ``transformers``."""

    requires: ClassVar[Mapping[str, str]] = {}

    def load_tokenizer(self) -> Any:
        return Letters()


class LettersSglang(SglangModel):
    """An `sglang_model` that needs no ``transformers``."""

    requires: ClassVar[Mapping[str, str]] = {}

    def load_tokenizer(self) -> Any:
        return Letters()


def answers(requests: list[PolicyRequest]) -> list[PolicyAnswer]:
    """The same answer to each."""
    ids = Letters.ids("\\boxed{A}")
    return [PolicyAnswer(ids, [-0.5] * len(ids), versions="4") for _ in requests]


class Engine:
    """The trainer's engine, as an actor."""

    def __init__(self) -> None:
        self.prompts = 0

    async def generate(self, requests: list[PolicyRequest]) -> list[PolicyAnswer]:
        self.prompts += len(requests)
        return answers(requests)

    def asked(self) -> int:
        return self.prompts


class HangingEngine:
    """One that never answers."""

    def __init__(self) -> None:
        self.begun = self.cancelled = 0

    async def generate(self, requests: list[PolicyRequest]) -> list[PolicyAnswer]:
        self.begun += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return []

    async def counts(self) -> tuple[int, int]:
        return self.begun, self.cancelled
