"""Profiles and comparisons of stored runs, against the definitions computed by hand."""

import math
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.runs import failure_of, rollout_of, write_lines, write_run

from gym_serve.metrics import Failures
from gym_serve.rollouts import Outputs
from gym_serve.rollouts.analysis import (
    Comparison,
    RewardProfile,
    RunScores,
    TaskKey,
    prompts_of_tasks,
    read_asked,
    read_rollouts,
    rows_of_tasks,
)
from gym_serve.rollouts.journal import Header
from gym_serve.rollouts.rows import Problems
from gym_serve.types.errors import InvalidRequest

REWARDS = st.dictionaries(
    st.integers(0, 50), st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=5), max_size=12
)


def profile_of(rewards: dict[int, list[float]], solved_at: float = 1.0) -> RewardProfile:
    profile = RewardProfile(solved_at)
    for task, of_task in rewards.items():
        for index, reward in enumerate(of_task):
            profile.add(rollout_of(task, index, reward))
    return profile


@given(REWARDS)
def test_the_profile_of_each_task(rewards: dict[int, list[float]]) -> None:
    profiles = {task.task_index: task for task in profile_of(rewards).tasks()}
    assert profiles.keys() == rewards.keys()
    for task, of_task in rewards.items():
        found = profiles[task]
        assert found.rollouts == len(of_task) == sum(found.histogram)
        assert found.pass_rate == sum(r == 1.0 for r in of_task) / len(of_task)
        assert math.isclose(found.mean, statistics.fmean(of_task))
        assert math.isclose(found.std, statistics.stdev(of_task) if len(of_task) > 1 else 0.0)
        assert (found.min, found.max) == (min(of_task), max(of_task))
        assert found.trainable == (len(set(of_task)) > 1)


@given(REWARDS)
def test_the_summary_counts_every_task_once(rewards: dict[int, list[float]]) -> None:
    summary = profile_of(rewards).summary(top=3)
    assert summary.tasks == len(rewards) == sum(summary.buckets.values()) == sum(summary.pass_rate_histogram)
    assert summary.rollouts == sum(map(len, rewards.values()))
    assert summary.trainable_tasks == sum(len(set(of_task)) > 1 for of_task in rewards.values())
    spreads = [task.std for task in summary.train_next]
    assert spreads == sorted(spreads, reverse=True)
    assert len(spreads) == min(3, summary.trainable_tasks)


@pytest.mark.parametrize(
    ("solved", "rollouts", "bucket"),
    [
        (0, 8, "never"),
        (1, 8, "hard"),
        (2, 8, "medium"),
        (6, 8, "medium"),
        (7, 8, "easy"),
        (8, 8, "always"),
        (0, 1, "never"),
        (1, 1, "always"),
    ],
)
def test_difficulty(solved: int, rollouts: int, bucket: str) -> None:
    (task,) = profile_of({0: [1.0] * solved + [0.0] * (rollouts - solved)}).tasks()
    assert task.bucket == bucket


def test_rewards_of_another_scale_and_below_the_threshold_teach_as_well() -> None:
    profile = profile_of({0: [-3.0, 7.0], 1: [2.0, 2.0]}, solved_at=10.0)
    assert [task.pass_rate for task in profile.tasks()] == [0.0, 0.0]
    assert list(profile.trainable_tasks()) == [0]
    assert (profile.bin_edges[0], profile.bin_edges[-1]) == (-3.0, 7.0)
    assert [task.histogram for task in profile.tasks()] == [
        (1, 0, 0, 0, 0, 0, 0, 0, 0, 1),
        (0, 0, 0, 0, 0, 2, 0, 0, 0, 0),
    ]


def test_failed_rollouts_are_missing_and_no_zeros(tmp_path: Path) -> None:
    run = write_run(tmp_path / "out.jsonl", {0: [1.0, 1.0]}, failed=[0, 1])
    problems, profile = Problems(), RewardProfile()
    for rollout in read_rollouts([run], TaskKey(), problems):
        profile.add(rollout)
    summary = profile.summary(top=5)
    assert (summary.tasks, summary.unscored_tasks, summary.failed_attempts) == (1, 1, 2)
    assert summary.mean_reward == {"value": 1.0, "num_tasks": 1}
    (task,) = profile.tasks()
    assert (task.rollouts, task.missing) == (2, 1)


