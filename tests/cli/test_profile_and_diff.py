"""`gym-serve profile` and `gym-serve diff`: what they print, and how they exit."""

import json
from pathlib import Path

import pytest
from support.runs import rollout_of, write_lines, write_run
from typer.testing import CliRunner

from gym_serve.cli import main

runner = CliRunner()

REWARDS = {0: [0.0, 0.0], 1: [0.0, 1.0], 2: [1.0, 1.0], 3: [1.0, 0.0, 0.0, 0.0]}


@pytest.fixture
def run(tmp_path: Path) -> str:
    return str(write_run(tmp_path / "out.jsonl", REWARDS, failed=[7]))


def test_profile_prints_what_to_train_on_next(run: str) -> None:
    result = runner.invoke(main, ["profile", run])
    assert result.exit_code == 0, result.output
    words = [line.split() for line in result.stdout.splitlines()]
    assert words[1] == ["math_agent", "10/11", "0.438", "0.166", "to", "0.753", "62.5", "(k=2)", "10/5", "-"]
    assert "10 of 11 rollouts are scored" in result.stdout
    assert ["3-1", "math_agent", "0.000", "the", "verifier", "gives", "none"] in words
    assert ["model_timeout", "1", "1"] in words
    assert next(line[:2] for line in words if line[:1] == ["never"]) == ["never", "1"]
    assert "1 tasks have no scored rollout, because all failed or are masked" in result.stdout
    listed = result.stdout[result.stdout.index("to train on next: 2 of 4 tasks") :].splitlines()[2:]
    assert [line.split()[:5] for line in listed] == [
        ["1", "math_agent", "1/2", "0.500", "0.707"],
        ["3", "math_agent", "1/4", "0.250", "0.500"],
    ]
    assert listed[0].rstrip().endswith("Question 1?")


@pytest.mark.parametrize("key", [(), ("--key", "id")])
def test_the_rollouts_of_several_runs_are_all_counted(tmp_path: Path, key: tuple[str, ...]) -> None:
    runs = [
        write_lines(tmp_path / f"{reward}.jsonl", [rollout_of(n, 0, reward, id=f"q{n}") for n in range(5)])
        for reward in (0.0, 1.0)
    ]
    report = json.loads(runner.invoke(main, ["profile", *map(str, runs), *key, "--json"]).stdout)
    assert report["coverage"] == {"scored": 10, "asked": 10}
    assert (report["mean_reward"]["value"], report["trainable_tasks"], report["tasks"]) == (0.5, 5, 5)
    assert report["notes"] == []


def test_failed_attempts_and_failed_rollouts_are_two_columns(run: str) -> None:
    failures = Path(run).with_name("out_failures.jsonl")
    (lost,) = failures.read_text().splitlines()
    later = json.loads(lost) | {"_ng_task_index": 1, "_ng_rollout_index": 0}  # it succeeded then
    failures.write_text("".join(f"{line}\n" for line in (lost, lost, lost, json.dumps(later))))
    lines = runner.invoke(main, ["profile", run]).stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("failure "))
    assert lines[at].split("  ")[0] == "failure"
    assert "failed attempts  failed rollouts" in lines[at]
    assert lines[at + 1].split()[:3] == ["model_timeout", "4", "1"]


