"""From rows to rollouts: metadata, repeats, seeds, shards, overrides, and what is refused."""

from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rollouts import JSON, keys, row, rows, write_jsonl

from gym_serve.rollouts import Expansion, PromptTemplate, Rows, expand
from gym_serve.types.errors import InvalidRequest, NotFound


def expanded(source: Rows, **options: Any) -> list[JSON]:
    problems: list[str] = []
    found = [row for group in expand(source, Expansion(**options), problem=problems.append) for row in group]
    assert not problems
    return found


def problems_of(source: Rows, **options: Any) -> list[str]:
    problems: list[str] = []
    for _ in expand(source, Expansion(**options), problem=problems.append):
        pass
    return problems


def test_repeats_and_metadata() -> None:
    found = expanded(rows(2), repeats=2)
    assert [r["_ng_rollout_id"] for r in found] == ["0-0", "0-1", "1-0", "1-1"]
    assert [r["number"] for r in found] == [0, 0, 1, 1]
    assert keys(found) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_the_given_rows_are_not_changed() -> None:
    given_rows = [row(0, extra_body={"seed": 1}), row(1, agent_ref={"name": "x"})]
    before = orjson.dumps(given_rows)
    expanded(given_rows, repeats=2, seed=7, agent="a", params={"temperature": 0})
    assert orjson.dumps(given_rows) == before


def test_identical_rows_share_a_task() -> None:
    found = expanded([row(0), row(1), row(0)], repeats=2)
    assert [r["_ng_rollout_id"] for r in found] == ["0-0", "0-1", "1-0", "1-1", "0-2", "0-3"]


def test_the_order_of_keys_does_not_make_a_task() -> None:
    assert len({r["_ng_task_index"] for r in expanded([{"a": 1, "b": 2}, {"b": 2, "a": 1}])}) == 1


def test_metadata_of_the_caller_are_kept() -> None:
    own = row(0, _ng_task_index=42, _ng_rollout_index=3, _ng_rollout_id="mine")
    found = expanded([own, row(1, _ng_task_index=42)])
    assert [(r["_ng_task_index"], r["_ng_rollout_index"], r["_ng_rollout_id"]) for r in found] == [
        (42, 3, "mine"),
        (42, 4, "42-4"),
    ]


@pytest.mark.parametrize("index", [-1, 2**40, 1.0, "1", True, [0]])
def test_a_bad_index_is_a_problem(index: Any) -> None:
    (problem,) = problems_of([row(0, _ng_task_index=index)])
    assert problem.startswith("row 1: _ng_task_index must be an integer from 0 to 1099511627775")


def test_repeats_by_agent() -> None:
    source = [row(0, agent_ref={"name": "a"}), row(1, agent_ref={"name": "b"}), row(2)]
    found = expanded(source, repeats={"a": 3, "_default": 1}, default_agent="c")
    assert Counter(r["number"] for r in found) == {0: 3, 1: 1, 2: 1}
    assert [r["agent_ref"]["name"] for r in found] == ["a", "a", "a", "b", "c"]


def test_an_agent_without_repeats_is_a_problem() -> None:
    source = [row(0, agent_ref={"name": "a"}), row(1, agent_ref={"name": "b"})]
    assert problems_of(source, repeats={"a": 3}) == ["row 2: `repeats` must have 'b' or '_default'"]


def test_an_agent_that_no_row_has_is_noted() -> None:
    notes: list[str] = []
    source = [row(0, agent_ref={"name": "a"})]
    list(expand(source, Expansion(repeats={"a": 1, "tpyo": 2}), problem=pytest.fail, note=notes.append))
    assert notes == ["`repeats`: no row has the agent tpyo"]


def test_the_agent_is_set() -> None:
    kept = {"type": "responses_api_agents", "name": "own", "more": 1}
    assert expanded([row(0, agent_ref=kept)], default_agent="d")[0]["agent_ref"] == kept
    assert expanded([row(0, agent_ref=kept)], agent="all")[0]["agent_ref"] == kept | {"name": "all"}
    ref = expanded([row(0)], default_agent="d")[0]["agent_ref"]
    assert ref == {"type": "responses_api_agents", "name": "d"}
    assert "agent_ref" not in expanded([row(0)])[0]


def test_seeds() -> None:
    params = {"input": "x", "metadata": {"extra_body": '{"top_k": 5}', "other": "kept"}}
    found = expanded([{"responses_create_params": params}], repeats=2, seed=10)
    metadata = [r["responses_create_params"]["metadata"] for r in found]
    assert [orjson.loads(m["extra_body"]) for m in metadata] == [
        {"top_k": 5, "seed": 10},
        {"top_k": 5, "seed": 11},
    ]
    assert all(m["other"] == "kept" for m in metadata)


