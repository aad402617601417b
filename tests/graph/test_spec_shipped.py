"""The graphs that ship: sound with an endpoint for the policy, and without one."""

from pathlib import Path

import pytest
import yaml

from gym_serve.graph.loading import load_graph
from gym_serve.graph.resolving import resolve
from gym_serve.graph.spec import Graph
from gym_serve.types.errors import GraphError

GRAPHS = sorted((Path(__file__).parents[2] / "graphs").glob("*.yaml"))
POLICY = {"POLICY_BASE_URL": "http://h:8000/v1", "POLICY_MODEL": "some/model"}


def resolved(file: Path, env: dict[str, str]) -> Graph:
    source = load_graph(file)
    assert source.name == file.stem
    assert source.route_prefix == f"/{file.stem}"
    return resolve(source.spec, source=source.path, env=env, literal_secrets=False)


@pytest.mark.parametrize("file", GRAPHS, ids=lambda file: file.stem)
def test_serve_run_answers_this_machine_alone(file: Path) -> None:
    assert yaml.safe_load(file.read_text())["http_options"] == {"host": "127.0.0.1"}


def test_there_are_graphs() -> None:
    assert {file.stem for file in GRAPHS} >= {"quickstart", "weather", "mcqa", "math"}


@pytest.mark.parametrize("file", GRAPHS, ids=lambda file: file.stem)
def test_without_an_endpoint_the_embedded_policy_answers(file: Path) -> None:
    graph = resolved(file, {})
    assert graph.nodes["policy"].type == "scripted_model"
    assert "judge" not in graph.nodes


@pytest.mark.parametrize("file", GRAPHS, ids=lambda file: file.stem)
def test_with_an_endpoint_it_is_the_policy(file: Path) -> None:
    policy = resolved(file, POLICY).nodes["policy"]
    assert policy.type == "chat_model"
    assert policy.settings == {"base_url": ["http://h:8000/v1"], "model": "some/model"}
    with_key = resolved(file, {**POLICY, "POLICY_API_KEY": "k"}).nodes["policy"]
    assert with_key.settings["api_key"].get_secret_value() == "k"


@pytest.mark.parametrize("file", GRAPHS, ids=lambda file: file.stem)
def test_an_endpoint_without_a_model_is_no_fallback(file: Path) -> None:
    with pytest.raises(GraphError, match="environment variable POLICY_MODEL is not set"):
        resolved(file, {"POLICY_BASE_URL": "http://h:8000/v1"})


def test_the_judge_of_math() -> None:
    file = next(file for file in GRAPHS if file.stem == "math")
    nodes = resolved(file, {"JUDGE_BASE_URL": "http://j/v1", "JUDGE_MODEL": "j"}).nodes
    assert nodes["math"].references == {"judge": "judge"}
    assert nodes["judge"].type == "chat_model"
