"""The first run, without the repository: graphs and rows are in the wheel, and are found by name."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import pytest
from typer.testing import CliRunner

from gym_serve.cli import catalog, local_ray, main
from gym_serve.deployments.simple_agent import SimpleAgent
from gym_serve.graph import load_graph
from gym_serve.graph.classes import FOLDER, graph_file

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "stem"),
    [("weather", "weather"), ("simple_weather", "weather"), ("math_with_judge", "math"), ("mcqa", "mcqa")],
)
def test_a_name_leads_to_a_graph(name: str, stem: str) -> None:
    assert graph_file(name) == FOLDER / f"{stem}.yaml"


def test_a_file_at_hand_goes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_graph("mcqa").base_dir == tmp_path  # where its .env is looked for
    (tmp_path / "mcqa").write_text("models: {}\n")
    assert graph_file("mcqa") == Path("mcqa")
    assert graph_file("mcqa.yaml") == Path("mcqa.yaml")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("rows.jsonl", "rows.jsonl is no graph; known: "),
        ("wether", "wether is no graph; did you mean 'weather'?"),
    ],
)
def test_rows_alone_are_no_graph(tmp_path: Path, given: str, said: str) -> None:
    result = CliRunner().invoke(main, ["collect", given, "-o", str(tmp_path / "out.jsonl")])
    assert result.exit_code == 2
    output = " ".join(result.output.replace("│", " ").split())
    assert said in output
    assert "If it has rows, say which graph makes rollouts of them: a graph file before it" in output


def test_a_graph_without_one_agent_asks_for_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["collect", "quickstart", "-o", "out.jsonl", "--no-ray"])
    assert result.exit_code == 1
    assert "several agents" in result.output


class Lacking(SimpleAgent):
    """An agent whose package is not installed."""

    requires: ClassVar[Mapping[str, str]] = {"no_such_module": "gym-serve[never]"}


def test_validate_list_and_up_tell_alike_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lacking = f"{__name__}:Lacking"
    told = "no_such_module is not installed where its replicas run: pip install 'gym-serve[never]'"
    Path("graph.yaml").write_text(
        "models: {policy: {type: scripted_model}}\n"
        "resources: {weather: {type: simple_weather}}\n"
        f"agents: {{agent: {{type: '{lacking}', model: policy, resources: weather}}}}\n"
    )
    validated = CliRunner().invoke(main, ["validate", "graph.yaml"])
    assert validated.exit_code == 0  # the file is right
    assert f"missing on this machine: agents.agent: {told}" in validated.stderr
    monkeypatch.setattr(local_ray, "use", lambda address: None)  # no Ray runs
    monkeypatch.setattr(local_ray, "start", lambda: pytest.fail("a Ray is started"))
    raised = CliRunner().invoke(main, ["up", "graph.yaml"])
    assert raised.exit_code == 1
    assert f"agents.agent: {told}" in raised.stderr
    point = EntryPoint("lacking", lacking, "gym_serve.agents")
    monkeypatch.setattr(catalog, "entry_points", lambda group: [point])
    monkeypatch.setattr(catalog, "find_class", lambda kind, name: Lacking)
    (entry,) = catalog.type_entries("agent")
    assert entry.missing == told


PARTS = ("gym_serve", "deployments", "environments", "graphs", "pyproject.toml", "README.md", "LICENSE")
"""What the wheel is built from."""


@pytest.mark.slow
def test_the_wheel_in_an_empty_folder(tmp_path: Path) -> None:
    """It is built twice, alike, and stands before the checkout on the path."""
    installed, empty = tmp_path / "installed", tmp_path / "empty"
    empty.mkdir()
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheels = []
    for build in ("first", "second"):
        source = tmp_path / build
        source.mkdir()
        for part in PARTS:
            copy = ["cp", "-a", str(ROOT / part), str(source)]
            subprocess.run(copy, check=True)
        command = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", source / "dist", source]
        subprocess.run(command, env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}, check=True)
        wheels += (source / "dist").glob("*.whl")
    first, second = wheels
    assert first.read_bytes() == second.read_bytes()
    assert {f"gym_serve/graphs/{file.name}" for file in ROOT.glob("graphs/*.yaml")} <= set(
        zipfile.ZipFile(first).namelist()
    )
    subprocess.run([*pip, "install", "--no-deps", "--target", installed, first], check=True)

    def run(*arguments: str) -> str:
        env = {**os.environ, "PYTHONPATH": str(installed)}
        command = [sys.executable, *arguments]
        ran = subprocess.run(command, cwd=empty, env=env, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    command = str(installed / "bin" / "gym-serve")
    assert run("-c", "import gym_serve; print(gym_serve.__file__)").startswith(str(installed))
    assert "simple_weather" in run(command, "list", "environment")
    assert "weather " in run(command, "list", "graph")
    assert "9 of 9 rollouts: 9 scored" in run(
        command, "collect", "simple_weather", "-o", "out.jsonl", "--no-ray"
    )
    assert len((empty / "out.jsonl").read_text().splitlines()) == 9