def test_a_seed_replaces_the_one_of_a_plain_extra_body() -> None:
    assert expanded([row(0, extra_body={"seed": 1, "top_k": 2})], seed=5)[0]["extra_body"] == {
        "seed": 5,
        "top_k": 2,
    }


@pytest.mark.parametrize("extra", ["no json", "[1]", 5])
def test_seeds_need_an_extra_body_that_can_be_read(extra: Any) -> None:
    params = {"input": "x", "metadata": {"extra_body": extra}}
    (problem,) = problems_of([{"responses_create_params": params}], seed=0)
    assert "metadata.extra_body" in problem


def test_overrides() -> None:
    found = expanded([row(0)], params={"temperature": 0.5, "input": "other"})
    assert found[0]["responses_create_params"] == {"input": "other", "temperature": 0.5}


def test_a_prompt_makes_the_input_of_rows_that_have_none() -> None:
    source = [
        {"q": "a", "responses_create_params": {"tools": []}},
        {"q": "b"},
        {"q": "c", "responses_create_params": {"input": []}},
    ]
    found = expanded(source, prompt=PromptTemplate("{q}?"))
    assert [r["responses_create_params"]["input"][0]["content"] for r in found] == ["a?", "b?", "c?"]
    assert found[0]["responses_create_params"]["tools"] == []


def test_all_rows_that_a_prompt_does_not_fit_are_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [row(0, q="x"), {"q": "y"}, {"other": 1}])
    assert problems_of(path, prompt=PromptTemplate("{q}")) == [
        f"{path}:1: `responses_create_params.input` must be left out: the prompt template makes it",
        f"{path}:3: the prompt template needs the keys q; the row has other",
    ]


def test_a_check_refuses_rows() -> None:
    def check(row: JSON) -> None:
        if row["number"] == 1:
            raise NotFound("no such agent")

    problems: list[str] = []
    found = list(expand(rows(3), Expansion(), problem=problems.append, check=check))
    assert [r["number"] for group in found for r in group] == [0, 2]
    assert problems == ["row 2: no such agent"]
    assert [r["_ng_task_index"] for group in found for r in group] == [0, 1]


def test_a_limit_draws_no_row_more() -> None:
    drawn = []

    def source() -> Any:
        for one in rows(10):
            drawn.append(one)
            yield one

    assert len(expanded(source(), limit=3, repeats=2)) == 6
    assert len(drawn) == 3


def test_rows_that_json_cannot_hold() -> None:
    assert "not JSON" in problems_of([{"x": object()}])[0]


def test_a_rollout_that_is_named_twice() -> None:
    source = [
        row(0, _ng_task_index=5, _ng_rollout_index=1),
        row(1, _ng_task_index=5),
        row(0, _ng_task_index=5, _ng_rollout_index=1),
    ]
    problems: list[str] = []
    found = [r for g in expand(source, Expansion(), problem=problems.append, unique=True) for r in g]
    assert keys(found) == [(5, 1), (5, 2)]
    assert problems == ["row 3: rollout 1 of task 5 is there twice"]
    assert len(expanded(source)) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"repeats": 0},
        {"repeats": {"a": 0}},
        {"limit": 0},
        {"shard": (0, 2)},
        {"shard": (3, 2)},
    ],
)
def test_values_out_of_range(options: Any) -> None:
    with pytest.raises(InvalidRequest):
        Expansion(**options)


ROWS = st.lists(
    st.fixed_dictionaries(
        {"number": st.integers(0, 5), "responses_create_params": st.just({"input": "x"})},
        optional={
            "_ng_task_index": st.integers(0, 8),
            "agent_ref": st.sampled_from([{"name": "a"}, {"name": "b"}]),
        },
    ),
    max_size=12,
)


@given(ROWS, st.one_of(st.integers(1, 4), st.just({"a": 2, "_default": 3})))
def test_every_rollout_has_a_key_of_its_own_unless_the_caller_gives_them(
    source: list[JSON], repeats: Any
) -> None:
    found = expanded(source, repeats=repeats, seed=0)
    assert len(set(keys(found))) == len(found)
    expected = [r["number"] for r in source for _ in range(repeats if isinstance(repeats, int) else 0)]
    assert not expected or [r["number"] for r in found] == expected


@given(ROWS, st.integers(1, 3), st.integers(1, 5))
def test_shards_are_the_whole(source: list[JSON], repeats: int, count: int) -> None:
    whole = expanded(source, repeats=repeats)
    parts = [expanded(source, repeats=repeats, shard=(part, count)) for part in range(1, count + 1)]
    in_order = sorted((r for part in parts for r in part), key=whole.index)
    assert in_order == whole
    tasks = [{r["_ng_task_index"] for r in part} for part in parts]
    assert sum(map(len, tasks)) == len(set().union(*tasks))
