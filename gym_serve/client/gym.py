"""`Gym` and `AsyncGym`: one object that a trainer or an evaluation asks for rollouts.

    with Gym.from_graph("graphs/math.yaml") as gym:
        async for rollout in gym.rollouts(rows, repeats=8): ...

It deploys a graph, joins a running one, or speaks to one over HTTP; the rest is the same. The methods of
`Gym` block, those of `AsyncGym` are awaited. Rollouts and groups that come one by one are asynchronous
iterators in both: several run at once, and they belong to the caller's event loop.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from typing_extensions import Self, TypedDict, Unpack

from gym_serve.client import loop
from gym_serve.client.connection import Connection, HttpConnection, LocalConnection
from gym_serve.client.core import CollectOptions, Core, GroupStream, collected, tracked
from gym_serve.client.policy import AsyncPolicy, Policy
from gym_serve.client.rollout_client import RolloutOptions
from gym_serve.graph import GraphSpec, load_graph, resolve
from gym_serve.rollouts import (
    Budget,
    Group,
    GroupFeed,
    GroupOptions,
    Job,
    Order,
    Report,
    RolloutTracking,
    Rows,
    Spending,
    Straddle,
    StreamOptions,
    Tracker,
    compared,
    expand,
    groups,
    jobs_of,
    prices_of,
    raise_problem,
    stream,
)
from gym_serve.types.errors import InvalidRequest
from gym_serve.types.requests import JSON
from gym_serve.types.rows import Rollout


class GraphOptions(TypedDict, total=False):
    """Options of `Gym.from_graph`. All may be left out."""

    overrides: Mapping[str, Any] | Sequence[str] | None
    """Values by path, e.g. ``{"agents.math_agent.max_steps": 3}``."""
    name: str | None
    """Name of the application; the file's by default. Several graphs side by side on one cluster need a name
    each."""
    application: str | None
    """Which graph of the file, if it has several ``applications``."""
    ray: bool
    """False runs the graph in this process, without Ray: it starts within a second and gives the same
    trajectories. It has one instance of each server, no GPUs and no HTTP routes."""
    dashboard: bool
    """True starts the new local Ray with its dashboard (`dashboard_url`), which takes eleven processes. A Ray
    that runs already has one, or not."""
    owner: str | None
    """Name of the run that the graph belongs to, the same in each of its processes. The last one to call this
    takes the graph over from the one before, whether that has ended or not."""
    lease_s: float
    """Seconds that a graph whose process has ended waits to be taken over (300). Then it is taken down."""
    detached: bool
    """True lets it wait for ever."""


class BaseGym:
    """What `Gym` and `AsyncGym` have in common: what does not wait, and what is iterated over."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.name = core.name
        self.url = core.connection.url
        self.graph = core.graph
        self.default_agent = core.default_agent

    def __repr__(self) -> str:
        servers = ", ".join(self._core.servers)
        return f"<{type(self).__name__} {self.name!r}: {self._core.connection.kind}, servers {servers}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process attaches to the same graph, and leaves it running."""
        return _joined, (type(self), self._core.connection.again(), self.rows)

    @property
    def rows(self) -> Rows:
        """The rows of the benchmark's split, which each iteration draws anew; none of a graph."""
        return self._core.rows

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
        drawn = await self._core.client.groups(rows, options)
        async with aclosing(self._stream(drawn, order, options)) as pairs:
            async for _, rollout in pairs:
                yield Rollout(rollout)

    def run_examples(
        self, examples: Sequence[JSON], **options: Unpack[RolloutOptions]
    ) -> Iterator[Awaitable[tuple[JSON, JSON]]]:
        """NeMo Gym's interface: awaitables of ``(row, result)``, in the order of completion.

        Call it inside a running event loop; there is one for each rollout.
        """
        drawn = list(expand(examples, self._core.client.expansion(options), problem=raise_problem))
        return loop.awaitables(self._stream(iter(drawn), "completion", options), sum(map(len, drawn)))

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
        client = self._core.client
        wanted = GroupOptions(size, oversample, quorum, deadline)
        settings = client.runner_options(options, attempts=3)
        jobs = jobs_of(await client.groups(rows, _of_groups(options, wanted)))
        run = client.at(options.get("endpoint")).run
        async with aclosing(
            groups(jobs, run, wanted, settings, client.compare, spending=spending)
        ) as settled:
            async for group in settled:
                yield group

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

        The policy gets a new version by `Policy.update_weights`, or by `Policy.set_endpoints` with a
        ``version``, in this process or another one. The staleness of a group (``group.staleness``) is how
        many policy versions passed between the start of its oldest rollout and now.

        Groups are taken as they get ready, and every row in its turn: the iteration waits for a slow group
        that would otherwise become too old. Those that do become too old are cancelled, down to the model's
        request, and restart before later rows. So each row is trained on as often as it is in ``rows``.

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
        core, client = self._core, self._core.client
        settings = client.runner_options(options, attempts=3)
        wanted = GroupOptions(size, oversample, quorum, deadline)
        repeated = _of_groups(options, wanted)

        async def draw() -> Iterator[list[Job]]:
            return jobs_of(await client.groups(rows, repeated))

        feed = GroupFeed(
            draw,
            client.at(options.get("endpoint")).run,
            options=wanted,
            stream=StreamOptions(max_staleness, straddle, batch, ahead),
            runner_options=settings,
            version=core.policy_updates,
            compare=client.compare,
        )
        groups_stream = GroupStream(feed, core.taken)
        core.streams.add(groups_stream)
        return groups_stream

    def spending(self, budget: Budget | None = None) -> Spending:
        """A count of what model calls use and cost, at this graph's prices, for any number of `groups` calls.

        Raises:
            InvalidRequest: the budget, which is for all of them, cannot be kept; see `Budget.check`.
        """
        prices, budget = prices_of(self.graph), budget or Budget()
        budget.check(prices)
        return Spending(prices, budget)

    def track(self, tracker: str | Tracker, config: Mapping[str, Any] | None = None) -> RolloutTracking:
        """Let a tracker of experiments follow all rollouts from now on, whatever asks for them.

            with gym.track("wandb", config={"learning_rate": 1e-6}):
                async for group in gym.groups(rows, size=8): ...

        It gets numbers over time and tables of samples, until the block or this object ends.

        Args:
            tracker: ``wandb``, ``mlflow``, ``tensorboard`` (whose files are in ``NAME_tensorboard`` here), or
                any `Tracker`.
            config: what the tracker shows as the configuration of the run, beside the graph.

        Raises:
            InvalidRequest: there is no such tracker, or its package is missing.
        """
        return tracked(self._core, tracker, config)

    @property
    def dashboard_url(self) -> str | None:
        """URL of the dashboard of the graph's Ray; None where there is none."""
        return self._core.connection.dashboard_url

    def handle(self, server: str) -> Any:
        """The Serve handle of a server, for code that composes deployments.

        Raises:
            NotFound: no such server.
            BadRequest: the graph does not run on a cluster that this process joined.
        """
        self._core.check(server)
        return self._core.connection.handle(server)

    def metrics(self) -> str:
        """The metrics of this process and its graphs, in the text format of Prometheus (docs/monitoring.md).

        Raises:
            BadRequest: the graph does not run in this process: its Ray nodes publish its metrics.
        """
        return self._core.connection.metrics()

    def _stream(
        self, drawn: Iterator[list[JSON]], order: Order, options: RolloutOptions
    ) -> AsyncGenerator[tuple[JSON, JSON], None]:
        client = self._core.client
        settings = client.runner_options(options, attempts=1)
        return stream(jobs_of(drawn), client.at(options.get("endpoint")).run, settings, order)

    async def _run(self, rows: Rows, options: RolloutOptions) -> list[Rollout]:
        drawn = await self._core.client.groups(rows, options)
        return [Rollout(rollout) async for _, rollout in self._stream(drawn, "row", options)]

    async def _compare(self, rollouts: Sequence[JSON], options: RolloutOptions) -> Group:
        if not rollouts:
            raise InvalidRequest("compare needs at least one rollout, got none")
        group = Group(dict(rollouts[0]), [Rollout(each) for each in rollouts], [], usable=True)
        client = self._core.client
        settings = client.runner_options(options, attempts=3)
        return await compared(group, client.compare, settings, lambda usage: None)


