"""What `Gym` takes down, keeps and leaves alone when something else breaks; without Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve
from ray.serve.schema import ApplicationStatus

from gym_serve import BadRequest, Conflict, GraphError, Gym, NotFound, Unavailable
from gym_serve.client import cluster, connection, deployed
from gym_serve.client.core import Core
from gym_serve.client.deployed import ClusterConnection
from gym_serve.cluster import reports as graph_running
from gym_serve.cluster.deploy import GATEWAY
from gym_serve.cluster.ownership import Claim, Ownership, Terms
from gym_serve.cluster.serve_compat import RunningVersion
from gym_serve.cluster.weights import WeightStore
from gym_serve.graph import load_graph, resolve

GRAPH: dict[str, Any] = {
    "models": {
        "policy": {"type": "chat_model", "base_url": "http://a/v1", "model": "first"},
        "judge": {"type": "chat_model", "base_url": "http://a/v1", "model": "judge"},
    },
}
SOURCE = load_graph(GRAPH)
RESOLVED = resolve(SOURCE.spec)
CLAIM = Claim("1", Terms(), "worker", "node", "process 1 on here")


class FakeCluster:
    http = "http://127.0.0.1:9"
    left = 0

    def __init__(self, address: str | None, *, dashboard: bool = False) -> None:
        pass

    def leave(self) -> None:
        FakeCluster.left += 1


def a_gym() -> Gym:
    """A Gym that owns the graph."""
    found = FakeCluster(None)
    connection = ClusterConnection(
        found,
        name="default",
        public=RESOLVED.public(),
        url=found.http,
        default_agent=None,
        graph=RESOLVED,
        claim=CLAIM,
    )
    return Gym(Core(connection))


@pytest.fixture
def deleted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the applications that were deleted."""
    names: list[str] = []
    monkeypatch.setattr(FakeCluster, "left", 0)
    monkeypatch.setattr(deployed, "Cluster", FakeCluster)
    monkeypatch.setattr(WeightStore, "delete", lambda store: None)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(Ownership, "claim", lambda ownership: CLAIM)
    monkeypatch.setattr(Ownership, "take", lambda ownership, terms: CLAIM)
    monkeypatch.setattr(Ownership, "forget", lambda ownership: None)
    monkeypatch.setattr(serve, "delete", names.append)
    return names


def running(monkeypatch: pytest.MonkeyPatch, **deployments: Any) -> None:
    applications = {
        name: SimpleNamespace(status=ApplicationStatus.RUNNING, deployments=found)
        for name, found in deployments.items()
    }
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications=applications))


