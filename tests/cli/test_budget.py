"""What `gym-serve collect` says of what a run used, and of a budget that stopped it."""

import io
import json
from pathlib import Path

import pytest
import typer
from rich.console import Console

from gym_serve.cli.run_collection import report_and_exit
from gym_serve.cli.run_report import print_report, report_json
from gym_serve.rollouts import Outputs, Progress, Report, Spent

COUNTS = {"calls": 2, "unreported": 0, "input_tokens": 1500, "cached_tokens": 400, "output_tokens": 30}


def report(folder: Path, *, complete: bool, exhausted: str | None) -> Report:
    return Report(
        Outputs.of(folder / "out.jsonl"),
        Progress(3, 3 if complete else 2, 2, 0, 0, {}, 1.0),
        metrics=[],
        problems=[],
        notes=[],
        complete=complete,
        spent=Spent({"model": {"policy": COUNTS}}, 1530, 0.25, {("model", "policy"): 0.25}),
        exhausted=exhausted,
    )


@pytest.mark.parametrize(
    ("complete", "exhausted", "signalled", "status"),
    [(False, "the run has cost 1", None, 4), (False, "the run has cost 1", 130, 130), (True, None, None, 3)],
)
def test_the_exit_status(
    tmp_path: Path, complete: bool, exhausted: str | None, signalled: int | None, status: int
) -> None:
    with pytest.raises(typer.Exit) as caught:
        report_and_exit(report(tmp_path, complete=complete, exhausted=exhausted), signalled, as_json=True)
    assert caught.value.exit_code == status


def test_the_summary_has_tokens_and_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(tmp_path, complete=False, exhausted="the run has cost 0.2500 of at most 0.2")
    console = Console(file=io.StringIO(), width=200)
    print_report(found, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "of them cached" in shown
    line = next(line for line in shown.splitlines() if "policy" in line)
    assert line.split() == ["model", "policy", "2", "1,500", "400", "30", "0.2500"]
    as_json = json.loads(json.dumps(report_json(found)))
    assert (as_json["tokens"], as_json["cost"]) == (1530, 0.25)
    assert as_json["model_usage"]["model"]["policy"] == COUNTS
    with pytest.raises(typer.Exit):
        report_and_exit(found, None, as_json=False)
    assert "a higher limit" in capsys.readouterr().err
