"""What a cluster lacks for a graph, by the resources of its nodes."""

from typing import Any

import pytest
from support.graph_fakes import FakeModel

from gym_serve.cluster.deploy import deployed_options
from gym_serve.cluster.preflight import resource_problems
from gym_serve.graph.resolving import resolve
from gym_serve.graph.spec import GraphSpec

_CPU = {"CPU": 8.0, "memory": 8e9}
_GPU = {"CPU": 64.0, "memory": 64e9, "GPU": 4.0, "accelerator_type:H100": 1.0}
_VLLM = "gym_serve.deployments.vllm_engine:VLLMEngine"


def _problems(options: dict[str, Any], nodes: list[dict[str, float]]) -> list[str]:
    judge = {"type": FakeModel, "model": "m", **options}
    return list(resource_problems(resolve(GraphSpec(models={"judge": judge}), env={}), nodes))


@pytest.mark.parametrize(
    ("options", "nodes", "expected"),
    [
        (
            {"num_gpus": 1},
            [_CPU],
            "models.judge.num_gpus: a replica needs 1 GPU, and no node of the cluster has any",
        ),
        ({"num_gpus": 8}, [_CPU, _GPU], "models.judge.num_gpus: a replica needs 8 GPU, and the largest node"),
        ({"num_cpus": 9}, [_CPU, _CPU], "models.judge.num_cpus: a replica needs 9 CPU"),
        (
            {"num_gpus": 1, "accelerator_type": "A100"},
            [_GPU],
            "models.judge.accelerator_type: a replica needs a A100",
        ),
        ({"resources": {"tpu": 1}}, [_GPU], "models.judge.resources: a replica needs 1 tpu"),
        (
            {"placement_group_bundles": [{"CPU": 1}, {"GPU": 1}]},
            [_CPU],
            "models.judge.num_gpus: a replica needs 1 GPU",
        ),
        (
            {"num_gpus": 1, "num_replicas": 5},
            [_GPU],
            "GPU: all servers together need 5, and the cluster has 4 (judge 5)",
        ),
        (
            {"num_gpus": 2, "autoscaling": {"min_replicas": 3, "max_replicas": 9}},
            [_GPU],
            "GPU: all servers together need 6",
        ),
    ],
)
def test_the_resource_that_is_missing_is_named(
    options: dict[str, Any], nodes: list[dict[str, float]], expected: str
) -> None:
    (problem,) = _problems(options, nodes)
    assert problem.startswith(expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_gpus": 0.5, "num_replicas": 8},
        {"num_gpus": 4, "autoscaling": {"min_replicas": 0, "max_replicas": 9}},
        {"accelerator_type": "H100", "num_gpus": 1},
        {"num_cpus": 0, "num_replicas": 1000},
    ],
)
def test_what_fits_is_no_problem(options: dict[str, Any]) -> None:
    assert _problems(options, [_CPU, _GPU]) == []


def test_workers_of_one_model_get_a_bundle_each() -> None:
    judge = {"type": _VLLM, "model": "m", "num_gpus": 1, "num_cpus": 2, "tensor_parallel_size": 3}
    node = resolve(GraphSpec(models={"judge": judge}), env={}).nodes["judge"]
    options = deployed_options(node)
    assert options["placement_group_bundles"] == [{"CPU": 2.0, "GPU": 1.0}, {"GPU": 1.0}, {"GPU": 1.0}]
    assert options["num_gpus"] == 0
