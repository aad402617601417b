"""Pairs, scores, ties, adjustments, what the model is shown, and models that fail."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.environments import Bench, examples, said
from support.tables import each

from gym_serve.environments.genrm_compare import (
    GenrmCompare,
    Scores,
    pairs_of,
    parse_scores,
    relative_weights,
    style_density,
)
from gym_serve.testing import ScriptedReplies
from gym_serve.types.errors import GymError, InvalidRequest, Overloaded

DEFAULT = Scores(3.0, 3.0, 3.5)


class GenRM:
    """Scores responses by their text: those in ``quality`` have a quality, all others are as good as 3."""

    def __init__(self, quality: dict[str, float] | None = None, failure: GymError | None = None) -> None:
        self.quality = quality or {}
        self.failure = failure
        self.bodies: list[dict[str, Any]] = []

    async def responses(self, params: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    async def chat_completions(self, body: dict[str, Any]) -> dict[str, Any]:
        self.bodies.append(body)
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        first, second = (self.quality.get(m["content"], 3.0) for m in body["messages"][-2:])
        text = f'```json\n{{"score_1": {first}, "score_2": {second}}}\n```'
        return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def group(*texts: str, reasoning: tuple[str, ...] = (), **body: Any) -> dict[str, Any]:
    thoughts = [
        [{"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}] for text in reasoning
    ] or [[] for _ in texts]
    return {
        "conversation_history": [{"role": "user", "content": "Write."}],
        "response_objs": [
            {"output": [*thought, *said(text)]} for thought, text in zip(thoughts, texts, strict=True)
        ],
        **body,
    }


async def compared(genrm: Any, body: dict[str, Any], **settings: Any) -> dict[str, Any]:
    answer: dict[str, Any] = await Bench(GenrmCompare(genrm=genrm, **settings)).call("compare", body)
    return answer


@pytest.mark.parametrize("row", examples(GenrmCompare), ids=lambda row: row["agent_ref"]["name"])
async def test_example_row(row: dict[str, Any]) -> None:
    history = row["responses_create_params"]["input"]
    assert history[-1]["role"] == "user"
    body = {**group("good", "bad"), "conversation_history": history, "principle": row.get("principle")}
    answer = await compared(GenRM({"good": 5, "bad": 1}), body, use_principle=True)
    assert answer["rewards"] == [5.0, 1.0]


async def test_a_ring_of_pairs() -> None:
    answer = await compared(GenRM({"a": 5, "b": 2, "c": 4}), group("a", "b", "c"))
    assert answer["rewards"] == [5.0, 2.0, 4.0]
    results = answer["comparison_results"]
    assert [(r["response_i"], r["response_j"]) for r in results] == [(0, 1), (1, 2), (2, 0)]
    assert results[0] == {
        "response_i": 0, "response_j": 1, "judge_idx": 0, "score_1": 5.0, "score_2": 2.0, "ranking": 3.5,
    }  # fmt: skip
    assert answer["metrics"]["mean_individual_score"] == pytest.approx(11 / 3)
    assert answer["metrics"]["tiebreak_usage_rate"] == 0.0


@pytest.mark.parametrize(("strategy", "calls"), [("circular", 4), ("all_pairs", 6)])
async def test_the_number_of_comparisons(strategy: str, calls: int) -> None:
    genrm = GenRM()
    settings = {"comparison_strategy": strategy, "num_judges_per_comparison": 2, "max_concurrency": 3}
    answer = await compared(genrm, group("a", "b", "c", "d"), **settings)
    assert len(genrm.bodies) == len(answer["comparison_results"]) == 2 * calls
    assert [r["judge_idx"] for r in answer["comparison_results"]] == [0] * calls + [1] * calls


@given(st.integers(2, 20))
def test_every_response_is_compared(count: int) -> None:
    for pairs in (pairs_of(count, "circular"), pairs_of(count, "all_pairs")):
        assert {index for pair in pairs for index in pair} == set(range(count))
        assert all(first != second for first, second in pairs)


@pytest.mark.parametrize("body", [group(), group("alone")])
async def test_nothing_to_compare(body: dict[str, Any]) -> None:
    assert (await compared(GenRM(), body))["rewards"] == [3.0] * len(body["response_objs"])


async def test_the_ranking_breaks_a_tie() -> None:
    replies = ScriptedReplies()
    replies.replies = [
        '{"score_1": 4, "score_2": 4, "ranking": 1}',
        '{"score_1": 4, "score_2": 4, "ranking": 4}',
    ]
    answer = await compared(replies, group("a", "b"))
    # a: 4 + 2.5 as the first, 4 + 0.5 as the second of a pair
    assert answer["rewards"] == [5.5, 2.5]
    assert answer["metrics"]["tiebreak_usage_rate"] == 1.0


async def test_a_model_that_gives_no_scores_is_asked_again() -> None:
    replies = ScriptedReplies()
    replies.replies = ["Well.", '{"score_1": 5, "score_2": 1}']
    settings = {"comparison_strategy": "all_pairs", "genrm_parse_retries": 1}
    assert (await compared(replies, group("a", "b"), **settings))["rewards"] == [5.0, 1.0]
    replies.replies = ["Well.", "Well, well."]
    answer = await compared(replies, group("a", "b"), **settings)
    assert answer["rewards"] == [3.0, 3.0]
    assert answer["metrics"]["default_score_rate"] == 1.0


async def test_a_model_that_fails_is_no_tie() -> None:
    with pytest.raises(Overloaded) as caught:
        await compared(GenRM(failure=Overloaded("queue", retry_after=2.0)), group("a", "b"))
    assert caught.value.retry_after == 2.0


@pytest.mark.parametrize("body", [{}, {"conversation_history": []}, group("a", "b", response_objs=[{}])])
async def test_requests_that_do_not_fit(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        await compared(GenRM(), body)


async def test_the_roles_of_a_genrm() -> None:
    genrm = GenRM()
    params = {"max_output_tokens": 100, "temperature": 0.6, "input": []}
    settings = {"use_principle": True, "comparison_strategy": "all_pairs", "max_answer_chars": 3}
    body = group("first", " ", principle="Be brief.")
    await compared(genrm, body, genrm_responses_create_params=params, **settings)
    (sent,) = genrm.bodies
    assert sent == {
        "max_tokens": 100,
        "temperature": 0.6,
        "messages": [
            {"role": "user", "content": "Write."},
            {"role": "principle", "content": "Be brief."},
            {"role": "response_1", "content": "fir"},
            {"role": "response_2", "content": "None"},
        ],
    }


async def test_a_prompt_for_any_model() -> None:
    settings = {"message_format": "prompt", "comparison_strategy": "all_pairs"}
    replies = ScriptedReplies()
    replies.replies = ['I like the second.\n{"score_1": 2, "score_2": 5, "ranking": 5}']
    answer = await compared(replies, group("one {x}", "two {question}"), **settings)
    assert answer["rewards"] == [2.0, 5.0]


@pytest.mark.parametrize(
    ("text", "scores"),
    [
        *each((4, 2, 2), '{"score_1": 4, "score_2": 2, "ranking": 2}'),
        *each((4, 2, 2), '\\boxed{{"score_1": 4, "score_2": 2, "ranking": 2}}</s>'),
        ('{"score_1": "4", "score_2": 2.5}', (4, 2.5, 3.5)),
        ('{"ranking": 6}', (3, 3, 6)),
        *each((2, 3, 3.5), 'Before {"score_1": 1} between {"score_1": 2} after'),
        *each((2, 3, 3.5), '```json\n{"score_1": 1}\n``` and {"score_1": 2}'),
        *each(None, '<think>{"score_1": 1}</think>', '<think>{"score_1": 1} and so on', "{'score_1': 4}"),
        *each(None, "score_1: 4, score_2: 2", '{"score_1": 5} and then {"score_1": "five"}'),
        *each(None, '{"score_1": true}', '{"score_1": null}', '{"score_1": NaN}', '{"score_1": [4]}'),
        *each(None, '{"winner": 1}', "[4, 2]", ""),
        ('{"score_1": 4, "score_2": 2}\nThe first one asks for {"score_1": 5}.', (4, 2, 3.5)),
        *each((4, 3, 3.5), '<think>{"score_1": 1}</think>**{"score_1": 4}**'),
        *each((4, 3, 3.5), '{"rubric": [{"score_1": 9}], "overall": {"score_1": 4}}'),
        *each((4, 3, 3.5), '{"note": "{", "score_1": 4}'),
        ('{"score_1": 1e308, "score_2": -4, "ranking": 99}', (5, 1, 6)),
        ('{broken {"score_2": 5}', (3, 5, 3.5)),
    ],
)
def test_scores(text: str, scores: tuple[float, ...] | None) -> None:
    found = parse_scores(text, DEFAULT)
    assert (found if found is None else tuple(found)) == scores


@given(st.text('{}"score_1: 4,[]`jsn\n'))
def test_any_text_has_scores_or_none(text: str) -> None:
    found = parse_scores(text, DEFAULT)
    assert found is None or len(found) == 3


def test_a_long_text_is_no_burden() -> None:
    assert parse_scores('{"a":' * 100_000, DEFAULT) is None
    assert style_density("**a " * 50_000 + "- " * 50_000 + "\n" * 50_000) >= 0


@pytest.mark.parametrize(
    ("settings", "rewards"),
    [
        ({}, [3.0, 3.0, 5.0]),
        ({"answer_bonus": 1.0, "top_percentile": 1.0}, [4.0, 3.0, 5.0]),
        ({"answer_bonus": 1.0}, [3.0, 3.0, 5.0]),
        ({"reasoning_bonus": 0.5}, [3.0, 3.0, 5.5]),
        ({"group_answer_length_penalty_coeff": 1.0}, [3.5, 3.0, 4.5]),
        ({"group_reasoning_length_penalty_coeff": 2.0}, [2.0, 3.0, 6.0]),
    ],
)
async def test_adjustments_for_length(settings: dict[str, float], rewards: list[float]) -> None:
    body = group("x", "xxx", "xxxxx", reasoning=("yyy", "yy", "y"))
    answer = await compared(GenRM({"xxxxx": 5.0}), body, **settings)
    assert answer["rewards"] == pytest.approx(rewards)


async def test_an_adjustment_for_style() -> None:
    body = group("plain words", "**bold** words")
    answer = await compared(GenRM(), body, group_style_penalty_coeff=1.0)
    assert answer["rewards"] == [3.5, 2.5]


@pytest.mark.parametrize(
    ("text", "elements"),
    [
        ("# Title\n- one\n* two\n1. three", 4),
        ("**bold** and __bold__", 2),
        ("\U0001f600\u2728", 2),
        ("```\n# code\n- code\n```", 0),
        ("```\n# no code", 1),
        ("plain - text 1. with # signs", 0),
        ("", 0),
    ],
)
def test_style(text: str, elements: int) -> None:
    prose = text if text.count("```") < 2 else ""
    assert style_density(text) == pytest.approx(elements / max(1, len(prose.strip())))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20))
def test_relative_weights_add_up_to_nothing(values: list[float]) -> None:
    weights = relative_weights(values)
    assert sum(weights) == pytest.approx(0.0, abs=1e-9)
    assert max(weights) - min(weights) == pytest.approx(float(len(set(values)) > 1))