class Gym(BaseGym):
    """A running graph, for scripts, notebooks and trainers. Construct it with `from_graph`, `attach` or
    `connect`.

    Its methods block, also inside a running event loop, which they hold up; `AsyncGym` has the same ones to
    be awaited. ``async for`` takes `rollouts`, `groups` and `stream` in the caller's loop. Use it as a
    context manager, or call `shutdown`.
    """

    @classmethod
    def from_graph(
        cls,
        graph: str | Path | Mapping[str, Any] | GraphSpec,
        address: str | None = None,
        **options: Unpack[GraphOptions],
    ) -> Self:
        """Deploy a graph and wait until it is ready; a running one of the same file is taken over or joined.

        A deployed graph belongs to this process: `shutdown` takes it down, and so does the cluster, some time
        after this process has ended. A graph that was joined is left running. A cluster that this process has
        not started gets the packages of the graph's own classes (docs/deploying.md).

        Args:
            graph: path of a graph file, or what stands under its ``args``.
            address: None for this process's Ray or else a new local one; ``"auto"`` or
                ``"host:port"`` for a running cluster.
            **options: see `GraphOptions`.

        Raises:
            GraphError: the graph has problems; all of them. Without Ray, also: it needs a cluster.
            InvalidRequest: an argument of a cluster is given beside ``ray=False``; ``owner`` is empty, or
                ``lease_s`` no positive number.
            Conflict: another graph runs under this name, or this one belongs to another ``owner`` or to none.
            ClusterMismatch: the cluster runs another version of Ray or Python.
            Unavailable: no cluster at the address, or the graph did not start.
            Unauthorized: the cluster asks for a token that this process does not send.
        """
        return cls(Core(_deployed(graph, address, **options)))

    @classmethod
    def from_benchmark(
        cls,
        benchmark: str,
        model: str | Mapping[str, Any],
        address: str | None = None,
        *,
        split: str = "train",
        judge: str | Mapping[str, Any] | None = None,
        **options: Unpack[GraphOptions],
    ) -> Self:
        """Deploy a benchmark with a model. `rows` are those of its split, with its prompt, for its verifier.

        Args:
            benchmark: its name, the path of its file, or ``CATALOGUE:WHAT`` (docs/benchmarks.md).
            model: ``type`` and settings of the policy, or a word of ``gym-serve eval --model``.
            address: as for `from_graph`.
            split: one that the benchmark names.
            judge: the same as ``model``, of the judge of a benchmark that needs one.
            **options: see `GraphOptions`.

        Raises:
            NotFound: no such benchmark.
            InvalidRequest: it has no such split, or needs a judge; or see `from_graph`.
            GraphError, Conflict, Unavailable: see `from_graph`.
        """
        graph, rows = _of_benchmark(benchmark, model, judge, split)
        return cls(Core(_deployed(graph, address, **options), rows))

    @classmethod
    def attach(cls, name: str, address: str | None = "auto") -> Self:
        """Join a graph that runs on a cluster under ``name``; `shutdown` leaves it running.

        Raises:
            NotFound: no such application.
        """
        return cls(Core(_attached(name, address)))

    @classmethod
    def connect(cls, url: str, auth_token: str | None = None) -> Self:
        """Speak to a graph over HTTP: another cluster, or no Ray at all on this side.

        Args:
            url: its address with the route prefix, e.g. ``http://host:8000/math``.
            auth_token: the graph's bearer token, if it has one.
        """
        return cls(Core(HttpConnection(url, auth_token)))

    @property
    def policy(self) -> Policy:
        """The models that a trainer trains: pauses, weights, endpoints, versions."""
        return Policy(self._core)

    def run(self, rows: Rows, **options: Unpack[RolloutOptions]) -> list[Rollout]:
        """The same as `rollouts` as a list, in the order of the rows."""
        return loop.wait(self._run(rows, options))

    def compares(self, rollout: JSON) -> bool:
        """Whether the environment of a rollout rewards groups: no trainer of single rollouts can use it."""
        return loop.wait(self._core.client.compares(rollout))

    def compare(self, rollouts: Sequence[JSON], **options: Unpack[RolloutOptions]) -> Group:
        """A group of scored rollouts of one row, in their order, for a trainer that makes its groups itself.

        If the environment has ``compare``, that gives the rewards; if it fails, the group is not usable and
        has a ``reason``. ``attempts`` and ``timeout`` are those of the comparison.

        Raises:
            InvalidRequest: there is no rollout.
            OperatorError: a setting is wrong.
        """
        return loop.wait(self._compare(rollouts, options))

    def collect(self, rows: Rows, output: str | Path, **options: Unpack[CollectOptions]) -> Report:
        """Collect rollouts into files, so that nothing is lost and nothing is done twice.

        If an environment has ``compare``, the rollouts of each row are compared once all have ended.

        Args:
            rows: as for `rollouts`; the first 1,000 are checked before anything runs, the others meanwhile.
            output: ``out.jsonl``, ``.jsonl.gz`` or ``.jsonl.zst``; failures, inputs and metrics lie
                beside it (docs/formats.md, Files of collect).
            **options: see `CollectOptions`.

        Returns:
            the report. An `OperatorError` is not raised, but is the report's ``operator_error``: the rollouts
            that met it stay open, and ``resume`` continues the run once it is fixed.

        Raises:
            InvalidRequest, Conflict, Unavailable, BadRequest: see `gym_serve.rollouts.collect`.
        """
        return loop.wait(collected(self._core, rows, output, **options))

    def health(self) -> JSON:
        """State of every server, by name (the ``servers`` of ``/health``)."""
        return loop.wait(self._core.connection.health())

    def pressure(self) -> JSON:
        """The load of the graph: its bottleneck, and how many rollouts suit it.

        ``bottleneck`` names the server with the highest ``load`` (1: fully used), ``reason`` the saturated
        resource; ``concurrency`` is what suits the graph. They are None while nothing runs. ``servers`` has
        the counts.
        """
        return loop.wait(self._core.connection.pressure())

    def stats(self) -> JSON:
        """Counts of all replicas of the graph, and their load (``/stats``).

        Beside the keys of `pressure`: ``metrics`` has, for each series of docs/monitoring.md, its ``labels``
        and ``value``; each server has ``cpu_seconds``, by stage.
        """
        return loop.wait(self._core.connection.stats())

    def call(self, server: str, op: str, body: Any = None, *, timeout: float | None = None) -> Any:
        """One call to a server by its name; its decoded answer.

        Args:
            op: the operation, e.g. ``verify``, ``tools/{name}`` or ``v1/responses``.
            body: what JSON can hold; None for none.
            timeout: seconds to wait; None for no limit.

        Raises:
            NotFound: no such server.
            DeadlineExceeded: the time is over.
            GymError: any other failure of the server or of the transport.
        """
        return loop.wait(self._core.call(server, op, body, timeout))

    def shutdown(self) -> None:
        """Take the graph down, if this object owns it, and leave Ray as it was found. Safe to call twice."""
        self._core.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.shutdown()


