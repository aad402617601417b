"""`gym-serve calibrate`: labels in rollouts against their rewards."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gym_serve.cli import main

ROLLOUTS = [
    {"reward": 1.0, "human": 1, "meta": {"grade": "good"}, "verdict": "good"},
    {"reward": 0.7, "human": 1, "meta": {"grade": "good"}, "verdict": "bad"},
    {"reward": 0.0, "human": 0, "meta": {"grade": "bad"}, "verdict": "bad"},
    {"reward": 0.6, "human": 0, "meta": {"grade": "bad"}, "verdict": "bad"},
    {"reward": 0.6},
]


def calibrated(folder: Path, rollouts: list[dict[str, Any]], *arguments: str) -> Any:
    path = folder / "out.jsonl"
    path.write_text("".join(json.dumps(rollout) + "\n" for rollout in rollouts))
    return CliRunner().invoke(main, ["calibrate", str(path), *arguments])


@pytest.mark.parametrize(
    ("arguments", "agreement", "kappa"),
    [
        ("--label human --at 0.65", 1.0, 1.0),
        ("--label human --at 0.5", 0.75, 0.5),
        ("--label human", 0.5, 0.3333),
        ("--label meta.grade --score verdict", 0.75, 0.5),
    ],
)
def test_agreement(tmp_path: Path, arguments: str, agreement: float, kappa: float) -> None:
    found = json.loads(calibrated(tmp_path, ROLLOUTS, *arguments.split(), "--json").stdout)
    assert found["rows"] == 4
    assert (found["agreement"], found["kappa"]) == (agreement, pytest.approx(kappa, abs=1e-3))
    shown = calibrated(tmp_path, ROLLOUTS, *arguments.split()).stdout
    assert f"4 rollouts: agreement {100 * agreement:.1f} %, kappa {kappa:.3f}" in shown


@pytest.mark.parametrize(
    ("rollouts", "arguments", "problem"),
    [
        (ROLLOUTS, "--label nobody", "at least one labelled row"),
        (ROLLOUTS, "--label meta", "must be a text, a number or a boolean, got a dict"),
        (ROLLOUTS, "--label verdict --at 0.5", "`verdict` must be a number with --at, got 'good'"),
        ([], "--label human", "at least one labelled row"),
    ],
)
def test_labels_that_cannot_be_compared(
    tmp_path: Path, rollouts: list[dict[str, Any]], arguments: str, problem: str
) -> None:
    result = calibrated(tmp_path, rollouts, *arguments.split())
    assert result.exit_code == 1
    assert problem in result.output


def test_there_is_no_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["calibrate", str(tmp_path / "none.jsonl"), "--label", "human"])
    assert result.exit_code == 1
    assert "no such file" in result.output


def test_verdicts_that_were_corrected_in_the_viewer(tmp_path: Path) -> None:
    noted = [{"n": 0, "id": "0-0", "reward": 1.0}, {"n": 2, "id": "2-0", "reward": 0.0}]
    noted += [
        {"n": 2, "id": "2-0", "reward": 1.0},
        {"n": 3, "id": "other", "reward": 1.0},
        {"n": 4, "id": "4-0"},
    ]
    lines = "".join(json.dumps(note) + "\n" for note in noted)
    (tmp_path / "out.annotations.jsonl").write_text(lines + '{"torn')
    rollouts = [{**rollout, "_ng_rollout_id": f"{n}-0"} for n, rollout in enumerate(ROLLOUTS)]
    found = json.loads(calibrated(tmp_path, rollouts, "--json").stdout)
    assert (found["rows"], found["agreement"]) == (2, 0.5)


def test_without_labels_it_says_how_to_make_some(tmp_path: Path) -> None:
    result = calibrated(tmp_path, ROLLOUTS)
    assert result.exit_code == 1
    assert "has no corrected verdict: correct some by `gym-serve view" in result.output
