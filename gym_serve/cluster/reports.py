"""What replicas tell of themselves to whoever asks them: their load, their counts, their episodes.

A replica answers such a call at once, also when its queue is full. Each has some seconds; one that does not
answer holds up nobody.

State of every server of the running application, for ``/health``.

A server is ready if its calls are answered now: at least one replica runs, or the deployment is scaled to
zero and starts one on a call. The replicas count, not the last deploy: if Serve cannot build a new version of
the file, it lists no deployments of the application, and those of the previous version are asked directly.

An application of Serve on its way to running: started, waited for, and changed while it runs.

`NodeLogs`: reads the logs of servers on all machines of the connected cluster.

Each machine reads its own files, by a task of Ray; that of this process needs none. No dashboard is needed.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.schema import ApplicationStatus
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gym_serve.assembly import GONE
from gym_serve.cluster.autoscaling import CALLS, SESSIONS
from gym_serve.cluster.routing.admission import Admission
from gym_serve.cluster.routing.rpc import (
    Address,
    Channel,
    ConnectError,
    ConnectionLostError,
    ConnectTimeoutError,
    Directory,
    NotDeliveredError,
    QueueFullError,
)
from gym_serve.cluster.serve_compat import (
    RunningVersion,
    live_nodes,
    logs_directory,
    node_address,
    running_version,
)
from gym_serve.cluster.starting import START_LOG
from gym_serve.gateway.host import PRESSURE, reached
from gym_serve.graph.spec import Node
from gym_serve.observe.logs import Level, Record, read_log
from gym_serve.servers.transport import Call, Reply
from gym_serve.types.errors import DeadlineExceeded, NotFound, Unavailable
from gym_serve.types.requests import JSON

_SECONDS = 2.0  # for a replica to answer about its episodes
_REPORT_SECONDS = 5.0


def report(
    node: Node,
    admission: Admission,
    *,
    sessions: int,
    boxes: Mapping[str, int] | None,
    limit: int,
    draining: bool,
    loads: Mapping[str, float],
) -> JSON:
    """The counts of one replica: of its calls, of live sessions and boxes, and the limit of calls at the same
    time."""
    scaling = node.options.autoscaling
    target = None if scaling is None else scaling.sessions or scaling.target_ongoing_requests
    by_sessions = scaling is not None and scaling.sessions is not None and node.kind == "resources"
    return {
        "draining": draining,
        "running": admission.running,
        "waiting": admission.waiting,
        "limit": limit if target is None or by_sessions else min(limit, target),
        "sessions": sessions,
        "boxes": boxes,
        "target_sessions": target if by_sessions else None,
        "max_replicas": 0 if scaling is None else scaling.max_replicas,
        "autoscaling": None
        if scaling is None
        else {
            "measure": "sessions" if scaling.sessions else "calls",
            "load": loads[SESSIONS if scaling.sessions else CALLS],
            "target": target or 1.0,
            "min": scaling.fewest,
            "max": scaling.max_replicas,
        },
        "cpu": admission.meter.cpu(),
        "refused": admission.meter.refused(),
    }


async def reports_of(application: str, servers: Iterable[str], op: str = PRESSURE) -> dict[str, list[JSON]]:
    """What all replicas answer, by server; a replica that does not answer is left out."""
    names = list(servers)
    reports = await asyncio.gather(*(_server(application, name, Call(op, b"")) for name in names))
    return dict(zip(names, reports, strict=True))


async def _server(application: str, server: str, call: Call) -> list[JSON]:
    addresses = (await Directory(application, server).all()).values()
    answers = await asyncio.gather(*(_replica(address, call) for address in addresses))
    return [report for report in answers if report is not None]


async def _replica(address: Address, call: Call) -> JSON | None:
    try:
        async with Channel.opened(address) as channel:
            reply = await asyncio.wait_for(channel.call(call), _REPORT_SECONDS)
    except (ConnectError, NotDeliveredError, QueueFullError, ConnectionLostError, asyncio.TimeoutError):
        return None
    counts: JSON = reply.json()
    return counts


class AgentReplicas:
    """The replicas of an application that may run agents."""

    def __init__(self, application: str, nodes: Mapping[str, Node]) -> None:
        self._application = application
        agents = {name for name, node in nodes.items() if node.kind == "agent"}
        # A server may have the agents that it calls in its own replicas.
        self._servers = [
            name
            for name, node in nodes.items()
            if node.url is None and (name in agents or agents & set(node.references.values()))
        ]

    async def ask(self, call: Call) -> tuple[list[tuple[str, JSON]], list[str]]:
        replicas = await asyncio.gather(*map(self._addresses, self._servers))
        places = {f"{server}.{replica}": a for server, all in replicas for replica, a in all.items()}
        answers = await asyncio.gather(*(self._answer(address, call) for address in places.values()))
        named = list(zip(places, answers, strict=True))
        reports = [(name, reply.json()) for name, reply in named if reply.status]
        return reports, [name for name, reply in named if reply == _SILENT]

    async def tell(self, name: str, call: Call) -> Reply:
        server, _, replica = name.partition(".")
        address = await self._directory(server).get(replica) if server in self._servers else None
        reply = _LEFT if address is None else await self._answer(address, call)
        if reply == _LEFT:
            raise NotFound(GONE)
        if reply == _SILENT:
            problem = f"a replica of {server} did not answer within {_SECONDS:g} s"
            raise DeadlineExceeded(problem, server=server)
        return reply

    def _directory(self, server: str) -> Directory:
        return Directory(self._application, server)

    async def _addresses(self, server: str) -> tuple[str, dict[str, Address]]:
        return server, await self._directory(server).all()

    async def _answer(self, address: Address, call: Call) -> Reply:
        try:
            return await asyncio.wait_for(self._call(address, call), _SECONDS)
        except (asyncio.TimeoutError, ConnectTimeoutError):
            return _SILENT
        except (ConnectError, NotDeliveredError, ConnectionLostError):
            return _LEFT

    async def _call(self, address: Address, call: Call) -> Reply:
        async with Channel.opened(address) as channel:
            return await channel.call(call)


_SILENT, _LEFT = Reply(0, b"silent"), Reply(0, b"left")


_MESSAGE = 1000  # characters; the end of a traceback says most
_UNKNOWN = "no replica runs, and Serve starts none: the last deploy failed, or the graph is being taken down"


async def health(nodes: Mapping[str, Node]) -> dict[str, dict[str, Any]]:
    """By server: its state (``ready``, ``starting``, ``unhealthy``, ``unreachable``) and replicas."""
    remote = {name: node for name, node in nodes.items() if node.url is not None}
    own = nodes.keys() - remote.keys()
    own_health, elsewhere = await asyncio.gather(_own(own), reached(remote))
    return {name: elsewhere[name] if name in elsewhere else own_health[name] for name in nodes}


async def _own(servers: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The servers of this application, as Serve sees them, else by asking their replicas."""
    application = serve.get_replica_context().app_name
    deployments = await asyncio.to_thread(_deployments, application)
    states = {name: _state(deployments[name]) for name in servers if name in deployments}
    reports = await reports_of(application, [name for name in servers if name not in deployments])
    for name, replicas in reports.items():
        if running := sum(not replica["draining"] for replica in replicas):
            states[name] = {"state": "ready", "replicas": {"RUNNING": running}}
        else:
            states[name] = {"state": "unhealthy", "replicas": {}, "message": _UNKNOWN}
    return states


