"""Trackers of experiments: what a collection tells them, and what the tools' own files then hold."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from typer.testing import CliRunner

from gym_serve import AsyncGym, Gym
from gym_serve.cli import main
from gym_serve.rollouts import Progress
from gym_serve.rollouts.trackers import (
    COLUMNS,
    TRACKERS,
    RolloutTracking,
    Tracking,
    open_tracker,
    samples,
)
from gym_serve.types.errors import InvalidRequest

ROWS = Path("environments/simple_weather/data/example.jsonl")
FINAL = "weather_agent/mean/reward"
SCORED = {"responses_create_params": {"input": "Hi"}, "response": {"output": []}, "reward": 1.0}


class Recorded:
    """A tracker that keeps what it gets."""

    def __init__(self, broken: bool = False) -> None:
        self.got: list[tuple[Any, ...]] = []
        self.broken = broken

    def config(self, values: Mapping[str, Any]) -> None:
        self.got.append(("config", dict(values)))

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        if self.broken:
            raise ConnectionError("no such host")
        self.got.append(("metrics", dict(values), step))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        self.got.append(("table", columns, rows, step))

    def close(self) -> None:
        self.got.append(("close",))


async def test_a_collection_is_followed_from_its_config_to_its_samples(tmp_path: Path) -> None:
    tracker = Recorded()
    with Gym.from_graph("graphs/weather.yaml", ray=False) as blocking:
        gym = AsyncGym.of(blocking)
        report = await gym.collect(ROWS, tmp_path / "out.jsonl", track=tracker, repeats=2)
    (kind, config), *metrics, (_, columns, rows, step), end = tracker.got
    assert (kind, end) == ("config", ("close",))
    assert config["repeats"] == 2
    assert config["graph"]["agents"]["weather_agent"]["type"] == "simple_agent"
    *_, counts, final = metrics
    assert counts[1]["rollouts/scored"] == report.progress.scored == step == counts[2]
    assert counts[1]["tokens"] == report.spent.tokens
    assert counts[1]["reward/mean"] == pytest.approx(report.progress.mean_reward)
    assert FINAL in final[1]
    assert columns == COLUMNS
    assert len(rows) == report.progress.scored
    assert {len(row) for row in rows} == {len(COLUMNS)}


async def test_few_of_the_metrics_of_many_attempts_are_told(tmp_path: Path) -> None:
    tracker = Recorded()
    rows = Path("environments/mcqa/data/example.jsonl")
    with Gym.from_graph("graphs/mcqa.yaml", ray=False) as blocking:
        gym = AsyncGym.of(blocking)
        report = await gym.collect(rows, tmp_path / "out.jsonl", track=tracker, repeats=11, limit=2)
    *_, (_, told, _) = [entry for entry in tracker.got if entry[0] == "metrics"]
    assert report.metrics is not None
    known = {f"mcqa_agent/{key}" for key in report.metrics[0]["agent_metrics"]}
    assert {f"mcqa_agent/pass@{k}/accuracy" for k in range(1, 12)} <= known
    few = (1, 2, 4, 8, 11)
    for kind in ("pass@{k}", "majority@{k}", "pass@1[avg-of-{k}]"):
        names = {f"mcqa_agent/{kind.format(k=k)}/accuracy": k for k in range(1, 12)}
        assert [k for name, k in names.items() if name in told] == list(few), kind


async def test_a_tracker_that_fails_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = Recorded(broken=True)
    with Gym.from_graph("graphs/weather.yaml", ray=False) as blocking:
        gym = AsyncGym.of(blocking)
        report = await gym.collect(ROWS, tmp_path / "out.jsonl", track=tracker)
    assert report.complete
    assert [entry[0] for entry in tracker.got] == ["config", "table", "close"]
    warnings = [record.message for record in caplog.records if "tracker" in record.message]
    assert warnings == ["the tracker failed: ConnectionError: no such host"]


def test_counts_are_told_every_10_seconds_with_their_rates() -> None:
    now = [0.0]
    tracker = Recorded()
    tracking = Tracking(tracker, {}, clock=lambda: now[0])
    for second in range(25):
        now[0] = float(second)
        tracking.progress(
            Progress(100, 2 * second, second, 0, 1, {"overloaded": second}, 0.5, tokens=50 * second)
        )
    tracking.close()
    counts = told(tracker, "metrics")
    assert [step for _, _, step in counts] == [0, 20, 40]
    assert counts[-1][1] == {
        "rollouts/scored": 20, "rollouts/failed": 20, "rollouts/running": 1, "tokens": 1000,
        "rollouts/waiting_seconds": 0.0, "failures/overloaded": 20,
        "reward/mean": 0.5, "reward/coverage": 0.5,
        "rollouts/per_second": 2.0, "tokens/per_second": 50.0,
    }  # fmt: skip


def told(tracker: Recorded, kind: str) -> list[Any]:
    return [entry for entry in tracker.got if entry[0] == kind]


async def test_a_gym_tells_every_rollout_whatever_asks_for_it(tmp_path: Path) -> None:
    tracker = Recorded()
    with Gym.from_graph("graphs/weather.yaml", ray=False) as blocking:
        gym = AsyncGym.of(blocking)
        with gym.track(tracker, config={"learning_rate": 1e-6}):
            made = await gym.run(ROWS, repeats=2)
            made += [rollout async for rollout in gym.rollouts(ROWS)]
            made += [r async for group in gym.groups(ROWS, size=2) for r in group.rollouts]
            made += [
                (await pair)[1] for pair in gym.run_examples([{"responses_create_params": {"input": "Hi"}}])
            ]
            report = await gym.collect(ROWS, tmp_path / "out.jsonl")
        await gym.run(ROWS)  # no longer followed
    [(_, config)], *_ = [told(tracker, "config")]
    assert config["learning_rate"] == 1e-6
    assert config["graph"]["agents"]["weather_agent"]["type"] == "simple_agent"
    *_, (_, counts, step) = told(tracker, "metrics")
    assert counts["rollouts/scored"] == len(made) + report.progress.scored == step
    tokens = sum(sum(rollout["model_usage"]["model"]["policy"][k] for k in ("input_tokens", "output_tokens"))
                 for rollout in made)  # fmt: skip
    assert counts["tokens"] == tokens + report.spent.tokens
    [(_, columns, rows, _)] = told(tracker, "table")
    assert columns == COLUMNS
    assert len(rows) == min(50, step)
    assert tracker.got[-1] == ("close",)


async def test_failed_attempts_are_told_by_their_class_and_the_end_of_a_gym_ends_its_tracking() -> None:
    tracker = Recorded()
    with Gym.from_graph("graphs/weather.yaml", ray=False) as blocking:
        gym = AsyncGym.of(blocking)
        gym.track(tracker)
        [rollout] = await gym.run([{"responses_create_params": {"input": "Hi"}, "verifier_metadata": 3}])
    *_, (_, counts, step) = told(tracker, "metrics")
    assert rollout.failure is not None
    assert counts == {
        "rollouts/scored": 0, "rollouts/failed": 1, "rollouts/running": 0, "tokens": ANY,
        "rollouts/waiting_seconds": 0.0,
        f"failures/{rollout.failure['kind']}": 1, "rollouts/per_second": ANY, "tokens/per_second": ANY,
    }  # fmt: skip
    assert step == 1
    assert told(tracker, "table") == []
    assert tracker.got[-1] == ("close",)


def test_the_reward_of_a_training_is_that_of_the_last_seconds_and_samples_come_again_and_again() -> None:
    now = [0.0]
    tracker = Recorded()
    with RolloutTracking(tracker, {}, lambda: 4, clock=lambda: now[0]) as tracking:
        for second in range(1, 1301):
            now[0] = float(second)
            tracking.add({**SCORED, "_ng_rollout_id": f"{second}-0", "reward": second // 600})
    rewards = {step: values["reward/mean"] for _, values, step in told(tracker, "metrics")}
    assert {rewards[step] for step in rewards if step < 600} == {0.0}
    assert {rewards[step] for step in rewards if step > 1210} == {2.0}
    assert [step for *_, step in told(tracker, "table")] == [600, 1200, 1300]
    assert all(len(rows) == 50 for _, _, rows, _ in told(tracker, "table"))


def test_samples_are_some_of_a_long_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(SCORED | {"_ng_rollout_id": f"{n}-0"}) + "\n" for n in range(500)))
    ids = [int(row[0].partition("-")[0]) for row in samples(path, 50)]
    assert len(set(ids)) == 50
    assert 100 < sum(ids) / 50 < 400


def test_an_unknown_tracker_and_a_missing_package_are_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match=r"must be one of wandb, mlflow, tensorboard, got 'w'"):
        open_tracker("w", tmp_path / "out.jsonl")
    monkeypatch.setattr(TRACKERS["wandb"], "package", "no_such_package")
    command = ["collect", "--no-ray", "graphs/weather.yaml", str(ROWS), "-o", str(tmp_path / "o.jsonl")]
    result = CliRunner().invoke(main, [*command, "--track", "wandb"])
    assert result.exit_code == 1
    assert "pip install 'gym-serve[wandb]'" in result.stderr
    assert not list(tmp_path.iterdir())


def collected(kind: str, folder: Path, **environment: str) -> None:
    """Run ``gym-serve collect --track`` in a process of its own."""
    code = "from gym_serve.cli import main; main()"
    words = ["collect", "--no-ray", "graphs/weather.yaml", str(ROWS), "-o", str(folder / "out.jsonl")]
    done = subprocess.run(
        [sys.executable, "-c", code, *words, "--track", kind],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "the tracker failed" not in done.stderr


def test_tensorboard_reads_the_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    collected("tensorboard", tmp_path)
    values: dict[str, list[Any]] = {}
    for event in _events(tmp_path / "out_tensorboard"):
        for value in event.summary.value:
            values.setdefault(value.tag, []).append(value)
    rows = len(ROWS.read_text().splitlines())
    assert values["rollouts/scored"][-1].simple_value == rows
    assert FINAL in values
    assert b"simple_agent" in values["config/text_summary"][0].tensor.string_val[0]
    assert values["samples/text_summary"][0].tensor.string_val[0].count(b"\n") == rows + 1


def _events(folder: Path) -> Iterator[Any]:
    from tensorboardX.proto.event_pb2 import Event

    [path] = folder.glob("events.*")
    content = path.read_bytes()
    while content:  # a record: its length, a checksum, the event, a checksum
        [length] = struct.unpack("<Q", content[:8])
        yield Event.FromString(content[12 : 12 + length])
        content = content[16 + length :]


def needs(package: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Marks what `make interop` runs, in a venv of its own."""
    missing = importlib.util.find_spec(package) is None

    def marked(test: Callable[..., None]) -> Callable[..., None]:
        return pytest.mark.interop(pytest.mark.skipif(missing, reason=f"needs the extra {package}")(test))

    return marked


