"""Trackers of experiments: Weights & Biases, MLflow and TensorBoard follow a collection or a training.

`Tracking` gives a `Tracker` the numbers of a collection, and `RolloutTracking` those of all rollouts that a
`Gym` makes. Both have a thread of their own: a service that is slow or gone delays no rollout, and what it
raises is logged and ends nothing. Where the results go is set as always with these tools: by ``WANDB_MODE``,
``MLFLOW_TRACKING_URI`` and so on.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import orjson

from gym_serve.metrics import failure_class
from gym_serve.rollouts.analysis.reading import prompt_text
from gym_serve.rollouts.collecting import Report
from gym_serve.rollouts.files import read_records
from gym_serve.rollouts.progress import Progress, Spending, Tally
from gym_serve.types.errors import InvalidRequest
from gym_serve.types.requests import JSON
from gym_serve.types.rows import Rollout, agent_name

logger = logging.getLogger("gym_serve")

COLUMNS = ("rollout", "agent", "prompt", "answer", "reward", "reason")  # the columns of a table of samples

SAMPLES = 50  # the rollouts of a table of samples

_EVERY_SECONDS = 10.0
_TABLE_SECONDS = 600.0
_TEXT = 4_000  # characters of a prompt or an answer
_MLFLOW_BATCH = 1_000  # metrics that its servers take at once


class Tracker(Protocol):
    """What follows a run."""

    def config(self, values: Mapping[str, Any]) -> None:
        """Take the configuration of the run, once."""

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Take numbers after ``step`` rollouts."""

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Take a table of samples after ``step`` rollouts."""

    def close(self) -> None:
        """Send what is left, and end the run."""


def open_tracker(kind: str, output: Path) -> Tracker:
    """A tracker of a run that writes to ``output``, whose name is that of the run. TensorBoard's files lie
    beside it, in ``OUT_tensorboard``. Raises as `check_tracker`.

    A run of the same tool that this process has begun already, as trainers do, goes on: W&B adds the numbers
    to those that the trainer logs next, and MLflow makes a run below it.
    """
    check_tracker(kind)
    return TRACKERS[kind](output.name.partition(".")[0], output.parent)


def check_tracker(kind: str) -> None:
    """Check that a tracker can be opened. Raises `InvalidRequest`: there is none, or it is not installed."""
    if kind not in TRACKERS:
        raise InvalidRequest(f"`track` must be one of {', '.join(TRACKERS)}, got {kind!r}")
    if find_spec(package := TRACKERS[kind].package) is None:
        raise InvalidRequest(f"`track` {kind} needs {package}: pip install 'gym-serve[{kind}]'")


class WandbTracker:
    """Weights & Biases."""

    package = "wandb"

    def __init__(self, name: str, folder: Path) -> None:
        self._wandb = import_module("wandb")
        self._is_own = self._wandb.run is None
        self._run = self._wandb.init(name=name, dir=str(folder)) if self._is_own else self._wandb.run

    def config(self, values: Mapping[str, Any]) -> None:
        self._run.config.update(dict(values) if self._is_own else {"gym_serve": dict(values)})

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self._log(dict(values), step)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        table = self._wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        self._log({"samples": table}, step)

    def close(self) -> None:
        if self._is_own:
            self._run.finish()

    def _log(self, values: dict[str, Any], step: int) -> None:
        if self._is_own:
            self._run.log(values, step=step)
        else:  # the trainer counts the steps of its run
            self._run.log({**values, "rollouts": step}, commit=False)


class MlflowTracker:
    """MLflow. The run is named in every call, as the functions of its module mean the run of their thread."""

    package = "mlflow"

    def __init__(self, name: str, folder: Path) -> None:
        mlflow = import_module("mlflow")
        self._client = mlflow.MlflowClient()
        if (active := mlflow.active_run()) is None:
            run = self._client.create_run(_experiment(mlflow), run_name=name)
        else:
            parent = {"mlflow.parentRunId": active.info.run_id}
            run = self._client.create_run(active.info.experiment_id, tags=parent, run_name=name)
        self._run = run.info.run_id

    def config(self, values: Mapping[str, Any]) -> None:
        self._client.log_dict(self._run, dict(values), "config.json")
        for name, value in values.items():
            if not isinstance(value, dict | list):
                self._client.log_param(self._run, name, value)

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        entities, now = import_module("mlflow.entities"), int(time.time() * 1000)
        names = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in values.items()}
        metrics = [entities.Metric(name, value, now, step) for name, value in names.items()]
        for begin in range(0, len(metrics), _MLFLOW_BATCH):
            self._client.log_batch(self._run, metrics[begin : begin + _MLFLOW_BATCH])

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        data = {name: [row[position] for row in rows] for position, name in enumerate(columns)}
        self._client.log_table(self._run, data, "samples.json")

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _experiment(mlflow: Any) -> str:
    """The id of the experiment that ``MLFLOW_EXPERIMENT_NAME`` or ``_ID`` name, by default gym_serve."""
    variables = import_module("mlflow.environment_variables")
    if (experiment := variables.MLFLOW_EXPERIMENT_ID.get()) is not None:
        return str(experiment)
    name = variables.MLFLOW_EXPERIMENT_NAME.get() or "gym_serve"
    return str(mlflow.set_experiment(name).experiment_id)


class TensorboardTracker:
    """TensorBoard: files of events, which ``tensorboard --logdir`` shows."""

    package = "tensorboardX"

    def __init__(self, name: str, folder: Path) -> None:
        self._writer = import_module("tensorboardX").SummaryWriter(str(folder / f"{name}_tensorboard"))

    def config(self, values: Mapping[str, Any]) -> None:
        text = orjson.dumps(values, option=orjson.OPT_INDENT_2, default=str).decode()
        self._writer.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()))

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        lines = [columns, ["---"] * len(columns), *rows]
        text = "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)
        self._writer.add_text("samples", text, step)

    def close(self) -> None:
        self._writer.close()


def _cell(value: Any) -> str:
    text = re.sub(r"([\\`*_{}\[\]<>()#+!|~])", r"\\\1", str(value))
    return " ".join(text.split())


TRACKERS: Mapping[str, type[WandbTracker | MlflowTracker | TensorboardTracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "tensorboard": TensorboardTracker,
}
"""The trackers by name, which is also the extra that installs each."""


class Tracking:
    """Gives a tracker what a collection does, until it is closed."""

    def __init__(
        self, tracker: Tracker, config: Mapping[str, Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tracker = tracker
        self._clock = clock
        self._told: tuple[float, Progress] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gym_serve-tracker")
        self._failed = False
        self._closed = False
        self._send(tracker.config, dict(config))

    def progress(self, progress: Progress) -> None:
        if self.is_due:
            self._tell(progress)

    def finish(self, report: Report) -> None:
        self._tell(report.progress)
        step = report.progress.finished
        if report.metrics:
            self._send(self._tracker.metrics, dict(_final(report.metrics)), step)
        self._send(lambda: self._tracker.table(COLUMNS, samples(report.outputs.rollouts), step))

    def close(self) -> None:
        """Close the tracker, once it has got everything; blocks until then. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._send(self._tracker.close)
        self._thread.shutdown()

    @property
    def is_due(self) -> bool:
        return self._told is None or self._clock() >= self._told[0] + _EVERY_SECONDS

    def _tell(self, progress: Progress, since: Progress | None = None) -> None:
        """Tell the counts; the reward is that of ``since``, if given."""
        now = self._clock()
        values: dict[str, float] = {
            "rollouts/scored": progress.scored,
            "rollouts/failed": progress.failed,
            "rollouts/running": progress.running,
            "rollouts/waiting_seconds": progress.waiting.seconds if progress.waiting else 0.0,
            "tokens": progress.tokens,
            **{f"failures/{kind}": count for kind, count in progress.failed_attempts.items()},
        }
        rewarded = since or progress
        if rewarded.mean_reward is not None:
            values["reward/mean"] = rewarded.mean_reward
            values["reward/coverage"] = rewarded.scored / max(rewarded.finished, 1)
        if self._told is not None and now > self._told[0]:
            seconds, before = now - self._told[0], self._told[1]
            values["rollouts/per_second"] = (progress.finished - before.finished) / seconds
            values["tokens/per_second"] = (progress.tokens - before.tokens) / seconds
        self._told = now, progress
        self._send(self._tracker.metrics, values, progress.finished)

    def _send(self, work: Callable[..., None], *args: Any) -> None:
        self._thread.submit(self._try, work, args)

    def _try(self, work: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            work(*args)
        except Exception as error:  # a tracker's library may raise anything, and the run goes on
            if not self._failed:
                logger.warning("the tracker failed: %s: %s", type(error).__name__, error)
            self._failed = True


class RolloutTracking(Tracking):
    """Gives a tracker every rollout that it is told of, until it is closed: by `Gym.track`.

    Counts are told every 10 seconds, and a table of samples every 10 minutes. ``reward/mean`` and
    ``reward/coverage`` are those of the rollouts since the last time, as a policy in training changes;
    ``rollouts/failed`` counts attempts.
    """

    def __init__(
        self,
        tracker: Tracker,
        config: Mapping[str, Any],
        running: Callable[[], int],
        on_close: Callable[[RolloutTracking], None] = lambda tracking: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(tracker, config, clock)
        self._running = running
        self._on_close = on_close
        self._all, self._since = Tally(0), Tally(0)
        self._spending = Spending()
        self._samples = _Samples(SAMPLES)
        self._table_due = clock() + _TABLE_SECONDS

    def __enter__(self) -> RolloutTracking:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def add(self, rollout: JSON) -> None:
        """Count an attempt, and keep it as a sample perhaps."""
        for tally in (self._all, self._since):
            tally.add(rollout)
            tally.finish(1)
        self._spending.add(rollout)
        if failure_class(rollout) is None:
            self._samples.add(rollout)
        if self.is_due:
            self._tell_counts()
        if self._clock() >= self._table_due:
            self._tell_samples()

    def close(self) -> None:
        """Tell what is left, and close the tracker; blocks until it has got all. Safe to call twice."""
        if not self._closed:
            self._on_close(self)
            self._tell_counts()
            self._tell_samples()
        super().close()

    def _tell_counts(self) -> None:
        counts = self._all.progress(self._running(), tokens=self._spending.tokens)
        since, self._since = self._since.progress(), Tally(0)
        self._tell(counts, since)

    def _tell_samples(self) -> None:
        if rows := self._samples.take():
            self._send(self._tracker.table, COLUMNS, rows, self._all.progress().finished)
        self._table_due = self._clock() + _TABLE_SECONDS


def samples(rollouts: Path, count: int = SAMPLES) -> list[list[Any]]:
    """Some rollouts of a file, each as likely as any other: the rows of a table with `COLUMNS`."""
    chosen = _Samples(count)
    for record in read_records(rollouts):
        if failure_class(record) is None:
            chosen.add(record)
    return chosen.take()


class _Samples:
    """Some of the rollouts that come by, each as likely as any other (reservoir sampling)."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._choice = random.Random(0)
        self._seen = 0
        self._rows: list[list[Any]] = []

    def add(self, rollout: JSON) -> None:
        self._seen += 1
        if len(self._rows) < self._count:
            self._rows.append(_row(rollout))
        elif (place := self._choice.randrange(self._seen)) < self._count:
            self._rows[place] = _row(rollout)

    def take(self) -> list[list[Any]]:
        rows, self._rows, self._seen = self._rows, [], 0
        return rows


def _row(rollout: JSON) -> list[Any]:
    return [
        str(rollout.get("_ng_rollout_id", "")),
        agent_name(rollout) or "",
        prompt_text(rollout)[:_TEXT],
        Rollout(rollout).output_text[:_TEXT],
        rollout["reward"],
        str(rollout.get("reason") or "")[:_TEXT],
    ]


def _final(agents: Sequence[JSON]) -> Iterator[tuple[str, float]]:
    """The numbers in the metrics of a run, as ``agent/metric``, and the share of rollouts they are of."""
    for agent in agents:
        name, metrics = agent["agent_ref"]["name"], agent.get("agent_metrics") or {}
        if (of := agent.get("coverage")) and of["asked"]:
            yield f"{name}/coverage", of["scored"] / of["asked"]
        attempts = {key: int(numbers[-1]) for key in metrics if (numbers := _ATTEMPTS.findall(key))}
        largest = max(attempts.values(), default=0)
        for key, value in metrics.items():
            k = attempts.get(key, 1)
            if isinstance(value, int | float) and (k & (k - 1) == 0 or k == largest):
                yield f"{name}/{key}", float(value)


_ATTEMPTS = re.compile(r"(?:@|avg-of-)(\d+)")  # the k in ``pass@k``, ``pass@1[avg-of-k]`` and ``majority@k``
