"""The stream of one generation: chat chunks of what was produced since the last one.

What is streamed is always the beginning of the finished answer. So text waits while it may turn out to be
something else: a stop text, a tool call, half of a character, or white space before a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from gym_serve.types.requests import JSON

if TYPE_CHECKING:
    from gym_serve.deployments.batched.batches import Row

_HALF = "\ufffd"  # what the bytes of an unfinished character are decoded to


class TextStream:
    """Tokens in, text out that stays as it is. It ends before one of ``ends``; with ``strip``, white space is
    held back until something follows it.
    """

    def __init__(self, decode: Callable[[list[int]], str], ends: Sequence[str], *, strip: bool) -> None:
        self._decode = decode
        self._ends = ends
        self._strip = strip
        self._window: list[int] = []
        self._read = 0
        self._held = ""
        self._closed = False

    def add(self, tokens: Sequence[int]) -> str:
        """The text that these tokens settle."""
        if self._closed:
            return ""
        self._held += self._text(tokens)
        ends = [at for end in self._ends if (at := self._held.find(end)) >= 0]
        self._closed = bool(ends)
        settled = self._held[: min(ends)] if ends else self._certain()
        if self._strip:
            settled = settled.rstrip()
        self._held = self._held[len(settled) :]
        return settled

    def _text(self, tokens: Sequence[int]) -> str:
        """New text. The tokens before them are decoded again: in some vocabularies they decide on spaces."""
        self._window += tokens
        text = self._decode(self._window)
        if text.endswith(_HALF):
            return ""
        new = text[len(self._decode(self._window[: self._read])) :]
        self._window = self._window[self._read :]
        self._read = len(self._window)
        return new

    def _certain(self) -> str:
        """What is held, without an end of it that one of the ends may begin with."""
        longest = max(map(len, self._ends), default=1) - 1
        for at in range(max(len(self._held) - longest, 0), len(self._held)):
            if any(end.startswith(self._held[at:]) for end in self._ends):
                return self._held[:at]
        return self._held


class Stream:
    """The chunks of a generation, with ``head`` in each; ``scores`` makes the fields for some tokens."""

    def __init__(self, head: JSON, text: TextStream, scores: Callable[[Row, int, int], JSON]) -> None:
        self._head = {**head, "object": "chat.completion.chunk"}
        self._text = text
        self._scores = scores
        self._read = self._told = self._said = 0

    def grown(self, row: Row) -> Iterator[JSON]:
        """The chunks of what the row has got, if that is any text."""
        if not self._read:
            first = {"role": "assistant", "content": ""}
            yield self._chunk({"delta": first}) | {"prompt_token_ids": row.prompt}
        until = len(row.log_probs)  # the last to grow
        text = self._text.add(row.tokens[self._read : until])
        self._read = until
        if text:
            scores = self._scores(row, self._told, until)
            self._said, self._told = self._said + len(text), until
            yield self._chunk({"delta": {"content": text}, **scores})

    def end(self, row: Row, completion: JSON) -> JSON:
        """The chunk of what is left of the finished answer."""
        (choice,) = completion["choices"]
        message = choice["message"]
        delta: JSON = {}
        if rest := (message["content"] or "")[self._said :]:
            delta["content"] = rest
        if calls := message.get("tool_calls"):
            delta["tool_calls"] = [{**call, "index": i} for i, call in enumerate(calls)]
        scores = self._scores(row, self._told, len(row.tokens))
        return self._chunk({"delta": delta, **scores, "finish_reason": choice["finish_reason"]})

    def _chunk(self, choice: JSON) -> JSON:
        empty: JSON = {"index": 0, "finish_reason": None, "logprobs": None}
        return {**self._head, "choices": [{**empty, **choice}]}
