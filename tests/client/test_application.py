"""A graph file with several graphs: which one `Gym.from_graph` deploys."""

from pathlib import Path
from typing import Any

import pytest

from gym_serve import GraphError, Gym
from gym_serve.client import deployed
from gym_serve.graph import Graph, GraphSource

FILE = """
applications:
- {name: a, import_path: "gym_serve.graph:app", args: {models: {m: {type: scripted_model}}}}
- {name: b, route_prefix: /b, import_path: "gym_serve.graph:app", args: {models: {n: {type: scripted_model}}}}
"""


class Deployed(Exception):
    pass


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def deploy(source: GraphSource, graph: Graph, address: str | None, **options: Any) -> None:
        raise Deployed(source.name, source.route_prefix, *graph.nodes)

    monkeypatch.setattr(deployed, "deploy", deploy)
    path = tmp_path / "two.yaml"
    path.write_text(FILE)
    return path


def test_the_chosen_one(file: Path) -> None:
    with pytest.raises(Deployed) as seen:
        Gym.from_graph(file, application="b")
    assert seen.value.args == ("b", "/b", "n")
    with pytest.raises(Deployed) as seen:
        Gym.from_graph(file, application="b", name="mine")
    assert seen.value.args == ("mine", "/mine", "n")


def test_none_or_a_wrong_one(file: Path) -> None:
    with pytest.raises(GraphError, match=r"several graphs \(a, b\); choose one with application=NAME"):
        Gym.from_graph(file)
    with pytest.raises(GraphError, match=r"unknown graph 'c'; known: a, b"):
        Gym.from_graph(file, application="c")
