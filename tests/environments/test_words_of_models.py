"""Right answers as models write them, in queries, schemas, results of MCP tools and tags (faults.md, G)."""

from __future__ import annotations

from typing import Any

import pytest
from mcp.types import CallToolResult, TextContent, Tool

from gym_serve.environments.mcp import completed, offered, text_of
from gym_serve.environments.reasoning_gym import answer_in
from gym_serve.environments.structured_outputs.schemas import ecma
from gym_serve.environments.text_to_sql import extract_sql
from gym_serve.environments.text_to_sql.execution import difference


def result(*rows: list[Any]) -> dict[str, Any]:
    return {"rows": list(rows), "tables": None}


@pytest.mark.parametrize(
    ("expected", "given", "same"),
    [
        ([["ann", 10], ["cy", 30]], [["ann", 30], ["cy", 10]], False),
        ([["ann", 10], ["cy", 30]], [["cy", 30], ["ann", 10]], True),
        ([["ann", 10], ["cy", 30]], [[30, "cy"], [10, "ann"]], True),
        ([[1, 2], [2, 1]], [[2, 1], [1, 2]], True),
        ([[1, 2], [2, 1]], [[1, 1], [2, 2]], False),
        ([[1, 2, 3], [2, 1, 3]], [[2, 3, 1], [1, 3, 2]], True),
        ([["a", 1.25], ["b", 1.5]], [["b", 1.5], ["a", 1.3]], True),  # rounded
        ([["a", 1.25], ["b", 1.5]], [["a", 1.5], ["b", 1.3]], False),
        ([["a"], ["b"]], [["a", 1], ["b", 2]], True),  # further columns do no harm
    ],
)
def test_rows_are_compared_as_tuples(expected: list[Any], given: list[Any], same: bool) -> None:
    assert (difference(result(*expected), result(*given)) is None) == same


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("The query is SELECT a FROM t WHERE b = 1; it lists all.", "SELECT a FROM t WHERE b = 1;"),
        ("Use `SELECT a FROM t` to list them.", "SELECT a FROM t;"),
        ("Select the rows first. Then:\n\nSELECT a FROM t\n\nThis works; try it.", "SELECT a FROM t;"),
        ("select a from t", "select a from t;"),
        ("WITH x AS (SELECT 1) SELECT * FROM x;\nDone; really.", "WITH x AS (SELECT 1) SELECT * FROM x;"),
        ("First SELECT 1; no, SELECT 2;", "SELECT 2;"),
        ("```sql\nSELECT 3\n``` and `SELECT 4`", "SELECT 3"),
        ("I do not know.", None),
    ],
)
def test_the_query_is_found(text: str, query: str | None) -> None:
    assert extract_sql(text) == query


@pytest.mark.parametrize(
    ("pattern", "translated"),
    [
        (r"^\d+$", r"^[0-9]+\Z"),
        (r"[\d\w-]\W\D", r"[0-9A-Za-z0-9_-][^A-Za-z0-9_][^0-9]"),
        (r"\$[$\]]\\d", r"\$[$\]]\\d"),
        (r"^\p{L}+$", r"^\p{L}+\Z"),
        (r"^(?<y>\d{4})$", r"^(?<y>[0-9]{4})\Z"),
    ],
)
def test_patterns_of_ecma(pattern: str, translated: str) -> None:
    assert ecma(pattern) == translated


def test_the_structure_of_a_result_without_content() -> None:
    assert text_of(CallToolResult(content=[], structuredContent={"n": 1}), 100) == '{"n":1}'
    text = [TextContent(type="text", text="one")]
    assert text_of(CallToolResult(content=text, structuredContent={"n": 1}), 100) == "one"


def test_schemas_of_tools() -> None:
    found = offered([Tool(name="half", inputSchema={"type": "object"})], None)
    assert found["half"].parameters == {"type": "object", "properties": {}}
    assert completed({"properties": {"a": {}}}) == {"properties": {"a": {}}}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("I will use <answer> tags. <answer>42</answer>", "42"),
        ("<answer>1</answer> no: <answer>2</answer>", "2"),
        ("<answer></answer>", ""),
        ("<answer>open", "<answer>open"),
    ],
)
def test_the_last_pair_of_tags_counts(text: str, answer: str) -> None:
    assert answer_in(text) == answer
