"""`gym-serve list`, `show` and `gym-serve test`."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gym_serve.cli import main

runner = CliRunner()
ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "environments" / "mcqa" / "fixtures.jsonl"
GRAPHS = ["--graphs", str(ROOT / "graphs")]


def test_list_has_types_and_graphs() -> None:
    result = runner.invoke(main, ["list", *GRAPHS, "--json"])
    assert result.exit_code == 0, result.output
    entries = {(entry["kind"], entry["name"]): entry for entry in json.loads(result.stdout)}
    assert entries["environment", "mcqa"]["summary"].startswith("Multiple-choice questions")
    assert entries["environment", "mcqa"]["import_path"] == "gym_serve.environments.mcqa:Mcqa"
    assert ("agent", "simple_agent") in entries
    assert ("model", "scripted_model") in entries
    graph = entries["graph", str(ROOT / "graphs" / "math.yaml")]
    assert graph["summary"].startswith("Mathematics, scored by math-verify.")


def test_list_of_some_kinds(tmp_path: Path) -> None:
    (tmp_path / "prompt.yaml").write_text("user: Hello\n")
    (tmp_path / "broken.yaml").write_text("a: [")
    (tmp_path / "graph.yml").write_text("models: {policy: {type: scripted_model}}\n")
    result = runner.invoke(main, ["list", "agent", "graph", "--graphs", str(tmp_path)])
    assert result.exit_code == 0, result.output
    kinds = [line.split()[:2] for line in result.stdout.splitlines()[1:]]
    assert ["agent", "simple_agent"] in kinds
    assert kinds[-1] == ["graph", str(tmp_path / "graph.yml")]
    assert {kind for kind, _ in kinds} == {"agent", "graph"}
    assert runner.invoke(main, ["list", "grph"]).exit_code == 2


PLUGIN = {
    "gs_plugin-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: gs-plugin\nVersion: 1.0\n",
    "gs_plugin-1.0.dist-info/entry_points.txt": (
        "[gym_serve.environments]\ngs_good = gs_plugin:Good\ngs_broken = gs_broken:Broken\n"
    ),
    "gs_broken.py": 'import gs_missing_module\n\n\nclass Broken:\n    """Mends zithers."""\n',
    "gs_plugin.py": (
        "from gym_serve import ResourcesServer\n\n\n"
        "class Good(ResourcesServer):\n    '''Sorts xylophones.\n\n    By hand.\n    '''\n\n"
        "    def verify(self) -> float:\n        return 0.0\n"
    ),
}


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with an environment that works, and one that does not."""
    for name, text in PLUGIN.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "gs_plugin", raising=False)


@pytest.mark.usefixtures("plugin")
def test_types_of_other_packages_are_listed_and_broken_ones_with_the_reason() -> None:
    result = runner.invoke(main, ["list", "environment", "--json"])
    assert result.exit_code == 0, result.output
    entries = {entry["name"]: entry for entry in json.loads(result.stdout)}
    assert entries["gs_good"]["summary"] == "Sorts xylophones."
    assert entries["gs_good"]["package"] == "gs-plugin 1.0"
    assert "No module named 'gs_missing_module'" in entries["gs_broken"]["error"]
    assert entries["gs_broken"]["summary"] == "Mends zithers."
    table = runner.invoke(main, ["list", "environment"]).stdout
    assert table.index("Mends zithers.") < table.index("No module named 'gs_missing_module'")
    broken = runner.invoke(main, ["show", "gs_broken"])
    assert broken.exit_code == 1
    assert "No module named 'gs_missing_module'" in broken.stderr


def test_show_an_environment() -> None:
    result = runner.invoke(main, ["show", "simple_weather", "--json"])
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert shown["tools"][0]["name"] == "get_weather"
    assert shown["reverify_mode"] == "unsupported"
    assert shown["files"].keys() == {"readme", "fixtures", "data"}
    setting = shown["settings"][0]
    assert setting["name"] == "session_ttl"
    text = runner.invoke(main, ["show", "gym_serve.environments.simple_weather:SimpleWeather"])
    assert text.exit_code == 0, text.output
    assert "tool get_weather(city): Get the current weather of a city." in text.stdout


