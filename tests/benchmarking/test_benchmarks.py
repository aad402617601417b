"""Benchmarks: each command tells its usage, those without Ray run on a small scale, summaries are right."""

from __future__ import annotations

import importlib.util
import pkgutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import orjson
import pytest
from support.sandboxes import needs_bubblewrap

import benchmarks
from benchmarks import gpu_wheels, idle, startup
from benchmarks.harness.ray_processes import kind_of
from benchmarks.harness.reports import medians, table
from benchmarks.harness.uncounted import uncounted
from gym_serve import Gym
from gym_serve.observe import catalogue

_MODULES = [import_module(f"benchmarks.{info.name}") for info in pkgutil.iter_modules(benchmarks.__path__)]
COMMANDS = {module.__name__.rpartition(".")[2]: module for module in _MODULES if hasattr(module, "main")}

Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process; what it printed."""

    def run(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        COMMANDS[name].main()
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_how_to_run_it(name: str, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    module: ModuleType = COMMANDS[name]
    with pytest.raises(SystemExit) as exit:
        run(name, "--help")
    assert exit.value.code == 0
    assert f"python -m benchmarks.{name}" in (module.__doc__ or "")
    assert (module.__doc__ or "").splitlines()[0] in capsys.readouterr().out


@needs_bubblewrap
def test_boxes(run: Run) -> None:
    shown = orjson.loads(run("boxes", "--boxes", 8, "--commands", 5, "--live", 2, "--episodes", 2))
    assert shown["oracle"]["scored_1"] == 2


def test_long_episodes(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    shown = run("long_episodes", "--turns", 10, "--tokens", 20, "--episodes", 1, "--output", output)
    turns = orjson.loads(output.read_bytes())["turns"]
    assert len(turns) == 11
    assert turns[9]["agent_to_model"] > turns[0]["agent_to_model"]
    assert shown.count("\n") == 4  # the header, and turns 1 and 10


def test_capacity_reads_the_results_of_others(run: Run, tmp_path: Path) -> None:
    with pytest.raises(
        SystemExit, match=r"rollouts\.json is missing: run `python -m benchmarks\.rollouts` first"
    ):
        run("capacity", "--results", tmp_path)
    cpu_ms = dict.fromkeys(("driver", "agent", "policy", "weather"), 0.5)
    summary = {"transports": "replica", "concurrency": 8, "cpu_ms": cpu_ms}
    (tmp_path / "rollouts.json").write_bytes(orjson.dumps({"summary": [summary]}))
    (tmp_path / "in_flight.json").write_bytes(orjson.dumps({"kb_per_rollout": cpu_ms}))
    assert "| 6000 | 100 | driver | 0.05 | 1 | 3 |" in run(
        "capacity", "--results", tmp_path, "--in-flight", 6000
    )


def test_soak_of_the_engine(run: Run, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as exit:
        run("soak", "--rows", 200, "--engine-only", "--output", tmp_path)
    assert not exit.value.code  # no row lost, none doubled


def test_startup_counts_runs_that_fail(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {
        "seconds": 2.0,
        "cpu_s": {"driver": 1.5},
        "pss_mb": {"driver": 50.0},
        "processes": {"driver": 1},
    }
    answers = iter([figures, None, {**figures, "seconds": 4.0}, None])
    monkeypatch.setattr(startup, "child", lambda stage, limit_s: next(answers))
    output = tmp_path / "result.json"
    shown = run("startup", "--runs", 2, "--stages", "ray,graph", "--output", output)
    result = orjson.loads(output.read_bytes())
    assert result["failed"] == {"ray": 0, "graph": 2}
    assert "| ray | 3 | 1.5 | 1 | 50 |" in shown
    assert "| driver | 1: 1.5 s, 50 MB |" in shown


def test_a_run_of_startup_that_hangs_ends_with_its_stacks(capfd: pytest.CaptureFixture[str]) -> None:
    assert startup.child("graph", limit_s=0.01) is None
    assert "most recent call first" in capfd.readouterr().err


def test_idle_shows_what_only_one_stage_has() -> None:
    shown = idle.kinds_table({"empty": {"driver": 1.0}, "graph": {"driver": 2.0, "replicas": 3.0}})
    assert shown.splitlines()[2:] == ["| driver | 1 | 2 |", "| replicas |  | 3 |"]


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("ray::ServeReplica:default:agent", "replicas"),
        ("ray::ServeController.listen_for_change", "Serve controller"),
        ("/venv/ray/core/src/ray/raylet/raylet --python_worker_command=python default_worker.py", "raylet"),
        ("python /venv/ray/dashboard/dashboard.py --host=127.0.0.1", "dashboard"),
        ("ray-dashboard-NodeHead-0 (python -B)", "dashboard"),
        ("python server.py", "other"),
    ],
)
def test_kinds_of_processes(command: str, kind: str) -> None:
    assert kind_of(command) == kind


def test_medians_of_figures_that_are_not_in_every_run() -> None:
    runs = [{"cpu": {"driver": 1.0}}, {"cpu": {"driver": 3.0, "replica": 6.0}}, {"cpu": {"driver": 2.0}}]
    assert medians(runs) == {"cpu": {"driver": 2.0, "replica": 0.0}}


def test_a_table_shows_three_digits() -> None:
    assert table(("a", "b"), [(1234.5, 0.12345)]).splitlines()[-1] == "| 1,234 | 0.123 |"


def test_nothing_is_counted_where_the_cost_of_metrics_is_compared_with_none() -> None:
    def counted() -> float:
        metrics = (catalogue.CALLS, catalogue.ROLLOUTS, catalogue.TOKENS, catalogue.CPU_SECONDS)
        return sum(point.value for metric in metrics for point in metric.points())

    with Gym.from_graph("graphs/weather.yaml", ray=False) as gym:
        before = counted()
        with uncounted():
            gym.run("environments/simple_weather/data/example.jsonl", limit=1)
        assert counted() == before
        gym.run("environments/simple_weather/data/example.jsonl", limit=1)
        assert counted() > before


def test_a_part_that_fails_is_named_with_its_reason(run: Run, tmp_path: Path) -> None:
    """Here no part can be done: this venv has no torch, and the others go on."""
    if importlib.util.find_spec("torch") is not None:
        pytest.skip("the parts would run")
    output = tmp_path / "gpu.json"
    shown = run("gpu", "--device", "cpu", "--only", "hf_engine", "training", "--output", output)
    parts = orjson.loads(output.read_bytes())["parts"]
    assert list(parts) == ["hf_engine", "training"]
    assert "No module named 'torch'" in parts["hf_engine"]["reason"]
    assert shown.count("could not be done") == 2


def test_a_slimmed_wheel_is_installed(tmp_path: Path) -> None:
    wheel, site = tmp_path / "vllm-1.0-py3-none-any.whl", tmp_path / "site"
    kept, dropped = "vllm/__init__.py", "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so"
    info = "vllm-1.0.dist-info"
    files = {
        kept: "x = 1",
        dropped: "machine code",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "".join(f"{name},,\n" for name in (kept, dropped, f"{info}/RECORD")),
    }
    with zipfile.ZipFile(wheel, "w") as made:
        for name, text in files.items():
            made.writestr(name, text)
    gpu_wheels.slimmed(wheel)
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", site]
    subprocess.run([*words, wheel], check=True, capture_output=True)
    assert (site / kept).exists()
    assert not (site / dropped).exists()
