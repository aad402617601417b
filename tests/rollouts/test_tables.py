"""`IntTable` is a dict."""

from hypothesis import given
from hypothesis import strategies as st

from gym_serve.rollouts.tables import IntTable

KEYS = st.integers(0, 2**63 - 1)
VALUES = st.integers(0, 2**32 - 1)


@given(st.lists(st.tuples(KEYS | st.integers(0, 50), VALUES)), st.lists(KEYS))
def test_it_is_a_dict(items: list[tuple[int, int]], others: list[int]) -> None:
    table, expected = IntTable(), {}
    for key, value in items:
        table[key] = value
        expected[key] = value
    assert len(table) == len(expected)
    assert sorted(table.values()) == sorted(expected.values())
    for key in [*expected, *others]:
        assert table.get(key) == expected.get(key)


def test_it_grows() -> None:
    table = IntTable()
    for key in range(0, 10**6, 7):
        table[key << 23] = key % 1000
    assert all(table.get(key << 23) == key % 1000 for key in range(0, 10**6, 7))
    assert table.get(1) is None
