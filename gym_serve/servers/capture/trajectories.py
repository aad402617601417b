"""From a tree of calls to trajectories that can be trained on: pure functions.

- Every call is in exactly one *chain*, so no token is trained on twice.
- A chain is prefix-contiguous: the prompt of each call begins with exactly the tokens of the call before,
  prompt and generation. Where an engine tokenized the history anew and got other tokens, a new chain begins.
- Where a conversation branches, the branch with the most calls goes on with the chain (the latest one among
  equals); each other one is a chain of its own, kept apart.
- A trajectory shows its whole conversation, so that a verifier sees what led up to it; only the calls of its
  chain carry tokens.
"""

from __future__ import annotations

from gym_serve.servers.capture.tree import Node, bundle_of, without_tokens
from gym_serve.types.protocols import TOKEN_KEYS, usage_sum
from gym_serve.types.requests import JSON

__all__ = ["chains_of", "trajectories_of"]


def trajectories_of(nodes: list[Node]) -> list[JSON]:
    """The trajectories of a harness's calls; the one with the call that ended last comes first.

    Args:
        nodes: the calls, each after the one that it goes on with.

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
    given = after[TOKEN_KEYS[0]]
    return bool(given[: len(prompt)] == prompt and given[len(prompt) : end] == generation)


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
        said = node.response["output"]
        output += said if node in trained else map(without_tokens, said)
    usage = usage_sum(node.response.get("usage") for node in chain)
    return {
        "input": path[0].fresh,
        "response": {**chain[-1].response, "output": output, "usage": usage},
        "calls": len(chain),
        "context": context,
    }
