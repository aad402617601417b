"""The message graph of a verifiers trace: every message once, with the tokens that it adds.

Invariant: the tokens on the path from the root to an assistant message of a call are the call's prompt
and generation, no more and no less. So a call whose prompt does not go on from the path so far starts a
branch at the last message that still agrees; the messages after it stand again on the branch, as given
to the model instead of sampled from it.
"""

from __future__ import annotations

from gym_serve.interop.export.tokens import Bundle
from gym_serve.types.requests import JSON

__all__ = ["MessageGraph"]


class MessageGraph:
    """A graph in the making.

    Args:
        tools: what the model could call, kept on each root.
        timestamp: Unix time of every message; rollouts do not record it.

    Attributes:
        nodes: the messages; ``parent`` is an index into the list.
    """

    def __init__(self, tools: list[JSON], timestamp: float) -> None:
        self.nodes: list[JSON] = []
        self._tools = tools
        self._timestamp = timestamp
        self._path: list[int] = []

    def begin(self) -> None:
        """Begin another conversation, from a root of its own."""
        self._path = []

    def add(self, message: JSON) -> None:
        """A message that the model was given."""
        self._append(message)

    def add_sampled(self, message: JSON, tokens: Bundle | None) -> int:
        """A message that the model produced; its index."""
        if tokens is None:
            return self._append(message, sampled=True)
        start = self._agree(tokens.prompt)
        new = tokens.prompt[start:]
        return self._append(
            message,
            sampled=True,
            token_ids=new + tokens.generation,
            mask=[False] * len(new) + [True] * len(tokens.generation),
            logprobs=tokens.logprobs,
        )

    def _agree(self, prompt: list[int]) -> int:
        """Branch where the path leaves ``prompt``; the number of tokens that agree."""
        start = 0
        for place, index in enumerate(self._path):
            ids = self.nodes[index].get("token_ids", [])
            if prompt[start : start + len(ids)] != ids:
                again = [self.nodes[i]["message"] for i in self._path[place:]]
                del self._path[place:]
                for message in again:
                    self._append(message)
                break
            start += len(ids)
        return start

    def _append(self, message: JSON, **fields: object) -> int:
        node: JSON = {"message": message, "timestamp": self._timestamp, **fields}
        if self._path:
            node["parent"] = self._path[-1]
        elif self._tools:
            node["tools"] = self._tools
        self.nodes.append(node)
        self._path.append(len(self.nodes) - 1)
        return self._path[-1]
