"""`gym-serve validate` and `gym-serve resolve`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from gym_serve.cli import main

QUICKSTART = Path(__file__).parents[2] / "graphs" / "quickstart.yaml"

runner = CliRunner()

GRAPH = """
applications:
  - name: math
    import_path: gym_serve.graph:app
    args:
      models: {policy: {type: "gs_cli_env:MyModel", key: "${GS_CLI_KEY:-}"}}
      agents: {}
      resources: {mcqa: {type: mcqa, autoscaling: {min_replicas: 0, max_replicas: 4}}}
      auth_token: "${GS_CLI_KEY:-}"
"""
MODULE = """
from pydantic import SecretStr
from gym_serve.servers import ModelServer

class MyModel(ModelServer):
    class Config(ModelServer.Config):
        key: SecretStr | None = None
        steps: int = 3

    async def responses(self, body):
        return {}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A graph whose model is a class of the current directory, as in a user's project."""
    (tmp_path / "graph.yaml").write_text(GRAPH)
    (tmp_path / "gs_cli_env.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "gs_cli_env", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return "graph.yaml"


def test_validate_prints_the_servers(file: str) -> None:
    result = runner.invoke(main, ["validate", file])
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines == [
        ["ok"],
        ["server", "kind", "type", "references", "replicas"],
        ["policy", "model", "gs_cli_env:MyModel", "1"],
        ["mcqa", "resources", "mcqa", "0", "to", "4"],
    ]


def test_validate_prints_every_problem_to_stderr(file: str) -> None:
    result = runner.invoke(
        main, ["validate", file, "--set", "models.policy.stps=1", "--set", "default_agent=x"]
    )
    assert result.exit_code == 1
    assert result.output == (
        "2 problems in graph.yaml:\n"
        "  - models.policy.stps: unknown setting; did you mean 'steps'?\n"
        "  - default_agent: unknown agent 'x'\n"
    )


def test_validate_checks_many_files(file: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("applications: []")
    good = runner.invoke(main, ["validate", file, file])
    assert (good.exit_code, good.stdout.count("\nok\n")) == (0, 2), good.output
    both = runner.invoke(main, ["validate", str(bad), file])
    assert both.exit_code == 1
    assert f"{bad}: " in both.stderr
    assert "\nok\n" in both.stdout
    told = json.loads(runner.invoke(main, ["validate", str(bad), file, "--json"]).stdout)
    assert (told["ok"], [one["ok"] for one in told["files"].values()]) == (False, [False, True])


def test_validate_as_json(file: str) -> None:
    good = runner.invoke(main, ["validate", file, "--json"])
    assert good.exit_code == 0
    assert json.loads(good.stdout)["graph"]["models"]["policy"]["steps"] == 3
    arguments = [file, "--json", "--set", "models.policy.steps=x"]
    bad = runner.invoke(main, ["validate", *arguments])
    assert bad.exit_code == 1
    problems = ["models.policy.steps: must be a valid integer, unable to parse string as an integer"]
    report = json.loads(bad.stdout)
    assert (report["ok"], report["problems"]) == (False, problems)
    assert report["error"]["code"] == "graph_error"
    assert runner.invoke(main, ["resolve", *arguments]).stdout == bad.stdout


def test_a_secret_on_the_command_line_is_refused_and_not_shown(file: str) -> None:
    result = runner.invoke(main, ["validate", file, "--set", "models.policy.key=hunter2"])
    assert result.exit_code == 1
    assert "models.policy.key: write a secret as ${NAME}" in result.output
    assert "hunter2" not in result.output


def test_resolve_prints_the_graph_with_secrets_masked(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GS_CLI_KEY", "hunter2")
    result = runner.invoke(main, ["resolve", file, "--set", "models.policy.steps=5", "--application", "math"])
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(result.stdout) == {
        "models": {
            "policy": {
                "type": "gs_cli_env:MyModel",
                "prices": None,
                "capture_ttl": 3600.0,
                "max_captures": 10_000,
                "key": "**********",
                "steps": 5,
            }
        },
        "resources": {
            "mcqa": {
                "type": "mcqa",
                "session_ttl": 3600.0,
                "unavailable_tools": "fail",
                "max_client_sessions": 10_000,
                "grading_mode": None,
                "autoscaling": {"min_replicas": 0, "max_replicas": 4},
            }
        },
        "auth_token": "**********",
    }
    as_json = runner.invoke(main, ["resolve", file, "--set", "models.policy.steps=5", "--json"])
    assert json.loads(as_json.stdout) == yaml.safe_load(result.stdout)


def test_resolve_of_a_missing_file() -> None:
    result = runner.invoke(main, ["resolve", "no_such.yaml"])
    assert result.exit_code == 1
    assert "no such file: no_such.yaml" in result.output


def test_one_of_several_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "two.yaml").write_text(
        "applications:\n"
        "- {name: a, import_path: 'gym_serve.graph:app', args: {models: {m: {type: scripted_model}}}}\n"
        "- {name: b, import_path: 'gym_serve.graph:app', args: {models: {n: {type: scripted_model}}}}\n"
    )
    monkeypatch.chdir(tmp_path)
    commands = [
        "validate two.yaml",
        "resolve two.yaml",
        "up two.yaml",
        "collect two.yaml rows.jsonl -o o.jsonl",
    ]
    commands += [
        "reverify out.jsonl -o o.jsonl --graph two.yaml",
        "dataset validate r.jsonl --graph two.yaml",
    ]
    for command in commands:
        result = runner.invoke(main, [*command.split(), "--json"])
        assert result.exit_code == 1, command
        (problem,) = json.loads(result.stdout)["problems"]
        assert (
            problem
            == "applications: several graphs (a, b); choose one with application=NAME (--application NAME)"
        )
        wrong = runner.invoke(main, [*command.split(), "--application", "c"])
        assert "unknown graph 'c'; known: a, b" in wrong.stderr
    chosen = runner.invoke(main, ["resolve", "two.yaml", "--application", "b", "--json"])
    assert json.loads(chosen.stdout)["models"].keys() == {"n"}
    (listed,) = json.loads(runner.invoke(main, ["list", "graph", "--graphs", ".", "--json"]).stdout)
    assert "error" not in listed
    alone = runner.invoke(main, ["dataset", "validate", "r.jsonl", "--application", "a"])
    assert alone.exit_code == 2


def test_validate_in_a_process_of_its_own_loads_no_ray() -> None:
    code = (
        "import sys\nfrom gym_serve.cli import main\n"
        "main(['validate', sys.argv[1]], standalone_mode=False)\n"
        "print('ray' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(QUICKSTART)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["False"], done.stderr
