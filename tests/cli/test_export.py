"""`gym-serve export`."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gym_serve.cli import main

runner = CliRunner()


def rollout(task: int, reward: float) -> dict[str, Any]:
    text = {"type": "output_text", "text": "four", "annotations": []}
    message = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [text]}
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "2 + 2?"}]},
        "response": {"output": [message]},
        "reward": reward,
        "agent_ref": {"name": "math"},
        "_ng_task_index": task,
        "_ng_rollout_index": 0,
        "_ng_rollout_id": f"{task}-0",
    }


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    path = tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(rollout(task, task / 2)) + "\n" for task in range(3)))
    return path


def invoke(*arguments: Any) -> Any:
    return runner.invoke(main, ["export", *map(str, arguments)])


def test_what_is_written_and_what_is_left_out(rollouts: Path, tmp_path: Path) -> None:
    out = tmp_path / "sft.jsonl"
    result = invoke(rollouts, "--to", "sft", "-o", out, "--min-reward", 0.5)
    assert result.exit_code == 0, result.output
    assert f"{out}: 2 records of 2 rollouts" in result.stdout
    assert "left out: 1 low_reward; e.g. 0-0: the reward is lower than 0.5" in result.stdout
    assert len(out.read_text().splitlines()) == 2
    nothing = invoke(rollouts, "--to", "sft", "-o", tmp_path / "none.jsonl", "--min-reward", 5, "--json")
    assert (nothing.exit_code, json.loads(nothing.stdout)["ok"]) == (1, False)
    assert "Every rollout is left out" in nothing.stderr
    again = invoke(rollouts, "--to", "sft", "-o", out)
    assert again.exit_code == 1
    assert "exists" in again.stderr
    result = invoke(rollouts, rollouts, "--to", "sft", "-o", out, "--overwrite", "--json")
    report = json.loads(result.stdout)
    assert (report["read"], report["exported"], report["records"]) == (6, 6, 6)
    assert invoke(rollouts, "--to", "nemo_rl", "-o", tmp_path / "tokens.jsonl").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--to", "vrl"), "did you mean 'verl'"),
        (("--to", "sft", "--option", "no_such=1"), "no option 'no_such'"),
        (("--to", "trl", "--option", "kind=much"), "option kind must be"),
    ],
)
def test_wrong_formats_and_options(
    rollouts: Path, tmp_path: Path, arguments: tuple[str, ...], problem: str
) -> None:
    result = invoke(rollouts, "-o", tmp_path / "x.jsonl", *arguments)
    assert result.exit_code == 1
    assert problem in result.stderr
    assert not (tmp_path / "x.jsonl").exists()


def test_a_damaged_line_is_named(rollouts: Path, tmp_path: Path) -> None:
    rollouts.write_text(rollouts.read_text() + "{\n")
    result = invoke(rollouts, "--to", "sft", "-o", tmp_path / "x.jsonl")
    assert result.exit_code == 1
    assert f"{rollouts}:4: not JSON" in result.stderr
    assert not (tmp_path / "x.jsonl").exists()


def test_the_formats_are_listed() -> None:
    result = invoke("--formats")
    assert result.exit_code == 0
    for name in ("verl", "nemo_rl", "openrlhf", "trl", "sft", "atif", "verifiers"):
        assert name in result.stdout
