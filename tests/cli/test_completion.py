"""Shell completion of `gym-serve`, as shells ask for it: by environment variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gym_serve.cli import main
from gym_serve.graph import shipped

BIN = Path(sys.executable).parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's project: two graph files, and YAML files that are none."""
    (tmp_path / "graphs").mkdir()
    (tmp_path / "graphs" / "math.yaml").write_text(
        "applications:\n"
        "- {name: math, import_path: 'gym_serve.graph:app', args: {agents: {math_agent: {}}}}\n"
    )
    (tmp_path / "mine.yml").write_text(
        "applications:\n"
        "- {name: one, import_path: 'gym_serve.graph:app', args: {models: {policy: {type: chat_model}}}}\n"
        "- {name: two, import_path: 'gym_serve.graph:app', args: {agents: {other_agent: {}}}}\n"
    )
    (tmp_path / "compose.yaml").write_text("services: {web: {image: nginx}}\n")
    (tmp_path / "broken.yaml").write_text("models: [\n")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    return tmp_path


def gym_serve(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BIN / "gym-serve"],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("gym-serve re", ["resolve", "reverify"]),
        ("gym-serve dataset co", ["collate"]),
        ("gym-serve collect --sh", ["--shard"]),
        ("gym-serve validate ", ["broken.yaml", "mine.yml", "graphs/math.yaml", *shipped.names()]),
        ("gym-serve up wea", ["weather"]),
        ("gym-serve show wea", ["weather"]),
        ("gym-serve validate graphs/", ["graphs/math.yaml"]),
        ("gym-serve resolve ./graphs/m", ["./graphs/math.yaml"]),
        ("gym-serve resolve nowhere/", []),
        ("gym-serve collect graphs", ["graphs/math.yaml"]),
        ("gym-serve collect graphs/math.yaml ", []),  # rows: a file as any other
        ("gym-serve collect --url http://host:8000/math ", []),
        ("gym-serve collect graphs/math.yaml rows.jsonl --agent ", ["math_agent"]),
        ("gym-serve collect --url http://host:8000/math rows.jsonl --agent ", ["math_agent", "other_agent"]),
        ("gym-serve eval --attach ", ["math", "one", "two"]),
        ("gym-serve up mine.yml --application ", ["one", "two"]),
        ("gym-serve up broken.yaml --application ", []),
        ("gym-serve reverify out.jsonl --graph graphs/math.yaml --application ", ["math"]),
        ("gym-serve dataset validate rows.jsonl --graph gr", ["graphs/math.yaml"]),
        ("gym-serve logs ", ["math_agent", "other_agent", "policy"]),
        ("gym-serve down t", ["two"]),
        ("gym-serve show math_with_ju", ["math_with_judge"]),
        ("gym-serve show mi", ["mine.yml"]),
        ("gym-serve test simple_w", ["simple_weather"]),
        ("gym-serve list g", ["graph"]),
        ("gym-serve export out.jsonl --to v", ["verl", "verifiers"]),
    ],
)
def test_proposals(
    folder: Path,
    line: str,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process: those below have one of their own, as the shell's question has."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("_GYM_SERVE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    with pytest.raises(SystemExit) as ended:
        main(args=[], prog_name="gym-serve")
    out, err = capsys.readouterr()
    assert (ended.value.code, err) == (0, "")
    assert out.split() == expected


def test_nothing_heavy_is_imported_for_it(folder: Path) -> None:
    for line in ("gym-serve logs ", "gym-serve show "):
        done = gym_serve(
            folder,
            _GYM_SERVE_COMPLETE="complete_bash",
            COMP_WORDS=line,
            COMP_CWORD="2",
            PYTHONPROFILEIMPORTTIME="1",
        )
        imported = {row.rpartition("|")[2].strip() for row in done.stderr.splitlines()}
        assert "gym_serve.cli.completion" in imported
        assert not imported & {"ray", "openai", "httpx", "gym_serve.environments.mcqa"}


def bash(folder: Path, script: str) -> str:
    """What a script prints, for a user whose home is ``folder``."""
    variables = {"HOME": str(folder), "PATH": f"{BIN}:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", "--norc", "-euc", script],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout


@pytest.mark.parametrize(
    "set_up",
    [
        'eval "$(gym-serve --show-completion)"',
        "gym-serve --install-completion && source .bashrc",
    ],
)
def test_bash_completes(folder: Path, set_up: str) -> None:
    printed = bash(
        folder,
        f"{set_up}\n"
        "COMP_WORDS=(gym-serve validate gr) COMP_CWORD=2\n"
        "_gym_serve_completion gym-serve\n"
        'echo "proposed: ${COMPREPLY[*]}"\n'
        "complete -p gym-serve",
    )
    assert "proposed: graphs/math.yaml\n" in printed
    assert "-F _gym_serve_completion gym-serve" in printed
