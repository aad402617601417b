"""Orders of results: nothing is lost or doubled, and each order is what its name says."""

from hypothesis import given
from hypothesis import strategies as st

from gym_serve.rollouts.scheduling import Order, Ordering

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=6)


def ordered(
    order: Order, sizes: list[int], draw: st.DataObject
) -> tuple[list[int], list[int], dict[int, int]]:
    """Jobs in the order in which they are done, and in which they leave; the group of each."""
    ordering: Ordering[int] = Ordering(order)
    group_of = dict(enumerate(group for group, size in enumerate(sizes) for _ in range(size)))
    for group, size in enumerate(sizes):
        ordering.expect(group, size)
    done = draw.draw(st.permutations(list(group_of)))
    left: list[int] = []
    for count, job in enumerate(done, 1):
        left += ordering.push(group_of[job], job, job)
        assert ordering.held == count - len(left)
    assert sorted(left) == list(group_of)
    return list(done), left, group_of


@given(SIZES, st.data())
def test_completion(sizes: list[int], data: st.DataObject) -> None:
    done, left, _ = ordered("completion", sizes, data)
    assert left == done


@given(SIZES, st.data())
def test_row(sizes: list[int], data: st.DataObject) -> None:
    _, left, _ = ordered("row", sizes, data)
    assert left == sorted(left)


@given(SIZES, st.data())
def test_group(sizes: list[int], data: st.DataObject) -> None:
    done, left, group_of = ordered("group", sizes, data)
    last = {group_of[job]: position for position, job in enumerate(done)}
    complete = sorted(last, key=last.__getitem__)
    assert left == [job for group in complete for job in sorted(group_of) if group_of[job] == group]
