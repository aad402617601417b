"""`KubernetesBoxes`: boxes that are pods, by Kubernetes' API.

The first process of a pod is that of a box (`gym_serve.sandbox.attached`), over one connection to the API. So
a pod's processes end with the process that made it. Each owner renews a `Lease`, which its pods belong to:
where an owner is gone, its lease runs out, the next start of any owner removes it, and Kubernetes' garbage
collection the pods. Besides, ``activeDeadlineSeconds`` ends every pod.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import ClientError, ClientWebSocketResponse, WSMsgType

from gym_serve.sandbox.attached import FIRST, PYTHON, SOURCE, Channel, Message, settings_of
from gym_serve.sandbox.boxes import Sandbox, SandboxSpec
from gym_serve.sandbox.resident_boxes import ResidentBox
from gym_serve.types.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient

T = TypeVar("T")

logger = logging.getLogger("gym_serve")

OWNER = "gym-serve/owner"
"""Label of all its objects; its value is the name of their owner's lease."""
NETWORK = "gym-serve/network"
"""Label of its pods; the pods of ``none`` have a policy that lets nothing in and out."""

_LEASE_SECONDS = 60
_RENEW_SECONDS = 15.0
_LONGEST_SECONDS = 24 * 3600
_START_SECONDS = 600.0  # an image may have to be pulled
_LOOK_SECONDS = 0.25
_HEARTBEAT_SECONDS = 20.0
_NEVER = {"ErrImageNeverPull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError"}
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class KubernetesBoxes:
    """Makes pods; see the module. The cluster and its namespace are those of this pod, or of the current
    context of ``KUBECONFIG``."""

    def __init__(self) -> None:
        self._owner = f"gym-serve-{secrets.token_hex(8)}"
        self._lease: asyncio.Task[dict[str, Any]] | None = None
        self._renewing: asyncio.Task[None] | None = None

    def problems(self) -> list[str]:
        """See `SandboxProvider.problems`."""
        try:
            import kubernetes_asyncio  # noqa: F401
        except ImportError:
            return ["sandbox: kubernetes needs its client: pip install 'gym-serve[kubernetes]'"]
        if not _NAMESPACE.exists() and not any(map(os.path.exists, _files())):
            return [
                f"sandbox: no cluster: neither a pod's account nor {_files()[0]}; KUBECONFIG names another"
            ]
        return []

    async def create(self, spec: SandboxSpec, *, layer: Path | None = None) -> Sandbox:
        """See `SandboxProvider.create`. Changes stay in the pod: ``layer`` must be None."""
        if spec.image is None or spec.root is not None or spec.layers or layer is not None:
            raise InvalidRequest("a pod is made of an image, not of folders of this machine")
        if spec.network in ("model", "allowlist"):
            raise InvalidRequest(
                f"a pod reaches all hosts or none here, got network: {spec.network}; it must be none or full"
            )
        async with AsyncExitStack() as stack:
            client, namespace = await stack.enter_async_context(_client())
            lease = await self._leased(client, namespace)
            channel = await _said(self._start(stack, client, namespace, lease, spec), spec.image)
            channel.stack = stack.pop_all()
        box = ResidentBox(channel, spec)
        async with box.beginning():
            await box.begin(settings_of(spec), SOURCE)
        return box

    async def _start(
        self,
        stack: AsyncExitStack,
        client: ApiClient,
        namespace: str,
        lease: dict[str, Any],
        spec: SandboxSpec,
    ) -> Channel:
        from kubernetes_asyncio.client import CoreV1Api

        core: Any = CoreV1Api(client)
        pod = await core.create_namespaced_pod(namespace, pod_of(spec, lease))
        name = pod.metadata.name
        stack.push_async_callback(_removed, core, name, namespace)
        await asyncio.wait_for(_running(core, name, namespace), _START_SECONDS)
        held = await stack.enter_async_context(_attached(client, name, namespace))
        channel = await stack.enter_async_context(Channel(held))
        if await asyncio.wait_for(channel.reader.readexactly(1), _START_SECONDS) != b"r":
            raise InvalidRequest(f"a box of {spec.image} needs python3, 3.9 or newer, in the image")
        return channel

    async def _leased(self, client: ApiClient, namespace: str) -> dict[str, Any]:
        """The owner's lease, as its pods refer to it; it is made, and others are swept, at the first time."""
        if self._lease is None:
            self._lease = asyncio.create_task(_said(_begun(client, namespace, self._owner), "a lease"))
        try:
            lease = await asyncio.shield(self._lease)
        except BaseException:
            self._lease = None
            raise
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew())
        return lease

    async def _renew(self) -> None:
        from kubernetes_asyncio.client import ApiException, CoordinationV1Api

        while True:
            await asyncio.sleep(_RENEW_SECONDS)
            try:
                async with _client() as (client, namespace):
                    leases: Any = CoordinationV1Api(client)
                    renewed = {"spec": {"renewTime": _now()}}
                    await leases.patch_namespaced_lease(self._owner, namespace, renewed)
            except ApiException as error:
                if error.status == 404:  # it ran out, and was swept: the next box begins another
                    self._lease = None
                    return
                logger.warning("the lease of this process's pods is not renewed: %s", error.reason)
            except (OSError, ClientError, asyncio.TimeoutError) as error:
                logger.warning("the lease of this process's pods is not renewed: %s", error)