def test_profile_as_json_has_every_task(run: str) -> None:
    result = runner.invoke(main, ["profile", run, "--json", "--top", "1"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["ok"] is True
    assert (report["tasks"], report["rollouts"], report["failed_attempts"]) == (4, 10, 1)
    assert report["pass_rate"]["value"] == 43.75
    assert report["pass_rate"]["low"] < 43.75 < report["pass_rate"]["high"]
    assert report["buckets"] == {"never": 1, "hard": 0, "medium": 2, "easy": 0, "always": 1}
    assert report["train_next"] == [1]
    assert [(task["task_index"], task["pass_rate"], task["bucket"]) for task in report["per_task"]] == [
        (0, 0.0, "never"),
        (1, 50.0, "medium"),
        (2, 100.0, "always"),
        (3, 25.0, "medium"),
    ]


def test_profile_writes_the_rows_to_train_on_next(run: str, tmp_path: Path) -> None:
    rows = tmp_path / "next.jsonl"
    result = runner.invoke(main, ["profile", run, "-o", str(rows)])
    assert result.exit_code == 0, result.output
    written = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["responses_create_params"]["input"][0]["content"] for row in written] == [
        "Question 1?",
        "Question 3?",
    ]
    assert f"2 rows to train on next: {rows}" in result.stdout
    again = runner.invoke(main, ["dataset", "validate", str(rows)])
    assert again.exit_code == 0, again.output


def test_profile_of_shards_and_of_damaged_files(tmp_path: Path, run: str) -> None:
    other = write_run(tmp_path / "other.jsonl", {9: [1.0]})
    with other.open("a") as file:
        file.write("[1]\n")
    result = runner.invoke(main, ["profile", run, str(other), "--json"])
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["tasks"] == 5
    assert report["problems"] == [f"{other}:2: a row must be a JSON object, got a list"]
    text = runner.invoke(main, ["profile", str(other)])
    assert text.exit_code == 1
    assert text.stderr == f"{other}:2: a row must be a JSON object, got a list\n"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["profile", "none.jsonl"], 1, "cannot read none.jsonl: No such file"),
        (["profile", "a.jsonl", "b.jsonl", "-o", "n.jsonl"], 2, "--output needs a single run"),
        (["profile"], 2, "Missing argument"),
        (["profile", "a.jsonl", "--failures", "none"], 2, "must be mask or zero, got 'none'"),
        (["diff", "none.jsonl", "none.jsonl"], 1, "cannot read none.jsonl"),
        (["diff", "one.jsonl"], 2, "Missing argument"),
    ],
)
def test_wrong_usage(arguments: list[str], status: int, message: str) -> None:
    result = runner.invoke(main, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == status
    assert message in result.stderr


def test_profile_of_a_run_without_a_scored_rollout(tmp_path: Path) -> None:
    run = write_run(tmp_path / "out.jsonl", {}, failed=[0])
    result = runner.invoke(main, ["profile", str(run)])
    assert result.exit_code == 1
    assert result.stderr == "No scored rollouts.\n"
    report = runner.invoke(main, ["profile", str(run), "--json"])
    assert json.loads(report.stdout)["mean_reward"] == {"value": None, "num_tasks": 0}


def test_diff_prints_the_difference_and_the_flips(tmp_path: Path, run: str) -> None:
    after = write_run(tmp_path / "after.jsonl", {0: [1.0, 1.0], 1: [1.0, 1.0], 2: [0.0, 1.0], 5: [1.0]})
    result = runner.invoke(main, ["diff", run, str(after)])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[1].split()[:6] == ["mean", "reward", "all", "3", "0.5", "0.8333"]
    assert "3 tasks in both runs (1 in A alone, 1 in B alone): 2 fixed, 1 broken" in lines
    flips = [line.split() for line in lines[lines.index("") + 3 :]]
    assert flips == [
        ["0", "math_agent", "fixed", "0/2", "2/2", "0.000", "1.000", "Question", "0?"],
        ["1", "math_agent", "fixed", "1/2", "2/2", "0.500", "1.000", "Question", "1?"],
        ["2", "math_agent", "broken", "2/2", "1/2", "1.000", "0.500", "Question", "2?"],
    ]
    report = json.loads(runner.invoke(main, ["diff", run, str(after), "--json"]).stdout)
    assert report["ok"] is True
    assert [task["flip"] for task in report["per_task"]] == ["fixed", "fixed", "broken"]
    assert report["flips"] == [0, 1, 2]


def test_diff_fails_where_the_second_run_is_clearly_worse(tmp_path: Path) -> None:
    good = write_run(tmp_path / "good.jsonl", {task: [1.0] for task in range(30)})
    bad = write_run(tmp_path / "bad.jsonl", {task: [0.0] for task in range(30)})
    assert runner.invoke(main, ["diff", str(good), str(bad)]).exit_code == 1
    assert runner.invoke(main, ["diff", str(bad), str(good)]).exit_code == 0


def test_diff_pairs_by_a_field_where_the_order_differs(tmp_path: Path) -> None:
    a = write_lines(tmp_path / "a.jsonl", [rollout_of(n, 0, float(n == 0), id=f"q{n}") for n in range(4)])
    b = write_lines(tmp_path / "b.jsonl", [rollout_of(n, 0, float(n == 3), id=f"q{3 - n}") for n in range(4)])
    right = json.loads(runner.invoke(main, ["diff", str(a), str(b), "--key", "id", "--json"]).stdout)
    assert [estimate["difference"] for estimate in right["estimates"]] == [0.0, 0.0]
    assert right["different_prompts"] == 4


def test_diff_of_different_data_sets(tmp_path: Path, run: str) -> None:
    other = write_run(tmp_path / "other.jsonl", {99: [1.0]})
    result = runner.invoke(main, ["diff", run, str(other)])
    assert result.exit_code == 1
    assert "The runs share no task. Identify tasks by a field of the rows: --key FIELD" in result.stderr


@pytest.mark.parametrize(("failures", "mean"), [("mask", 0.4375), ("zero", 0.35)])
def test_coverage_stands_beside_a_score_and_failures_are_zeros_on_request(
    run: str, failures: str, mean: float
) -> None:
    report = json.loads(runner.invoke(main, ["profile", run, "--failures", failures, "--json"]).stdout)
    assert report["mean_reward"]["value"] == mean
    assert report["coverage"] == {"scored": 10, "asked": 11}
    assert report["agents"][0]["mean_reward"] == mean
    report = json.loads(runner.invoke(main, ["diff", run, run, "--failures", failures, "--json"]).stdout)
    assert report["coverage"] == {"a": {"scored": 10, "asked": 11}, "b": {"scored": 10, "asked": 11}}
    assert report["estimates"][0]["a"] == mean


def test_diff_leaves_out_tasks_with_other_prompts_and_says_so(tmp_path: Path) -> None:
    a = write_lines(tmp_path / "a.jsonl", [rollout_of(n, 0, 1.0) for n in range(3)])
    other = {"responses_create_params": {"input": "Of another data set?"}}
    b = write_lines(tmp_path / "b.jsonl", [rollout_of(0, 0, 1.0), {**rollout_of(1, 0, 0.0), **other}])
    result = runner.invoke(main, ["diff", str(a), str(b)])
    assert "1 tasks in both runs (1 in A alone, 0 in B alone): 0 fixed, 0 broken" in result.stdout
    assert "left out: 1 tasks with the same number, but another prompt in B" in result.stdout


def test_reasons_are_shown_and_nothing_of_a_row_reaches_the_terminal(tmp_path: Path) -> None:
    rollout = rollout_of(0, 0, 0.0, agent="a\x1b]0;title\x07", _ng_rollout_id="\x1b[2J0-0")
    run = write_lines(tmp_path / "out.jsonl", [{**rollout, "reason": "no box \x1b[31mfound\x9b1m"}])
    for arguments in (["profile", str(run)], ["diff", str(run), str(run)], ["profile", str(run), "--json"]):
        result = runner.invoke(main, arguments)
        assert not {"\x1b", "\x07", "\x9b"} & set(result.output)
        assert ("no box \ufffd[31mfound" in result.stdout) == (arguments == ["profile", str(run)])
