"""Benchmarks: each command tells its usage, those without Ray run on a small scale, summaries are right."""

import pkgutil
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import orjson
import pytest
from support.sandboxes import needs_bubblewrap

import benchmarks

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


def test_soak_of_the_engine(run: Run, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as exit:
        run("soak", "--rows", 200, "--engine-only", "--output", tmp_path)
    assert not exit.value.code  # no row lost, none doubled
