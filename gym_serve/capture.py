"""Rollout capture, its pure part: the recorded model calls of an external harness become trajectories.

A harness sends back what it was told in its own form: it drops item ids, status and reasoning, re-encodes
arguments, and splits or joins messages. A *turn* is what does not change: everything that the assistant said
and called in a row, or one message or tool output of somebody else.

`CallTree` keeps each call under the call whose conversation it continues, because an agent with sub-agents,
retries or a compacted context does not make one conversation but several. Of each call it keeps only what
the input added, so its memory grows with the conversation, not with its square.

`trajectories_of` makes trajectories of the tree:

- Every call is in exactly one *chain*, so no token is trained on twice.
- A chain is prefix-contiguous: the prompt of each call begins with exactly the tokens of the call before,
  prompt and generation. Where an engine re-tokenized the history differently, a new chain begins.
- Where a conversation branches, the branch with the most calls continues the chain (the latest one among
  equals); each other branch is a chain of its own.
- A trajectory shows its whole conversation, so that a verifier sees what led up to it; only the calls of its
  chain carry tokens.

The model server's operations that record are in `gym_serve.servers.captures`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import orjson

from gym_serve.types.errors import BadRequest
from gym_serve.types.protocols import TOKEN_KEYS, usage_sum
from gym_serve.types.requests import JSON

__all__ = ["CallTree", "Node", "chains_of", "trajectories_of", "with_bundle", "without_tokens"]


Prefix = tuple[int, bytes]
"""Where a turn ends, as a number of items, and the digest of the conversation up to there."""


def prefixes(items: Sequence[JSON]) -> list[Prefix]:
    """The ends of all turns of a conversation, in order; turns without content are none."""
    marks: list[Prefix] = []
    value = b""
    for end, turn in _turns(items):
        value = hashlib.sha256(value + _bytes(turn)).digest()
        marks.append((end, value))
    return marks


def digest(items: Sequence[JSON]) -> bytes:
    """The digest of a whole conversation."""
    marks = prefixes(items)
    return marks[-1][1] if marks else b""


def is_said(item: JSON) -> bool:
    """Whether an item is the assistant's."""
    kind = item.get("type", "message")
    return kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant")


def _turns(items: Sequence[JSON]) -> Iterator[tuple[int, Any]]:
    end = 0
    for is_own, group in groupby(items, key=is_said):
        run = list(group)
        if is_own:
            end += len(run)
            if turn := _assistant_turn(run):
                yield end, turn
            continue
        for item in run:
            end += 1
            if item.get("type") == "function_call_output":
                yield end, ["output", item.get("call_id"), _content(item.get("output"))]
            elif item.get("type", "message") == "message":
                role = item.get("role")
                yield end, ["system" if role == "developer" else role, _content(item.get("content"))]
            else:
                yield end, item


def _assistant_turn(run: Sequence[JSON]) -> Any:
    """What the assistant said and called; None if that is nothing."""
    messages = (item for item in run if item.get("type", "message") == "message")
    text = "".join(_content(message.get("content")) for message in messages).strip()
    calls = [
        [item.get("call_id"), item.get("name"), _decoded(item.get("arguments"))]
        for item in run
        if item.get("type") == "function_call"
    ]
    return ["assistant", text, calls] if text or calls else None