class AsyncGym(BaseGym):
    """A running graph, for code that runs in an event loop and must not hold it up. Construct it with
    ``await AsyncGym.from_graph(...)``, `attach` or `connect`, or from a `Gym` with `of`.

    It has the methods of `Gym`, to be awaited. Use it with ``async with``, or await `shutdown`.
    """

    @classmethod
    async def from_graph(
        cls,
        graph: str | Path | Mapping[str, Any] | GraphSpec,
        address: str | None = None,
        **options: Unpack[GraphOptions],
    ) -> Self:
        """See `Gym.from_graph`. If it is cancelled, the graph is shut down once it has started."""
        return cls(await _started(lambda: Core(_deployed(graph, address, **options))))

    @classmethod
    async def from_benchmark(
        cls,
        benchmark: str,
        model: str | Mapping[str, Any],
        address: str | None = None,
        *,
        split: str = "train",
        judge: str | Mapping[str, Any] | None = None,
        **options: Unpack[GraphOptions],
    ) -> Self:
        """See `Gym.from_benchmark`."""
        graph, rows = await asyncio.to_thread(_of_benchmark, benchmark, model, judge, split)
        return cls(await _started(lambda: Core(_deployed(graph, address, **options), rows)))

    @classmethod
    async def attach(cls, name: str, address: str | None = "auto") -> Self:
        """See `Gym.attach`."""
        return cls(await _started(lambda: Core(_attached(name, address))))

    @classmethod
    async def connect(cls, url: str, auth_token: str | None = None) -> Self:
        """See `Gym.connect`."""
        return cls(await _started(lambda: Core(HttpConnection(url, auth_token))))

    @classmethod
    def of(cls, gym: Gym) -> Self:
        """The graph of a `Gym`, to be awaited. The two are one: what shuts one down ends both."""
        return cls(gym._core)

    @property
    def policy(self) -> AsyncPolicy:
        """The models that a trainer trains: pauses, weights, endpoints, versions."""
        return AsyncPolicy(self._core)

    async def run(self, rows: Rows, **options: Unpack[RolloutOptions]) -> list[Rollout]:
        return await self._run(rows, options)

    async def compares(self, rollout: JSON) -> bool:
        return await self._core.client.compares(rollout)

    async def compare(self, rollouts: Sequence[JSON], **options: Unpack[RolloutOptions]) -> Group:
        return await self._compare(rollouts, options)

    async def collect(self, rows: Rows, output: str | Path, **options: Unpack[CollectOptions]) -> Report:
        return await collected(self._core, rows, output, **options)

    async def health(self) -> JSON:
        return await loop.run(self._core.connection.health())

    async def pressure(self) -> JSON:
        return await loop.run(self._core.connection.pressure())

    async def stats(self) -> JSON:
        return await loop.run(self._core.connection.stats())

    async def call(self, server: str, op: str, body: Any = None, *, timeout: float | None = None) -> Any:
        return await loop.run(self._core.call(server, op, body, timeout))

    async def shutdown(self) -> None:
        await asyncio.to_thread(self._core.shutdown)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.shutdown()


