"""The book of groups: when a group is settled, with which rollouts, and what it says if they are too few."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rollouts import JSON

from gym_serve.rollouts.grouping import Group, GroupBook, GroupOptions
from gym_serve.rollouts.scheduling import Job
from gym_serve.types.errors import InvalidRequest


def failure(kind: str = "tool_timeout", detail: str = "the tool is slow") -> JSON:
    return {"_ng_failure_class": kind, "failure": {"detail": detail}}


def opened(count: int, **options: object) -> tuple[GroupBook, list[Job]]:
    book = GroupBook(GroupOptions(**options))  # type: ignore[arg-type]
    jobs = [Job(number, 0, {"_ng_task_index": 7}) for number in range(count)]
    book.expect(jobs)
    for job in jobs:
        book.started(job, 100.0 + job.number)
    return book, jobs


def test_it_is_settled_with_the_first_ones_that_are_in() -> None:
    book, jobs = opened(5, size=2, oversample=3)
    assert book.ended(jobs[4], {"n": 4}, failed=False) is None
    assert book.ended(jobs[0], failure(), failed=True) is None
    settled = book.ended(jobs[2], {"n": 2}, failed=False)
    assert settled is not None
    group, stragglers = settled
    assert group == Group({"_ng_task_index": 7}, [{"n": 2}, {"n": 4}], [failure()], usable=True)
    assert group.task_index == 7
    assert stragglers == [jobs[1], jobs[3]]
    assert book.ended(jobs[1], {"n": 1}, failed=False) is None


def test_one_that_cannot_be_filled_says_why_at_once() -> None:
    book, jobs = opened(3, size=2, oversample=1)
    assert book.ended(jobs[0], failure(), failed=True) is None
    settled = book.ended(jobs[1], failure("model_timeout", "no answer"), failed=True)
    assert settled is not None
    group, stragglers = settled
    assert (group.rollouts, group.usable, stragglers) == ([], False, [jobs[2]])
    assert group.reason == (
        "0 of 2 rollouts: 1 failed with tool_timeout: the tool is slow; "
        "1 failed with model_timeout: no answer; 1 cancelled because 2 could not be reached"
    )


def test_a_quorum_takes_what_it_can_get() -> None:
    book, jobs = opened(3, size=3, quorum=2)
    book.ended(jobs[0], failure(), failed=True)
    assert book.ended(jobs[1], {"n": 1}, failed=False) is None
    settled = book.ended(jobs[2], {"n": 2}, failed=False)
    assert settled is not None
    assert settled[0].usable
    assert settled[0].reason == "2 of 3 rollouts: 1 failed with tool_timeout: the tool is slow"


@pytest.mark.parametrize(("quorum", "usable"), [(None, False), (1, True)])
def test_a_deadline_counts_from_the_first_start(quorum: int | None, usable: bool) -> None:
    book, jobs = opened(3, size=3, quorum=quorum, deadline=5.0)
    assert book.next_deadline() == 105.0
    book.ended(jobs[1], {"n": 1}, failed=False)
    assert book.expired(104.9) == []
    ((group, stragglers),) = book.expired(105.0)
    assert (group.rollouts, group.usable, stragglers) == ([{"n": 1}], usable, [jobs[0], jobs[2]])
    assert group.reason == "1 of 3 rollouts: the deadline of 5 s passed with 2 unfinished"
    assert book.next_deadline() == float("inf")


@pytest.mark.parametrize("options", [{"size": 0}, {"size": 2, "oversample": -1}, {"size": 2, "quorum": 3}])
def test_options_out_of_range(options: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest):
        GroupOptions(**options)


@given(
    st.integers(1, 4),
    st.integers(0, 3),
    st.data(),
)
def test_a_group_is_settled_once_and_as_early_as_can_be(
    size: int, oversample: int, data: st.DataObject
) -> None:
    quorum = data.draw(st.none() | st.integers(1, size))
    book, jobs = opened(size + oversample, size=size, oversample=oversample, quorum=quorum)
    needed = size if quorum is None else quorum
    scored: list[int] = []
    left = set(range(len(jobs)))
    settled = None
    for job in data.draw(st.permutations(jobs)):
        failed = data.draw(st.booleans())
        result = book.ended(job, failure() if failed else {"n": job.number}, failed=failed)
        if settled is not None:
            assert result is None
            continue
        left.remove(job.number)
        if not failed:
            scored.append(job.number)
        decided = len(scored) == size or not left or len(scored) + len(left) < needed
        assert (result is not None) == decided
        settled = result
    assert settled is not None
    group, stragglers = settled
    assert [r["n"] for r in group.rollouts] == sorted(scored)
    assert {job.number for job in stragglers} == left
    assert group.usable == (len(scored) >= needed)
    assert (group.reason is None) == (len(scored) == size)
