"""The picture of a graph, drawn from its file: docs/graph.svg.

``python docs/generate.py`` writes it. Other pictures (an episode, the topologies, the architecture) are SVG
that was written by hand: edit their text.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import NamedTuple

from gym_serve.graph import load_graph, resolve

ROOT = Path(__file__).parents[1]
GRAPH = ROOT / "graphs" / "math_gpu_judge.yaml"
COLUMNS = ("agent", "resources", "model")
LOOK = {  # of each kind: its name in the picture, fill, line
    "agent": ("agent", "#fde9d2", "#b0762c"),
    "resources": ("environment", "#dff2dc", "#4a8f3f"),
    "model": ("model", "#dbe8fb", "#3d6fb5"),
}
WIDTH, HEIGHT, GAP = 230, 74, 80


class Box(NamedTuple):
    """A server in the picture."""

    x: int
    y: int
    lines: tuple[str, ...]
    kind: str


def graph_picture() -> str:
    """The text of graph.svg: agents on the left, then environments, then models; arrows to what they use."""
    graph = resolve(load_graph(GRAPH).spec, env={})
    columns = [[name for name, node in graph.nodes.items() if node.kind == kind] for kind in COLUMNS]
    tall = max(map(len, columns))
    boxes: dict[str, Box] = {}
    for column, names in enumerate(columns):
        top = 20 + (tall - len(names)) * (HEIGHT + 40) // 2
        for row, name in enumerate(names):
            node = graph.nodes[name]
            scaling = node.options.autoscaling
            replicas = f"{scaling.fewest} to {scaling.max_replicas} replicas" if scaling else "1 replica"
            gpus = f", {node.options.num_gpus:g} GPU each" if node.options.num_gpus else ""
            place = (20 + column * (WIDTH + GAP), top + row * (HEIGHT + 40))
            boxes[name] = Box(*place, (name, node.type, replicas + gpus), node.kind)
    width = 40 + 3 * WIDTH + 2 * GAP
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {tall * (HEIGHT + 40)}"'
            ' font-family="sans-serif" font-size="13">',
            "<!-- Written by docs/generate.py from graphs/math_gpu_judge.yaml; do not edit. -->",
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7"'
            ' orient="auto"><path d="M0,0 L10,5 L0,10 z" fill="#333"/></marker></defs>',
            '<rect width="100%" height="100%" fill="white"/>',
            *(
                _arrow(boxes[name], boxes[target])
                for name, node in graph.nodes.items()
                for target in dict.fromkeys(node.references.values())
            ),
            *map(_box, boxes.values()),
            "</svg>\n",
        ]
    )


def _box(box: Box) -> str:
    shown, fill, line = LOOK[box.kind]
    name, type_name, size = map(escape, box.lines)
    middle = box.x + WIDTH // 2
    return (
        f'<rect x="{box.x}" y="{box.y}" width="{WIDTH}" height="{HEIGHT}"'
        f' rx="6" fill="{fill}" stroke="{line}"/>'
        f'<text x="{middle}" y="{box.y + 22}" text-anchor="middle" font-weight="bold">{name}</text>'
        f'<text x="{middle}" y="{box.y + 41}" text-anchor="middle">{shown}: {type_name}</text>'
        f'<text x="{middle}" y="{box.y + 60}" text-anchor="middle" fill="#555">{size}</text>'
    )


def _arrow(begin: Box, end: Box) -> str:
    """From the right edge of a box to the left edge of another one. It bends before the next column."""
    x, y, to_x, to_y = begin.x + WIDTH, begin.y + HEIGHT // 2, end.x - 2, end.y + HEIGHT // 2
    bend, straight = x + GAP // 2, x + GAP - 10
    return (
        f'<path d="M {x} {y} C {bend} {y}, {bend} {to_y}, {straight} {to_y} L {to_x} {to_y}"'
        ' fill="none" stroke="#333" marker-end="url(#tip)"/>'
    )
