"""Whether the references of a graph lead where they should: names, kinds, inline, cycles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gym_serve.graph.drafts import Draft
from gym_serve.graph.names import nearest
from gym_serve.graph.settings import Problem
from gym_serve.servers.clients import Kind

__all__ = ["reference_problems"]

_A: dict[Kind, str] = {"model": "a model", "resources": "a resources server", "agent": "an agent"}


def reference_problems(drafts: Mapping[str, Draft], kinds: Mapping[str, Kind]) -> Iterator[Problem]:
    """What is wrong with the references of a graph.

    Args:
        drafts: its servers.
        kinds: the kind of every name, also of servers that are too broken for a draft.
    """
    for draft in drafts.values():
        yield from _targets(draft, kinds)
        yield from _inline(draft, drafts, kinds)
    yield from _cycles(drafts)


def _targets(draft: Draft, kinds: Mapping[str, Kind]) -> Iterator[Problem]:
    for path, target in draft.node.references.items():
        wanted = draft.kinds[path]
        if target not in kinds:
            fitting = [name for name, kind in kinds.items() if kind in wanted]
            yield draft.entry.at(path), f"{target!r} is no server{nearest(target, fitting)}"
        elif kinds[target] not in wanted:
            meant = " or ".join(_A[kind] for kind in sorted(wanted))
            yield draft.entry.at(path), f"{target!r} is {_A[kinds[target]]}, but must be {meant}"


def _inline(draft: Draft, drafts: Mapping[str, Draft], kinds: Mapping[str, Kind]) -> Iterator[Problem]:
    referenced = set(draft.node.references.values())
    for index, target in enumerate(draft.node.inline):
        path = draft.entry.at(f"inline[{index}]")
        if target not in kinds:
            yield path, f"{target!r} is no server{nearest(target, referenced)}"
        elif target not in referenced and not draft.is_open:
            yield path, f"{draft.node.name!r} has no reference to {target!r}, so it cannot run inside it"
        elif target in drafts and drafts[target].node.cls is None:
            yield path, f"{target!r} is a remote server (type: http), which cannot run inside another"


def _cycles(drafts: Mapping[str, Draft]) -> Iterator[Problem]:
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> Iterator[Problem]:
        if name in way:
            cycle = [*way[way.index(name) :], name]
            yield drafts[name].entry.path, f"a cycle of references: {' -> '.join(cycle)}"
        elif name not in done:
            for target in dict.fromkeys(drafts[name].node.references.values()):
                if target in drafts:
                    yield from visit(target, (*way, name))
            done.add(name)

    for name in drafts:
        yield from visit(name, ())
