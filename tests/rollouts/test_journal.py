"""The journal, against a model: whatever is acknowledged survives, and each rollout is scored once."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.rollouts import JSON, read_jsonl, row, scored

from gym_serve.rollouts import Outputs
from gym_serve.rollouts.journal import Header, Journal
from gym_serve.types.errors import BadRequest, Conflict, Unavailable
from gym_serve.types.rows import failed_rollout


def row_of(task: int, rollout: int = 0) -> JSON:
    return row(task, _ng_task_index=task, _ng_rollout_index=rollout, _ng_rollout_id=f"{task}-{rollout}")


def header() -> Header:
    return Header.new(input={}, expansion={}, graph={}, rollouts=9, problems=0, source="rows.jsonl")


def opened(path: Path, resume: bool = False) -> Journal:
    journal = Journal(Outputs.of(path), resume=resume)
    try:
        if journal.header is None:
            journal.begin(header())
        else:
            list(journal.recover())
    except Conflict:
        journal.close()
        raise
    return journal


def test_names_of_the_files() -> None:
    outputs = Outputs.of("runs/out.jsonl")
    assert [p.name for p in (outputs.rollouts, outputs.failures, outputs.inputs, outputs.metrics)] == [
        "out.jsonl",
        "out_failures.jsonl",
        "out_materialized_inputs.jsonl",
        "out_aggregate_metrics.json",
    ]
    assert {p.parent for p in (outputs.rollouts, outputs.failures, outputs.inputs, outputs.metrics)} == {
        Path("runs")
    }
    assert Outputs.of("a.b.jsonl.zst").failures.name == "a.b_failures.jsonl.zst"
    assert Outputs.of("a.b.jsonl.gz").metrics.name == "a.b_aggregate_metrics.json"
    assert Outputs.of("plain").inputs.name == "plain_materialized_inputs.jsonl"
    for folder in ("", ".", ".."):
        with pytest.raises(BadRequest, match="is a folder: name a file in it"):
            Outputs.of(folder)


@pytest.mark.parametrize(("first", "second"), [("x.jsonl", "x"), ("x.jsonl", "x.json"), ("x", "x.jsonl.gz")])
def test_names_that_differ_in_their_ending_share_no_files(tmp_path: Path, first: str, second: str) -> None:
    opened(tmp_path / first).close()
    for resume in (False, True):
        with pytest.raises(Conflict, match=f"x_run.json belongs to the run in {first}"):
            opened(tmp_path / second, resume)
    (tmp_path / first).rename(tmp_path / second)  # it has become that of this name
    opened(tmp_path / second, resume=True).close()


def test_a_link_is_the_run_that_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "out.jsonl"
    link.symlink_to(tmp_path / "disk" / "run.jsonl")  # which is not there yet
    with opened(link) as journal:
        journal.append(row_of(0), scored(row_of(0)))
    assert link.is_symlink()
    assert len(read_jsonl(tmp_path / "disk" / "run.jsonl")) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"disk", "out.jsonl"}


def test_successes_and_failures_go_to_their_files(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with opened(path) as journal:
        journal.append(row_of(0), scored(row_of(0)))
        journal.append(row_of(1), failed_rollout(row_of(1), Unavailable("gone")))
        journal.append(row_of(1), scored(row_of(1)) | {"mask_sample": True})
        run = journal.header.run if journal.header else None
    assert [(r["number"], r["_ng_run_id"]) for r in read_jsonl(path)] == [(0, run), (1, run)]
    assert [r["number"] for r in read_jsonl(tmp_path / "out_failures.jsonl")] == [1]


def test_what_is_left_to_do(tmp_path: Path) -> None:
    with opened(tmp_path / "out.jsonl") as journal:
        journal.append(row_of(0), scored(row_of(0)))
        for task, failures in ((1, 1), (2, 3), (3, 2)):
            for _ in range(failures):
                journal.append(row_of(task), failed_rollout(row_of(task), Unavailable("gone")))
        journal.append(row_of(4), failed_rollout(row_of(4), BadRequest("never")))
        journal.append(row_of(3), scored(row_of(3)))
    with opened(tmp_path / "out.jsonl", resume=True) as journal:
        left = [journal.failed_attempts(row_of(task), 3) for task in range(6)]
        assert left == [None, (1, 0), None, None, None, (0, 0)]
        assert journal.finished(3) == 4
        assert journal.failed_attempts(row_of(2), 4) == (3, 0)


def test_a_rollout_that_cannot_be_stored_is_a_failure(tmp_path: Path) -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with opened(tmp_path / "out.jsonl") as journal:
        recorded = journal.append(row_of(0), scored(row_of(0)) | {"deep": deep})
        assert recorded["_ng_failure_terminal"] is True
    assert read_jsonl(tmp_path / "out.jsonl") == []
    (failure,) = read_jsonl(tmp_path / "out_failures.jsonl")
    assert "cannot be stored as JSON" in failure["failure"]["detail"]
    while deep:
        deep = deep[0]  # freed piece by piece


def test_a_run_is_not_begun_over_another(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with opened(path) as journal:
        journal.append(row_of(0), scored(row_of(0)))
    with pytest.raises(Conflict, match=r"out.jsonl holds a run; resume it \(--resume\)"):
        Journal(Outputs.of(path), resume=False)


def test_a_run_of_nothing_is_begun_anew(tmp_path: Path) -> None:
    opened(tmp_path / "out.jsonl").close()
    for resume in (False, True):
        with Journal(Outputs.of(tmp_path / "out.jsonl"), resume=resume) as journal:
            assert journal.header is None


def test_without_its_header_a_run_is_not_resumed(tmp_path: Path) -> None:
    with opened(tmp_path / "out.jsonl") as journal:
        journal.append(row_of(0), scored(row_of(0)))
    (tmp_path / "out_run.json").unlink()
    with pytest.raises(Conflict, match=r"out_run.json is missing"):
        Journal(Outputs.of(tmp_path / "out.jsonl"), resume=True)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 99}', '{"format": 1, "run": "x"}'])
def test_a_header_that_is_none(tmp_path: Path, content: str) -> None:
    with opened(tmp_path / "out.jsonl") as journal:
        journal.append(row_of(0), scored(row_of(0)))
    (tmp_path / "out_run.json").write_text(content)
    with pytest.raises(Conflict, match=r"out_run.json"):
        Journal(Outputs.of(tmp_path / "out.jsonl"), resume=True)


def test_rollouts_of_another_run_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with opened(tmp_path / f"{name}.jsonl") as journal:
            journal.append(row_of(0), scored(row_of(0)))
    shutil.copy(tmp_path / "b.jsonl", tmp_path / "a.jsonl")
    with pytest.raises(Conflict, match=r"rollout 0-0 .* is of run"):
        opened(tmp_path / "a.jsonl", resume=True)


def test_a_rollout_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with opened(path) as journal:
        journal.append(row_of(0), scored(row_of(0)))
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(Conflict, match="holds rollout 0-0 twice"):
        opened(path, resume=True)


class JournalModel(RuleBasedStateMachine):
    """Append, crash with or without a torn line, reopen; the files agree with what was acknowledged."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.outputs = Outputs.of(self.folder / f"out.jsonl{self.suffix}")
        self.scored: set[int] = set()
        self.failures: dict[int, int] = {}
        self.forgiven: dict[int, int] = {}
        self.hopeless: set[int] = set()
        self.journal = opened(self.outputs.rollouts)

    suffix = ""

    def expected(self, task: int, allowed: int = 99) -> tuple[int, int] | None:
        failed, forgiven = self.failures.get(task, 0), self.forgiven.get(task, 0)
        over = task in self.scored or task in self.hopeless or failed - forgiven >= allowed
        return None if over else (failed, forgiven)

    @rule(task=st.integers(0, 8), fails=st.booleans(), terminal=st.booleans())
    def attempt(self, task: int, fails: bool, terminal: bool) -> None:
        if (self.expected(task, 3)) is None:
            return
        if fails:
            error = BadRequest("never") if terminal else Unavailable("gone")
            self.journal.append(row_of(task), failed_rollout(row_of(task), error))
            self.failures[task] = self.failures.get(task, 0) + 1
            if terminal:
                self.hopeless.add(task)
        else:
            self.journal.append(row_of(task), scored(row_of(task)))
            self.scored.add(task)

    @rule(failed=st.booleans(), part=st.floats(0, 1))
    def crash(self, failed: bool, part: float) -> None:
        """A write was under way: part of a line is there, which nobody was told of."""
        path = self.outputs.failures if failed else self.outputs.rollouts
        before = path.stat().st_size
        self.journal.append(
            row_of(9), failed_rollout(row_of(9), Unavailable("x")) if failed else scored(row_of(9))
        )
        torn = path.stat().st_size - before - 1
        self._die()
        os.truncate(path, before + int(part * torn))
        self._reopen()

    @rule()
    def forgive(self) -> None:
        """As `collect` does it: after a resume, before anything runs."""
        self._die()
        self._reopen()
        if self.journal.header is not None and (self.scored or self.failures):
            self.journal.forgive()
            self.forgiven = {task: n for task, n in self.failures.items() if task not in self.scored}
            self.hopeless.clear()

    @rule(written=st.booleans())
    def die_while_forgiving(self, written: bool) -> None:
        """Killed before the header is replaced, or after: nothing or all of it has happened."""
        if written:
            self.forgive()
        self._die()
        self._reopen()

    @rule()
    def die(self) -> None:
        self._die()
        self._reopen()

    @rule()
    def close(self) -> None:
        self.journal.close()
        self._reopen()

    @precondition(lambda self: self.scored or self.failures)
    @invariant()
    def the_files_hold_what_was_acknowledged(self) -> None:
        journal = self.journal
        assert journal.header is not None
        state = {task: journal.failed_attempts(row_of(task), 99) for task in range(9)}
        assert all(past is None or past[0] <= self.failures.get(task, 0) for task, past in state.items())

    def teardown(self) -> None:
        self._die()
        self._reopen()
        self.journal.close()
        shutil.rmtree(self.folder)

    def _die(self) -> None:
        """As SIGKILL does: descriptors are closed, and nothing is synced."""
        for file in self.journal._files:
            file._file.close()

    def _reopen(self) -> None:
        self.journal = Journal(self.outputs, resume=True)
        if self.journal.header is None:
            assert not self.scored
            assert not self.failures
            self.journal.begin(header())
            return
        records = list(self.journal.recover())
        assert sorted(r["_ng_task_index"] for r in records if "failure" not in r) == sorted(self.scored)
        assert sum("failure" in record for record in records) == sum(self.failures.values())
        for task in range(10):
            assert self.journal.failed_attempts(row_of(task), 99) == self.expected(task)
            assert self.journal.failed_attempts(row_of(task), 2) == self.expected(task, 2)
        finished = [task for task in range(10) if self.expected(task, 2) is None]
        assert self.journal.finished(2) == len(finished)


class CompressedJournalModel(JournalModel):
    suffix = ".gz"


JournalModel.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
CompressedJournalModel.TestCase.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
TestJournal = JournalModel.TestCase
TestCompressedJournal = CompressedJournalModel.TestCase