def _deployed(
    graph: str | Path | Mapping[str, Any] | GraphSpec,
    address: str | None,
    *,
    overrides: Mapping[str, Any] | Sequence[str] | None = None,
    name: str | None = None,
    application: str | None = None,
    ray: bool = True,
    dashboard: bool = False,
    owner: str | None = None,
    lease_s: float = 300.0,
    detached: bool = False,
) -> Connection:
    source = load_graph(graph, overrides=overrides or {}, application=application)
    base = Path(source.path).parent if source.path else None
    resolved = resolve(source.spec, source=source.path, base_dir=base, literal_secrets=source.path is None)
    if name is not None:
        source = replace(source, name=name, route_prefix=f"/{name}")
    if owner == "":
        raise InvalidRequest("`owner` must be the name of a run, got ''")
    if not 0 < lease_s < math.inf:
        raise InvalidRequest(f"`lease_s` must be a positive number of seconds, got {lease_s!r}")
    if not ray:
        needs_ray = {"address": address, "dashboard": dashboard, "owner": owner, "detached": detached}
        for argument, value in needs_ray.items():
            if value:
                raise InvalidRequest(f"`{argument}` must be left out with ray=False, got {value!r}")
        return LocalConnection(source.name, resolved)
    from gym_serve.client import deployed
    from gym_serve.cluster.ownership import Terms

    terms = Terms(owner, lease_s, detached)
    return deployed.deploy(source, resolved, address, dashboard=dashboard, terms=terms)