def test_lines_that_are_no_rollouts_are_problems_with_their_place(tmp_path: Path) -> None:
    run = write_lines(
        tmp_path / "out.jsonl",
        [
            rollout_of(0, 0, 1.0),
            {"reward": 1.0},
            {**rollout_of(0, 1, 1.0), "reward": None},
            {**rollout_of(0, 2, 1.0), "reward": True},
            {**rollout_of(0, 3, 1.0), "reward": 1e300},
            {**rollout_of(0, 4, 1.0), "_ng_task_index": "x"},
        ],
    )
    with run.open("a") as file:
        file.write('{"torn": ')
    problems = Problems()
    assert len(list(read_rollouts([run], TaskKey(), problems))) == 1
    assert [problem.removeprefix(str(run)).split(" ")[0] for problem in problems.kept] == [
        ":2:",
        ":3:",
        ":4:",
        ":5:",
        ":6:",
        ":7:",
    ]
    with pytest.raises(InvalidRequest, match="cannot read"):
        list(read_rollouts([tmp_path / "missing.jsonl"], TaskKey(), problems))


def test_rows_to_train_on_have_neither_metadata_nor_seeds(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "out.jsonl", {0: [0.0, 1.0], 1: [1.0, 1.0]}, extra_body={"seed": 3, "top_k": 5}
    )
    (row,) = rows_of_tasks(run, [0])
    assert not [key for key in row if key.startswith("_ng_")]
    assert row["extra_body"] == {"seed": 3, "top_k": 5}  # the caller's own: this run was not seeded
    expansion = {"seed": 7}
    header = Header.new(input={}, expansion=expansion, graph={}, rollouts=4, problems=0, source="rows.jsonl")
    header.write(Outputs.of(run).header)
    (row,) = rows_of_tasks(run, [0])
    assert row["extra_body"] == {"top_k": 5}
    Outputs.of(run).inputs.unlink()
    with pytest.raises(InvalidRequest, match="out_materialized_inputs"):
        list(rows_of_tasks(run, [0]))


@pytest.mark.parametrize("inputs", [True, False])
def test_prompts(tmp_path: Path, inputs: bool) -> None:
    run = write_run(tmp_path / "out.jsonl", {0: [0.0], 1: [1.0], 2: [0.0]}, inputs=inputs)
    assert prompts_of_tasks(run, [0, 2, 9]) == {0: "Question 0?", 2: "Question 2?"}


@given(REWARDS, REWARDS)
def test_a_comparison_is_over_the_tasks_of_both_runs(
    a: dict[int, list[float]], b: dict[int, list[float]]
) -> None:
    comparison = compared(a, b)
    both = sorted(a.keys() & b.keys())
    assert [task.task_index for task in comparison.tasks()] == both
    summary = comparison.summary(top=100)
    assert summary.paired_tasks == len(both)
    assert (summary.only_a, summary.only_b) == (len(a.keys() - b.keys()), len(b.keys() - a.keys()))
    if not both:
        assert summary.estimates == []
        return
    reward = summary.estimates[0]
    differences = [statistics.fmean(b[task]) - statistics.fmean(a[task]) for task in both]
    assert math.isclose(reward.difference, statistics.fmean(differences), abs_tol=1e-12)
    assert math.isclose(reward.difference, reward.b - reward.a, abs_tol=1e-12)
    if len(both) > 1:
        assert reward.low is not None
        assert reward.high is not None
        assert reward.low <= reward.difference + 1e-12
        assert reward.difference <= reward.high + 1e-12
    solved = [{task for task in both if 2 * run[task].count(1.0) > len(run[task])} for run in (a, b)]
    flips = {task.task_index: task.flip for task in summary.flips}
    assert {task for task, flip in flips.items() if flip == "fixed"} == solved[1] - solved[0]
    assert {task for task, flip in flips.items() if flip == "broken"} == solved[0] - solved[1]


def test_verdicts() -> None:
    tasks = range(40)
    low, high = {task: [0.0] for task in tasks}, {task: [1.0] for task in tasks}
    mixed = {task: [float(task % 2)] for task in tasks}
    assert compared(low, high).summary(0).estimates[0].verdict == "better"
    assert compared(high, low).summary(0).estimates[0].verdict == "worse"
    assert compared(mixed, mixed).summary(0).estimates[0].verdict == "no clear difference"
    for few in range(1, 6):
        lost = compared({task: [1.0] for task in range(few)}, {task: [0.0] for task in range(few)})
        (verdict,) = {(e.verdict, e.p) for e in lost.summary(0).estimates}
        assert verdict == ("no clear difference", 2 / 2**few)