def pod_of(spec: SandboxSpec, lease: dict[str, Any]) -> dict[str, Any]:
    """The pod of a box, which belongs to a lease."""
    limits = {
        "cpu": str(spec.cpus),
        "memory": f"{spec.memory_mb}Mi",
        "ephemeral-storage": f"{spec.disk_mb}Mi",
    }
    return {
        "metadata": {
            "generateName": "gym-serve-",
            "labels": {OWNER: lease["name"], NETWORK: spec.network},
            "ownerReferences": [lease],
        },
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": max(1, round(spec.ttl or _LONGEST_SECONDS)),
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "containers": [
                {
                    "name": "box",
                    "image": spec.image,
                    "command": ["/bin/sh", "-c", FIRST, "sh", PYTHON],
                    "workingDir": spec.workdir,
                    "env": [{"name": name, "value": value} for name, value in spec.env.items()],
                    "stdin": True,
                    "stdinOnce": True,  # its input ends with the first connection to it
                    "resources": {"limits": limits, "requests": limits},
                    "securityContext": {
                        "runAsUser": 0,
                        "allowPrivilegeEscalation": False,
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                }
            ],
        },
    }


def _files() -> list[str]:
    return os.environ.get("KUBECONFIG", os.path.expanduser("~/.kube/config")).split(os.pathsep)


def _own_namespace() -> str | None:
    return _NAMESPACE.read_text().strip() if _NAMESPACE.exists() else None


@asynccontextmanager
async def _client() -> AsyncIterator[tuple[ApiClient, str]]:
    """A client of the cluster, and the namespace of its boxes."""
    from kubernetes_asyncio import client, config

    loading: Any = config
    configuration = client.Configuration()
    if (namespace := await asyncio.to_thread(_own_namespace)) is not None:
        loading.load_incluster_config(client_configuration=configuration)
    else:
        files = os.pathsep.join(_files())
        await loading.load_kube_config(files, client_configuration=configuration)
        _, context = await asyncio.to_thread(loading.list_kube_config_contexts, files)
        namespace = context["context"].get("namespace") or "default"
    async with client.ApiClient(configuration) as api:
        yield api, namespace


async def _said(work: Coroutine[Any, Any, T], what: str) -> T:
    """What ``work`` returns; what the cluster says instead, as errors of a provider."""
    from kubernetes_asyncio.client import ApiException

    try:
        return await work
    except ApiException as error:
        failure = InvalidRequest if error.status in (400, 403, 404, 422) else Unavailable
        raise failure(
            f"a pod of {what} does not start: {error.status} {error.reason}: {error.body!s}"
        ) from error
    except (OSError, ClientError, EOFError, asyncio.TimeoutError) as error:
        raise Unavailable(f"a pod of {what} does not start: {str(error) or 'not in time'}") from error