def _content(content: Any) -> str:
    """Content as one text; parts that are no text are written as JSON."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    return "".join(_part(part) for part in parts if part is not None)


def _part(part: Any) -> str:
    if isinstance(part, dict):
        text = part.get("text") or part.get("refusal")
        if isinstance(text, str):
            return text
    return _bytes(part).decode("utf-8", "replace")


def _bytes(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # a lone surrogate, an integer over 64 bits, or nested deeply
        pass
    try:
        return repr(value).encode("utf-8", "replace")
    except RecursionError:
        raise BadRequest("the conversation has a value that is nested too deeply") from None


def _decoded(arguments: Any) -> Any:
    """The arguments of a call without the ways in which JSON can be written.

    Numbers are doubles, as a harness in JavaScript has no others. Nothing is the empty object.
    """
    if not isinstance(arguments, str):
        return arguments
    try:
        decoded = json.loads(arguments or "{}", parse_int=_double, parse_float=_double)
        orjson.dumps(decoded)
    except (ValueError, TypeError, RecursionError):  # no JSON, or none that another side could write again
        return arguments
    return decoded


def _double(text: str) -> float:
    return float(text) + 0.0  # JavaScript writes -0.0 as 0


_OF_TOKENS = (*TOKEN_KEYS, "routed_experts")


@dataclass(eq=False, slots=True)
class Node:
    """One model call.

    Attributes:
        number: its place in the order in which calls ended, from 0.
        parent: the call whose conversation it goes on with.
        fresh: the items that its input added to that; without a parent, the whole input.
        response: the model's answer, with its token bundle.
        children: the calls that go on with its own conversation.
    """

    number: int
    parent: Node | None
    fresh: list[JSON]
    response: JSON
    children: list[Node] = field(default_factory=list)


class CallTree:
    """The calls of one harness."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        """All of them, in the order in which they ended: a parent stands before its children."""
        self._ends: dict[bytes, Node] = {}

    def parent_of(self, items: list[JSON]) -> tuple[Node | None, int]:
        """The call that an input goes on with, and how many items of the input are its conversation.

        It is the longest one that the input begins with; among equals, the latest.
        """
        for end, value in reversed(prefixes(items)):
            if (node := self._ends.get(value)) is not None:
                return node, end
        return None, 0

    def add(self, items: list[JSON], response: JSON, parent: Node | None, begins: int) -> Node:
        """Take a call in."""
        node = Node(len(self.nodes), parent, items[begins:], response)
        self.nodes.append(node)
        if parent is not None:
            parent.children.append(node)
        self._ends[digest([*items, *response["output"]])] = node
        return node


def bundle_of(response: JSON) -> JSON | None:
    """The token bundle of a model call: on its last output item, or nowhere."""
    last = response["output"][-1] if response["output"] else {}
    return {key: last[key] for key in TOKEN_KEYS} if all(key in last for key in TOKEN_KEYS) else None


def with_bundle(items: list[JSON], parent: Node | None, begins: int) -> list[JSON]:
    """An input with the token bundle of the call that it goes on with, for an engine that takes tokens.

    A harness speaks in words. With the bundle on the assistant's last item, the engine's next prompt can
    start with exactly the tokens that it saw and made. A harness also writes the arguments of calls anew,
    with other spaces: for an engine that does not take tokens, they are again what the model wrote.
    """
    if parent is None or not begins:
        return items
    recorded = list(_with_arguments(items[:begins], parent))
    bundle = bundle_of(parent.response)
    if bundle is not None and is_said(recorded[-1]):
        recorded[-1] = {**recorded[-1], **bundle}
    return [*recorded, *items[begins:]]


def _with_arguments(items: list[JSON], parent: Node) -> Iterator[JSON]:
    """The items of a conversation, with the arguments of its calls as they are recorded."""
    path: list[Node] = []
    node: Node | None = parent
    while node is not None:
        path.append(node)
        node = node.parent
    recorded = (item for node in reversed(path) for item in (*node.fresh, *node.response["output"]))
    calls = (item for item in recorded if item.get("type") == "function_call")
    for item in items:
        if item.get("type") == "function_call" and (call := next(calls, None)) is not None:
            yield {**item, "arguments": call.get("arguments")}
        else:
            yield item


def without_tokens(item: JSON) -> JSON:
    """An item without what it says of tokens."""
    return {key: value for key, value in item.items() if key not in _OF_TOKENS}


def trajectories_of(nodes: list[Node]) -> list[JSON]:
    """The trajectories of a harness's calls; the one with the call that ended last comes first.

    Returns:
        ``{"input": [items], "response": Response, "calls": int, "context": int}`` each. ``response`` is that
        of the last call, with all items of the conversation after ``input`` as its ``output``, and its
        chain's usage. The first ``context`` items of the output led up to the chain and are in another one.
    """
    chains = sorted(chains_of(nodes), key=lambda chain: -chain[-1].number)
    return [_trajectory(chain) for chain in chains]


def chains_of(nodes: list[Node]) -> list[list[Node]]:
    """The calls, partitioned into chains."""
    sizes = [1] * len(nodes)
    for node in reversed(nodes):
        sizes[node.number] += sum(sizes[child.number] for child in node.children)
    following: dict[Node, Node] = {}
    for node in nodes:
        if candidates := [child for child in node.children if _continues(node, child)]:
            following[node] = max(candidates, key=lambda child: (sizes[child.number], child.number))
    first = [node for node in nodes if node.parent is None or following.get(node.parent) is not node]
    chains = []
    for node in first:
        chain = [node]
        while chain[-1] in following:
            chain.append(following[chain[-1]])
        chains.append(chain)
    return chains


def _continues(parent: Node, child: Node) -> bool:
    """Whether a call's prompt begins with exactly the tokens of the call that it goes on with."""
    before, after = bundle_of(parent.response), bundle_of(child.response)
    if before is None or after is None:
        return before is after  # without any tokens the words have to do
    prompt, generation = before[TOKEN_KEYS[0]], before[TOKEN_KEYS[1]]
    end = len(prompt) + len(generation)
    continued = after[TOKEN_KEYS[0]]
    return bool(continued[: len(prompt)] == prompt and continued[len(prompt) : end] == generation)


def _trajectory(chain: list[Node]) -> JSON:
    path = chain[::-1]
    while (parent := path[-1].parent) is not None:
        path.append(parent)
    path.reverse()
    trained = set(chain)
    output: list[JSON] = []
    context = 0
    for node in path:
        if node.parent is not None:
            output += node.fresh
        if node is chain[0]:
            context = len(output)
        items = node.response["output"]
        output += items if node in trained else map(without_tokens, items)
    usage = usage_sum(node.response.get("usage") for node in chain)
    return {
        "input": path[0].fresh,
        "response": {**chain[-1].response, "output": output, "usage": usage},
        "calls": len(chain),
        "context": context,
    }