def _attached(name: str, address: str | None) -> Connection:
    from gym_serve.client import deployed

    return deployed.attach(name, address)


async def _started(start: Callable[[], Core]) -> Core:
    """What ``start`` returns, from a thread; shut down if nobody waits for it any more."""
    started: list[Core] = []
    left = threading.Event()

    def run() -> Core:
        core = start()
        started.append(core)
        if left.is_set():
            core.shutdown()
        return core

    try:
        return await asyncio.to_thread(run)
    except asyncio.CancelledError:
        left.set()
        for core in started:  # it had started already
            await asyncio.shield(asyncio.to_thread(core.shutdown))
        raise


def _joined(cls: type[BaseGym], connect: Callable[[], Connection], rows: Rows) -> BaseGym:
    return cls(Core(connect(), rows))


def _of_benchmark(
    name: str, model: str | Mapping[str, Any], judge: str | Mapping[str, Any] | None, split: str
) -> tuple[JSON, Rows]:
    """Its graph, and the rows of a split."""
    # Imported here: templates and sources of rows are loaded by those who use benchmarks.
    from gym_serve.evaluation.benchmark import BenchmarkRows, find_benchmark
    from gym_serve.evaluation.models import settings_of

    benchmark = find_benchmark(name)
    benchmark.rows_from.check(split)
    graph = benchmark.graph(settings_of(model), None if judge is None else settings_of(judge))
    return graph, BenchmarkRows(benchmark, split)


def _of_groups(options: RolloutOptions, wanted: GroupOptions) -> RolloutOptions:
    if "repeats" in options:
        raise InvalidRequest("repeats: a group's size and oversample say how many rollouts a row gets")
    return {**options, "repeats": wanted.size + wanted.oversample}