async def _begun(client: ApiClient, namespace: str, owner: str) -> dict[str, Any]:
    """Make an owner's lease, and the policy of boxes without a network; remove leases that ran out."""
    from kubernetes_asyncio.client import ApiException, CoordinationV1Api, NetworkingV1Api

    leases: Any = CoordinationV1Api(client)
    networking: Any = NetworkingV1Api(client)
    now = datetime.datetime.now(datetime.timezone.utc)
    for lease in (await leases.list_namespaced_lease(namespace, label_selector=OWNER)).items:
        if now - lease.spec.renew_time > datetime.timedelta(seconds=lease.spec.lease_duration_seconds):
            with suppress(ApiException):  # another one removes it as well
                await leases.delete_namespaced_lease(
                    lease.metadata.name, namespace, propagation_policy="Background"
                )
    policy = {
        "metadata": {"name": "gym-serve-none"},
        "spec": {"podSelector": {"matchLabels": {NETWORK: "none"}}, "policyTypes": ["Ingress", "Egress"]},
    }
    try:
        await networking.create_namespaced_network_policy(namespace, policy)
    except ApiException as error:
        if error.status != 409:  # it is there
            raise
    holder = f"{socket.gethostname()}:{os.getpid()}"
    times = {"leaseDurationSeconds": _LEASE_SECONDS, "acquireTime": _now(), "renewTime": _now()}
    own = await leases.create_namespaced_lease(
        namespace,
        {
            "metadata": {"name": owner, "labels": {OWNER: owner}},
            "spec": {"holderIdentity": holder, **times},
        },
    )
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "name": owner, "uid": own.metadata.uid}


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


async def _running(core: Any, name: str, namespace: str) -> None:
    """Wait until a pod runs. Raises `InvalidRequest` if it never will, and `Unavailable` if it has ended."""
    while True:
        status = (await core.read_namespaced_pod_status(name, namespace)).status
        for container in status.container_statuses or ():
            waits = container.state.waiting
            if waits is not None and waits.reason in _NEVER:
                raise InvalidRequest(f"a pod does not start: {waits.reason}: {waits.message}")
        if status.phase == "Running":
            return
        if status.phase in ("Succeeded", "Failed"):
            raise Unavailable(f"a pod ended at its start: {status.reason} {status.message}")
        await asyncio.sleep(_LOOK_SECONDS)


async def _removed(core: Any, name: str, namespace: str) -> None:
    from kubernetes_asyncio.client import ApiException

    with suppress(ApiException, OSError, ClientError):  # the lease's end removes it as well
        await core.delete_namespaced_pod(name, namespace, grace_period_seconds=0)


class _Attachment:
    """A WebSocket of the protocol ``v4.channel.k8s.io``: the first byte of a message says which file."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self._socket = socket

    async def read_out(self) -> Message | None:
        while True:
            message = await self._socket.receive()
            if message.type is WSMsgType.BINARY and message.data:
                return Message(message.data[0], message.data[1:])
            if message.type is not WSMsgType.BINARY:
                return None

    async def write_in(self, data: bytes) -> None:
        await self._socket.send_bytes(b"\0" + data)


@asynccontextmanager
async def _attached(client: ApiClient, name: str, namespace: str) -> AsyncIterator[_Attachment]:
    from kubernetes_asyncio.client import CoreV1Api
    from kubernetes_asyncio.stream import WsApiClient

    async with WsApiClient(client.configuration, heartbeat=_HEARTBEAT_SECONDS) as api:
        core: Any = CoreV1Api(api)
        connecting = await core.connect_get_namespaced_pod_attach(
            name, namespace, container="box", stdin=True, stdout=True, stderr=True, _preload_content=False
        )
        async with connecting as held:
            yield _Attachment(held)
