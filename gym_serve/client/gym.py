"""`Gym`: one object that a trainer or an evaluation asks for rollouts.

    with Gym.from_graph("graphs/math.yaml") as gym:
        async for rollout in gym.rollouts(rows, repeats=8): ...

It deploys a graph, joins a running one, or speaks to one over HTTP; the rest is the same.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

import orjson
from typing_extensions import Self, Unpack

from gym_serve.client import loop
from gym_serve.client.connection import Connection, HttpConnection, LocalConnection
from gym_serve.client.policy import Generate, PolicyService
from gym_serve.client.rollout_client import RolloutClient, RolloutOptions
from gym_serve.client.stream import GroupStream
from gym_serve.graph import GraphSource, GraphSpec, load_graph, resolve
from gym_serve.graph.spec import SECTIONS
from gym_serve.observe import tracing
from gym_serve.observe.catalogue import DRIVER_IN_FLIGHT, STALENESS, WEIGHTS_UPDATE_SECONDS
from gym_serve.rollouts import (
    Budget,
    Collection,
    Group,
    GroupFeed,
    GroupOptions,
    Job,
    Order,
    Progress,
    Report,
    RolloutTracking,
    Rows,
    Spending,
    Straddle,
    StreamOptions,
    Tracker,
    Tracking,
    collect,
    compared,
    expand,
    groups,
    jobs_of,
    open_tracker,
    prices_of,
    raise_problem,
    stream,
)
from gym_serve.servers.model import HoldMode, PauseMode
from gym_serve.servers.transport import Call, Transport, encode
from gym_serve.types.errors import BadRequest, InvalidRequest, NotFound
from gym_serve.types.requests import JSON
from gym_serve.types.rows import Rollout

logger = logging.getLogger("gym_serve")


class Gym:
    """A running graph. Construct it with `from_graph`, `attach` or `connect`.

    Use it as a context manager (``with`` or ``async with``), or call `shutdown`.
    """

    def __init__(self, connection: Connection) -> None:
        self.name = connection.name
        self.url = connection.url
        self.graph = connection.public
        self._connection = connection
        self._servers = [name for section in SECTIONS for name in self.graph.get(section) or {}]
        self.default_agent = connection.default_agent or _only(self.graph.get("agents") or {})
        self._transports: dict[str, Transport] = {}
        self._services: dict[str, PolicyService] = {}
        self._trackings: list[RolloutTracking] = []
        self._streams: WeakSet[GroupStream] = WeakSet()
        if self.graph.get("tracing") is not None:
            try:
                tracing.start()
            except ModuleNotFoundError as error:  # the graph's servers record their part all the same
                logger.warning("this process records no traces: %s", error)
        self._client = RolloutClient(
            self.graph, self.default_agent, self._transport, connection.graph, self.name
        )
        # Its own, as a process may have several Gyms.
        self._in_flight, self._update_seconds = DRIVER_IN_FLIGHT.fresh(), WEIGHTS_UPDATE_SECONDS.fresh()
        self._staleness = STALENESS.fresh()
        metrics = (self._in_flight, self._update_seconds, self._staleness)
        connection.publish(metrics, self._set_gauges)

    def __repr__(self) -> str:
        return f"<Gym {self.name!r}: {self._connection.kind}, servers {', '.join(self._servers)}>"

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
        dashboard: bool = False,
        owner: str | None = None,
        lease_s: float = 300.0,
        detached: bool = False,
    ) -> Self:
        """Deploy a graph and wait until it is ready; a running one of the same file is taken over or joined.

        A deployed graph belongs to this process: `shutdown` takes it down, and so does the cluster, some time
        after this process has ended without it. A graph that was joined is left running. A cluster that this
        process has not started gets the packages of the graph's own classes (docs/deploying.md).

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
            dashboard: True starts the new local Ray with its dashboard (`dashboard_url`), which takes eleven
                processes. A Ray that runs already has one, or not.
            owner: name of the run that the graph belongs to, the same in each of its processes. The last one
                to call this takes the graph over from the one before, whether that has ended or not.
            lease_s: seconds for which a graph whose process has ended waits to be taken over. Then it is
                taken down.
            detached: True lets it wait for ever.

        Raises:
            GraphError: the graph has problems; all of them. Without Ray, also: it needs a cluster.
            InvalidRequest: an argument of a cluster is given beside ``ray=False``; ``owner`` is empty, or
                ``lease_s`` no positive number.
            Conflict: another graph runs under this name, or this one belongs to another ``owner`` or to none.
            ClusterMismatch: the cluster runs another version of Ray or Python.
            Unavailable: no cluster at the address, or the graph did not start.
            Unauthorized: the cluster asks for a token that this process does not send.
        """
        source = load_graph(graph, overrides=overrides or {}, application=application)
        base = Path(source.path).parent if source.path else None
        resolved = resolve(
            source.spec, source=source.path, base_dir=base, literal_secrets=source.path is None
        )
        if owner == "":
            raise InvalidRequest("`owner` must be the name of a run, got ''")
        if not 0 < lease_s < math.inf:
            raise InvalidRequest(f"`lease_s` must be a positive number of seconds, got {lease_s!r}")
        if not ray:
            given = {"address": address, "dashboard": dashboard, "owner": owner, "detached": detached}
            for argument, value in given.items():
                if value:
                    raise InvalidRequest(f"`{argument}` must be left out with ray=False, got {value!r}")
            return cls(LocalConnection(_named(source, name).name, resolved))
        from gym_serve.client import deployed
        from gym_serve.cluster.ownership import Terms

        terms = Terms(owner, lease_s, detached)
        return cls(deployed.deploy(_named(source, name), resolved, address, dashboard=dashboard, terms=terms))

    @classmethod
    async def afrom_graph(
        cls,
        graph: str | Path | Mapping[str, Any] | GraphSpec,
        address: str | None = None,
        overrides: Mapping[str, Any] | Sequence[str] | None = None,
        name: str | None = None,
        application: str | None = None,
        *,
        ray: bool = True,
        dashboard: bool = False,
        owner: str | None = None,
        lease_s: float = 300.0,
        detached: bool = False,
    ) -> Self:
        """Like `from_graph`, but async. If it is cancelled, the graph is shut down once it has started."""
        return await _started(
            partial(
                cls.from_graph,
                graph,
                address,
                overrides,
                name,
                application,
                ray=ray,
                dashboard=dashboard,
                owner=owner,
                lease_s=lease_s,
                detached=detached,
            )
        )

    @classmethod
    def attach(cls, name: str, address: str | None = "auto") -> Self:
        """Join a graph that runs on a cluster under ``name``; `shutdown` leaves it running.

        Raises:
            NotFound: no such application.
        """
        from gym_serve.client import deployed

        return cls(deployed.attach(name, address))

    @classmethod
    async def aattach(cls, name: str, address: str | None = "auto") -> Self:
        """Like `attach`, but async."""
        return await asyncio.to_thread(cls.attach, name, address)

    @classmethod
    def connect(cls, url: str, auth_token: str | None = None) -> Self:
        """Speak to a graph over HTTP: another cluster, or no Ray at all on this side.

        Args:
            url: its address with the route prefix, e.g. ``http://host:8000/math``.
            auth_token: the graph's bearer token, if it has one.
        """
        return cls(HttpConnection(url, auth_token))

    @classmethod
    async def aconnect(cls, url: str, auth_token: str | None = None) -> Self:
        """Like `connect`, but async."""
        return await asyncio.to_thread(cls.connect, url, auth_token)

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
                row met one without such a model or path. Running rollouts are cancelled.
        """
        async with aclosing(self._pairs(rows, order, options)) as pairs:
            async for _, rollout in pairs:
                yield Rollout(rollout)

    def run(self, rows: Rows, **options: Unpack[RolloutOptions]) -> list[Rollout]:
        """The same as a list, in the order of the rows, blocking; also inside a running event loop."""
        return loop.wait(self.arun(rows, **options))

    async def arun(self, rows: Rows, **options: Unpack[RolloutOptions]) -> list[Rollout]:
        """Like `run`, but async."""
        return [Rollout(rollout) async for _, rollout in self._pairs(rows, "row", options)]

    def run_examples(
        self, examples: Sequence[JSON], **options: Unpack[RolloutOptions]
    ) -> Iterator[Awaitable[tuple[JSON, JSON]]]:
        """NeMo Gym's interface: awaitables of ``(row, result)``, in the order of completion.

        Call it inside a running event loop; there is one for each rollout.
        """
        groups = list(expand(examples, self._client.expansion(options), problem=raise_problem))
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

        A group is settled once ``size`` rollouts are scored; its other rollouts are cancelled, down to the
        model's request. A group that cannot be filled has a ``reason``. If the environment has ``compare``,
        that gives the rewards.

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
        settings = self._client.runner_options(options, attempts=3)
        options["repeats"] = size + oversample
        jobs = jobs_of(await self._client.groups(rows, options))
        run = self._client.at(options.get("endpoint")).run
        settled = groups(jobs, run, wanted, settings, self._client.compare, spending=spending)
        async with aclosing(settled) as found:
            async for group in found:
                yield group

    async def compares(self, rollout: JSON) -> bool:
        """Whether the environment of a rollout compares the rollouts of a group, which gives their rewards. A
        trainer that asks for single rollouts cannot use it."""
        return await self._client.compares(rollout)

    async def compare(self, rollouts: Sequence[JSON], **options: Unpack[RolloutOptions]) -> Group:
        """A group of scored rollouts of one row, for a trainer that makes its groups itself.

        Args:
            rollouts: at least one; they keep their order.
            **options: see `RolloutOptions`; ``attempts`` and ``timeout`` are those of the comparison.

        Returns:
            the group. If the environment has ``compare``, that gave the rewards; if it failed, the group is
            not usable and has a ``reason``.

        Raises:
            InvalidRequest: there is no rollout.
            OperatorError: a setting is wrong.
        """
        if not rollouts:
            raise InvalidRequest("compare needs at least one rollout, got none")
        group = Group(dict(rollouts[0]), [Rollout(each) for each in rollouts], [], usable=True)
        settings = self._client.runner_options(options, attempts=3)
        return await compared(group, self._client.compare, settings, lambda usage: None)

    def stream(
        self,
        rows: Rows,
        *,
        size: int,
        max_staleness: int,
        straddle: Straddle = "continue",
        batch: int | None = None,
        ahead: int | None = None,
        oversample: int = 0,
        quorum: int | None = None,
        deadline: float | None = None,
        **options: Unpack[RolloutOptions],
    ) -> GroupStream:
        """Groups for asynchronous training: they are made while the trainer learns, and none is too old.

        The policy gets a new version by `update_weights`, or by `set_model_endpoints` with a ``version``, in
        this process or another one. The staleness of a group (``group.staleness``) is how many policy
        versions passed between the start of its oldest rollout and now.

        Groups are taken as they get ready, and every row in its turn: the iteration waits for a slow group
        that would otherwise become too old. If the trainer takes fewer groups for a version than it said,
        groups do become too old; they are cancelled, down to the model's request, and restart before later
        rows. So each row is trained on as often as it is in ``rows``, however slow it is.

        Args:
            rows: as for `rollouts`; those of the caller are drawn in a thread, and may wait.
            size: rollouts wanted per row.
            max_staleness: the largest staleness, k. At most (k + 1) * ``batch`` groups have begun and are not
                taken; with 0, nothing is made while the trainer learns.
            straddle: what happens to rollouts that run while the policy changes. ``continue``: they
                continue, with the new weights from some token on (``TrainingSample.versions``);
                ``restart``: they restart, so that each rollout has one version; ``cancel``: their groups
                restart, so that each group has one version.
            batch: usable groups that the trainer takes for each version. By default as many as for the
                version before, and for the first one as many as fit into ``concurrency``.
            ahead: for how many versions groups are made ahead; by default k. With a lower number they are
                fresher, and only slow groups use the rest of k.
            oversample, quorum, deadline: as for `groups`.
            **options: see `RolloutOptions`; without ``repeats``.

        Raises:
            InvalidRequest: a number is out of its range.
        """
        if "repeats" in options:
            raise InvalidRequest("repeats: a group's size and oversample say how many rollouts a row gets")
        settings = self._client.runner_options(options, attempts=3)
        options["repeats"] = size + oversample

        async def draw() -> Iterator[list[Job]]:
            return jobs_of(await self._client.groups(rows, options))

        feed = GroupFeed(
            draw,
            self._client.at(options.get("endpoint")).run,
            options=GroupOptions(size, oversample, quorum, deadline),
            stream=StreamOptions(max_staleness, straddle, batch, ahead),
            runner_options=settings,
            version=self._policy_updates,
            compare=self._client.compare,
        )
        made = GroupStream(feed, self._taken)
        self._streams.add(made)
        return made

    def _taken(self, group: Group) -> None:
        if group.usable and group.staleness is not None:
            self._staleness.observe(value=group.staleness)

    async def _policy_updates(self) -> int:
        """How often the weights of the policy were replaced."""
        return max([await self._connection.updates(name) for name in self._policies(None)], default=0)

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
        track: str | Tracker | None = None,
        **options: Unpack[RolloutOptions],
    ) -> Report:
        """Collect rollouts into files, so that nothing is lost and nothing is done twice.

        If an environment has ``compare``, the rollouts of each row are compared once all have ended.

        Args:
            rows: as for `rollouts`; all of them are checked before anything runs.
            output: ``out.jsonl``, ``.jsonl.gz`` or ``.jsonl.zst``; failures, inputs and metrics lie
                beside it (docs/formats.md, Files of collect).
            resume: continue the run in ``output``, if there is one.
            retry_failed: resume, and retry the rollouts that have failed permanently.
            progress: called with the counts whenever results come in.
            stop: once set, no further rollout starts; running ones may end.
            budget: what the run may use; once it is spent, as if ``stop`` was set.
            track: follows the run: ``wandb``, ``mlflow``, ``tensorboard``, or any `Tracker`, which is closed
                at the end.
            **options: see `RolloutOptions`.

        Returns:
            the report. An `OperatorError` is not raised, but is the report's ``operator_error``: the rollouts
            that met it stay open, and ``resume`` continues the run once it is fixed.

        Raises:
            InvalidRequest, Conflict, Unavailable, BadRequest: see `gym_serve.rollouts.collect`.
        """
        client = self._client.at(options.get("endpoint"))
        collection = Collection(
            backend=client,
            expansion=client.expansion(options),
            options=client.runner_options(options, attempts=3),
            budget=budget or Budget(),
        )
        if isinstance(track, str):
            track = open_tracker(track, Path(output))
        tracking = None if track is None else Tracking(track, self._run_config(rows, options))

        def told(counts: Progress) -> None:
            progress(counts)
            if tracking is not None:
                tracking.progress(counts)

        try:
            report = await collect(
                rows,
                output,
                collection,
                resume=resume,
                retry_failed=retry_failed,
                skip_invalid=options.get("skip_invalid", False),
                progress=told,
                stop=stop,
            )
            if tracking is not None:
                tracking.finish(report)
            return report
        finally:
            if tracking is not None:
                await asyncio.to_thread(tracking.close)

    def track(self, tracker: str | Tracker, config: Mapping[str, Any] | None = None) -> RolloutTracking:
        """Let a tracker of experiments follow all rollouts from now on, whatever asks for them.

            with gym.track("wandb", config={"learning_rate": 1e-6}):
                async for group in gym.groups(rows, size=8): ...

        It gets numbers over time and tables of samples, until the block or this Gym ends.

        Args:
            tracker: ``wandb``, ``mlflow``, ``tensorboard`` (whose files are in ``NAME_tensorboard`` here), or
                any `Tracker`.
            config: what the tracker shows as the configuration of the run, beside the graph.

        Raises:
            InvalidRequest: there is no such tracker, or its package is missing.
        """
        if isinstance(tracker, str):
            tracker = open_tracker(tracker, Path(self.name.rpartition("/")[2]))
        tracking = RolloutTracking(
            tracker,
            _plain({"name": self.name, **(config or {}), "graph": self.graph}),
            lambda: self._client.in_flight,
            self._untrack,
        )
        self._trackings.append(tracking)
        self._client.followers.append(tracking.add)
        return tracking

    def _untrack(self, tracking: RolloutTracking) -> None:
        self._client.followers.remove(tracking.add)
        self._trackings.remove(tracking)

    def _run_config(self, rows: Rows, options: RolloutOptions) -> JSON:
        """What a tracker is told of a run: no secrets."""
        given = {name: value for name, value in options.items() if name != "endpoint" and value is not None}
        source = {"rows": str(rows)} if isinstance(rows, str | Path) else {}
        return _plain({"name": self.name, **source, **given, "graph": self.graph})

    async def _pairs(
        self, rows: Rows, order: Order, options: RolloutOptions
    ) -> AsyncGenerator[tuple[JSON, JSON], None]:
        groups = await self._client.groups(rows, options)
        async with aclosing(self._stream(groups, order, options)) as pairs:
            async for pair in pairs:
                yield pair

    def _stream(
        self, groups: Iterator[list[JSON]], order: Order, options: RolloutOptions
    ) -> AsyncGenerator[tuple[JSON, JSON], None]:
        settings = self._client.runner_options(options, attempts=1)
        return stream(jobs_of(groups), self._client.at(options.get("endpoint")).run, settings, order)

    # The graph

    def health(self) -> JSON:
        """State of every server, by name (the ``servers`` of ``/health``)."""
        return loop.wait(self._connection.health())

    async def ahealth(self) -> JSON:
        """Like `health`, but async."""
        return await loop.run(self._connection.health())

    @property
    def dashboard_url(self) -> str | None:
        """URL of the dashboard of the graph's Ray; None where there is none."""
        return self._connection.dashboard_url

    def pressure(self) -> JSON:
        """The load of the graph: its bottleneck, and how many rollouts suit it.

        ``bottleneck`` names the server with the highest ``load`` (1: fully used), ``reason`` the saturated
        resource; ``concurrency`` is what suits the graph. They are None while nothing runs. ``servers`` has
        the counts.
        """
        return loop.wait(self._connection.pressure())

    async def apressure(self) -> JSON:
        """Like `pressure`, but async."""
        return await loop.run(self._connection.pressure())

    def stats(self) -> JSON:
        """Counts of all replicas of the graph, and their load (``/stats``).

        Beside the keys of `pressure`: ``metrics`` has, for each series of docs/monitoring.md, its ``labels``
        and ``value``; each server has ``cpu_seconds``, by stage.
        """
        return loop.wait(self._connection.stats())

    async def astats(self) -> JSON:
        """Like `stats`, but async."""
        return await loop.run(self._connection.stats())

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
        """Like `call`, but async."""
        return await loop.run(self._call(server, op, body, timeout))

    async def _call(self, server: str, op: str, body: Any, timeout: float | None) -> Any:
        content = b"" if body is None else encode(body)
        return (await self._transport(server).call(Call(op, content, timeout=timeout))).json()

    # Its models

    async def pause(self, mode: HoldMode = "keep", *, model: str | None = None) -> None:
        """Let no model call begin until `resume`, while the policy changes. Episodes wait; none fails for it.

        A waiting call spends its time limit: ``model_timeout`` of the agent must exceed the pause. Judges and
        other models go on, unless they are named.

        Args:
            mode: ``keep``: running generations of an engine in the graph stop between two tokens and go on
                afterwards, those of an endpoint end there; ``wait``: returns when none runs any more;
                ``abort``: they are ended now, and made again from their prompt afterwards.
            model: a model server; by default every model of an agent.

        Raises:
            NotFound: no such server.
            BadRequest: the model is not part of this graph's process or cluster, or also runs inside another
                server (``inline``).
            Forbidden: the graph is reached over HTTP, and has no ``auth_token``.
            Unavailable: a replica did not answer.
        """
        for name in self._policies(model):
            await loop.run(self._connection.hold(name, mode))

    async def resume(self, *, model: str | None = None) -> None:
        """Release the model calls that were held.

        Args:
            model: as for `pause`.

        Raises: as `pause`.
        """
        for name in self._policies(model):
            await loop.run(self._connection.release(name))

    def serve_policy(
        self, model: str, generate: Generate | Any, *, max_batch: int = 64, concurrency: int | None = None
    ) -> None:
        """Generate for a ``callback_model``, in this process, until `shutdown` or another call for the model.

        Args:
            model: a model server of the type ``callback_model``.
            generate: takes a list of `PolicyRequest` and returns a list of `PolicyAnswer`, in their order. A
                function runs in a thread. An asynchronous one runs on the event loop from which this is
                called, if there is one; do not block that loop. Of a Ray actor, the method ``generate`` is
                called.
            max_batch: most requests in one call: 1 for an engine that batches by itself, as otherwise a
                short answer waits for the longest of its batch.
            concurrency: most calls at the same time; by default 1 for a function, and no limit otherwise.

        Raises:
            NotFound: no such model.
            InvalidRequest: ``generate`` is nothing that can be called, or a number is out of its range.
            BadRequest: the graph is reached over HTTP.
        """
        self._policies(model)
        service = PolicyService(
            model, generate, partial(self._connection.replicas, model), max_batch, concurrency
        )
        loop.wait(self._serve(model, service))

    async def _serve(self, model: str, service: PolicyService) -> None:
        await self._connection.replicas(model)  # refuses where it cannot be
        if (before := self._services.pop(model, None)) is not None:
            await before.stop()
        self._services[model] = service
        service.start()

    @property
    def policy_version(self) -> str | None:
        """Version of the policy's weights, as the model server has it; None if none was set.

        It is that of `update_weights`, or of `set_model_endpoints` with a ``version``.

        Raises:
            BadRequest: the agents have models of different versions.
        """
        names = self._policies(None)
        found = {
            str(loop.wait(self._connection.policy(self._transport(n)))["weight_version"] or "") for n in names
        }
        if len(found) > 1:
            raise BadRequest(f"the models of {self.name} have different versions: {', '.join(sorted(found))}")
        return next(iter(found), None) or None

    def _policies(self, model: str | None) -> list[str]:
        """The named model, or the models of all agents."""
        models = self.graph.get("models") or {}
        if model is not None:
            if model not in models:
                raise NotFound(f"no model {model!r} in {self.name}; it has {', '.join(models)}")
            return [model]
        named = (agent.get("model") for agent in (self.graph.get("agents") or {}).values())
        return list(dict.fromkeys(name for name in named if name in models))

    def set_model_endpoints(
        self,
        model: str,
        base_urls: Sequence[str],
        model_name: str | None = None,
        version: str | None = None,
    ) -> None:
        """Point a model server at other endpoints, live: its replicas go on, new ones know as well.

        Args:
            model: name of a model server of the type ``chat_model`` or ``openai_model``.
            base_urls: the new endpoints.
            model_name: the new name of the model there; None keeps the old one.
            version: name of the weights there, which further calls carry; None keeps the old one.

        Raises:
            NotFound: no such server.
            BadRequest: another process owns the graph, or none; it does not run on a cluster; the server has
                no endpoints, or none are given.
            Forbidden: the graph is reached over HTTP, and has no ``auth_token``.
        """
        self._check(model)
        if not base_urls:
            raise BadRequest(f"{model}: `base_urls` must name at least one endpoint")
        settings: JSON = {"base_url": list(base_urls) if len(base_urls) > 1 else base_urls[0]}
        if model_name is not None:
            settings["model"] = model_name
        self._connection.reconfigure(model, settings)
        if version is not None:
            self.update_weights(model, version)

    async def aset_model_endpoints(
        self,
        model: str,
        base_urls: Sequence[str],
        model_name: str | None = None,
        version: str | None = None,
    ) -> None:
        """Like `set_model_endpoints`, but async."""
        await asyncio.to_thread(self.set_model_endpoints, model, base_urls, model_name, version)

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
            model: a model server with ``weight_updates`` on (``vllm_engine``, ``hf_engine``); any other one
                can be given a version.
            version: name of the weights, e.g. the trainer's step.
            path: a folder or file of safetensors that the replicas' machines see.
            tensors: or the weights themselves, as ``safetensors.torch.save(state_dict)`` writes them; they
                go through Ray's object store. Without both, only the version changes: the trainer has
                replaced the weights itself, for example at the endpoints of a ``chat_model``.
            mode: running generations continue with the new weights (``keep``), or fail as retryable
                (``abort``).

        Raises:
            NotFound: no such server.
            BadRequest: the model takes no weights, or not these; the graph is reached over HTTP, where only
                a version can be told.
            Forbidden: it is, and has no ``auth_token``.
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
        """Like `update_weights`, but async."""
        self._check(model)
        if path is not None and tensors is not None:
            raise BadRequest("give path or tensors, one of the two")
        where = None if path is None else str(path)
        update = self._connection.update_weights(model, version, path=where, tensors=tensors, mode=mode)
        begun = time.monotonic()
        await loop.run(update)
        self._update_seconds.observe(model, value=time.monotonic() - begun)
        for running in list(self._streams):
            running.look()

    def metrics(self) -> str:
        """The metrics of a graph in this process, in the text format of Prometheus (see docs/monitoring.md).

        They include other graphs of this process.

        Raises:
            BadRequest: the graph does not run in this process: its Ray nodes publish its metrics.
        """
        return self._connection.metrics()

    def _set_gauges(self) -> None:
        self._in_flight.set(value=self._client.in_flight)

    # Its end

    def shutdown(self) -> None:
        """Take the graph down, if this Gym owns it, and leave Ray as it was found. Safe to call twice."""
        try:
            while self._trackings:
                self._trackings[-1].close()
            loop.wait(self._close_edges())
        finally:
            self._connection.close()
            tracing.flush()

    async def ashutdown(self) -> None:
        """Like `shutdown`, but async."""
        await asyncio.to_thread(self.shutdown)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.ashutdown()

    async def _close_edges(self) -> None:
        for running in list(self._streams):
            await running.aclose()
        while self._services:
            await self._services.popitem()[1].stop()
        while self._transports:
            await self._transports.popitem()[1].close()

    def _check(self, server: str) -> None:
        if server not in self._servers:
            raise NotFound(f"no server {server!r} in {self.name}; it has {', '.join(self._servers)}")

    def _transport(self, server: str) -> Transport:
        if server not in self._transports:
            self._check(server)
            self._transports.setdefault(
                server, self._connection.transport(server)
            )  # of two threads, both have the same one
        return self._transports[server]


_G = TypeVar("_G", bound=Gym)


async def _started(start: Callable[[], _G]) -> _G:
    """What ``start`` returns, from a thread; shut down if nobody waits for it any more."""
    started: list[_G] = []
    left = threading.Event()

    def run() -> _G:
        gym = start()
        started.append(gym)
        if left.is_set():
            gym.shutdown()
        return gym

    try:
        return await asyncio.to_thread(run)
    except asyncio.CancelledError:
        left.set()
        for gym in started:  # it had started already
            await asyncio.shield(gym.ashutdown())
        raise


def _joined(connect: Callable[[], Connection]) -> Gym:
    return Gym(connect())


def _plain(config: JSON) -> JSON:
    """A configuration as JSON alone."""
    plain: JSON = orjson.loads(orjson.dumps(config, default=str))
    return plain


def _only(agents: Mapping[str, Any]) -> str | None:
    return next(iter(agents)) if len(agents) == 1 else None


def _named(source: GraphSource, name: str | None) -> GraphSource:
    return source if name is None else replace(source, name=name, route_prefix=f"/{name}")