@needs("mlflow")
@pytest.mark.filterwarnings("default")  # the libraries warn of their own code
def test_mlflow_reads_the_run(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    artifacts = str(tmp_path / "artifacts")
    collected("mlflow", tmp_path, MLFLOW_TRACKING_URI=uri, _MLFLOW_SERVER_ARTIFACT_ROOT=artifacts)
    import mlflow

    client = mlflow.MlflowClient(uri)
    [experiment] = client.search_experiments(filter_string="name = 'gym_serve'")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "out"
    assert run.info.status == "FINISHED"
    assert run.data.metrics["rollouts/scored"] == len(ROWS.read_text().splitlines())
    assert FINAL in run.data.metrics
    assert run.data.params["rows"] == str(ROWS)
    found = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert {"config.json", "samples.json"} <= found


@needs("wandb")
def test_wandb_keeps_the_run_offline(tmp_path: Path) -> None:
    collected("wandb", tmp_path, WANDB_MODE="offline", WANDB_SILENT="true")
    [run] = tmp_path.glob("wandb/offline-run-*")
    [path] = run.glob("*.wandb")
    content = path.read_bytes()  # records of protocol buffers, with their keys as they are
    for key in ("rollouts/scored", "reward/mean", FINAL, "simple_agent"):
        assert key.encode() in content, key
    [table] = run.glob("files/media/table/samples_*.table.json")
    shown = json.loads(table.read_text())
    assert shown["columns"] == list(COLUMNS)
    assert len(shown["data"]) == len(ROWS.read_text().splitlines())


@needs("wandb")
@pytest.mark.filterwarnings("default")  # the libraries warn of their own code
def test_wandb_joins_the_run_of_a_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    with wandb.init(dir=tmp_path, config={"learning_rate": 1e-6}) as run:
        with Gym.from_graph("graphs/weather.yaml", ray=False) as gym, gym.track("wandb"):
            for step in range(3):
                gym.run(ROWS)
                run.log({"loss": 0.5}, step=step)
        assert wandb.run is run  # the trainer ends it
    wandb.teardown()  # the end of a process: the file is written
    [folder] = tmp_path.glob("wandb/offline-run-*")
    content = next(folder.glob("*.wandb")).read_bytes()
    for key in ("loss", "rollouts/scored", "simple_agent"):
        assert key.encode() in content, key
    assert len(list(folder.glob("files/media/table/samples_*.table.json"))) == 1


@needs("mlflow")
@pytest.mark.filterwarnings("default")  # the libraries warn of their own code
def test_mlflow_makes_a_run_below_that_of_a_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_MLFLOW_SERVER_ARTIFACT_ROOT", str(tmp_path / "artifacts"))
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    with (
        mlflow.start_run() as above,
        Gym.from_graph("graphs/weather.yaml", ray=False) as gym,
        gym.track("mlflow"),
    ):
        gym.run(ROWS)
    client = mlflow.MlflowClient()
    below = f"tags.`mlflow.parentRunId` = '{above.info.run_id}'"
    [run] = client.search_runs([above.info.experiment_id], below)
    assert (run.info.run_name, run.info.status) == ("weather", "FINISHED")
    assert run.data.metrics["rollouts/scored"] == len(ROWS.read_text().splitlines())
