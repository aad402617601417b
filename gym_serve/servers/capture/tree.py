"""`CallTree`: the model calls of one harness, each under the call whose conversation it goes on with.

An agent with sub-agents, retries or a context that it compacts does not make one conversation but several.
The tree keeps, of each call, only what its input added; so its memory grows with the conversation, not with
its square. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gym_serve.servers.capture.conversation import digest, is_said, prefixes
from gym_serve.types.protocols import TOKEN_KEYS
from gym_serve.types.requests import JSON

__all__ = ["CallTree", "Node", "bundle_of", "with_bundle", "without_tokens"]

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
        """Take a call in.

        Args:
            items: its input.
            response: the model's answer.
            parent, begins: what `parent_of` said of the input when the call was made.
        """
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
    said = list(_with_arguments(items[:begins], parent))
    bundle = bundle_of(parent.response)
    if bundle is not None and is_said(said[-1]):
        said[-1] = {**said[-1], **bundle}
    return [*said, *items[begins:]]


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
