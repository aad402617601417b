"""`gym-serve merge`: shards as one run, with its metrics and what is missing."""

import asyncio
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.rollouts import FakeAgent, collection, rows, write_jsonl
from typer.testing import CliRunner

from gym_serve.cli import main
from gym_serve.rollouts import collect
from gym_serve.types.errors import BadRequest

runner = CliRunner()
GRAPH = {"agents": {"agent": {"resources": "mcqa"}}, "resources": {"mcqa": {"type": "mcqa"}}}


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    """Two shards of six rows, each of two rollouts; one fails for good."""
    source = write_jsonl(tmp_path / "rows.jsonl", rows(6))

    def one(part: int) -> str:
        agent = FakeAgent(errors={(4, 1): [BadRequest("never")]})
        output = tmp_path / f"part{part}.jsonl"
        wanted = collection(agent, shard=(part, 2), repeats=2, graph=GRAPH)
        asyncio.run(collect(source, output, wanted))
        return str(output)

    return [one(part) for part in (1, 2)]


def merged(tmp_path: Path, *arguments: str) -> Any:
    return runner.invoke(main, ["merge", *arguments, "-o", str(tmp_path / "all.jsonl")])


def test_the_run_of_all_shards(shards: list[str], tmp_path: Path) -> None:
    result = merged(tmp_path, *shards, "--json")
    assert result.exit_code == 3, result.output
    report = json.loads(result.stdout)
    assert report["complete"]
    assert report["rollouts"] == {"total": 12, "finished": 12, "scored": 11, "failed": 1, "earlier": 0}
    assert [failure["kind"] for failure in report["failures"]] == ["bad_request"]
    # mcqa's own metrics, by the type that the header names.
    assert "pass@1[avg-of-2]/accuracy" in report["metrics"][0]["key_metrics"]
    again = merged(tmp_path, *shards)
    assert again.exit_code == 1
    assert "all.jsonl exists; choose another file for the merged run" in again.stderr


def test_what_is_missing_is_said(shards: list[str], tmp_path: Path) -> None:
    first = Path(shards[0])
    first.write_bytes(b"".join(first.read_bytes().splitlines(keepends=True)[:2]))
    result = merged(tmp_path, *shards)
    assert result.exit_code == 3
    assert "rollouts are missing. Make them with: gym-serve collect --resume" in result.stderr
    assert "of 12 rollouts" in result.stdout


def test_a_shard_too_few(shards: list[str], tmp_path: Path) -> None:
    result = merged(tmp_path, shards[0], "--json")
    assert result.exit_code == 1
    assert "shards are missing: 2/2" in json.loads(result.stdout)["error"]["message"]
    assert not (tmp_path / "all.jsonl").exists()


def test_a_shard_twice(shards: list[str], tmp_path: Path) -> None:
    result = merged(tmp_path, *shards, shards[1])
    assert result.exit_code == 1
    assert "part2.jsonl is given twice" in result.stderr


def test_a_merge_without_space_leaves_nothing(
    shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, before = os.replace, set(tmp_path.iterdir())

    def full(source: Path, target: Path) -> None:
        if target.name == "all.jsonl":
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        result = merged(tmp_path, *shards)
    assert result.exit_code == 1
    assert "all.jsonl (No space left on device). Free some space, then run the command again" in result.stderr
    assert set(tmp_path.iterdir()) == before
    assert merged(tmp_path, *shards).exit_code == 3
