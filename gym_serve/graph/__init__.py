"""Graphs: the file format, its validation, and the Serve application that it becomes.

Reading and validating a graph does not import Ray; `app` and `build` do, when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from gym_serve.graph.loading import GraphSource, load_graph
from gym_serve.graph.resolving import resolve
from gym_serve.graph.spec import Graph, GraphSpec, Node, ServerOptions

__all__ = [
    "Graph",
    "GraphSource",
    "GraphSpec",
    "Node",
    "ServerOptions",
    "app",
    "build",
    "load_graph",
    "resolve",
]


def __getattr__(name: str) -> Any:
    if name in ("app", "build"):  # by name, as the file does not import the cluster that it may run on
        return getattr(import_module("gym_serve.cluster.deploy"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
