"""`collect` where an environment compares the rollouts of a row: each group once, whatever interrupts it."""

import asyncio
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rollouts import JSON, FakeAgent, collection, keys, read_jsonl, rows, with_backend, write_jsonl

from gym_serve.rollouts import Budget, Collection, Progress, Report, collect, merge
from gym_serve.rollouts.files import RecordFile
from gym_serve.servers.usage import UsageMeter
from gym_serve.types.errors import BadRequest, Unavailable, VerifierFailed


class Judge:
    """Rewards the rollouts of a group 0, 10, 20, ..., in order; counts how often it was asked."""

    def __init__(self, errors: dict[int, list[Exception]] | None = None, seconds: float = 0) -> None:
        self.asked: Counter[int] = Counter()
        self.bodies: list[JSON] = []
        self.most = self.running = 0
        self._errors = errors or {}
        self._seconds = seconds

    async def __call__(self, row: JSON, body: JSON, meter: UsageMeter) -> JSON:
        task = row["_ng_task_index"]
        self.asked[task] += 1
        self.bodies.append(body)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self._seconds)
        self.running -= 1
        meter.record("compare", "genrm", {"input_tokens": 7, "output_tokens": 0})
        if errors := self._errors.get(task):
            raise errors.pop(0)
        return {"rewards": [10.0 * place for place, _ in enumerate(body["response_objs"])], "seen": task}

    async def comparing(self) -> Any:
        return self


def compared(agent: FakeAgent, judge: Judge, **options: Any) -> Collection:
    return with_backend(collection(agent, **options), comparing=judge.comparing)


def rewards(path: Path) -> dict[tuple[int, int], float]:
    found = read_jsonl(path)
    assert len(keys(found)) == len(set(keys(found))) == len(found)
    return {(r["_ng_task_index"], r["_ng_rollout_index"]): r["reward"] for r in found}


async def test_the_rewards_of_the_comparison_replace_those_of_verify(tmp_path: Path) -> None:
    judge, out = Judge(), tmp_path / "out.jsonl"
    report = await collect(rows(5), out, compared(FakeAgent(), judge, repeats=3))
    assert rewards(out) == {(task, place): 10.0 * place for task in range(5) for place in range(3)}
    assert {rollout["verify_reward"] for rollout in read_jsonl(out)} == {1.0}
    assert judge.asked == dict.fromkeys(range(5), 1)
    asked = {body["conversation_history"][0]["content"] for body in judge.bodies}
    assert asked == {f"question {task}" for task in range(5)}
    assert (report.complete, report.uncompared, report.progress.mean_reward) == (True, [], 10.0)
    assert report.metrics[0]["agent_metrics"]["mean/reward"] == 10.0
    assert report.spent.usage["compare"]["genrm"]["calls"] == 5
    comparisons = read_jsonl(tmp_path / "out_comparisons.jsonl")
    assert sorted(c["comparison"]["seen"] for c in comparisons) == [0, 1, 2, 3, 4]


async def test_a_group_without_its_failed_rollouts_is_compared(tmp_path: Path) -> None:
    agent = FakeAgent(
        errors={(0, 1): [BadRequest("never")], (1, 0): [BadRequest("no")], (1, 1): [BadRequest("no")]}
    )
    judge, out = Judge(), tmp_path / "out.jsonl"
    report = await collect(rows(2), out, compared(agent, judge, repeats=3))
    assert rewards(out) == {(0, 0): 0.0, (0, 2): 10.0, (1, 2): 0.0}
    assert (report.complete, report.progress.failed) == (True, 3)


async def test_an_environment_without_compare_changes_nothing(tmp_path: Path) -> None:
    async def nothing(row: JSON, body: JSON, meter: UsageMeter) -> None:
        """An agent whose environment has no such operation, in a graph where another has."""

    async def comparing() -> Any:
        return nothing

    plain, asked = tmp_path / "plain.jsonl", tmp_path / "asked.jsonl"
    await collect(rows(3), plain, collection(FakeAgent(), repeats=2))
    work = with_backend(collection(FakeAgent(), repeats=2), comparing=comparing)
    report = await collect(rows(3), asked, work)
    assert report.complete
    assert rewards(asked) == rewards(plain)
    assert not any("verify_reward" in rollout for rollout in read_jsonl(asked))
    assert not (tmp_path / "plain_comparisons.jsonl").exists()


