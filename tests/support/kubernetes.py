"""A cluster of Kubernetes' API alone: objects are checked by the schema of the client, pods run in bwrap."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml
from aiohttp import WSMsgType, web

KINDS = {
    "pods": ("api/v1", "V1Pod"),
    "leases": ("apis/coordination.k8s.io/v1", "V1Lease"),
    "networkpolicies": ("apis/networking.k8s.io/v1", "V1NetworkPolicy"),
}


def check(value: Any, type_: str, place: str = "") -> None:
    """Raises AssertionError: an object is not of a type of Kubernetes' published schema."""
    from kubernetes_asyncio.client import models

    if found := re.fullmatch(r"(list\[|dict\(str, |dict\[str, )(.+)[])]", type_):
        assert isinstance(value, list if found[1] == "list[" else dict), place
        members = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in members:
            check(each, found[2], f"{place}.{key}")
    elif hasattr(models, type_):
        model = getattr(models, type_)
        names = {name: attribute for attribute, name in model.attribute_map.items()}
        for key, each in value.items():
            assert key in names, f"{place}.{key} is no field of {type_}"
            check(each, model.openapi_types[names[key]], f"{place}.{key}")
        model(**{names[key]: each for key, each in value.items()})  # what it requires is there
    else:
        assert isinstance(
            value, {"str": str, "int": int, "bool": bool, "datetime": str}.get(type_, object)
        ), place


class Cluster:
    """The objects, and the processes of pods.

    Attributes:
        objects: by kind and name.
        waiting: what pods wait for, in the place of running: a reason.
        user: whom the cluster has their containers run as.
    """

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.waiting: str | None = None
        self.user = 0

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        for kind, (group, _) in KINDS.items():
            place = f"/{group}/namespaces/boxes/{kind}"
            app.router.add_post(place, self._created)
            app.router.add_get(place, self._listed)
            app.router.add_get(f"{place}/{{name}}/status", self._read)
            app.router.add_patch(f"{place}/{{name}}", self._patched)
            app.router.add_delete(f"{place}/{{name}}", self._deleted)
        app.router.add_get("/api/v1/namespaces/boxes/pods/{name}/attach", self._attached)
        return app

    def _kind(self, request: web.Request) -> str:
        return request.path.split("/boxes/")[1].split("/")[0]

    async def _created(self, request: web.Request) -> web.Response:
        kind, body = self._kind(request), await request.json()
        check(body, KINDS[kind][1])
        meta = body["metadata"]
        name = meta.get("name") or meta["generateName"] + uuid.uuid4().hex[:5]
        if name in self.objects[kind]:
            return web.json_response({"kind": "Status", "reason": "AlreadyExists"}, status=409)
        body["metadata"] = {**meta, "name": name, "uid": str(uuid.uuid4())}
        if kind == "pods":
            self._settle(body)
            if not self.waiting:
                await self._run(name, body)
        self.objects[kind][name] = body
        return web.json_response(body, status=201)

    def _settle(self, pod: Any) -> None:
        state: Any = {"waiting": {"reason": self.waiting}} if self.waiting else {"running": {}}
        statuses = {
            "name": "box",
            "state": state,
            "image": "",
            "imageID": "",
            "ready": True,
            "restartCount": 0,
        }
        pod["status"] = {"phase": "Pending" if self.waiting else "Running", "containerStatuses": [statuses]}

    async def _run(self, name: str, pod: Any) -> None:
        [container] = pod["spec"]["containers"]
        image = {"busybox": ("--tmpfs", "/usr/bin", "--ro-bind", "/usr/bin/dash", "/usr/bin/sh")}
        variables = [word for each in container["env"] for word in ("--setenv", each["name"], each["value"])]
        links = [
            word for name in ("bin", "lib", "lib64") for word in ("--symlink", f"usr/{name}", f"/{name}")
        ]
        self.processes[name] = await asyncio.create_subprocess_exec(
            # All but those of users: a pod's are the machine's.
            *("bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
            *("--as-pid-1", "--die-with-parent", "--clearenv"),
            *(("--unshare-user", "--uid", str(self.user)) if self.user else ("--cap-add", "ALL")),
            *("--ro-bind", "/usr", "/usr", *image.get(container["image"], ()), "--ro-bind", "/etc", "/etc"),
            *(*links, "--dir", "/app", "--dir", "/tmp", "--proc", "/proc", "--dev", "/dev"),
            *("--setenv", "PATH", "/usr/bin:/bin", *variables),
            *("--chdir", container["workingDir"], *container["command"]),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )

    async def _listed(self, request: web.Request) -> web.Response:
        label = request.query.get("labelSelector")
        items = [
            each for each in self.objects[self._kind(request)].values() if label in each["metadata"]["labels"]
        ]
        return web.json_response({"items": items})

    async def _read(self, request: web.Request) -> web.Response:
        return web.json_response(self.objects[self._kind(request)][request.match_info["name"]])

    async def _patched(self, request: web.Request) -> web.Response:
        kind, name = self._kind(request), request.match_info["name"]
        if name not in self.objects[kind]:
            return web.json_response({"kind": "Status", "reason": "NotFound"}, status=404)
        self.objects[kind][name]["spec"].update((await request.json())["spec"])
        return web.json_response(self.objects[kind][name])

    async def _deleted(self, request: web.Request) -> web.Response:
        self.delete(self._kind(request), request.match_info["name"])
        return web.json_response({"kind": "Status"})

    def delete(self, kind: str, name: str) -> None:
        """Remove an object, and what belongs to it."""
        gone = self.objects[kind].pop(name, None)
        if name in self.processes:
            self._kill(name)
        for pod, body in list(self.objects["pods"].items()):
            owners = [owner["uid"] for owner in body["metadata"].get("ownerReferences", [])]
            if gone is not None and gone["metadata"]["uid"] in owners:
                self.delete("pods", pod)

    def _kill(self, name: str) -> None:
        if self.processes[name].returncode is None:
            self.processes[name].kill()

    async def _attached(self, request: web.Request) -> web.WebSocketResponse:
        assert {request.query[key] for key in ("stdin", "stdout", "stderr")} == {"True"}
        process = self.processes[request.match_info["name"]]
        held = web.WebSocketResponse(protocols=("v4.channel.k8s.io",), max_msg_size=1 << 26)
        await held.prepare(request)
        assert process.stdin is not None

        async def written() -> None:
            assert process.stdout is not None
            while data := await process.stdout.read(1 << 16):
                await held.send_bytes(b"\1" + data)
            await held.close()

        writing = asyncio.create_task(written())
        async for message in held:
            assert message.type is WSMsgType.BINARY
            assert message.data[0] == 0
            process.stdin.write(message.data[1:])
        process.stdin.close()  # stdinOnce
        await asyncio.wait([writing])
        return held

    async def end(self) -> None:
        for name in self.processes:
            self._kill(name)
        await asyncio.gather(*(process.wait() for process in self.processes.values()))


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[tuple[Cluster, Path]]:
    """A cluster, and the file that leads to it."""
    there = Cluster()
    runner = web.AppRunner(there.application())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    config = folder / "kubeconfig"
    named = {"name": "here", "cluster": {"server": f"http://127.0.0.1:{port}"}}
    context = {"name": "here", "context": {"cluster": "here", "user": "me", "namespace": "boxes"}}
    users = [{"name": "me", "user": {"token": "secret"}}]
    config.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "clusters": [named],
                "contexts": [context],
                "users": users,
            }
        )
    )
    try:
        yield there, config
    finally:
        await there.end()
        await runner.cleanup()
