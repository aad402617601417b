"""Flame graphs: a profile as a picture that any browser shows (https://www.brendangregg.com/flamegraphs.html).

A box is a function, as wide as its share of the CPU time; on it stand the functions that it called. Pointing
at one shows its file, line and time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

from gym_serve.types.requests import JSON

_WIDTH, _ROW, _MARGIN = 1200, 18, 10  # pixels
_LETTER = 6.2  # pixels of a character
_NARROWEST = 1.0  # pixels of a box that is drawn
_OURS, _OTHERS = "#f2a65a", "#a9bcd0"


@dataclass
class _Function:
    """A function where it was called from, and its samples."""

    frame: JSON
    seconds: float = 0.0
    called: dict[tuple[Any, ...], _Function] = field(default_factory=dict)


class _Box(NamedTuple):
    function: _Function
    depth: int
    begin: float  # seconds, from the left


def flame_graph(profile: JSON) -> str:
    """A profile of `gym_serve.graph.profiling` as SVG. All threads and replicas are added up."""
    root = _added_up(profile)
    scale = (_WIDTH - 2 * _MARGIN) / (root.seconds or 1)
    boxes = [box for box in _boxes(root) if box.function.seconds * scale >= _NARROWEST]
    rows = 1 + max((box.depth for box in boxes), default=0)
    height = rows * _ROW + 3 * _MARGIN + _ROW
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="monospace" font-size="11">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_MARGIN}" y="{_MARGIN + 12}" font-size="14">{escape(str(profile["name"]))}: '
        f"{root.seconds:.2f} s of CPU time; gym_serve is orange</text>",
    ]
    for function, depth, begin in boxes:
        x, width = _MARGIN + begin * scale, function.seconds * scale
        y = height - _MARGIN - (depth + 1) * _ROW
        frame, share = function.frame, function.seconds / (root.seconds or 1)
        name, file = str(frame.get("name")), str(frame.get("file") or "")
        place = f"{file}:{frame['line']}" if frame.get("line") else file
        shown = name if len(name) * _LETTER <= width - 4 else name[: max(0, int((width - 10) / _LETTER))]
        lines.append(
            f"<g><title>{escape(name)} {escape(place)}\n{function.seconds:.2f} s, {share:.1%}</title>"
            f'<rect x="{x:.1f}" y="{y}" width="{max(width - 0.5, 0.3):.1f}" height="{_ROW - 1}" rx="1" '
            f'fill="{_OURS if "gym_serve" in file else _OTHERS}"/>'
            f'<text x="{x + 3:.1f}" y="{y + 13}">{escape(shown)}</text></g>'
        )
    return "\n".join([*lines, "</svg>", ""])


def _added_up(profile: JSON) -> _Function:
    """The calls of all samples, from a root that holds the time of all."""
    frames = profile["shared"]["frames"]
    root = _Function({"name": "all"})
    for thread in profile["profiles"]:
        for stack, seconds in zip(thread["samples"], thread["weights"], strict=True):
            at = root
            at.seconds += seconds
            for number in stack:
                frame = frames[number]
                key = (frame.get("name"), frame.get("file"))
                at = at.called.setdefault(key, _Function(frame))
                at.seconds += seconds
    return root


def _boxes(root: _Function) -> Iterator[_Box]:
    waiting = [_Box(root, 0, 0.0)]  # no recursion: a stack may be as deep as Python allows
    while waiting:
        box = waiting.pop()
        yield box
        begin = box.begin
        for called in sorted(box.function.called.values(), key=lambda each: str(each.frame.get("name"))):
            waiting.append(_Box(called, box.depth + 1, begin))
            begin += called.seconds
