"""Whose graph it is: who may join it, take it over, change it and take it down; without Ray."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve
from ray.serve.schema import ApplicationStatus

from gym_serve import AsyncGym, BadRequest, Conflict, Gym, InvalidRequest
from gym_serve.client import deployed
from gym_serve.client.connection import LocalConnection
from gym_serve.client.core import Core
from gym_serve.cluster import ownership
from gym_serve.cluster import reports as graph_running
from gym_serve.cluster.deploy import GATEWAY
from gym_serve.cluster.ingress import Description
from gym_serve.cluster.ownership import Terms
from gym_serve.cluster.serve_compat import RunningVersion
from gym_serve.cluster.weights import WeightStore
from gym_serve.graph import Graph, load_graph, resolve

SPEC: dict[str, Any] = {
    "models": {"policy": {"type": "chat_model", "base_url": "http://a/v1", "model": "first"}}
}
SOURCE = load_graph(SPEC)
GRAPH = resolve(SOURCE.spec)
NAME = SOURCE.name


class Cluster:
    """A cluster with Serve: what runs there, who lives, and what it was told."""

    http = "http://127.0.0.1:9"

    def __init__(self) -> None:
        self.running: dict[str, Any] = {}
        self.deployed: list[dict[str, Any]] = []
        self.keys: dict[bytes, bytes] = {}
        self.workers: set[str] = set()
        self.owned = True
        self.me = "nobody"

    def be(self, worker: str) -> None:
        """Go on as another process."""
        self.me = worker
        self.workers.add(worker)

    def launch(self, graph: Graph, name: str, prefix: str, **options: Any) -> None:
        self.running[name] = SimpleNamespace(status=ApplicationStatus.RUNNING, deployments={GATEWAY: None})
        self.owned = options["owned"]

    def delete(self, name: str) -> None:
        del self.running[name]

    def leave(self) -> None:
        pass


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    found = Cluster()
    monkeypatch.setattr(deployed, "Cluster", lambda address, dashboard=False: found)
    monkeypatch.setattr(deployed, "launch", found.launch)
    monkeypatch.setattr(deployed, "preflight", lambda *_, **__: [])
    monkeypatch.setattr(deployed, "_described", lambda name: Description(GRAPH.public(), None, found.owned))
    live = RunningVersion(NAME, [serve.deployment(name="policy")(Cluster)], GATEWAY, "/")
    monkeypatch.setattr(graph_running, "running_version", lambda name: live)

    def restore(version: RunningVersion) -> None:
        found.deployed.append(version.settings("policy"))
        found.running[NAME].status = ApplicationStatus.RUNNING

    monkeypatch.setattr(RunningVersion, "restore", restore)
    monkeypatch.setattr(deployed, "_await_route", lambda prefix: None)
    monkeypatch.setattr(WeightStore, "delete", lambda store: None)
    monkeypatch.setattr(serve, "delete", found.delete)
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications=found.running))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    context = SimpleNamespace(get_worker_id=lambda: found.me, get_node_id=lambda: "node")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ownership, "kv_get", found.keys.get)
    monkeypatch.setattr(ownership, "kv_put", found.keys.__setitem__)
    monkeypatch.setattr(ownership, "kv_delete", lambda key: found.keys.pop(key, None))
    monkeypatch.setattr(ownership, "worker_is_alive", lambda worker, node: worker in found.workers)
    return found


def from_graph(owner: str | None = None) -> deployed.ClusterConnection:
    return deployed.deploy(SOURCE, GRAPH, None, terms=Terms(owner))


def move(connection: deployed.ClusterConnection) -> None:
    asyncio.run(connection.reconfigure("policy", {"base_url": "http://b/v1"}))


def test_a_restarted_process_of_the_run_takes_it_over(fake: Cluster) -> None:
    fake.be("first")
    first = from_graph("run-1")
    fake.workers.remove("first")
    fake.be("second")
    second = from_graph("run-1")
    move(second)
    second.close()
    assert fake.deployed == [{"base_url": "http://b/v1"}]
    assert fake.running == fake.keys == {}
    first.close()  # what is left of it does no harm


def test_one_that_was_replaced_is_a_guest(fake: Cluster) -> None:
    """Also while it lives: the run decides which of its processes is the one."""
    fake.be("first")
    first = from_graph("run-1")
    fake.be("second")
    second = from_graph("run-1")
    with pytest.raises(BadRequest, match="cannot be changed here: it belongs to the run 'run-1', process"):
        move(first)
    first.close()
    assert NAME in fake.running
    second.close()
    assert fake.running == {}


@pytest.mark.parametrize("alive", [True, False])
def test_two_owners_conflict(fake: Cluster, alive: bool) -> None:
    fake.be("first")
    from_graph("run-1")
    if not alive:
        fake.workers.remove("first")
    fake.be("second")
    gone = "" if alive else ", which is gone"
    with pytest.raises(
        Conflict,
        match=rf"'{NAME}' cannot belong to the run 'run-2': it belongs to the run 'run-1', process \d+ on "
        rf"\S+?{gone}\. Join it with Gym\.attach\('{NAME}'\), or give this graph another name",
    ):
        from_graph("run-2")
    assert NAME in fake.running


def test_who_names_no_run_joins_as_long_as_the_owner_lives(fake: Cluster) -> None:
    fake.be("first")
    from_graph()
    fake.be("second")
    guest = from_graph()
    with pytest.raises(BadRequest, match=r"it belongs to process \d+ on \S+$"):
        move(guest)
    guest.close()
    assert NAME in fake.running
    fake.workers.remove("first")
    heir = from_graph()
    move(heir)
    heir.close()
    assert fake.running == {}


def test_who_names_no_run_never_takes_that_of_one(fake: Cluster) -> None:
    fake.be("first")
    from_graph("run-1")
    fake.workers.remove("first")
    fake.be("second")
    from_graph().close()
    assert NAME in fake.running


def test_a_graph_of_an_operator_belongs_to_nobody(fake: Cluster) -> None:
    fake.be("first")
    from_graph("run-1")  # its claim is left behind by `serve delete`
    fake.launch(GRAPH, NAME, "", owned=False)
    for owner in ("run-1", "run-2"):
        with pytest.raises(Conflict, match=f"cannot belong to the run '{owner}': nobody owns"):
            from_graph(owner)
    guest = from_graph()
    with pytest.raises(BadRequest, match="cannot be changed here"):
        move(guest)
    guest.close()
    assert NAME in fake.running


def test_a_graph_that_was_left_half_way_is_started_again(fake: Cluster) -> None:
    fake.be("first")
    from_graph("run-1")
    fake.running[NAME].status = ApplicationStatus.DEPLOY_FAILED
    fake.be("second")
    from_graph("run-1")
    assert fake.deployed == [{}]


def test_one_that_is_being_deleted_is_waited_for(fake: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.be("first")
    from_graph("run-1")
    fake.running[NAME].status = ApplicationStatus.DELETING
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        fake.running.clear()

    monkeypatch.setattr(deployed.time, "sleep", sleep)
    from_graph("run-1")
    assert len(waited) == 1
    assert fake.running[NAME].status == ApplicationStatus.RUNNING
    fake.running[NAME].status = ApplicationStatus.DELETING
    monkeypatch.setattr(deployed, "_ENDING_SECONDS", -1.0)
    with pytest.raises(Conflict, match="is being taken down, and still has requests"):
        from_graph("run-1")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"owner": ""}, "`owner` must be the name of a run, got ''"),
        ({"lease_s": 0}, "`lease_s` must be a positive number of seconds, got 0"),
        ({"lease_s": float("nan")}, "`lease_s` must be a positive number of seconds, got nan"),
        ({"ray": False, "owner": "run-1"}, "`owner` must be left out with ray=False, got 'run-1'"),
        ({"ray": False, "detached": True}, "`detached` must be left out with ray=False, got True"),
    ],
)
def test_arguments_that_say_nothing(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{said}"):
        Gym.from_graph(SPEC, **options)


@pytest.mark.parametrize("late", [True, False])
async def test_a_start_that_is_cancelled_is_undone(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """Also if it is through at the very moment: nobody else knows of the graph."""
    begun, may_end, ended = (threading.Event() for _ in range(3))
    down: set[Core] = set()

    class Slow(LocalConnection):
        def __init__(self, *arguments: Any) -> None:
            begun.set()
            may_end.wait()
            super().__init__(*arguments)

    def shutdown(core: Core) -> None:
        down.add(core)
        shut_down(core)
        ended.set()

    shut_down = Core.shutdown
    monkeypatch.setattr("gym_serve.client.gym.LocalConnection", Slow)
    monkeypatch.setattr(Core, "shutdown", shutdown)
    starting = asyncio.create_task(AsyncGym.from_graph(SPEC, ray=False))
    await asyncio.to_thread(begun.wait)
    if not late:
        may_end.set()
        time.sleep(0.5)  # noqa: ASYNC251  # the loop must not hear of the end of the thread
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    may_end.set()
    await asyncio.to_thread(ended.wait)
    assert len(down) == 1
