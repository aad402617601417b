"""What a node of a graph becomes: its server, its clients and its runner; and `LocalGraph`, all nodes in a
process.

Every server of a local graph has one `ServerRunner`, as in a replica, and is called by the inline
transport; a server of ``type: http`` is called by its URL. So an episode runs the same code as on a
cluster, and gives the same trajectory. A local graph has no replicas, autoscaling or reserved GPUs.

An external harness reaches its model, and the tools of its environment, over HTTP
(`gym_serve.gateway.local`). What only a cluster has is missing:
the load of replicas (``/pressure``, ``/stats``), and changes of the policy
(`gym_serve.gateway.policy_routes`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from gym_serve.gateway.host import LIST, MOST, STOP, reached
from gym_serve.graph.classes import line_of
from gym_serve.graph.spec import Graph, Node
from gym_serve.servers.agent import AgentServer
from gym_serve.servers.base import Server, place_of
from gym_serve.servers.clients import CLIENTS, Client
from gym_serve.servers.live import EndedEpisode, identity
from gym_serve.servers.model import ModelServer
from gym_serve.servers.protocols import PROTOCOLS
from gym_serve.servers.resources import ResourcesServer
from gym_serve.servers.runner import ServerRunner
from gym_serve.servers.transport import Call, Reply, Transport
from gym_serve.transports import InlineTransport
from gym_serve.types.errors import Conflict, GraphError, GymError, NotFound, Stopped, Unavailable
from gym_serve.types.exact import exact_json
from gym_serve.types.requests import JSON

if TYPE_CHECKING:
    from gym_serve.gateway.local import LocalIngress


def constructed(
    node: Node,
    client: Callable[[str], Client],
    *,
    tracing: float | None,
    replica: str | None = None,
    lasting: bool = True,
    **settings: Any,
) -> ServerRunner:
    """The runner of a node's server. It is not started. ``tracing``: see `Graph.tracing`; ``lasting``:
    whether its sessions may outlive this process, on another replica."""
    assert node.cls is not None  # a remote server runs elsewhere
    settings = {**node.connected(client), **settings}
    if replica is not None and issubclass(node.cls, ResourcesServer | ModelServer):
        settings["replica"] = replica
    server = node.cls(name=node.name, **settings)
    if "name" not in vars(server):
        where = f"{place_of(node.cls.__init__)}: {node.cls.__name__}.__init__"
        raise TypeError(f"{where} must call super().__init__() with the settings that it gets")
    if isinstance(server, ResourcesServer) and not lasting:
        server.takes_snapshots = False
    return ServerRunner(server, replica, tracing=tracing)


def client_of(node: Node, transport: Transport) -> Client:
    """The client of a server, for those that call it."""
    return CLIENTS[node.kind](transport)


def remote_transport(node: Node) -> Transport:
    """The transport to a server of ``type: http``, by its URL."""
    # Imported here: its HTTP client takes longer to import than a small graph to start, and few need it.
    from gym_serve.transports import HttpTransport

    return HttpTransport(node.name, str(node.url), node.sent_headers(), node.unavailable_tools)


async def states_of(runners: Iterable[ServerRunner]) -> dict[str, JSON]:
    """State of every server of this process, by name, as in ``/health``."""
    return {runner.server.name: await _state(runner.server) for runner in runners}


async def _state(server: Server) -> JSON:
    try:
        await server.check_health()
    except Exception as error:  # a server may raise anything to say that it is broken
        return {"state": "unhealthy", "message": f"{type(error).__name__}: {error}"}
    return {"state": "ready"}


GONE = "the episode is gone: its caller has left it, or it ended a while ago"

_MOST_QUEUED = 50  # calls in a queue that are read
_OPERATIONS = frozenset({"run", *PROTOCOLS})  # of agents, each of which is an episode
_QUEUED = "q"  # begins the number of a call that waits


class QueuedCall(NamedTuple):
    """A call that waits. ``number``: of all calls that have waited there; ``call``: the call; ``since``:
    `time.monotonic` moment from which it waits."""

    number: int
    call: Call
    since: float


class Queue(Protocol):
    """The calls that wait for their turn at a replica."""

    def queued(self) -> Iterable[QueuedCall]: ...

    def refuse(self, number: int, error: GymError) -> bool:
        """End one of them with an error; whether it waits."""
        ...


async def answer_here(call: Call, runners: Sequence[ServerRunner], queue: Queue | None) -> Reply:
    """Answer `LIST`, `LOOK` or `STOP` for the agents of this process."""
    agents = [runner.server for runner in runners if isinstance(runner.server, AgentServer)]
    try:
        if call.op == LIST:
            queued = [] if queue is None else [c for c in queue.queued() if c.call.op in _OPERATIONS]
            return Reply.of(_listed(agents, queued if agents else []))
        body = exact_json(call.body)
        if call.op == STOP:
            return Reply.of(_stopped(agents, queue, body["number"]))
        return Reply.of(await _looked(agents, body["number"], body["known"]))
    except GymError as error:
        return Reply.failed(error)


def _listed(agents: Sequence[AgentServer], queued: Sequence[QueuedCall]) -> JSON:
    running = [
        {"number": str(live.number), "agent": agent.name, **live.summary()}
        for agent in agents
        for live in agent.live.running(MOST)
    ]
    ended = [
        {"number": str(one.number), "agent": agent.name, **one.summary()}
        for agent in agents
        for one in agent.live.ended()
    ]
    waiting = [_waits(agents[-1].name, one) for one in queued[:_MOST_QUEUED]]
    return {
        "running": sum(len(agent.live) for agent in agents),
        "queued": len(queued),
        "episodes": running + waiting,
        "ended": ended,
    }


def _waits(agent: str, queued: QueuedCall) -> JSON:
    try:
        row = exact_json(queued.call.body)
    except ValueError:  # the agent says what is wrong with it
        row = {}
    seconds = time.monotonic() - queued.since
    return {
        "number": f"{_QUEUED}{queued.number}",
        "agent": agent,
        **identity(row if isinstance(row, dict) else {}),
        "state": "queued",
        "tools": [],
        "state_seconds": seconds,
        "seconds": seconds,
        "turns": 0,
        "input_tokens": 0,
        "output_tokens": 0,
    }


def _stopped(agents: Sequence[AgentServer], queue: Queue | None, number: str) -> JSON:
    if number.startswith(_QUEUED):
        refusal = Stopped("a person stopped the episode while it waited for its turn")
        if queue is not None and queue.refuse(_number(number[1:]), refusal):
            return {"stopped": True}
        raise Conflict("the episode waits no more; look for it among those that run")
    for agent in agents:
        if (episode := agent.live.get(_number(number))) is not None:
            if isinstance(episode, EndedEpisode):
                raise Conflict("the episode has ended already")
            episode.stop()
            return {"stopped": True}
    raise NotFound(GONE)


async def _looked(agents: Sequence[AgentServer], number: str, known: str | None) -> JSON:
    for agent in agents:
        episode = agent.live.get(_number(number))
        if episode is None:
            continue
        summary = {"agent": agent.name, **episode.summary()}
        if isinstance(episode, EndedEpisode):
            return {**summary, "version": "ended", "rollout": exact_json(episode.body)}
        if (version := episode.version) == known:
            return {**summary, "version": version}
        return {**summary, "version": version, "rollout": await episode.so_far(agent.name)}
    raise NotFound(GONE)


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else 0


class ThisProcess:
    """The `Host` of a graph that runs in this process."""

    def __init__(self, graph: Graph, runners: Iterable[ServerRunner]) -> None:
        self._runners = list(runners)
        self._remote = {name: node for name, node in graph.nodes.items() if node.url is not None}

    async def states(self) -> dict[str, JSON]:
        return {**await states_of(self._runners), **await reached(self._remote)}

    async def reports(self, op: str) -> dict[str, list[JSON]]:
        raise NotFound(f"/{op}: only replicas tell their load, and a graph without Ray has none")

    async def ask(self, call: Call) -> tuple[list[tuple[str, JSON]], list[str]]:
        return [("local", (await answer_here(call, self._runners, None)).json())], []

    async def tell(self, name: str, call: Call) -> Reply:
        if name != "local":
            raise NotFound(GONE)
        return await answer_here(call, self._runners, None)

    def leaving(self) -> bool:
        return False

    async def updates(self, model: str) -> int | None:
        return None

    def steering(self, model: str) -> NoReturn:
        raise NotFound(
            f"only a graph on a Ray cluster lets its trainer change {model} over HTTP, and this one runs "
            "without Ray; call `pause`, `resume` or `update_weights` of its Gym, in its process"
        )


_CLUSTER_ONLY = ("num_gpus", "accelerator_type", "resources", "runtime_env", "placement_group_bundles")
"""Options that only a cluster can fulfil. The others set the number and size of replicas."""


class LocalGraph:
    """Runs a graph in this process. ``graph``: the graph; ``around``: wraps the transport to each server,
    e.g. to watch the calls. Raises GraphError: options of servers need a cluster; names all of them."""

    def __init__(
        self, graph: Graph, around: Callable[[Transport], Transport] = lambda transport: transport
    ) -> None:
        problems = [p for node in graph.nodes.values() if (p := _needs_cluster(node)) is not None]
        if problems:
            raise GraphError(problems)
        self._graph = graph
        self._runners: dict[str, ServerRunner] = {}
        self._transports: dict[str, Transport] = {}
        self._started: list[ServerRunner] = []
        self._ingress: LocalIngress | None = None  # where an agent needs one
        for name in graph.order():  # each after those that it calls
            self._transports[name] = around(self._construct(graph.nodes[name]))

    def transport(self, server: str) -> Transport:
        return self._transports[server]

    @property
    def runners(self) -> list[ServerRunner]:
        return list(self._runners.values())

    def server(self, name: str) -> Server | None:
        """A server of this process, by its name; None for one that is reached by its URL."""
        runner = self._runners.get(name)
        return None if runner is None else runner.server

    async def start(self) -> None:
        """Start the servers, each after those that it calls. Raises GymError: a server did not start; those
        before it are stopped."""
        try:
            for name, runner in self._runners.items():
                try:
                    await runner.start()
                except GymError:
                    raise
                except (Exception, SystemExit) as error:  # an author's code
                    raise _not_started(name, error) from error
                self._started.append(runner)
            if self._ingress is not None:
                host = ThisProcess(self._graph, self.runners)
                await self._ingress.start(self._graph, self._transports, host)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop the servers, each before those that it calls, and close the connections."""
        if self._ingress is not None:
            await self._ingress.stop()
        while self._started:
            await self._started.pop().stop()
        for transport in self._transports.values():
            await transport.close()

    def observe(self) -> None:
        """Set the gauges of all servers; see `gym_serve.observe.catalogue`."""
        for runner in self._runners.values():
            runner.observe()

    async def health(self) -> JSON:
        elsewhere = {"state": "unknown", "message": "it runs elsewhere; ask it there"}
        states = await states_of(self._runners.values())
        return {name: states.get(name, elsewhere) for name in self._transports}

    def _construct(self, node: Node) -> Transport:
        if node.cls is None:
            return remote_transport(node)
        settings = self._gateway() if "gateway_url" in node.cls.Config.model_fields else {}
        try:
            runner = constructed(node, self._client, tracing=self._graph.tracing, lasting=False, **settings)
        except GymError:
            raise
        except (Exception, SystemExit) as error:  # an author's code
            raise _not_started(node.name, error) from error
        self._runners[node.name] = runner
        return InlineTransport(runner)

    def _gateway(self) -> JSON:
        """Settings of an agent whose harness calls this graph over HTTP: an address that answers here."""
        if self._ingress is None:
            # Imported here: few graphs need it, and replicas, which never do, would start later.
            from gym_serve.gateway.local import LocalIngress

            self._ingress = LocalIngress()
        return {"gateway_url": self._ingress.url, "gateway_token": self._ingress.token}

    def _client(self, target: str) -> Client:
        return client_of(self._graph.nodes[target], self._transports[target])


def _not_started(server: str, error: BaseException) -> Unavailable:
    message = f"{server} did not start: {type(error).__name__}: {error}{line_of(error)}"
    return Unavailable(message, server=server)


def _needs_cluster(node: Node) -> str | None:
    chosen = node.options.model_dump(exclude_none=True)
    if node.cls is not None:
        chosen |= node.cls.deployment_options(node.settings, chosen)
    options = [name for name in _CLUSTER_ONLY if chosen.get(name)]
    if not options:
        return None
    return f"{node.name}: {', '.join(options)} needs a cluster; run this graph on Ray (without ray=False)"
