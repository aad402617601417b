"""`Core`: one graph, how it is reached, and what runs on it. `Gym` and `AsyncGym` are its two faces.

`GroupStream`: what `Gym.stream` returns. Groups are made in the background while the trainer learns.

They are made on the event loop of this package, in its own thread, so a training step that blocks the
trainer's thread holds up nothing.

Files and trackers of a `Gym`: `Gym.collect` and `Gym.track`.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakSet

import orjson
from typing_extensions import Self, Unpack

from gym_serve.client import loop
from gym_serve.client.connection import Connection
from gym_serve.client.policy_service import PolicyService
from gym_serve.client.rollout_client import RolloutClient, RolloutOptions
from gym_serve.graph.spec import SECTIONS
from gym_serve.observe import tracing
from gym_serve.observe.catalogue import DRIVER_IN_FLIGHT, STALENESS, WEIGHTS_UPDATE_SECONDS
from gym_serve.rollouts import (
    Budget,
    Collection,
    Group,
    GroupFeed,
    Handover,
    Progress,
    Report,
    RolloutTracking,
    Rows,
    StreamCounts,
    Tracker,
    Tracking,
    collect,
    open_tracker,
)
from gym_serve.servers.transport import Call, Transport, encode
from gym_serve.types.errors import NotFound
from gym_serve.types.requests import JSON


class GroupStream(AsyncIterator[Group], Iterator[Group]):
    """Groups for a trainer whose policy changes meanwhile; made by `Gym.stream`.

    Iterate over it with ``async for``, or with ``for`` if the trainer is not asynchronous. It begins with
    the first step, and ends with the last group, with `close` or `aclose`, at the end of a ``with`` or
    ``async with`` block, with its `Gym`, or when it is garbage-collected. Running rollouts are then
    cancelled, down to the model's request.
    """

    def __init__(self, feed: GroupFeed, on_take: Callable[[Group], None]) -> None:
        self._feed = feed
        self._on_take = on_take
        self._making = _Making(feed)
        weakref.finalize(self, self._making.abandon).atexit = False

    @property
    def counts(self) -> StreamCounts:
        """Counts of the groups and rollouts so far, and why rollouts were thrown away."""
        return self._feed.counts

    async def __anext__(self) -> Group:
        """The next group.

        Raises:
            StopAsyncIteration: all groups were taken, or the stream was closed.
            InvalidRequest: rows that cannot be used.
            OperatorError: a setting that all rollouts need is wrong; see `RolloutOptions`.
        """
        handover = Handover()
        try:
            group = await loop.run(self._take(handover))
        except asyncio.CancelledError:
            await loop.run(self._feed.give_back(handover))
            raise
        if group is None:
            raise StopAsyncIteration
        self._on_take(group)
        return group

    def __next__(self) -> Group:
        """The same, blocking.

        Raises:
            StopIteration: as `__anext__` ends.
        """
        handover = Handover()
        try:
            group = loop.wait(self._take(handover))
        except KeyboardInterrupt:
            loop.wait(self._feed.give_back(handover))
            raise
        if group is None:
            raise StopIteration
        self._on_take(group)
        return group

    async def aclose(self) -> None:
        """End the stream, and cancel running rollouts. Safe to call twice."""
        await loop.run(self._making.stop())

    def close(self) -> None:
        """The same, blocking."""
        loop.wait(self._making.stop())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    async def _take(self, handover: Handover) -> Group | None:
        if not self._making.start():
            return None
        try:
            group = await self._feed.take(handover)
        except Exception:
            await self._making.stop()
            raise
        if group is None:
            await self._making.stop()
        return group

    def look(self) -> None:
        """Look for a new version of the policy now. `Policy.update_weights` does so."""
        loop.start(self._making.look())


class _Making:
    """The task that makes the groups. It does not know the stream, so that nobody needs to close that.

    All methods but `abandon` run on the event loop of this package.
    """

    def __init__(self, feed: GroupFeed) -> None:
        self._feed = feed
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    def start(self) -> bool:
        """Begin, unless it runs; returns whether it does, or was stopped."""
        if self._task is None and not self._stopped:
            self._task = asyncio.ensure_future(self._feed.run())
        return not self._stopped

    async def stop(self) -> None:
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def look(self) -> None:
        self._feed.look()

    def abandon(self) -> None:
        loop.start(self.stop())


logger = logging.getLogger("gym_serve")


class Core:
    """The state that both faces share. Its coroutines run on the event loop of this package (`loop`)."""

    def __init__(self, connection: Connection, rows: Rows = ()) -> None:
        self.connection = connection
        self.rows = rows
        self.name = connection.name
        self.graph = connection.public
        self.servers = [name for section in SECTIONS for name in self.graph.get(section) or {}]
        agents = list(self.graph.get("agents") or {})
        self.default_agent = connection.default_agent or (agents[0] if len(agents) == 1 else None)
        self.services: dict[str, PolicyService] = {}
        self.trackings: list[RolloutTracking] = []
        self.streams: WeakSet[GroupStream] = WeakSet()
        self._transports: dict[str, Transport] = {}
        if self.graph.get("tracing") is not None:
            try:
                tracing.start()
            except ModuleNotFoundError as error:  # the graph's servers record their part all the same
                logger.warning("this process records no traces: %s", error)
        self.client = RolloutClient(
            self.graph, self.default_agent, self.transport, connection.graph, self.name
        )
        # Its own, as a process may have several Gyms.
        self._in_flight, self._staleness = DRIVER_IN_FLIGHT.fresh(), STALENESS.fresh()
        self.update_seconds = WEIGHTS_UPDATE_SECONDS.fresh()
        connection.publish((self._in_flight, self.update_seconds, self._staleness), self._set_gauges)

    def _set_gauges(self) -> None:
        self._in_flight.set(value=self.client.activity.in_flight)

    def taken(self, group: Group) -> None:
        if group.usable and group.staleness is not None:
            self._staleness.observe(value=group.staleness)

    def check(self, server: str) -> None:
        """Refuse a server that the graph lacks (`NotFound`)."""
        if server not in self.servers:
            raise NotFound(f"no server {server!r} in {self.name}; it has {', '.join(self.servers)}")

    def transport(self, server: str) -> Transport:
        if server not in self._transports:
            self.check(server)
            # Of two threads, both have the same one.
            self._transports.setdefault(server, self.connection.transport(server))
        return self._transports[server]

    def models(self, model: str | None) -> list[str]:
        """The named model, or the models of all agents."""
        models = self.graph.get("models") or {}
        if model is not None:
            if model not in models:
                raise NotFound(f"no model {model!r} in {self.name}; it has {', '.join(models)}")
            return [model]
        names = (agent.get("model") for agent in (self.graph.get("agents") or {}).values())
        return list(dict.fromkeys(name for name in names if name in models))

    async def policy_updates(self) -> int:
        """How often the weights of the policy were replaced."""
        return max([await self.connection.updates(name) for name in self.models(None)], default=0)

    async def call(self, server: str, op: str, body: Any, timeout: float | None) -> Any:
        content = b"" if body is None else encode(body)
        return (await self.transport(server).call(Call(op, content, timeout=timeout))).json()

    def shutdown(self) -> None:
        try:
            while self.trackings:
                self.trackings[-1].close()
            loop.wait(self._close_edges())
        finally:
            self.connection.close()
            tracing.flush()

    async def _close_edges(self) -> None:
        for stream in list(self.streams):
            await stream.aclose()
        while self.services:
            await self.services.popitem()[1].stop()
        while self._transports:
            await self._transports.popitem()[1].close()


class CollectOptions(RolloutOptions, total=False):
    """Options of `Gym.collect`, beside those of `RolloutOptions`. All may be left out."""

    resume: bool
    """Continue the run in ``output``, if there is one."""
    retry_failed: bool
    """Resume, and retry the rollouts that have failed permanently."""
    progress: Callable[[Progress], None]
    """Called with the counts whenever results come in; by `Gym.collect` in another thread."""
    stop: asyncio.Event | None
    """Once set, no further rollout starts; running ones may end. Of the caller's loop: for `AsyncGym`."""
    budget: Budget | None
    """What the run may use; once it is spent, as if ``stop`` was set."""
    track: str | Tracker | None
    """Follows the run: ``wandb``, ``mlflow``, ``tensorboard``, or any `Tracker`, closed at the end."""


