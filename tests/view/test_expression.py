"""The filter language: what it says, and where it is wrong. The SQL is checked against Python."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_serve.view.expression import NAMES, BadExpression, Clause, Schema, column, condition, parse

ROWS: list[dict[str, Any]] = [
    {"n": 0, "reward": 1.0, "agent": "math", "turns": 3, "tools": "\nfind\nread\n", "version": 9, "task": 1},
    {"n": 1, "reward": 0.0, "agent": "code", "turns": 1, "tools": "", "version": 10, "task": 1, "f0": 0.5},
    {"n": 2, "failure": "model_timeout", "agent": "math", "tools": "\nfinder\n", "task": "abc", "f1": "50%"},
    {
        "n": 3,
        "reward": 0.5,
        "tools": "",
        "input_tokens": 10,
        "output_tokens": 5,
        "seconds": 2.5,
        "version": "x",
    },
]
TEXTS = ["Paris is rainy", "oslo is dry", "the tool failed", "Märchen in Paris 東京"]
SCHEMA = Schema(
    {"score": "f0", "own": "f1"}, frozenset({"f0"}), lambda tag: "[1, 3]" if tag == "odd" else "[]"
)


@pytest.fixture(scope="module")
def select() -> Callable[[str], list[int]]:
    columns = [
        *("n", "task", "attempt", "agent", "environment", "reward", "failure", "turns", "tools"),
        *("input_tokens", "output_tokens", "seconds", "version", "last_version", "behind", "f0", "f1"),
    ]
    database = sqlite3.connect(":memory:")
    database.execute(f"CREATE TABLE rollouts ({', '.join(columns)})")
    database.execute("CREATE TABLE details (n, id, prompt)")
    database.execute("CREATE VIRTUAL TABLE words USING fts5(text, content='', detail=none, columnsize=0)")
    for row, text in zip(ROWS, TEXTS, strict=True):
        marks = ", ".join("?" * len(columns))
        database.execute(f"INSERT INTO rollouts VALUES ({marks})", [row.get(name) for name in columns])
        database.execute("INSERT INTO details VALUES (?, ?, ?)", (row["n"], f"{row['n']}-0", text))
        database.execute("INSERT INTO words (rowid, text) VALUES (?, ?)", (row["n"], text))

    def selected(expression: str) -> list[int]:
        where, values = condition(parse(expression), SCHEMA)
        return [n for (n,) in database.execute(f"SELECT n FROM rollouts WHERE {where} ORDER BY n", values)]

    return selected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("", [0, 1, 2, 3]),
        ("reward >= 0.5", [0, 3]),
        ("reward > -1", [0, 1, 3]),
        ("not reward >= 0.5", [1, 2]),
        ("reward = null", [2]),
        ("reward != null", [0, 1, 3]),
        ("reward == 1.0", [0]),
        ("tokens > 14", [3]),
        ("tokens = 0", [0, 1, 2]),
        ("agent = math and reward = 1", [0]),
        ("agent = 'math' reward = 1", [0]),
        ("agent = math or turns = 1", [0, 1, 2]),
        ("agent = code or agent = math and reward = 1", [0, 1]),
        ("(agent = code or agent = math) and reward = 1", [0]),
        ("not (agent = code or agent = math)", [3]),
        ("NOT agent = math AND NOT agent = code", [3]),
        ("agent ~ AT", [0, 2]),
        ("agent = null", [3]),
        ('failure != ""', [2]),
        ('failure = ""', [0, 1, 3]),
        ("tool = find", [0]),
        ("tool != find", [1, 2, 3]),
        ("tool ~ find", [0, 2]),
        ("tool = null", [1, 3]),
        ("version >= 10", [1, 3]),  # a text is after all numbers
        ("version = '9'", [0]),
        ("version = x", [3]),
        ("task = 1", [0, 1]),
        ("task = '1'", [0, 1]),
        ("task = abc", [2]),
        ("id = 2-0", [2]),
        ("prompt ~ paris", [0, 3]),
        ("fields.score >= 0.5", [1]),
        ("fields.own = '50%'", [2]),
        ("fields.own ~ '%'", [2]),
        ("fields.nothing = 1", []),
        ("tag = odd", [1, 3]),
        ("tag != odd", [0, 2]),
        ("paris", [0, 3]),
        ("paris rainy", [0]),
        ("'rainy paris'", [0]),
        ("not paris", [1, 2]),
        ("marchen", [3]),
        ("東京", [3]),
        ("rai*", [0]),
        ("text ~ 'is rainy!'", [0]),
        ("paris and reward < 1", [3]),
    ],
)
def test_what_it_selects(select: Callable[[str], list[int]], expression: str, expected: list[int]) -> None:
    assert select(expression) == expected


@pytest.mark.parametrize(
    ("expression", "position", "message"),
    [
        ("rewrad > 1", 0, "did you mean reward?"),
        ("reward >", 8, "a value after '>' is missing at the end"),
        ("reward > >", 9, "a value is missing after '>'"),
        ("reward > high", 9, "reward is a number"),
        ("reward ~ 1", 9, "reward is a number"),
        ("reward < null", 9, "null is only equal"),
        ("(reward = 1", 0, "this parenthesis is not closed"),
        ("reward = 1)", 10, "')' closes nothing"),
        ("agent = 'math", 8, "this quote is not closed"),
        ("and reward = 1", 0, "a condition is missing before 'and'"),
        ("reward = 1 and", 14, "a condition is missing at the end"),
        ("not", 3, "a condition is missing at the end"),
        ("= 1", 0, "a condition is missing before '='"),
        ("id > 1", 5, "id is a text"),
        ("tag ~ a", 6, "a tag is compared"),
        ("text = a", 7, "text is searched"),
        ("text ~ '!!'", 7, "has no word to search for"),
        ("a " * 200, 200, "too many conditions"),
        ("(" * 100, 51, "too many conditions"),
        ("x" * 5000, 4000, "at most 4,000 characters"),
    ],
)
def test_where_it_is_wrong(expression: str, position: int, message: str) -> None:
    with pytest.raises(BadExpression, match=re.escape(message)) as caught:
        parse(expression)
    assert caught.value.position == position


def test_a_sort_by_an_unknown_name() -> None:
    assert column("fields.nothing", SCHEMA) == "NULL"
    with pytest.raises(BadExpression, match="did you mean seconds"):
        column("second", SCHEMA)


def read(text: str) -> BadExpression | Clause:
    """What an expression becomes."""
    try:
        return condition(parse(text), SCHEMA)
    except BadExpression as error:
        return error


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused_with_its_place(text: str) -> None:
    found = read(text)
    if isinstance(found, BadExpression):
        assert 0 <= found.position <= len(text)
    else:
        assert found.sql.count("?") == len(found.values)


def test_values_never_reach_the_sql(select: Callable[[str], list[int]]) -> None:
    attack = "'); DROP TABLE rollouts; --"
    for name in NAMES:
        for value in (attack, '" OR "1"="1', "%", "\\", "*"):
            quoted = value.replace("\\", "\\\\").replace('"', '\\"')
            for op in ("=", "!=", "~"):
                try:
                    where, values = condition(parse(f'{name} {op} "{quoted}"'), SCHEMA)
                except BadExpression:
                    continue
                assert value not in where.replace("ESCAPE '\\'", "") or value in "%\\*"
                assert where.count("?") == len(values)
                select(f'{name} {op} "{quoted}"')
    assert select("") == [0, 1, 2, 3]


terms = st.recursive(
    st.sampled_from(
        [
            (
                "reward >= 0.5",
                lambda row: (row.get("reward") if row.get("reward") is not None else -1) >= 0.5,
            ),
            ("agent = math", lambda row: row.get("agent") == "math"),
            ("tool = find", lambda row: "\nfind\n" in row["tools"]),
            ("fields.score = null", lambda row: row.get("f0") is None),
            ("turns < 3", lambda row: row.get("turns") is not None and row["turns"] < 3),
        ]
    ),
    lambda inner: st.one_of(
        st.tuples(inner).map(lambda t: (f"not ({t[0][0]})", lambda row: not t[0][1](row))),
        st.tuples(inner, inner).map(
            lambda t: (f"({t[0][0]}) and ({t[1][0]})", lambda row: t[0][1](row) and t[1][1](row))
        ),
        st.tuples(inner, inner).map(
            lambda t: (f"({t[0][0]}) or ({t[1][0]})", lambda row: t[0][1](row) or t[1][1](row))
        ),
    ),
    max_leaves=6,
)


@given(term=terms)
def test_it_is_boolean_algebra(
    select: Callable[[str], list[int]], term: tuple[str, Callable[[dict[str, Any]], bool]]
) -> None:
    expression, holds = term
    assert select(expression) == [row["n"] for row in ROWS if holds(row)]
