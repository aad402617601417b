"""What `gym-serve export-k8s` writes, held against the schema of KubeRay's own CustomResourceDefinition.

`make interop` checks KubeRay out; its schema is in no package registry.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from gym_serve.cluster.kubernetes import PodSize, kubernetes_objects
from gym_serve.graph import load_graph, resolve

pytestmark = pytest.mark.interop

GRAPHS = sorted((Path(__file__).parents[2] / "graphs").glob("*.yaml"))
CRD = "helm-chart/kuberay-operator/crds/ray.io_rayservices.yaml"


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    venv = os.environ.get("INTEROP_VENV")
    if venv is None:
        pytest.skip("needs the venv of `make interop`")
    definition = yaml.load((Path(venv) / "src/kuberay" / CRD).read_text(), Loader=yaml.CSafeLoader)
    (version,) = [found for found in definition["spec"]["versions"] if found["name"] == "v1"]
    found: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    _close(found)
    return found


def _close(schema: dict[str, Any]) -> None:
    """Refuse keys that the schema does not name, as `kubectl apply` does."""
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema["additionalProperties"] = False
    below = [*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")]
    for part in below:
        if isinstance(part, dict):
            _close(part)


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.stem)
def test_every_shipped_graph_is_a_ray_service(graph: Path, schema: dict[str, Any]) -> None:
    source = load_graph(graph, overrides={"auth_token": "${GYM_TOKEN:-x}"})
    service, _ = kubernetes_objects(
        source, resolve(source.spec, base_dir=graph.parent), image="image", size=PodSize()
    )
    # The schema of `metadata` is Kubernetes' own, and left out of a definition.
    jsonschema.validate({**service, "metadata": {}}, schema)


def test_what_kuberay_does_not_know_is_found(schema: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError, match="workerGroups"):
        jsonschema.validate({"spec": {"rayClusterConfig": {"workerGroups": []}}}, schema)
