"""Boxes of Kubernetes' API, on a cluster that is an API and no more: it never ran on a real one here."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.kubernetes import Cluster, cluster
from support.sandboxes import ON_THE_FIRST, check_remote_box, needs_bubblewrap
from support.waiting import until

from gym_serve.sandbox import (
    SandboxProvider,
    SandboxSpec,
    find_provider,
    kubernetes_boxes,
)
from gym_serve.sandbox.kubernetes_boxes import NETWORK, OWNER
from gym_serve.types.errors import GraphError, InvalidRequest, SessionLost, Unavailable

pytest.importorskip("kubernetes_asyncio", reason="pip install 'gym-serve[kubernetes]'")
pytestmark = needs_bubblewrap

SPEC = SandboxSpec(image="python:3.13-slim", workdir="/app", env={"A": "b c"})
LONG = 60.0


@pytest.fixture
async def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as (there, config):
        monkeypatch.setenv("KUBECONFIG", str(config))
        yield there


@pytest.fixture
def provider(there: Cluster) -> SandboxProvider:
    return find_provider("kubernetes")


def test_no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(GraphError, match=r"no cluster: neither a pod's account nor .*none"):
        find_provider("kubernetes")


async def test_a_pod_is_a_box(there: Cluster, provider: SandboxProvider) -> None:
    box = await provider.create(SPEC)
    await check_remote_box(box)
    [process] = there.processes.values()
    await box.close()
    assert there.objects["pods"] == {}
    await asyncio.wait_for(process.wait(), LONG)
    with pytest.raises(SessionLost):
        await box.exec("true", timeout=LONG)


async def test_what_a_command_can_do_to_the_first_process(provider: SandboxProvider) -> None:
    box = await provider.create(SPEC)
    rights = [f"--{kind}=-all" for kind in ("bounding-set", "inh-caps", "ambient-caps")]
    done = await box.exec(["setpriv", *rights, "python3", "-c", ON_THE_FIRST], timeout=LONG)
    assert (done.status, done.text) == (0, "")
    await box.close()


async def test_a_pod_that_does_not_run_as_root(there: Cluster, provider: SandboxProvider) -> None:
    there.user = 1000  # an admission of the cluster has changed it
    with pytest.raises(Unavailable, match="must be root of the container, not user 1000"):
        await provider.create(SPEC)
    assert there.objects["pods"] == {}


async def test_what_a_pod_may_use(there: Cluster, provider: SandboxProvider) -> None:
    boxes = [
        await provider.create(
            SPEC.model_copy(update={"cpus": 2, "memory_mb": 512, "disk_mb": 100, "ttl": 90.0})
        ),
        await provider.create(SPEC.model_copy(update={"network": "full"})),
    ]
    first, second = there.objects["pods"].values()
    [container] = first["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": "2", "memory": "512Mi", "ephemeral-storage": "100Mi"}
    assert (first["spec"]["activeDeadlineSeconds"], second["spec"]["activeDeadlineSeconds"]) == (90, 86400)
    assert first["spec"]["automountServiceAccountToken"] is False
    [policy] = there.objects["networkpolicies"].values()
    assert policy["spec"]["podSelector"]["matchLabels"] == {NETWORK: "none"}
    assert [pod["metadata"]["labels"][NETWORK] for pod in (first, second)] == ["none", "full"]
    [lease] = there.objects["leases"].values()
    assert {pod["metadata"]["ownerReferences"][0]["uid"] for pod in (first, second)} == {
        lease["metadata"]["uid"]
    }
    for box in boxes:
        await box.close()


async def test_a_pod_ends_with_its_owner(there: Cluster, provider: SandboxProvider) -> None:
    box = await provider.create(SPEC)
    [process] = there.processes.values()
    await box._process._held._socket.close()  # as when the owner is killed
    await asyncio.wait_for(process.wait(), LONG)
    await until(lambda: not box.alive)
    await box.close()


async def test_an_owner_renews_its_lease_and_sweeps_others(
    there: Cluster, provider: SandboxProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_boxes, "_RENEW_SECONDS", 0.1)
    earlier = await provider.create(SPEC)
    [gone] = there.objects["leases"].values()
    first = gone["spec"]["renewTime"]
    await until(lambda: gone["spec"]["renewTime"] > first)
    provider._renewing.cancel()  # its process is gone
    then = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(minutes=2)
    gone["spec"]["renewTime"] = then.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    box = await find_provider("kubernetes").create(SPEC)
    [lease] = there.objects["leases"].values()
    [pod] = there.objects["pods"].values()
    assert pod["metadata"]["labels"][OWNER] == lease["metadata"]["name"] != gone["metadata"]["name"]
    await until(lambda: not earlier.alive)
    await earlier.close()
    await box.close()


async def test_a_lease_that_was_swept_is_begun_again(
    there: Cluster, provider: SandboxProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_boxes, "_RENEW_SECONDS", 0.1)
    await (await provider.create(SPEC)).close()
    [name] = there.objects["leases"]
    there.delete("leases", name)
    await until(provider._renewing.done)
    await (await provider.create(SPEC)).close()
    assert list(there.objects["leases"]) == [name]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"image": None}, "made of an image"),
        ({"network": "model"}, "must be none or full"),
        ({"network": "allowlist"}, "must be none or full"),
        ({"image": "busybox"}, "needs python3"),
    ],
)
async def test_a_box_that_cannot_be_made(
    there: Cluster, provider: SandboxProvider, changes: dict[str, str], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        await provider.create(SPEC.model_copy(update=changes))
    assert there.objects["pods"] == {}


async def test_an_image_that_is_not_there(there: Cluster, provider: SandboxProvider) -> None:
    there.waiting = "ImagePullBackOff"
    with pytest.raises(InvalidRequest, match="ImagePullBackOff"):
        await provider.create(SPEC)
    assert there.objects["pods"] == {}


async def test_a_cluster_that_does_not_answer(
    provider: SandboxProvider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with cluster(tmp_path):
        pass  # it has another port, where nobody listens any more
    with pytest.raises(Unavailable, match="does not start"):
        await provider.create(SPEC)