@pytest.mark.parametrize(
    ("name", "setting", "type_", "default"),
    [
        ("chat_model", "base_url", "list of string", "(required)"),
        ("chat_model", "api_key", "secret", ""),
        ("chat_model", "reasoning_input", "field, think_tags, drop", '"field"'),
        ("simple_agent", "model", "name of a model server", "(required)"),
        ("math_with_judge", "judge", "name of a model server", ""),
        ("math_with_judge", "judge_system_message", "string", "(long)"),
    ],
)
def test_show_settings(name: str, setting: str, type_: str, default: str) -> None:
    shown = json.loads(runner.invoke(main, ["show", name, "--json"]).stdout)
    found = next(entry for entry in shown["settings"] if entry["name"] == setting)
    assert (found["type"], found["default"]) == (type_, default)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("simple_wether", "did you mean 'simple_weather'?"),
        ("gym_serve.environments.mcqa:Nope", "has no attribute 'Nope'"),
        ("no_such_package:Env", "cannot import no_such_package:Env"),
        ("json:JSONDecoder", "is not a server class"),
    ],
)
def test_show_what_is_not_there(name: str, message: str) -> None:
    result = runner.invoke(main, ["show", name])
    assert result.exit_code == 1
    assert message in result.stderr


@pytest.mark.parametrize("name", ["mcqa", "gym_serve.environments.simple_weather:SimpleWeather"])
def test_fixtures_of_shipped_environments_pass(name: str) -> None:
    result = runner.invoke(main, ["test", name])
    assert result.exit_code == 0, result.output
    assert "passed, each run twice" in result.stdout


def test_failing_and_missing_fixtures(tmp_path: Path) -> None:
    cases = [json.loads(line) for line in FIXTURES.read_text("utf-8").splitlines()]
    full = next(case for case in cases if case["name"].startswith("full"))
    file = tmp_path / "fixtures.jsonl"
    file.write_text("\n".join(json.dumps(case) for case in (full, {**full, "reward": 0.5})))
    arguments = ["test", "mcqa", "--fixtures", str(file)]
    result = runner.invoke(main, arguments)
    assert result.exit_code == 1
    assert "1 of 2 passed" in result.stdout
    assert "reward: 0.5 was expected, not 1.0" in result.stderr
    assert "No fixture is of the kind 'zero'. Add one with the name 'zero: ...'" in result.stderr
    report = json.loads(runner.invoke(main, [*arguments, "--json"]).stdout)
    assert report["ok"] is False
    assert report["missing_kinds"] == ["zero", "malformed"]
    assert [fixture["passed"] for fixture in report["fixtures"]] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["mcqaa"], 1, "did you mean 'mcqa'?"),
        (["simple_agent"], 1, "'simple_agent' belongs under 'agents', not here"),
        (["mcqa", "--set", "grading=x"], 1, "settings of Mcqa: grading: unknown setting"),
        (
            ["mcqa", "--set", "grading_mode"],
            2,
            "must be KEY=VALUE, as in --set num_workers=1, got 'grading_mode'",
        ),
        (["mcqa", "--fixtures", "missing.jsonl"], 1, "cannot read missing.jsonl"),
    ],
)
def test_test_of_what_cannot_be_tested(arguments: list[str], status: int, message: str) -> None:
    result = runner.invoke(main, ["test", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == status
    assert message in result.stderr


def test_an_environment_without_fixtures_says_where_they_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(FIXTURES, tmp_path / "elsewhere.jsonl")
    (tmp_path / "gs_bare.py").write_text(
        "from gym_serve.environments.mcqa import Mcqa\n\n\nclass Bare(Mcqa):\n    '''A copy.'''\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "gs_bare", raising=False)
    result = runner.invoke(main, ["test", "gs_bare:Bare"])
    assert result.exit_code == 1
    assert f"{tmp_path / 'fixtures.jsonl'} does not exist" in result.stderr
    given = runner.invoke(main, ["test", "gs_bare:Bare", "--fixtures", "elsewhere.jsonl"])
    assert given.exit_code == 0, given.output
