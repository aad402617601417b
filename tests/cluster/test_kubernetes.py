"""`gym-serve export-k8s`: what KubeRay gets. tests/interop/test_kuberay.py checks it by KubeRay's schema."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from gym_serve import GraphError
from gym_serve.cli import main
from gym_serve.cluster.kubernetes import PodSize, kubernetes_objects
from gym_serve.graph import load_graph, resolve

ROOT = Path(__file__).parents[2]
TOKEN = "auth_token=${GYM_TOKEN}"


def exported(graph: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The specs of the cluster and of the application of a graph."""
    source = load_graph({"auth_token": "${GYM_TOKEN:-unset}", **graph})
    service, _ = kubernetes_objects(source, resolve(source.spec), image="image", size=PodSize())
    return service["spec"]["rayClusterConfig"], yaml.safe_load(service["spec"]["serveConfigV2"])


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """What the command writes for a graph with a judge on a GPU."""
    monkeypatch.setenv("GYM_TOKEN", "secret-token")
    graph, out = ROOT / "graphs/math_gpu_judge.yaml", tmp_path / "out.yaml"
    command = ["export-k8s", str(graph), "--image", "registry.example/gym:1", "--set", TOKEN, "-o", str(out)]
    done = CliRunner().invoke(main, command)
    assert (done.exit_code, done.stdout) == (0, "")
    assert "create secret generic math-gpu-judge-variables --from-literal=GYM_TOKEN=..." in done.stderr
    assert "secret-token" not in done.stderr + out.read_text()
    return list(yaml.safe_load_all(out.read_text()))


def test_kubectl_takes_it_as_json_too(objects: list[dict[str, Any]]) -> None:
    graph = ROOT / "graphs/math_gpu_judge.yaml"
    command = ["export-k8s", str(graph), "--image", "registry.example/gym:1", "--set", TOKEN, "--json"]
    printed = json.loads(CliRunner().invoke(main, command).stdout)
    assert printed == {"apiVersion": "v1", "kind": "List", "items": objects}


def test_the_application_is_the_graph_file_with_its_variables(objects: list[dict[str, Any]]) -> None:
    config = yaml.safe_load(objects[0]["spec"]["serveConfigV2"])
    (application,) = config["applications"]
    (written,) = yaml.safe_load((ROOT / "graphs/math_gpu_judge.yaml").read_text())["applications"]
    assert application == {**written, "args": {**written["args"], "auth_token": "${GYM_TOKEN}"}}
    assert config["http_options"]["host"] == "0.0.0.0"


def test_pods_get_the_variables_from_a_secret_and_are_not_root(objects: list[dict[str, Any]]) -> None:
    cluster = objects[0]["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        references = {v["name"]: v["valueFrom"]["secretKeyRef"] for v in container["env"]}
        assert references["GYM_TOKEN"] == {"name": "math-gpu-judge-variables", "key": "GYM_TOKEN"}
        assert references["POLICY_MODEL"]["optional"] is True
        assert container["image"] == "registry.example/gym:1"
        assert container["securityContext"]["runAsNonRoot"] is True


def test_workers_are_ready_when_the_graph_answers(objects: list[dict[str, Any]]) -> None:
    for group in objects[0]["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        assert container["readinessProbe"]["httpGet"] == {"path": "/math_gpu_judge/health", "port": "serve"}
        assert {"name": "serve", "containerPort": 8000} in container["ports"]


def test_prometheus_finds_all_pods(objects: list[dict[str, Any]]) -> None:
    service, monitor = objects
    cluster, wanted = service["spec"]["rayClusterConfig"], monitor["spec"]["selector"]["matchLabels"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert group["template"]["metadata"]["labels"] == wanted
        ports = [port["name"] for port in group["template"]["spec"]["containers"][0]["ports"]]
        assert monitor["spec"]["podMetricsEndpoints"][0]["port"] in ports


def test_gpus_have_pods_of_their_own(objects: list[dict[str, Any]]) -> None:
    cpu, gpu = objects[0]["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert (cpu["groupName"], cpu["minReplicas"], cpu["maxReplicas"]) == ("cpu-0", 1, 2)
    assert (gpu["groupName"], gpu["minReplicas"], gpu["maxReplicas"]) == ("1-gpu-1", 1, 4)
    (container,) = gpu["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_there_are_as_many_pods_as_the_replicas_fill() -> None:
    env = {"type": "mcqa", "num_cpus": 3, "num_replicas": 2}
    half = {"type": "scripted_model", "num_gpus": 0.5, "num_cpus": 0, "num_replicas": 4}
    rare = {"type": "scripted_model", "ray_resources": {"license": 1}, "num_cpus": 1, "num_replicas": 3}
    cluster, _ = exported({"resources": {"env": env}, "models": {"half": half, "rare": rare}})
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    assert {name: group["replicas"] for name, group in groups.items()} == {
        "cpu-0": 2,
        "cpu-license-1": 3,
        "1-gpu-2": 2,
    }
    assert groups["cpu-license-1"]["rayStartParams"] == {"resources": r'"{\"license\": 1.0}"'}


def test_a_replica_is_never_split_between_pods() -> None:
    wide = {"type": "mcqa", "num_cpus": 3, "num_replicas": 4}
    big = {"type": "scripted_model", "num_gpus": 0.6, "num_replicas": 5}
    heavy = {"type": "mcqa", "memory": 9 * 2**30, "ray_resources": {"disk": 1}, "num_replicas": 2}
    cluster, _ = exported({"resources": {"wide": wide, "heavy": heavy}, "models": {"big": big}})
    groups = {group["groupName"]: group["maxReplicas"] for group in cluster["workerGroupSpecs"]}
    assert groups == {"cpu-0": 4, "cpu-disk-1": 2, "1-gpu-2": 5}


def test_rays_own_ports_need_a_token(objects: list[dict[str, Any]]) -> None:
    assert objects[0]["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}


def test_all_problems_are_said_at_once() -> None:
    source = load_graph({"resources": {"env": {"type": "mcqa", "num_cpus": 8, "memory": 2**40}}})
    with pytest.raises(GraphError) as refused:
        kubernetes_objects(source, resolve(source.spec), image="image", size=PodSize())
    told = "\n".join(refused.value.problems)
    assert "auth_token: must be set" in told
    assert "env.num_cpus: must fit into a worker pod (4; --cpus), got 8" in told
    assert "env.memory: must fit into a worker pod (17179869184; --memory)" in told
