"""What rollouts hold breaks neither the index nor an answer: every hostile one, through the real server."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from view.hostile import hostile, write_hostile
from view.made import until_indexed, viewer

UNREADABLE = {"a list", "a text", "no JSON", "zero bytes", "deep nesting", "deeper nesting than Python"}
"""Those that are no rollouts: they are problems, and the others are shown."""


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, str, list[str]]]:
    folder = tmp_path_factory.mktemp("hostile")
    names = write_hostile(folder / "hostile.jsonl")
    with viewer(folder, cache=folder / "cache") as client:
        runs = until_indexed(client, len(names) - len(UNREADABLE))
        yield client, runs[0]["id"], names


def test_there_are_fifty() -> None:
    assert len(hostile()) >= 50


def test_every_one_is_shown_or_a_problem(names: tuple[httpx.Client, str, list[str]]) -> None:
    client, _, lines = names
    (found,) = client.get("api/runs").json()["runs"]
    told = {problem["line"]: problem["message"] for problem in found["problems"]}
    assert "the last line is not complete yet" in told.pop(None)
    assert {lines[line - 1] for line in told} == UNREADABLE
    assert found["problem_count"] == len(UNREADABLE) + 1
    shown = client.get("api/rollouts", params={"limit": 1000}).raise_for_status().json()["rows"]
    assert {lines[row["n"]] for row in shown} == set(lines) - UNREADABLE
    assert all(len(str(value)) < 10_000 for row in shown for key, value in row.items() if key != "fields")


def test_every_answer_is_whole_and_bounded(names: tuple[httpx.Client, str, list[str]]) -> None:
    client, run, lines = names
    for n, name in enumerate(lines):
        if name in UNREADABLE:
            continue
        whole = client.get(f"api/rollout/{run}/{n}")
        assert whole.status_code == 200, (name, whole.text[:500])
        assert len(whole.content) < 16_000_000, name
        assert len(whole.json()["items"]) <= 2000, name
        tokens = client.get(f"api/rollout/{run}/{n}/tokens")
        assert tokens.status_code == 200, (name, tokens.text[:500])
        assert len(tokens.content) < 16_000_000, name


def test_tables_and_figures_hold(names: tuple[httpx.Client, str, list[str]]) -> None:
    client, run, _ = names
    queries: list[tuple[str, dict[str, Any]]] = [
        *(
            ("api/rollouts", {"sort": sort})
            for sort in ("reward", "-task", "agent", "version", "tools", "id", "prompt")
        ),
        *(("api/tasks", {"sort": sort}) for sort in ("task", "-spread", "longest")),
        *(("api/summary", {}), ("api/compare", {"left": run, "right": run}), ("api/suggestions", {})),
        ("api/rollouts", {"where": "agent = '''; DROP TABLE rollouts; --'"}),
        ("api/rollouts", {"where": "words('drop table')"}),
        ("api/rollouts", {"where": "words('x'' OR 1=1')"}),
    ]
    for path, query in queries:
        answer = client.get(path, params=query)
        assert answer.status_code == 200, (path, query, answer.text)
        assert b"NaN" not in answer.content
    assert client.get("api/rollouts", params=queries[-3][1]).json()["total"] == 1


def test_a_long_conversation_is_read_in_parts(names: tuple[httpx.Client, str, list[str]]) -> None:
    client, run, lines = names
    n = lines.index("100,000 turns")
    whole = client.get(f"api/rollout/{run}/{n}").json()
    assert (whole["total"], whole["omitted"]) == (200_001, 198_001)
    assert [item["index"] for item in whole["items"][999:1001]] == [999, 199_001]
    part = client.get(f"api/rollout/{run}/{n}", params={"from": 1000, "to": 1010}).json()
    assert [item["index"] for item in part["items"]] == list(range(1000, 1010))
    assert part["items"][-1]["turn"] == 504


def test_a_long_text_is_cut_and_whole_alone(names: tuple[httpx.Client, str, list[str]]) -> None:
    client, run, lines = names
    n = lines.index("10 MB of text")
    whole = client.get(f"api/rollout/{run}/{n}").json()
    assert whole["cut"] == ["items[1]"]
    assert (len(whole["items"][1]["text"]), whole["items"][1]["bytes"]) == (100_000, 10_000_000)
    alone = client.get(f"api/rollout/{run}/{n}", params={"from": 1, "to": 2}).json()
    assert len(alone["items"][0]["text"]) == 10_000_000


def test_numbers_that_are_none_are_null(names: tuple[httpx.Client, str, list[str]]) -> None:
    client, run, lines = names
    found = client.get(f"api/rollout/{run}/{lines.index('NaN')}").json()["verdict"]
    assert found["reward"] is None
    assert found["fields"] == {"a": None, "b": None, "c": None}


def test_of_duplicate_keys_the_last_counts(names: tuple[httpx.Client, str, list[str]]) -> None:
    client, run, lines = names
    found = client.get(f"api/rollout/{run}/{lines.index('duplicate keys')}").json()
    assert (found["summary"]["reward"], found["verdict"]["reward"], found["summary"]["agent"]) == (
        0.25,
        0.25,
        "b",
    )
