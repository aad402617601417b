"""A resolved graph: what it shows of itself, its order, its options, and that it travels."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr
from support.graph_fakes import FakeEnvironment, FakeModel, graph

from gym_serve.graph.resolving import resolve
from gym_serve.graph.spec import Graph, GraphSpec, Node, ServerOptions
from gym_serve.types.errors import GraphError

QUICKSTART = Path(__file__).parents[2] / "graphs" / "quickstart.yaml"


def resolved(content: dict[str, Any]) -> Graph:
    return resolve(GraphSpec(**content), env={"KEY": "hunter2"}, literal_secrets=False)


def secretive() -> dict[str, Any]:
    return graph(
        models={
            "policy": {
                "type": FakeModel,
                "model": "m",
                "base_url": "http://user:hunter2@host/v1",
                "api_key": "${KEY}",
                "headers": {"X": "${KEY}"},
                "logins": [{"user": "u", "password": "${KEY}"}],
                "runtime_env": {"pip": ["x"], "env_vars": {"TOKEN": "${KEY}"}},
            },
            "remote": {"type": "http", "url": "http://h", "api_key": "${KEY}"},
        },
        auth_token="${KEY}",
    )


def test_public_fills_in_defaults_and_masks_secrets() -> None:
    result = resolved(secretive())
    public = result.public()
    assert public["models"] == {
        "policy": {
            "type": "support.graph_fakes:FakeModel",
            "prices": None,
            "capture_ttl": 3600.0,
            "max_captures": 10_000,
            "base_url": "http://**********@host/v1",
            "model": "m",
            "api_key": "**********",
            "headers": {"X": "**********"},
            "logins": [{"user": "u", "password": "**********"}],
            "temperature": 1.0,
            "runtime_env": {"pip": ["x"], "env_vars": {"TOKEN": "**********"}},
        },
        "remote": {"type": "http", "url": "http://h", "headers": {"Authorization": "**********"}},
    }
    assert list(public) == ["models", "resources", "agents"]
    assert json.loads(json.dumps(public)) == public


def test_no_secret_in_any_representation() -> None:
    content = secretive()
    del content["models"]["policy"]["base_url"]
    result = resolved(content)
    assert "hunter2" not in f"{result} {result!r} {result.public()}"
    spec = GraphSpec(
        models={"policy": {"api_key": "hunter2"}}, auth_token="hunter2", extra="hunter2", agents="hunter2"
    )
    assert repr(spec) == "GraphSpec(models=['policy'], resources=[], agents='str')"
    assert "hunter2" not in str(spec)


def test_public_of_options_beside_a_setting_of_the_same_name() -> None:
    content = graph()
    content["agents"]["math_agent"] |= {"ray_resources": {"tpu": 1}, "inline": ["math"]}
    content["resources"]["math"] |= {"resources": {"cpu2": 2}, "autoscaling": {"max_replicas": 3}}
    public = resolved(content).public()
    assert public["agents"]["math_agent"]["resources"] == "math"
    assert public["agents"]["math_agent"]["ray_resources"] == {"tpu": 1}
    assert public["agents"]["math_agent"]["inline"] == ["math"]
    assert public["resources"]["math"]["resources"] == {"cpu2": 2}
    assert public["resources"]["math"]["autoscaling"] == {"max_replicas": 3}


def test_what_is_public_resolves_again_to_the_same() -> None:
    content = graph()
    content["agents"]["math_agent"] |= {"ray_resources": {"tpu": 1}, "inline": ["math"], "num_replicas": 2}
    public = resolved(content).public()
    assert resolved(public).public() == public


def test_connected() -> None:
    content = graph(
        resources={
            "math": {
                "type": FakeEnvironment,
                "judge": "policy",
                "judges": ["policy"],
                "panel": {"x": "policy"},
            }
        }
    )
    nodes = resolved(content).nodes
    assert nodes["math"].connected(str.upper) == {
        "judge": "POLICY",
        "judges": ["POLICY"],
        "panel": {"x": "POLICY"},
    }
    assert nodes["math"].settings["judges"] == ["policy"]
    assert nodes["policy"].connected(str.upper) == {"model": "m"}
    client = object()
    assert nodes["math_agent"].connected(lambda _: client) == {"model": client, "resources": client}


def test_a_graph_pickles() -> None:
    result = resolved(secretive())
    again = pickle.loads(pickle.dumps(result))
    assert again == result
    assert again.nodes["policy"].settings["api_key"] == SecretStr("hunter2")


@given(st.data())
def test_order_puts_references_first(data: st.DataObject) -> None:
    names = [f"n{i}" for i in range(data.draw(st.integers(0, 8)))]
    nodes = {}
    for index, name in enumerate(names):
        targets = data.draw(st.lists(st.sampled_from(names[:index]), max_size=3)) if index else []
        nodes[name] = Node(name, "model", "t", references={f"r[{i}]": t for i, t in enumerate(targets)})
    shuffled = data.draw(st.permutations(names))
    order = Graph({name: nodes[name] for name in shuffled}).order()
    assert sorted(order) == sorted(names)
    for name in names:
        assert all(order.index(target) < order.index(name) for target in nodes[name].references.values())


# Options


def test_options_are_given_by_the_names_of_serve() -> None:
    options = {
        "autoscaling": {"min_replicas": 0, "max_replicas": 4, "initial_replicas": 2, "target_sessions": 64},
        "num_cpus": 0.5,
        "num_gpus": 1,
        "memory": 2**30,
        "accelerator_type": "H100",
        "max_ongoing_requests": 8,
        "max_queued_requests": -1,
        "placement_group_bundles": [{"GPU": 1}, {"GPU": 1}],
        "placement_group_strategy": "STRICT_PACK",
        "health_check_period_s": 5,
        "health_check_timeout_s": 10,
        "graceful_shutdown_timeout_s": 60,
    }
    content = graph(models={"policy": {"type": FakeModel, "model": "m", **options}})
    assert resolved(content).nodes["policy"].options.public() == options
    assert ServerOptions().public() == {}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"num_replicas": 2, "autoscaling": {"max_replicas": 3}},
            ": num_replicas and autoscaling exclude each other; remove one",
        ),
        ({"autoscaling": {}}, ".autoscaling.max_replicas: a required setting is missing"),
        (
            {"autoscaling": {"min_replicas": 4, "max_replicas": 2}},
            ".autoscaling: min_replicas must be at most max_replicas (2), got 4",
        ),
        (
            {"autoscaling": {"min_replicas": 1, "initial_replicas": 0, "max_replicas": 2}},
            ".autoscaling: initial_replicas must be between min_replicas (1) and max_replicas (2), got 0",
        ),
        ({"placement_group_strategy": "PACK"}, ": placement_group_strategy needs placement_group_bundles"),
        (
            {"placement_group_bundles": [{"CPU": 1}], "max_replicas_per_node": 1},
            ": placement_group_bundles and max_replicas_per_node exclude each other; remove one",
        ),
        ({"num_gpus": -1}, ".num_gpus: must be greater than or equal to 0, got -1"),
        ({"num_gpus": float("nan")}, ".num_gpus: must be a finite number, got nan"),
        (
            {"placement_group_bundles": [{"CPU": "x"}]},
            ".placement_group_bundles[0].CPU: must be a valid number",
        ),
        ({"autoscaling": 3}, ".autoscaling: must be a valid dictionary or instance of AutoscalingOptions"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(GraphError) as caught:
        resolved(graph(models={"policy": {"type": FakeModel, "model": "m", **options}}))
    (problem,) = caught.value.problems
    assert problem.startswith(f"models.policy{expected}")


def test_ray_is_not_imported() -> None:
    code = (
        "import sys, gym_serve.cli, gym_serve.graph\n"
        "from gym_serve.graph import load_graph, resolve\n"
        "source = load_graph(sys.argv[1])\n"
        "assert resolve(source.spec, env={}).nodes\n"
        "print([name for name in ('ray', 'openai') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(QUICKSTART)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
