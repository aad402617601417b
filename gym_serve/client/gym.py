"""`Gym`: one object that a trainer or an evaluation asks for rollouts.

    with Gym.from_graph("graphs/math.yaml") as gym:
        async for rollout in gym.rollouts(rows, repeats=8): ...

It deploys a graph, joins a running one, or speaks to one over HTTP; the rest is the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self, Unpack

from gym_serve.client import loop
from gym_serve.client.awaitables import awaitables
from gym_serve.client.driver import Driver, RolloutOptions
from gym_serve.client.model_control import ModelControl
from gym_serve.client.pages import page
from gym_serve.graph import GraphSource, GraphSpec, load_graph, resolve
from gym_serve.graph.local import LocalGraph
from gym_serve.graph.spec import Graph
from gym_serve.rollouts import (
    Budget,
    Collection,
    Group,
    GroupOptions,
    Order,
    Progress,
    Report,
    Rows,
    Spending,
    collect,
    expand,
    groups,
    jobs_of,
    prices_of,
    refuse,
    stream,
)
from gym_serve.routing.http import HttpEdge
from gym_serve.servers.edge import Call, Edge, encode
from gym_serve.types.errors import BadRequest, InvalidRequest, NotFound, error_from_body
from gym_serve.types.requests import JSON

__all__ = ["Gym"]


class Gym(ModelControl):
    """A running graph. Construct it with `from_graph`, `attach` or `connect`.

    Use it as a context manager (``with`` or ``async with``), or call `shutdown`.
    """

    def __init__(
        self,
        *,
        name: str,
        url: str,
        public: Mapping[str, Any],
        edge: Callable[[str], Edge],
        default_agent: str | None = None,
        auth_token: str | None = None,
        graph: Graph | None = None,
        local: LocalGraph | None = None,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.url = url
        self.graph = dict(public)
        self._default_agent = default_agent or _only(self.graph.get("agents") or {})
        self._new_edge = edge
        self._edges: dict[str, Edge] = {}
        self._driver = Driver(self.graph, self._default_agent, self._edge, graph, name)
        self._auth_token = auth_token
        self._resolved = graph
        self._changed = {}
        self._local = local
        self._leave = leave

    # Where it comes from

    @classmethod
    def from_graph(
        cls,
        graph: str | Path | Mapping[str, Any] | GraphSpec,
        address: str | None = None,
        overrides: Mapping[str, Any] | Sequence[str] | None = None,
        name: str | None = None,
        application: str | None = None,
        *,
        ray: bool = True,
    ) -> Self:
        """Deploy a graph and wait until it is ready; a running one with the same file is joined.

        Args:
            graph: path of a graph file, or what stands under its ``args``.
            address: None for this process's Ray or else a new local one; ``"auto"`` or
                ``"host:port"`` for a running cluster.
            overrides: values by path, e.g. ``{"agents.math_agent.max_steps": 3}``.
            name: name of the application; the file's by default. Several Gyms side by side on one
                cluster need a name each.
            application: which graph of the file, if it has several ``applications``.
            ray: False runs the graph in this process, without Ray: it starts within a second and gives the
                same trajectories. It has one instance of each server, no GPUs and no HTTP routes.

        Raises:
            GraphError: the graph has problems; all of them. Without Ray, also: it needs a cluster.
            InvalidRequest: ``address`` is given beside ``ray=False``.
            Conflict: another graph runs under this name.
            ClusterMismatch: the cluster runs another version of Ray or Python.
            Unavailable: no cluster at the address, or the graph did not start.
            Unauthorized: the cluster asks for a token that this process does not send.
        """
        source = load_graph(graph, overrides=overrides or {}, application=application)
        base = Path(source.path).parent if source.path else None
        resolved = resolve(
            source.spec, source=source.path, base_dir=base, literal_secrets=source.path is None
        )
        if not ray:
            if address is not None:
                raise InvalidRequest(f"`address` must be left out with ray=False, got {address!r}")
            return cls._in_process(_named(source, name).name, resolved)
        from gym_serve.client import deployed

        return cls(**deployed.deploy(_named(source, name), resolved, address))

    @classmethod
    def _in_process(cls, name: str, graph: Graph) -> Self:
        local = LocalGraph(graph)
        loop.wait(local.start())
        return cls(
            name=name,
            url="",
            public=graph.public(),
            edge=local.edge,
            default_agent=graph.default_agent,
            graph=graph,
            local=local,
            leave=lambda: loop.wait(local.stop()),
        )

    @classmethod
    def attach(cls, name: str, address: str | None = "auto") -> Self:
        """Join a graph that runs on a cluster under ``name``; `shutdown` leaves it running.

        Raises:
            NotFound: no such application.
        """
        from gym_serve.client import deployed

        return cls(**deployed.attach(name, address))

    @classmethod
    def connect(cls, url: str, auth_token: str | None = None) -> Self:
        """Speak to a graph over HTTP: another cluster, or no Ray at all on this side.

        Args:
            url: its address with the route prefix, e.g. ``http://host:8000/math``.
            auth_token: the graph's bearer token, if it has one.
        """
        url = url.rstrip("/")
        headers = {"authorization": f"Bearer {auth_token}"} if auth_token else {}
        public = page(f"{url}/graph", headers)
        return cls(
            name=url,
            url=url,
            public=public,
            edge=lambda server: HttpEdge(server, f"{url}/{server}", headers),
            auth_token=auth_token,
        )

    # Rollouts

    async def rollouts(
        self, rows: Rows, *, order: Order = "completion", **options: Unpack[RolloutOptions]
    ) -> AsyncIterator[JSON]:
        """Rollouts of rows.

        Args:
            rows: rows, drawn as places become free, or the path of a JSONL file (plain, ``.gz`` or
                ``.zst``), which is checked as a whole before anything runs.
            order: ``completion``: as they complete; ``row``: as the rows come, each with its
                repeats; ``group``: the rollouts of a row together, as they complete.
            **options: see `RolloutOptions`.

        Yields:
            row + response + reward + the verifier's fields (contracts section 6); a failed rollout
            has ``mask_sample`` and ``failure`` and raises nothing.

        Raises:
            InvalidRequest: rows that cannot be used; of a file, all of them.
        """
        async with aclosing(self._pairs(rows, order, options)) as pairs:
            async for _, rollout in pairs:
                yield rollout

    def run(self, rows: Rows, **options: Unpack[RolloutOptions]) -> list[JSON]:
        """The same as a list, in the order of the rows, blocking.

        Raises:
            RuntimeError: called inside an event loop; iterate over `rollouts` there.
        """

        async def gathered() -> list[JSON]:
            return [rollout async for _, rollout in self._pairs(rows, "row", options)]

        return asyncio.run(gathered())

    def run_examples(
        self, examples: Sequence[JSON], **options: Unpack[RolloutOptions]
    ) -> Iterator[Awaitable[tuple[JSON, JSON]]]:
        """NeMo Gym's interface: awaitables of ``(row, result)``, in the order of completion.

        Call it inside a running event loop; there is one for each rollout.
        """
        groups = list(expand(examples, self._driver.expansion(options), problem=refuse))
        pairs = self._stream(iter(groups), "completion", options)
        return awaitables(pairs, sum(map(len, groups)))

    async def groups(
        self,
        rows: Rows,
        *,
        size: int,
        oversample: int = 0,
        quorum: int | None = None,
        deadline: float | None = None,
        spending: Spending | None = None,
        **options: Unpack[RolloutOptions],
    ) -> AsyncIterator[Group]:
        """Groups of rollouts of one row each (GRPO), as they are settled.

        A group is settled once ``size`` rollouts are scored; what still runs of it is cancelled,
        down to the model's request. One that cannot be filled says why. Where the environment has
        ``compare``, it gives the rewards.

        Args:
            rows: as for `rollouts`.
            size: rollouts wanted per row.
            oversample: rollouts started beyond that.
            quorum: the fewest rollouts that are of use; by default ``size``.
            deadline: seconds from a group's first start, after which it is settled with what it has.
            spending: counts what rollouts and comparisons use; of `spending`. Once its budget is spent
                nothing more is started, and the iteration ends with the groups that run by then.
            **options: see `RolloutOptions`; without ``repeats``.
        """
        if "repeats" in options:
            raise InvalidRequest("repeats: a group's size and oversample say how many rollouts a row gets")
        wanted = GroupOptions(size, oversample, quorum, deadline)
        engine = self._driver.engine_options(options, attempts=3)
        options["repeats"] = size + oversample
        jobs = jobs_of(await self._driver.groups(rows, options))
        settled = groups(jobs, self._driver.run, wanted, engine, self._driver.compare, spending=spending)
        async with aclosing(settled) as found:
            async for group in found:
                yield group

    def spending(self, budget: Budget | None = None) -> Spending:
        """A count of what model calls use and cost, at this graph's prices, for any number of `groups` calls.

        Args:
            budget: its limit, for all of them together.

        Raises:
            InvalidRequest: the budget cannot be kept; see `Budget.check`.
        """
        prices, budget = prices_of(self.graph), budget or Budget()
        budget.check(prices)
        return Spending(prices, budget)

    async def collect(
        self,
        rows: Rows,
        output: str | Path,
        *,
        resume: bool = False,
        progress: Callable[[Progress], None] = lambda progress: None,
        stop: asyncio.Event | None = None,
        budget: Budget | None = None,
        **options: Unpack[RolloutOptions],
    ) -> Report:
        """Collect rollouts into files, so that nothing is lost and nothing is done twice.

        Where an environment has ``compare``, the rollouts of each row are compared once all have ended.

        Args:
            rows: as for `rollouts`; all of them are checked before anything runs.
            output: ``out.jsonl``, ``.jsonl.gz`` or ``.jsonl.zst``; failures, inputs and metrics lie
                beside it (contracts section 6).
            resume: go on with the run that ``output`` holds, if it holds one.
            progress: told of the counts whenever results come in.
            stop: once set, nothing more is started, and what runs may end.
            budget: what the run may use; once it is spent, as if ``stop`` was set.
            **options: see `RolloutOptions`.

        Raises:
            InvalidRequest, Conflict, Unavailable, BadRequest: see `gym_serve.rollouts.collect`.
        """
        driver = self._driver
        collection = Collection(
            run=driver.run,
            expansion=driver.expansion(options),
            engine=driver.engine_options(options, attempts=3),
            check=driver.check,
            graph=driver.described(),
            comparing=driver.comparing,
            aggregate=driver.aggregate,
            spec_of=driver.spec_of,
            prices=prices_of(self.graph),
            budget=budget or Budget(),
        )
        skip_invalid = options.get("skip_invalid", False)
        return await collect(
            rows, output, collection, resume=resume, skip_invalid=skip_invalid, progress=progress, stop=stop
        )

    async def _pairs(
        self, rows: Rows, order: Order, options: RolloutOptions
    ) -> AsyncGenerator[tuple[JSON, JSON], None]:
        groups = await self._driver.groups(rows, options)
        async with aclosing(self._stream(groups, order, options)) as pairs:
            async for pair in pairs:
                yield pair

    def _stream(
        self, groups: Iterator[list[JSON]], order: Order, options: RolloutOptions
    ) -> AsyncGenerator[tuple[JSON, JSON], None]:
        engine = self._driver.engine_options(options, attempts=1)
        return stream(jobs_of(groups), self._driver.run, engine, order)

    # The graph

    def health(self) -> JSON:
        """State of every server, by name (the ``servers`` of ``/health``)."""
        if self._local is not None:
            return loop.wait(self._local.health())
        answer = self._page("health", fine=(200, 503))
        if not isinstance(states := answer.get("servers"), dict):
            raise error_from_body(503, answer)
        return states

    def pressure(self) -> JSON:
        """How busy the graph is: the server that limits it, and how many rollouts it can take.

        ``limiting`` names the server with the highest ``load`` (1: as much to do as it can), ``because`` says
        of what, and ``concurrency`` is what suits it; None while nothing runs. ``servers`` has the counts.
        """
        self._needs_cluster("pressure")
        return self._page("pressure")

    def handle(self, server: str) -> Any:
        """The Serve handle of a server, for code that composes deployments.

        Raises:
            NotFound: no such server.
            BadRequest: this Gym speaks to the graph over HTTP, or runs it without Ray.
        """
        self._check(server)
        self._needs_cluster("handle")
        handle = getattr(self._new_edge(server), "handle", None)
        if handle is None:
            raise BadRequest(f"{server} is reached over HTTP, which has no handle")
        return handle

    def call(self, server: str, op: str, body: Any = None, *, timeout: float | None = None) -> Any:
        """One call to a server, blocking; its decoded answer.

        Args:
            server: its name.
            op: the operation, e.g. ``verify``, ``tools/{name}`` or ``v1/responses``.
            body: what JSON can hold; None for none.
            timeout: seconds to wait; None for no limit.

        Raises:
            NotFound: no such server.
            DeadlineExceeded: the time is over.
            GymError: any other failure of the server or of the edge.
        """
        content = b"" if body is None else encode(body)
        return loop.wait(self._edge(server).call(Call(op, content, timeout=timeout))).json()

    def shutdown(self) -> None:
        """Take the graph down, if this Gym deployed it, and leave Ray as it was found."""
        leave, self._leave = self._leave, lambda: None
        try:
            loop.wait(self._close_edges())
        finally:
            leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    async def _close_edges(self) -> None:
        while self._edges:
            await self._edges.popitem()[1].close()

    def _page(self, path: str, fine: tuple[int, ...] = (200,)) -> JSON:
        headers = {"authorization": f"Bearer {self._auth_token}"} if self._auth_token else {}
        return page(f"{self.url}/{path}", headers, fine)

    def _needs_cluster(self, what: str) -> None:
        if self._local is not None:
            raise BadRequest(f"{what} needs a cluster: {self.name} runs in this process (ray=False)")

    def _check(self, server: str) -> None:
        names = [name for kind in ("models", "resources", "agents") for name in self.graph.get(kind) or {}]
        if server not in names:
            raise NotFound(f"no server {server!r} in {self.name}; it has {', '.join(names)}")

    def _edge(self, server: str) -> Edge:
        if server not in self._edges:
            self._check(server)
            self._edges.setdefault(server, self._new_edge(server))  # of two threads, both have the same one
        return self._edges[server]


def _only(agents: Mapping[str, Any]) -> str | None:
    return next(iter(agents)) if len(agents) == 1 else None


def _named(source: GraphSource, name: str | None) -> GraphSource:
    return source if name is None else replace(source, name=name, route_prefix=f"/{name}")