async def collected(
    core: Core,
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
    """See `Gym.collect`."""
    client = core.client.at(options.get("endpoint"))
    collection = Collection(
        backend=client,
        expansion=client.expansion(options),
        options=client.runner_options(options, attempts=3),
        budget=budget or Budget(),
    )
    tracking = None
    if track is not None:
        tracker = open_tracker(track, Path(output)) if isinstance(track, str) else track
        tracking = Tracking(tracker, _run_config(core, rows, options))

    def on_progress(counts: Progress) -> None:
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
            progress=on_progress,
            stop=stop,
        )
        if tracking is not None:
            tracking.finish(report)
        return report
    finally:
        if tracking is not None:
            await asyncio.to_thread(tracking.close)


def tracked(core: Core, tracker: str | Tracker, config: Mapping[str, Any] | None) -> RolloutTracking:
    """See `Gym.track`."""

    def end(tracking: RolloutTracking) -> None:
        core.client.activity.followers.remove(tracking.add)
        core.trackings.remove(tracking)

    if isinstance(tracker, str):
        tracker = open_tracker(tracker, Path(core.name.rpartition("/")[2]))
    shown = _plain({"name": core.name, **(config or {}), "graph": core.graph})
    tracking = RolloutTracking(tracker, shown, lambda: core.client.activity.in_flight, end)
    core.trackings.append(tracking)
    core.client.activity.followers.append(tracking.add)
    return tracking


def _run_config(core: Core, rows: Rows, options: RolloutOptions) -> JSON:
    """What a tracker is told of a run: no secrets."""
    shown = {name: value for name, value in options.items() if name != "endpoint" and value is not None}
    source = {"rows": str(rows)} if isinstance(rows, str | Path) else {}
    return _plain({"name": core.name, **source, **shown, "graph": core.graph})


def _plain(config: JSON) -> JSON:
    plain: JSON = orjson.loads(orjson.dumps(config, default=str))
    return plain