def test_endpoints_that_were_changed_before_stay_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve tells a replica that starts later its `user_config` alone."""
    names = (GATEWAY, "policy", "judge")
    live = [RunningVersion("default", [serve.deployment(name=n)(FakeCluster) for n in names], GATEWAY, "/")]
    told: list[dict[str, Any]] = []

    def restore(version: RunningVersion) -> None:
        live.append(version)
        told.append({name: found for name in names if (found := version.settings(name))})

    running(monkeypatch, default={})
    monkeypatch.setattr(Ownership, "claim", lambda ownership: CLAIM)
    monkeypatch.setattr(graph_running, "running_version", lambda name: live[-1])
    monkeypatch.setattr(RunningVersion, "restore", restore)
    changing = a_gym()
    changing.policy.set_endpoints("policy", ["http://b/v1"], model_name="second")
    changing.policy.set_endpoints("judge", ["http://c/v1", "http://d/v1"])
    changing.policy.set_endpoints("policy", ["http://e/v1"])
    assert told == [
        {"policy": {"base_url": "http://b/v1", "model": "second"}},
        {
            "policy": {"base_url": "http://b/v1", "model": "second"},
            "judge": {"base_url": ["http://c/v1", "http://d/v1"]},
        },
        {
            "policy": {"base_url": "http://e/v1", "model": "second"},
            "judge": {"base_url": ["http://c/v1", "http://d/v1"]},
        },
    ]
    with pytest.raises(BadRequest, match="at least one endpoint"):
        changing.policy.set_endpoints("policy", [])
    assert len(told) == 3


def test_the_graph_is_taken_down_also_where_a_connection_does_not_close(
    monkeypatch: pytest.MonkeyPatch, deleted: list[str]
) -> None:
    class Transport:
        server = "policy"

        async def close(self) -> None:
            raise RuntimeError("the cluster is gone")

    monkeypatch.setattr(ClusterConnection, "transport", lambda self, server: Transport())
    leaving = a_gym()
    leaving._core.transport("policy")
    with pytest.raises(RuntimeError, match="the cluster is gone"):
        leaving.shutdown()
    leaving.shutdown()
    assert (deleted, FakeCluster.left) == (["default"], 1)


def test_ray_is_left_also_where_ctrl_c_interrupts_the_taking_down(
    monkeypatch: pytest.MonkeyPatch, deleted: list[str]
) -> None:
    def delete(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "delete", delete)
    with pytest.raises(KeyboardInterrupt):
        a_gym().shutdown()
    assert FakeCluster.left == 1


def test_a_health_page_of_somebody_else_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async def page(url: str, headers: Any, fine: Any) -> Any:
        return {"error": {"code": "unavailable", "message": "no graph here"}}

    monkeypatch.setattr(connection, "page", page)
    with pytest.raises(Unavailable, match="no graph here"):
        a_gym().health()


def test_a_ray_that_was_started_for_nothing_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[str] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: stopped.append("ray"))
    reaper = SimpleNamespace(
        reap=lambda: stopped.append("the rest"), dismiss=lambda: stopped.append("reaper")
    )
    monkeypatch.setattr(cluster, "start_ray", lambda *, dashboard: reaper)
    monkeypatch.setattr(cluster, "serve_is_running", lambda: False)

    def start(**options: Any) -> None:
        raise ValueError("host: no such name")

    monkeypatch.setattr(serve, "start", start)
    with pytest.raises(ValueError, match="no such name"):
        cluster.Cluster()
    assert stopped == ["ray", "the rest", "reaper"]


def test_nothing_is_deleted_as_long_as_nothing_was_deployed(
    monkeypatch: pytest.MonkeyPatch, deleted: list[str]
) -> None:
    def status() -> Any:
        raise ConnectionError("the controller does not answer")

    monkeypatch.setattr(serve, "status", status)
    with pytest.raises(ConnectionError):
        deployed.deploy(SOURCE, RESOLVED, None)
    assert deleted == []
    assert FakeCluster.left == 1


def test_an_application_that_is_no_graph_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, deleted: list[str]
) -> None:
    running(monkeypatch, default={"Chatbot": None})
    with pytest.raises(Conflict, match="something else runs as 'default'"):
        deployed.deploy(SOURCE, RESOLVED, None)
    with pytest.raises(NotFound, match="'default' is no graph of gym_serve"):
        deployed.attach("default", None)
    assert deleted == []
    assert FakeCluster.left == 2


def test_a_graph_that_does_not_start_is_deleted(monkeypatch: pytest.MonkeyPatch, deleted: list[str]) -> None:
    running(monkeypatch)
    monkeypatch.setattr(deployed, "preflight", lambda *_, **__: [])
    monkeypatch.setattr(deployed, "running_version", lambda name: None)
    monkeypatch.setattr(deployed, "build", lambda graph, owned, shipped: None)

    def run(targets: Any, **options: Any) -> None:
        raise RuntimeError("no replica came up")

    monkeypatch.setattr(serve, "run_many", run)
    with pytest.raises(Unavailable, match="'default' did not start: no replica came up"):
        deployed.deploy(SOURCE, RESOLVED, None)
    assert deleted == ["default"]


def test_what_lacks_something_is_not_deployed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployed, "preflight", lambda *_, **__: ["models.policy.num_gpus: too many"])
    monkeypatch.setattr(deployed, "build", lambda graph: pytest.fail("it was deployed"))
    with pytest.raises(GraphError, match=r"1 problem in graph\.yaml:\n.*models\.policy\.num_gpus: too many"):
        deployed.launch(RESOLVED, "default", "/", source="graph.yaml")


def test_a_gateway_that_hangs_is_said(monkeypatch: pytest.MonkeyPatch, deleted: list[str]) -> None:
    class Asked:
        def result(self, timeout_s: float, **options: Any) -> Any:
            raise TimeoutError

    class Handle:
        def __init__(self, deployment: str, application: str) -> None:
            self.describe = SimpleNamespace(remote=Asked)

    running(monkeypatch, default={GATEWAY: None})
    monkeypatch.setattr(deployed, "DeploymentHandle", Handle)
    with pytest.raises(Unavailable, match="the gateway of 'default' does not answer"):
        deployed.attach("default", None)
    assert deleted == []
