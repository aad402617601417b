"""Files and trackers of a `Gym`: `Gym.collect` and `Gym.track`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
from typing_extensions import Unpack

from gym_serve.client.core import Core
from gym_serve.client.rollout_client import RolloutOptions
from gym_serve.rollouts import (
    Budget,
    Collection,
    Progress,
    Report,
    RolloutTracking,
    Rows,
    Tracker,
    Tracking,
    collect,
    open_tracker,
)
from gym_serve.types.requests import JSON


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