def _deployments(application: str) -> Mapping[str, Any]:
    """Serve's view of an application; empty while it is taken down, and after a file that cannot be built."""
    status = serve.status().applications.get(application)
    return status.deployments if status is not None else {}


def _state(deployment: Any) -> dict[str, Any]:
    replicas = {str(getattr(state, "value", state)): n for state, n in deployment.replica_states.items()}
    status = str(getattr(deployment.status, "value", deployment.status))
    if replicas.get("RUNNING", 0) > 0 or (status == "HEALTHY" and not replicas):
        state = "ready"
    else:
        state = "unhealthy" if status in ("UNHEALTHY", "DEPLOY_FAILED") else "starting"
    message = {"message": deployment.message[-_MESSAGE:]} if deployment.message else {}
    return {"state": state, "replicas": replicas, **message}


# An exception in a traceback stands at the beginning of a line, after frames, which are indented.
_EXCEPTION = re.compile(r"\n[ ]+[^\n]*\n(?=[^ \n])")


def reason(message: str) -> str:
    """Why a deploy failed, in one line: the exception, if the message ends in a traceback."""
    first, *problems = _EXCEPTION.split(message.strip())[-1].splitlines() or [""]
    return f"{first} {'; '.join(line.strip().removeprefix('- ') for line in problems)}".strip()


