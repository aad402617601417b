"""`gym-serve init environment`: what it writes works at once, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gym_serve.cli import main
from gym_serve.cli.init import class_name

runner = CliRunner()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def run(folder: Path, *command: str) -> str:
    """What a command prints, in a process of its own; its status is 0."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_new_environment_works_on_the_first_run(folder: Path) -> None:
    result = runner.invoke(main, ["init", "environment", "gs_shop_floor"])
    assert result.exit_code == 0, result.output
    project = folder
    assert sorted(str(path.relative_to(project)) for path in project.rglob("*") if path.is_file()) == [
        "graphs/gs_shop_floor.yaml",
        "gs_shop_floor/README.md",
        "gs_shop_floor/__init__.py",
        "gs_shop_floor/data/example.jsonl",
        "gs_shop_floor/fixtures.jsonl",
        "gs_shop_floor/server.py",
        "pyproject.toml",
        "tests/test_gs_shop_floor.py",
    ]
    assert not [path for path in project.rglob("*.*") if path.is_file() and "{{" in path.read_text("utf-8")]
    # No Ray: importing it fails in the tests' process.
    (project / "sitecustomize.py").write_text("import sys\nsys.modules['ray'] = None\n")
    tests = run(project, "env", f"PYTHONPATH={project}", sys.executable, "-m", "pytest", "-q")
    assert "18 passed" in tests
    gym_serve = [sys.executable, "-c", "from gym_serve.cli import main; main()"]
    graph, rows = "graphs/gs_shop_floor.yaml", "gs_shop_floor/data/example.jsonl"
    assert run(project, *gym_serve, "validate", graph).startswith("ok")
    for environment in ("gs_shop_floor", "gs_shop_floor.server:GsShopFloor"):
        assert "11 of 11 passed" in run(project, *gym_serve, "test", environment)
    assert "5 rows, 0 with problems" in run(
        project, *gym_serve, "dataset", "validate", rows, "--graph", graph
    )


def test_a_project_may_have_several_environments_and_no_file_is_changed(folder: Path) -> None:
    (folder / "here").mkdir()
    (folder / "here" / "notes.txt").touch()
    arguments = ["init", "environment", "gs_shop", "--folder", "here"]
    assert runner.invoke(main, arguments).exit_code == 0
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    again = runner.invoke(main, arguments)
    assert again.exit_code == 1
    assert "exists already" in again.stderr
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    rows = (folder / "here" / "gs_shop" / "data" / "example.jsonl").read_text("utf-8").splitlines()
    assert {json.loads(row)["agent_ref"]["name"] for row in rows} == {"gs_shop_agent"}
    second = runner.invoke(main, ["init", "environment", "gs_mill", "--folder", "here"])
    assert second.exit_code == 0
    assert "pyproject.toml" not in second.output
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert before.items() < after.items()


@pytest.mark.parametrize(("source", "count"), [("", 0), ("from .a import A\nfrom .b import B\n", 2)])
def test_a_package_is_an_environment_if_it_has_one(folder: Path, source: str, count: int) -> None:
    package = f"gs_package_{count}"
    (folder / package).mkdir()
    for name in ("a", "b") if source else ():
        made = f"from gym_serve import ResourcesServer\nclass {name.upper()}(ResourcesServer):\n"
        (folder / package / f"{name}.py").write_text(f"{made}    def verify(self): return 0.0\n")
    (folder / package / "__init__.py").write_text(source)
    result = runner.invoke(main, ["test", package])
    assert result.exit_code == 1
    assert f"the package {package} has {count} environments" in result.stderr


def test_a_package_that_cannot_be_imported(folder: Path) -> None:
    (folder / "gs_broken").mkdir()
    (folder / "gs_broken" / "__init__.py").write_text("1 / 0")
    result = runner.invoke(main, ["test", "gs_broken"])
    assert result.exit_code == 1
    assert "ZeroDivisionError" in result.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Shop-Floor", "e.g. shop_floor"),
        ("../shop", "e.g. shop"),
        ("class", "lower case letters, digits and _, got 'class'"),
        ("", "lower case letters, digits and _, got ''"),
        ("9lives", "e.g. lives"),
        ("json", "a package 'json' exists already"),
        ("pydantic", "a package 'pydantic' exists already"),
        ("tests", "'tests' is a folder of the project"),
        ("health", "'health' is a route of every graph"),
        ("a" * 60, "a package name must have only lower case letters"),
    ],
)
def test_names_that_cannot_be(folder: Path, name: str, message: str) -> None:
    result = runner.invoke(main, ["init", "environment", name, "--folder", "new"])
    assert result.exit_code == 1
    assert message in result.stderr
    assert not (folder / "new").exists()


def test_a_folder_that_cannot_be_written(folder: Path) -> None:
    (folder / "file").touch()
    result = runner.invoke(main, ["init", "environment", "gs_shop", "--folder", "file/new"])
    assert result.exit_code == 1
    assert "cannot write file/new" in result.stderr
    assert runner.invoke(main, ["init", "environment"]).exit_code == 2


def test_class_names() -> None:
    assert [class_name(name) for name in ("shop", "my_shop2", "a_b_")] == ["Shop", "MyShop2", "AB"]
