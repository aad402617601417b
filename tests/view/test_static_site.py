"""`gym-serve view --export`: the site is whole, and a plain file server is enough for it."""

from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner
from view.made import failed, rollout, write

from gym_serve.cli import main
from gym_serve.view import serving


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_site(tmp_path: Path) -> None:
    path = write(tmp_path / "out.jsonl", [rollout(task, index) for task in range(3) for index in range(2)])
    write(tmp_path / "out_failures.jsonl", [failed(0, 2)])
    arguments = ["view", str(path), "--export", str(tmp_path / "site"), "--where", "task < 2"]
    done = CliRunner().invoke(main, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    assert orjson.loads(done.stdout)["rollouts"] == 5
    site = tmp_path / "site"
    page = (site / "index.html").read_text()
    assert '<meta name="gym-serve" content="static">' in page
    assert {"static/main.js", "static/style.css"} <= {str(at.relative_to(site)) for at in site.rglob("*.*")}
    rows = orjson.loads((site / "api/rollouts.json").read_bytes())["rows"]
    assert len(rows) == 5
    for row in rows:
        at = site / "api" / "rollout" / row["run"]
        assert orjson.loads((at / f"{row['n']}.json").read_bytes())["id"] == row["id"]
        assert "turns" in orjson.loads((at / str(row["n"]) / "tokens.json").read_bytes())
        assert orjson.loads((at / str(row["n"]) / "raw.txt").read_bytes())["_ng_rollout_id"] == row["id"]
        assert (site / "api" / "annotations" / row["run"] / f"{row['n']}.json").exists()
    for name in ("runs", "summary", "tasks", "suggestions"):
        text = (site / "api" / f"{name}.json").read_text()
        assert orjson.loads(text)
        assert str(tmp_path) not in text, "a folder of this machine"


@pytest.mark.parametrize(
    ("where", "problem"),
    [("reward >", "a part of the condition is"), ("", "at most 2 rollouts, got 3")],
)
def test_what_cannot_be_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, problem: str
) -> None:
    monkeypatch.setattr(serving, "MOST_EXPORTED", 2)
    path = write(tmp_path / "out.jsonl", [rollout(task, 0) for task in range(3)])
    done = CliRunner().invoke(main, ["view", str(path), "--export", str(tmp_path / "site"), "--where", where])
    assert done.exit_code == 1
    assert problem in done.output
    assert not (tmp_path / "site").exists()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "out.jsonl", [rollout(0, 0)])
    done = CliRunner().invoke(main, ["view", str(path), "--export", str(tmp_path)])
    assert done.exit_code == 1
    assert "must be a new or an empty folder" in done.output