_log = logging.getLogger(START_LOG)
_POLL_SECONDS = 0.1


def start(name: str, deploy: Callable[[], object]) -> None:
    """Deploy an application, and wait until all of its servers run; or raise `Unavailable`, with the reason.
    (`serve.run` looks once a second, and says nothing.)"""
    try:
        deploy()
        _wait(name)
    except (RuntimeError, TimeoutError, RayError) as error:
        reasons = "; ".join(_reasons(name)) or " ".join(str(error).split())[:500]
        raise Unavailable(f"the graph {name!r} did not start: {reasons}") from error


def reconfigure(name: str, server: str, changes: dict[str, Any]) -> None:
    """Change settings of a running server; its replicas keep running (Serve's ``user_config``).

    Settings that were changed before stay changed: a replica that starts later knows only this
    ``user_config``. Raises `NotFound` if no such application runs, `Unavailable` if the settings do not fit.
    """
    start(name, the_running(name).configured(server, changes).restore)


def the_running(name: str) -> RunningVersion:
    """What runs as an application now. Raises `NotFound`."""
    if (running := running_version(name)) is None:
        raise NotFound(f"no application {name!r} runs on this cluster")
    return running


def _wait(name: str) -> None:
    reported: list[str] = []
    while True:
        application = serve.status().applications.get(name)
        if application is None:
            raise RuntimeError(f"{name} was deleted while it started")
        if application.status == ApplicationStatus.RUNNING:
            return
        if application.status == ApplicationStatus.DEPLOY_FAILED:
            raise RuntimeError(application.message)
        states = {server: deployment.status.value for server, deployment in application.deployments.items()}
        waiting = sorted(server for server, state in states.items() if state != "HEALTHY")
        if waiting and waiting != reported:
            ready = len(states) - len(waiting)
            _log.info("Waiting for %s (%s of %s ready)…", ", ".join(waiting), ready, len(states))
            reported = waiting
        time.sleep(_POLL_SECONDS)


def _reasons(name: str) -> Iterator[str]:
    application = serve.status().applications.get(name)
    for server, deployment in application.deployments.items() if application else ():
        if deployment.status.value in ("DEPLOY_FAILED", "UNHEALTHY"):
            yield f"{server}: {reason(deployment.message)}"


class NodeLogs:
    """The logs of some servers; each `read` goes on where the last one ended."""

    def __init__(
        self, servers: list[tuple[str, str]], *, level: Level = "debug", rollout: str | None = None
    ) -> None:
        self.found = False
        self._servers = servers
        self._only: dict[str, Any] = {"level": level, "rollout": rollout}
        self._positions: dict[str, dict[str, int]] = {}

    def read(self, last: int | None = None) -> list[Record]:
        here = node_address()
        requests: dict[str, Any] = {}
        answers: dict[str, tuple[list[Record], dict[str, int]]] = {}
        for address, node in {n["NodeManagerAddress"]: n["NodeID"] for n in live_nodes()}.items():
            arguments = (self._servers, self._positions.get(address, {}), {**self._only, "last": last})
            if address == here:
                answers[address] = _read(*arguments)
            else:
                there = NodeAffinitySchedulingStrategy(node, soft=False)
                task = ray.remote(num_cpus=0)(_read).options(scheduling_strategy=there)
                requests[address] = task.remote(*arguments)
        for address, answer in requests.items():
            try:
                answers[address] = ray.get(answer)
            except ray.exceptions.RayError:  # a node that is going takes its files along
                continue
        records_found: list[Record] = []
        for address, (records, positions) in answers.items():
            self._positions[address] = positions
            self.found = self.found or bool(positions)
            records_found += records
        return sorted(records_found, key=lambda record: record.time)


def _read(
    servers: list[tuple[str, str]], positions: Mapping[str, int], only: Mapping[str, Any]
) -> tuple[list[Record], dict[str, int]]:
    return read_log(logs_directory() / "serve", servers, positions, **only)
