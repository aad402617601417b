"""A graph's own code: which files it is, and what its hash follows."""

import importlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gym_serve.cli import main
from gym_serve.cluster.code import code_hash, own_code, shipped_files, with_code
from gym_serve.cluster.deploy import app, build
from gym_serve.environments.mcqa import Mcqa
from gym_serve.graph.resolving import resolve
from gym_serve.graph.spec import GraphSpec
from gym_serve.types.errors import GraphError

CLASS = """
import json
import os.path
import pydantic
from gym_serve.environments.mcqa import Mcqa

def later():
    from gs_code_helper.deep import thing

class Own(Mcqa):
    pass
"""
MODULES = ("gs_code_env", "gs_code_helper", "gs_code_single", "gs_code_other")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder: a package, another one that it imports, and a module that nothing needs."""
    files = {
        "gs_code_env/__init__.py": "from .env import Own",
        "gs_code_env/env.py": CLASS,
        "gs_code_helper/__init__.py": "",
        "gs_code_helper/deep.py": "import gs_code_single\nimport gs_code_env\nthing = 1",
        "gs_code_single.py": "",
        "gs_code_other.py": "from gym_serve.environments.mcqa import Mcqa\nclass Other(Mcqa): pass",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in MODULES]:
        del sys.modules[name]


def own() -> Any:
    return importlib.import_module("gs_code_env").Own


def versions() -> dict[str, str]:
    """Of the deployments, by server."""
    graph = GraphSpec(
        models={"policy": {"type": "scripted_model"}},
        resources={"env": {"type": "gs_code_env:Own"}, "other": {"type": "gs_code_other:Other"}},
        agents={
            "agent": {"type": "simple_agent", "model": "policy", "resources": "env"},
            "inliner": {"type": "simple_agent", "model": "policy", "resources": "env", "inline": ["env"]},
        },
    )
    found: dict[str, str] = {}
    ahead = [build(resolve(graph))]
    while ahead:
        deployment = ahead.pop()._bound_deployment
        found[deployment.name] = deployment._deployment_config.version
        arguments = deployment.init_args
        ahead += [
            value
            for given in arguments
            if isinstance(given, dict)
            for value in given.values()
            if hasattr(value, "_bound_deployment")
        ]
    return found


def test_it_is_the_package_and_what_it_imports(folder: Path) -> None:
    assert own_code(own()) == [
        folder / name for name in ("gs_code_env", "gs_code_helper", "gs_code_single.py")
    ]


def test_keys_data_and_links_out_of_the_package_stay_here(folder: Path, tmp_path: Path) -> None:
    package, outside = folder / "gs_code_env", folder / "elsewhere"
    names = ".env .aws/credentials.py id_rsa key.pem data/rows.jsonl data/big.jsonl made.py venv/lib.py"
    names += " sub/prompt.txt sub/secret.py sub/.gitignore sub/.x.py"
    for name in names.split():
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text("secret.py" if name.endswith(".gitignore") else "")
    outside.mkdir()
    (outside / "key.py").write_text("")
    (package / "link.py").symlink_to(outside / "key.py")
    (package / "inner.py").symlink_to(package / "env.py")
    (package / "folder").symlink_to(outside)
    os.mkfifo(package / "pipe.py")
    (folder / ".gitignore").write_text("made.py\n")
    found = [str(file.relative_to(package)) for file in shipped_files(package)]
    assert found == ["__init__.py", "env.py", "inner.py"]
    data = '[tool.setuptools.package-data]\n"*" = ["*.txt", "id_*"]\ngs_code_env = ["data/rows.jsonl"]\n'
    (folder / "pyproject.toml").write_text(data)
    found = [str(file.relative_to(package)) for file in shipped_files(package)]
    assert found == ["__init__.py", "data/rows.jsonl", "env.py", "id_rsa", "inner.py", "sub/prompt.txt"]


def test_what_would_be_sent_is_listed(folder: Path) -> None:
    graph = folder / "graph.yaml"
    args = "{resources: {env: {type: 'gs_code_env:Own'}}}"
    graph.write_text(f"applications: [{{name: x, import_path: 'gym_serve.graph:app', args: {args}}}]")
    result = CliRunner().invoke(main, ["up", str(graph), "--dry-run", "--json"])
    assert result.exit_code == 0, result.output
    files = [Path(name).relative_to(folder) for name in json.loads(result.stdout)["files"]]
    assert len(files) == 5
    assert Path("gs_code_helper/deep.py") in files


def test_what_is_installed_or_ours_is_not_own() -> None:
    assert (
        own_code(Mcqa) == own_code(GraphSpec) == own_code(type("Made", (), {"__module__": "__main__"})) == []
    )
    assert own_code(pytest.MonkeyPatch) == own_code(Path) == []


@pytest.mark.parametrize("changed", ["gs_code_env/env.py", "gs_code_helper/deep.py", "gs_code_single.py"])
def test_changed_code_changes_the_version_of_its_servers(folder: Path, changed: str) -> None:
    before = versions()
    (folder / "gs_code_env" / "notes.txt").write_text("not code")
    assert versions() == before
    with (folder / changed).open("a") as file:
        file.write("\nCHANGED = True\n")
    after = versions()
    assert {name for name in before if after[name] != before[name]} == {"env", "inliner"}
    assert before.keys() == {"policy", "env", "other", "agent", "inliner", "gateway"}


def test_a_class_without_own_code_follows_its_module() -> None:
    assert len(code_hash(Mcqa)) == 64
    assert code_hash(type("Made", (), {"__module__": "no_such_module"})) == ""


def test_shipped_code_joins_what_the_file_asks_for() -> None:
    asked = {"pip": ["lxml"], "py_modules": ["gcs://theirs.zip"]}
    assert with_code(asked, ["gcs://ours.zip"]) == {
        "pip": ["lxml"],
        "py_modules": ["gcs://theirs.zip", "gcs://ours.zip"],
    }
    assert with_code(asked, []) == asked == {"pip": ["lxml"], "py_modules": ["gcs://theirs.zip"]}
    assert with_code(None, []) == {}


def test_a_refused_graph_says_so_before_the_traceback_and_at_its_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`serve run` runs the builder in a process of Ray, whose output it shows, and then its traceback."""
    spec = GraphSpec.model_validate({"models": {"policy": {"type": "scripted_modle"}}})
    with pytest.raises(GraphError) as caught:
        app(spec)
    problem = "models.policy.type: unknown type 'scripted_modle'; did you mean 'scripted_model'?"
    assert capsys.readouterr().err.startswith("this graph is refused: 1 problem:\n  - " + problem)
    shown = "".join(traceback.format_exception(caught.value)).rstrip()
    assert shown.splitlines()[-1].startswith("  - " + problem)
