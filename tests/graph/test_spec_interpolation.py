"""Variables in graph files."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tables import each

from gym_serve.graph.loading import Variables, environment, has_literal
from gym_serve.types.errors import GraphError

ENV = {"HOST": "h", "PORT": "80", "EMPTY": "", "ODD": "${HOST}"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain $5 {x}", "plain $5 {x}"),
        ("${HOST}", "h"),
        ("http://${HOST}:${PORT}/v1", "http://h:80/v1"),
        ("${NONE:-x}", "x"),
        ("${EMPTY:-x}", "x"),
        ("${HOST:-x}", "h"),
        ("${NONE:-}", None),
        ("${NONE:-}${EMPTY:-}", None),
        ("a${NONE:-}", "a"),
        ("${NONE:-${HOST}}", "h"),
        ("${NONE:-${EMPTY:-y}}", "y"),
        ('${NONE:-{"a": {"b": 1}}}', '{"a": {"b": 1}}'),
        ("${NONE:-a:-b}", "a:-b"),
        ("$${HOST}", "${HOST}"),
        ("$$${HOST}", "$${HOST}"),
        ("${ODD}", "${HOST}"),
        ("${NONE:-two\nlines}", "two\nlines"),
    ],
)
def test_text(text: str, expected: str | None) -> None:
    variables = Variables(ENV)
    assert variables.fill(text, "a") == expected
    assert variables.problems == []


@pytest.mark.parametrize(
    "text", ["${", "${HOST", "${}", "${1X}", "${HOST-x}", "${HOST:+x}", "${A B}", "${HOST:}"]
)
def test_malformed(text: str) -> None:
    variables = Variables(ENV)
    assert variables.fill(text, "a.b") == text
    assert variables.problems == [
        ("a.b", "invalid variable; write ${NAME} or ${NAME:-default}, and $${ for a literal ${")
    ]


def test_missing_variables_are_all_named() -> None:
    variables = Variables(ENV)
    assert variables.fill({"x": ["${NONE} ${EMPTY}"]}, "a") == {"x": ["${NONE} ${EMPTY}"]}
    assert variables.problems == [
        (
            "a.x[0]",
            "environment variable NONE is not set; export it, put it into .env, or write ${NONE:-default}",
        ),
        (
            "a.x[0]",
            "environment variable EMPTY is empty; export it, put it into .env, or write ${EMPTY:-default}",
        ),
    ]


def test_a_value_that_comes_out_empty_is_not_given() -> None:
    filled = Variables({}).fill({"a": "${X:-}", "b": ["${X:-}", "c"], "d": "", "e": None, "f": 1}, "")
    assert filled == {"b": ["c"], "d": "", "e": None, "f": 1}


@given(st.text(alphabet="${}:-AB ", max_size=30))
def test_escaped_text_is_literal(text: str) -> None:
    variables = Variables({})
    assert variables.fill(text.replace("${", "$${"), "a") == text
    assert variables.problems == []


@given(st.text(alphabet="${}:-AB1 ", max_size=30))
def test_any_text_is_filled_or_a_problem(text: str) -> None:
    variables = Variables({"A": "x"})
    filled = variables.fill(text, "a")
    assert filled is None or isinstance(filled, str)
    has_literal(text)


@pytest.mark.parametrize(
    ("text", "literal"),
    [
        *each(True, "sk-1", "", "$${KEY}", "${KEY:-sk-1}", "${KEY:-${OTHER:-sk-1}}"),
        *each(False, "${KEY}", "Bearer ${KEY}", "${KEY:-}", "${KEY:-${OTHER}}", "EMPTY", "${KEY:-EMPTY}"),
    ],
)
def test_has_literal(text: str, literal: bool) -> None:
    assert has_literal(text) is literal


def test_the_process_goes_before_dotenv_and_the_graphs_before_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = tmp_path / "graphs"
    graphs.mkdir()
    (tmp_path / ".env").write_text("GS_A=here\nGS_B=here\nGS_C=here\nGS_UNSET\n")
    (graphs / ".env").write_text("GS_A=graphs\nGS_B='with # quotes'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GS_A", "process")
    variables = environment(graphs)
    assert [variables.get(f"GS_{x}") for x in "ABC"] == ["process", "with # quotes", "here"]
    assert "GS_UNSET" not in variables


def test_a_dotenv_that_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_bytes(b"A=\xff\xfe")
    with pytest.raises(GraphError, match=r"\.env: cannot be read: it must be a text in UTF-8"):
        environment(tmp_path)