async def test_a_comparison_that_fails_is_tried_again_and_then_on_resume(tmp_path: Path) -> None:
    judge = Judge({0: [Unavailable("away")], 1: [VerifierFailed("never")] * 3})
    out, agent = tmp_path / "out.jsonl", FakeAgent()
    report = await collect(rows(3), out, compared(agent, judge, repeats=2))
    assert not report.complete
    assert report.metrics == []
    assert report.uncompared == ["task 1: compare failed: never"]
    assert set(rewards(out).values()) == {1.0}  # not in part
    again = Judge()
    report = await collect(rows(3), out, compared(agent, again, repeats=2), resume=True)
    assert report.complete
    assert again.asked == {1: 1}
    assert rewards(out) == {(task, place): 10.0 * place for task in range(3) for place in range(2)}
    assert len(agent.ran) == 6
    assert (
        report.spent.usage["compare"]["genrm"]["calls"] == 4
    )  # those that failed for good are not in the files


async def test_a_run_that_is_complete_asks_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    first = await collect(rows(3), out, compared(FakeAgent(), Judge(), repeats=2))
    before, judge = out.read_bytes(), Judge()
    report = await collect(rows(3), out, compared(FakeAgent(), judge, repeats=2), resume=True)
    assert judge.asked == {}
    assert out.read_bytes() == before
    assert report.progress.mean_reward == first.progress.mean_reward == 5.0


async def test_a_group_that_has_grown_is_compared_again(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    agent = FakeAgent(errors={(0, 0): [Unavailable("away")] * 3})
    await collect(rows(2), out, compared(agent, Judge(), repeats=2))
    assert rewards(out) == {(0, 1): 0.0, (1, 0): 0.0, (1, 1): 10.0}
    more, judge = compared(FakeAgent(), Judge(), repeats=2), Judge()
    more = with_backend(replace(more, options=replace(more.options, attempts=4)), comparing=judge.comparing)
    report = await collect(rows(2), out, more, resume=True)
    assert report.complete
    assert judge.asked == {0: 1}
    assert rewards(out) == {(0, 0): 0.0, (0, 1): 10.0, (1, 0): 0.0, (1, 1): 10.0}
    assert {rollout["verify_reward"] for rollout in read_jsonl(out)} == {1.0}


async def test_few_groups_are_compared_at_once(tmp_path: Path) -> None:
    judge, told = Judge(seconds=0.01), list[Progress]()
    options = compared(FakeAgent(), judge, repeats=2, concurrency=3)
    await collect(rows(40), tmp_path / "out.jsonl", options, progress=told.append)
    assert 1 < judge.most <= 3
    assert {now.comparing for now in told if now.remaining} == {0}
    left = [now.comparing for now in told if not now.remaining][1:]
    assert (left[0], left[-1], left) == (40, 0, sorted(left, reverse=True))


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize(
    "crash_at", ["first comparison", "last comparison", "before the file", "after the file"]
)
async def test_a_crash_costs_no_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_at: str, suffix: str
) -> None:
    out, judge, agent = tmp_path / f"out.jsonl{suffix}", Judge(), FakeAgent()
    done: list[int] = []

    class Crash(Exception):
        pass

    append, replaced = RecordFile.append, os.replace

    def crashing(self: Any, record: JSON) -> None:
        append(self, record)
        if "comparison" in record:
            done.append(record["_ng_task_index"])
            if len(done) == {"first comparison": 1, "last comparison": 4}.get(crash_at):
                raise Crash

    def replacing(source: Path, target: Path) -> None:
        if target == out and crash_at == "before the file":
            raise Crash
        replaced(source, target)
        if target == out and crash_at == "after the file":
            raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(RecordFile, "append", crashing)
        patch.setattr(os, "replace", replacing)
        with pytest.raises(Crash):
            await collect(rows(4), out, compared(agent, judge, repeats=2))
    asked = Counter(judge.asked)
    report = await collect(rows(4), out, compared(agent, judge, repeats=2), resume=True)
    assert report.complete
    assert report.progress.mean_reward == 5.0
    assert all(judge.asked[task] == asked[task] for task in done)
    assert len(agent.ran) == 8
    if not suffix:
        assert rewards(out) == {(task, place): 10.0 * place for task in range(4) for place in range(2)}
    again = await collect(rows(4), out, compared(agent, judge, repeats=2), resume=True)
    assert again.progress == replace(report.progress, earlier=8)


