"""The graphs that come with gym_serve, by name: what a first run needs without the repository.

A graph's name is that of its file (``weather``). The name of an environment (``simple_weather``) leads to the
graph of its own name, else to the smallest one whose only environment it is. A file at hand goes first.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import yaml

import gym_serve
from gym_serve.graph.spec import SECTIONS

FOLDER = Path(gym_serve.__file__).parent / "graphs"
"""Where the files are."""

_SUFFIXES = (".yaml", ".yml")


def graph_file(name: str | Path) -> Path:
    """The file of a graph that comes with gym_serve, by its name; ``name`` as a path if there is none."""
    path = Path(name)
    if path.suffix in _SUFFIXES or len(path.parts) != 1 or path.exists():
        return path
    return _by_name().get(str(name), path)


def names() -> list[str]:
    """The names of the files."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def is_graph(path: Path) -> bool:
    """Whether a path that a command was given is a graph, by its suffix or as a name."""
    return path.suffix in _SUFFIXES or graph_file(path) != path


@lru_cache
def _by_name() -> dict[str, Path]:
    files = sorted(FOLDER.glob("*.yaml"), key=lambda file: file.stem)
    named: dict[str, tuple[int, Path]] = {}
    for file in files:
        args = yaml.safe_load(file.read_text(encoding="utf-8"))["applications"][0]["args"]
        servers = sum(len(args.get(section) or ()) for section in SECTIONS)
        types = {server.get("type") for server in (args.get("resources") or {}).values()}
        if len(types) == 1 and servers < named.get(type_ := str(types.pop()), (servers + 1, file))[0]:
            named[type_] = servers, file
    return {**{type_: file for type_, (_, file) in named.items()}, **{file.stem: file for file in files}}
