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
from gym_serve.client.connection import Connection, HttpConnection, LocalConnection
from gym_serve.client.rollout_client import RolloutClient, RolloutOptions
from gym_serve.graph import GraphSource, GraphSpec, load_graph, resolve
from gym_serve.graph.spec import SECTIONS
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
    raise_problem,
    stream,
)
from gym_serve.servers.model import PauseMode
from gym_serve.servers.transport import Call, Transport, encode
from gym_serve.types.errors import BadRequest, InvalidRequest, NotFound
from gym_serve.types.requests import JSON
from gym_serve.types.rows import Rollout

__all__ = ["Gym"]


class Gym:
    """A running graph. Construct it with `from_graph`, `attach` or `connect`.

    Use it as a context manager (``with`` or ``async with``), or call `shutdown`.
    """

    def __init__(self, connection: Connection) -> None:
        self.name = connection.name
        self.url = connection.url
        self.graph = connection.public
        self._connection = connection
        self._default_agent = connection.default_agent or _only(self.graph.get("agents") or {})
        self._transports: dict[str, Transport] = {}
        self._driver = RolloutClient(
            self.graph, self._default_agent, self._transport, connection.graph, self.name
        )

    def __repr__(self) -> str:
        servers = [name for section in SECTIONS for name in self.graph.get(section) or {}]
        return f"<Gym {self.name!r}: {self._connection.kind}, servers {', '.join(servers)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process attaches to the same graph, and leaves it running."""
        return _joined, (self._connection.again(),)

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
            return cls(LocalConnection(_named(source, name).name, resolved))
        from gym_serve.client import deployed

        return cls(deployed.deploy(_named(source, name), resolved, address))

    @classmethod
    def attach(cls, name: str, address: str | None = "auto") -> Self:
        """Join a graph that runs on a cluster under ``name``; `shutdown` leaves it running.

        Raises:
            NotFound: no such application.
        """
        from gym_serve.client import deployed

        return cls(deployed.attach(name, address))

    @classmethod
    def connect(cls, url: str, auth_token: str | None = None) -> Self:
        """Speak to a graph over HTTP: another cluster, or no Ray at all on this side.

        Args:
            url: its address with the route prefix, e.g. ``http://host:8000/math``.
            auth_token: the graph's bearer token, if it has one.
        """
        return cls(HttpConnection(url, auth_token))

    # Rollouts

    async def rollouts(
        self, rows: Rows, *, order: Order = "completion", **options: Unpack[RolloutOptions]
    ) -> AsyncIterator[Rollout]:
        """Rollouts of rows.

        Args:
            rows: rows, drawn as places become free, or the path of a JSONL file (plain, ``.gz`` or
                ``.zst``), which is checked as a whole before anything runs.
            order: ``completion``: as they complete; ``row``: as the rows come, each with its
                repeats; ``group``: the rollouts of a row together, as they complete.
            **options: see `RolloutOptions`.

        Yields:
            row + response + reward + the verifier's fields (docs/formats.md, Rollouts); a failed rollout
            has ``mask_sample`` and ``failure`` and raises nothing.

        Raises:
            InvalidRequest: rows that cannot be used; of a file, all of them.
            OperatorError: a setting is wrong: an endpoint refuses the key, or ``max_failures`` rollouts in a
                row met one without such a model or path. What still runs is cancelled.
        """
        async with aclosing(self._pairs(rows, order, options)) as pairs:
            async for _, rollout in pairs:
                yield Rollout(rollout)

    def run(self, rows: Rows, **options: Unpack[RolloutOptions]) -> list[Rollout]:
        """The same as a list, in the order of the rows, blocking; also inside a running event loop."""
        return loop.wait(self.arun(rows, **options))

    async def arun(self, rows: Rows, **options: Unpack[RolloutOptions]) -> list[Rollout]:
        """The same, to be awaited."""
        return [Rollout(rollout) async for _, rollout in self._pairs(rows, "row", options)]

    def run_examples(
        self, examples: Sequence[JSON], **options: Unpack[RolloutOptions]
    ) -> Iterator[Awaitable[tuple[JSON, JSON]]]:
        """NeMo Gym's interface: awaitables of ``(row, result)``, in the order of completion.

        Call it inside a running event loop; there is one for each rollout.
        """
        groups = list(expand(examples, self._driver.expansion(options), problem=raise_problem))
        pairs = self._stream(iter(groups), "completion", options)
        return loop.awaitables(pairs, sum(map(len, groups)))

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

        Raises:
            InvalidRequest, OperatorError: see `rollouts`.
        """
        if "repeats" in options:
            raise InvalidRequest("repeats: a group's size and oversample say how many rollouts a row gets")
        wanted = GroupOptions(size, oversample, quorum, deadline)
        engine = self._driver.runner_options(options, attempts=3)
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
        retry_failed: bool = False,
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
                beside it (docs/formats.md, Rollouts).
            resume: go on with the run that ``output`` holds, if it holds one.
            retry_failed: resume, and make the rollouts again that have failed for good.
            progress: told of the counts whenever results come in.
            stop: once set, no further rollout starts; running ones may end.
            budget: what the run may use; once it is spent, as if ``stop`` was set.
            **options: see `RolloutOptions`.

        Returns:
            what came of it. An `OperatorError` is no exception here: what met it stays open, and is the
            report's ``operator_error``; once it is fixed, ``resume`` continues the run.

        Raises:
            InvalidRequest, Conflict, Unavailable, BadRequest: see `gym_serve.rollouts.collect`.
        """
        driver = self._driver
        collection = Collection(
            backend=driver,
            expansion=driver.expansion(options),
            options=driver.runner_options(options, attempts=3),
            budget=budget or Budget(),
        )
        return await collect(
            rows,
            output,
            collection,
            resume=resume,
            retry_failed=retry_failed,
            skip_invalid=options.get("skip_invalid", False),
            progress=progress,
            stop=stop,
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
        engine = self._driver.runner_options(options, attempts=1)
        return stream(jobs_of(groups), self._driver.run, engine, order)

    # The graph

    def health(self) -> JSON:
        """State of every server, by name (the ``servers`` of ``/health``)."""
        return loop.wait(self._connection.health())

    async def ahealth(self) -> JSON:
        """The same, to be awaited."""
        return await loop.run(self._connection.health())

    def pressure(self) -> JSON:
        """The load of the graph: its bottleneck, and how many rollouts suit it.

        ``bottleneck`` names the server with the highest ``load`` (1: fully used), ``reason`` the saturated
        resource; ``concurrency`` is what suits the graph. They are None while nothing runs. ``servers`` has
        the counts.
        """
        return loop.wait(self._connection.pressure())

    async def apressure(self) -> JSON:
        """The same, to be awaited."""
        return await loop.run(self._connection.pressure())

    def handle(self, server: str) -> Any:
        """The Serve handle of a server, for code that composes deployments.

        Raises:
            NotFound: no such server.
            BadRequest: the graph does not run on a cluster that this process joined.
        """
        self._check(server)
        return self._connection.handle(server)

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
            GymError: any other failure of the server or of the transport.
        """
        return loop.wait(self._call(server, op, body, timeout))

    async def acall(self, server: str, op: str, body: Any = None, *, timeout: float | None = None) -> Any:
        """The same, to be awaited."""
        return await loop.run(self._call(server, op, body, timeout))

    async def _call(self, server: str, op: str, body: Any, timeout: float | None) -> Any:
        content = b"" if body is None else encode(body)
        return (await self._transport(server).call(Call(op, content, timeout=timeout))).json()

    # Its models

    def set_model_endpoints(
        self, model: str, base_urls: Sequence[str], model_name: str | None = None
    ) -> None:
        """Point a model server at other endpoints, live: its replicas go on, new ones know as well.

        Args:
            model: name of a model server of the type ``chat_model`` or ``openai_model``.
            base_urls: the new endpoints.
            model_name: the new name of the model there; None keeps the old one.

        Raises:
            NotFound: no such server.
            BadRequest: another process deployed the graph, it does not run on a cluster, the server has no
                endpoints, or none are given.
        """
        self._check(model)
        if not base_urls:
            raise BadRequest(f"{model}: `base_urls` must name at least one endpoint")
        settings: JSON = {"base_url": list(base_urls) if len(base_urls) > 1 else base_urls[0]}
        if model_name is not None:
            settings["model"] = model_name
        self._connection.reconfigure(model, settings)

    async def aset_model_endpoints(
        self, model: str, base_urls: Sequence[str], model_name: str | None = None
    ) -> None:
        """The same, to be awaited."""
        await asyncio.to_thread(self.set_model_endpoints, model, base_urls, model_name)

    def update_weights(
        self,
        model: str,
        version: str,
        *,
        path: str | Path | None = None,
        tensors: bytes | None = None,
        mode: PauseMode = "keep",
    ) -> None:
        """Give all replicas of a model new weights; blocks until they generate with them.

        Calls that begin afterwards carry ``weight_version`` beside their tokens. A replica that starts later
        (autoscaling, or one that died) has the same weights before it takes a call: leave them at their
        path until the next update.

        Args:
            model: a model server with ``weight_updates`` on (``vllm_engine``, ``hf_engine``).
            version: name of the weights, e.g. the trainer's step.
            path: a folder or file of safetensors that the replicas' machines see.
            tensors: or the weights themselves, as ``safetensors.torch.save(state_dict)`` writes them; they
                go through Ray's object store.
            mode: generations that run go on with the new weights (``keep``), or fail as retryable
                (``abort``).

        Raises:
            NotFound: no such server.
            BadRequest: the model takes no weights, or not these; the graph does not run on a cluster.
            Unavailable: a replica could not be reached, or broke; it is replaced.
        """
        loop.wait(self.aupdate_weights(model, version, path=path, tensors=tensors, mode=mode))

    async def aupdate_weights(
        self,
        model: str,
        version: str,
        *,
        path: str | Path | None = None,
        tensors: bytes | None = None,
        mode: PauseMode = "keep",
    ) -> None:
        """The same, to be awaited."""
        self._check(model)
        if (path is None) == (tensors is None):
            raise BadRequest("give path or tensors, one of the two")
        where = None if path is None else str(path)
        update = self._connection.update_weights(model, version, path=where, tensors=tensors, mode=mode)
        await loop.run(update)

    # Its end

    def shutdown(self) -> None:
        """Take the graph down, if this Gym deployed it, and leave Ray as it was found. Safe to call twice."""
        try:
            loop.wait(self._close_edges())
        finally:
            self._connection.close()

    async def ashutdown(self) -> None:
        """The same, to be awaited."""
        await asyncio.to_thread(self.shutdown)

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
        await self.ashutdown()

    async def _close_edges(self) -> None:
        while self._transports:
            await self._transports.popitem()[1].close()

    def _check(self, server: str) -> None:
        names = [name for kind in ("models", "resources", "agents") for name in self.graph.get(kind) or {}]
        if server not in names:
            raise NotFound(f"no server {server!r} in {self.name}; it has {', '.join(names)}")

    def _transport(self, server: str) -> Transport:
        if server not in self._transports:
            self._check(server)
            self._transports.setdefault(
                server, self._connection.transport(server)
            )  # of two threads, both have the same one
        return self._transports[server]


def _joined(connect: Callable[[], Connection]) -> Gym:
    return Gym(connect())


def _only(agents: Mapping[str, Any]) -> str | None:
    return next(iter(agents)) if len(agents) == 1 else None


def _named(source: GraphSource, name: str | None) -> GraphSource:
    return source if name is None else replace(source, name=name, route_prefix=f"/{name}")