async def test_a_stop_leaves_the_rest_to_the_next_one(tmp_path: Path) -> None:
    stop, out = asyncio.Event(), tmp_path / "out.jsonl"

    class Stopping(Judge):
        async def __call__(self, row: JSON, body: JSON, meter: UsageMeter) -> JSON:
            stop.set()
            return await super().__call__(row, body, meter)

    first = Stopping()
    report = await collect(rows(20), out, compared(FakeAgent(), first, repeats=2, concurrency=2), stop=stop)
    assert not report.complete
    assert 1 <= sum(first.asked.values()) <= 2
    second = Judge()
    report = await collect(rows(20), out, compared(FakeAgent(), second, repeats=2), resume=True)
    assert report.complete
    assert first.asked + second.asked == Counter(range(20))


async def test_comparisons_count_for_the_budget(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"

    async def run(tokens: int, judge: Judge) -> Report:
        limited = replace(
            compared(FakeAgent(), judge, repeats=2, concurrency=1), budget=Budget(max_tokens=tokens)
        )
        return await collect(rows(6), out, limited, resume=True)

    first, second = Judge(), Judge()  # the rollouts use 12 tokens, a comparison 7
    report = await run(24, first)
    assert (report.complete, sum(first.asked.values())) == (False, 2)
    assert "26 of at most 24 tokens" in (report.exhausted or "")
    report = await run(1000, second)
    assert report.complete
    assert report.spent.tokens == 12 + 6 * 7
    assert first.asked + second.asked == Counter(range(6))


async def test_comparisons_of_another_run_are_not_taken(tmp_path: Path) -> None:
    write_jsonl(
        tmp_path / "out_comparisons.jsonl",
        [{"_ng_task_index": 0, "rollouts": [0, 1], "rewards": [5.0, 5.0], "_ng_run": "x"}],
    )
    judge = Judge()
    await collect(rows(1), tmp_path / "out.jsonl", compared(FakeAgent(), judge, repeats=2))
    assert judge.asked == {0: 1}


async def test_merged_shards_keep_their_comparisons(tmp_path: Path) -> None:
    judge, shards = Judge(), [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    source = write_jsonl(tmp_path / "rows.jsonl", rows(4))
    for number, shard in enumerate(shards, 1):
        await collect(source, shard, compared(FakeAgent(), judge, repeats=2, shard=(number, 2)))
    await merge(shards, tmp_path / "all.jsonl")
    assert sorted(rewards(tmp_path / "all.jsonl").values()) == [0.0] * 4 + [10.0] * 4
    report = await collect(
        source, tmp_path / "all.jsonl", compared(FakeAgent(), judge, repeats=2), resume=True
    )
    assert report.complete
    assert set(judge.asked.values()) == {1}


@settings(max_examples=20)  # each syncs files to the disk
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(1, 3),
    st.lists(st.integers(0, 3), max_size=6),
)
def test_any_failures_leave_each_scored_rollout_with_one_reward(
    tasks: list[list[int]], concurrency: int, away: list[int]
) -> None:
    """``tasks``: by rollout, 0 scored, 1 at the second try, 2 never; ``away``: comparisons that fail once."""
    import tempfile

    size = max(map(len, tasks))
    errors: Any = {
        (task, place): [Unavailable("x")] if fate == 1 else [BadRequest("y")]
        for task, fates in enumerate(tasks)
        for place, fate in enumerate(fates)
        if fate
    }
    scored = {
        (task, place)
        for task, fates in enumerate(tasks)
        for place in range(size)
        if place >= len(fates) or fates[place] < 2
    }
    judge = Judge({task: [Unavailable("away")] * count for task, count in Counter(away).items()})

    async def work(folder: str) -> None:
        agent, out, report = FakeAgent(errors=errors), Path(folder, "out.jsonl"), None
        made = compared(agent, judge, repeats=size, concurrency=concurrency)
        while report is None or not report.complete:
            report = await collect(rows(len(tasks)), out, made, resume=True)
        found = rewards(out)
        assert found.keys() == scored
        for task in range(len(tasks)):
            mine = [found[key] for key in sorted(found) if key[0] == task]
            assert mine == [10.0 * place for place in range(len(mine))]
        assert orjson.loads(out.with_name("out_aggregate_metrics.json").read_bytes())

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(work(folder))