def test_agents_are_told_apart() -> None:
    a, b = RunScores(), RunScores()
    a.add(rollout_of(task, 0, 0.0, agent="weather" if task == 2 else "math_agent") for task in range(3))
    b.add([rollout_of(0, 0, 1.0), rollout_of(1, 0, 1.0), rollout_of(2, 0, 0.0)])
    summary = Comparison(a, b).summary(top=5)
    assert [(e.metric, e.agent, e.tasks, e.difference) for e in summary.estimates] == [
        ("mean reward", None, 3, 2 / 3),
        ("pass rate %", None, 3, 200 / 3),
        ("mean reward", "math_agent", 2, 1.0),
        ("pass rate %", "math_agent", 2, 100.0),
        ("mean reward", "weather", 1, 0.0),
        ("pass rate %", "weather", 1, 0.0),
    ]
    assert [e.method for e in summary.estimates[:2]] == ["paired bootstrap"] * 2


@pytest.mark.parametrize(("by_prompt", "paired", "difference"), [(True, 2, 0.5), (False, 3, 2 / 3)])
def test_tasks_of_different_data_sets_are_left_out(by_prompt: bool, paired: int, difference: float) -> None:
    a, b = RunScores(), RunScores()
    a.add(rollout_of(task, 0, 0.0) for task in range(3))
    other = {**rollout_of(1, 0, 1.0), "responses_create_params": {"input": "another"}}
    b.add([rollout_of(0, 0, 1.0), other, rollout_of(2, 0, 0.0)])
    summary = Comparison(a, b, by_prompt=by_prompt).summary(top=5)
    assert (summary.paired_tasks, summary.different_prompts) == (paired, 1)
    assert (summary.only_a, summary.only_b) == (0, 0)
    assert summary.estimates[0].difference == difference


@pytest.mark.parametrize(("failures", "a", "b"), [("mask", 1.0, 1.0), ("zero", 0.25, 0.5)])
def test_failures_in_a_comparison(failures: Failures, a: float, b: float) -> None:
    runs = [RunScores(failures=failures) for _ in range(2)]
    runs[0].add([rollout_of(0, 0, 1.0), failure_of(0, 1), failure_of(1, 0)])
    runs[1].add([rollout_of(0, 0, 1.0), failure_of(1, 0)])
    estimate = Comparison(*runs).summary(0).estimates[0]
    assert (estimate.a, estimate.b) == (a, b)
    assert [run.coverage() for run in runs] == [(1, 3), (1, 2)]


def test_rows_that_repeat_are_told(tmp_path: Path) -> None:
    """S10: rewards 1, 1, 0, of which the first two rows are alike."""
    run = write_run(tmp_path / "out.jsonl", {0: [1.0, 1.0], 1: [0.0]})
    assert read_asked([run]).notes == []  # without its header, nobody knows how many rows it had
    expansion = {"repeats": {"_default": 1}}
    header = Header.new(input={}, expansion=expansion, graph={}, rollouts=3, problems=0, source="rows.jsonl")
    header.write(Outputs.of(run).header)
    (note,) = read_asked([run]).notes
    assert note.startswith("3 rows are 2 tasks")
    assert profile_of({0: [1.0, 1.0], 1: [0.0]}).summary(0).mean_reward["value"] == 0.5
    assert read_asked([run]).rollouts == {"math_agent": 3}


def test_the_worst_rollouts_and_why() -> None:
    profile = RewardProfile(worst=2)
    for index, reward in enumerate([1.0, 0.5, 0.0, 0.25]):
        profile.add({**rollout_of(0, index, reward), "reason": f"reason {index}"})
    worst = profile.summary(0).worst
    assert [(one.rollout_id, one.reward, one.reason) for one in worst] == [
        ("0-2", 0.0, "reason 2"),
        ("0-3", 0.25, "reason 3"),
    ]


def test_tasks_named_by_a_field(tmp_path: Path) -> None:
    a = write_lines(tmp_path / "a.jsonl", [rollout_of(n, 0, 1.0, id=f"q{n}") for n in range(3)])
    b = write_lines(tmp_path / "b.jsonl", [rollout_of(n, 0, 1.0, id=f"q{2 - n}") for n in range(3)])
    key, problems = TaskKey("id"), Problems()
    runs = RunScores(), RunScores()
    runs[0].add(read_rollouts([a], key, problems))
    runs[1].add(read_rollouts([b], key, problems))
    comparison = Comparison(*runs, by_prompt=False)
    assert (comparison.summary(0).paired_tasks, comparison.summary(0).different_prompts) == (3, 2)
    list(read_rollouts([a], TaskKey("uuid"), problems))
    assert (
        problems.kept[0]
        == f"{a}:1: `uuid`, the field that identifies the task, is missing (and 2 more like this)"
    )


def compared(a: dict[int, list[float]], b: dict[int, list[float]]) -> Comparison:
    runs = RunScores(), RunScores()
    for scores, run in zip(runs, (a, b), strict=True):
        for task, rewards in run.items():
            scores.add(rollout_of(task, index, r) for index, r in enumerate(rewards))
    return Comparison(*runs)
