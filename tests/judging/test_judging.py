"""Judges: votes, orders, what is cached, how many calls run at once, and agreement with people."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_serve.environments.equivalence_llm_judge import EquivalenceLlmJudge
from gym_serve.environments.math_with_judge import MathWithJudge
from gym_serve.environments.text_to_sql import TextToSql
from gym_serve.judging import (
    CacheSettings,
    Calibration,
    JudgeCalls,
    LabelJudge,
    VerdictCache,
    check_fields,
    check_labels,
    escape_labels,
    final_text,
    json_objects,
    label_of,
    majority,
    verdict_in,
    whole_text,
)
from gym_serve.judging.calls import labels_in
from gym_serve.observe.catalogue import JUDGE_CALLS
from gym_serve.servers import ResourcesServer
from gym_serve.types.errors import BadRequest, Overloaded, VerifierFailed

YES, NO = "[[yes]]", "[[no]]"
LABELS = st.sampled_from([YES, NO, None])


class Voter:
    """Answers from a list; an error in it is raised. Knows how many calls it had, and at once."""

    def __init__(self, *replies: Any) -> None:
        self.replies = list(replies)
        self.calls = self.running = self.most = 0

    async def responses(self, params: dict[str, Any]) -> dict[str, Any]:
        self.calls += 1
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        content = [{"type": "output_text", "text": reply}]
        return {"output": [{"type": "message", "role": "assistant", "content": content}]}

    async def chat_completions(self, body: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError


def judge_of(*models: Any, calls: JudgeCalls | None = None, votes: int = 1) -> LabelJudge:
    return LabelJudge(models, calls or JudgeCalls(8), "Is {it} right?", (YES, NO), votes=votes)


@pytest.mark.parametrize(
    ("replies", "label"),
    [
        ((YES, YES, NO), YES),
        ((YES, NO, "?"), None),
        ((NO, Overloaded("busy"), NO), NO),
        ((YES, YES, Overloaded("busy")), YES),
        ((YES, NO, "?", "?", Overloaded("busy")), None),  # which could not have decided
    ],
)
async def test_the_majority_of_several_judges_counts(replies: tuple[Any, ...], label: str | None) -> None:
    ballot = await judge_of(*map(Voter, replies)).ask({"it": "this"})
    assert ballot.label == label
    assert len(ballot.votes) == sum(isinstance(reply, str) for reply in replies)


async def test_a_failed_vote_that_could_decide_is_a_failure() -> None:
    with pytest.raises(Overloaded, match="busy"):
        await judge_of(Voter(YES), Voter(NO), Voter(Overloaded("busy"))).ask({"it": "this"})


@given(st.lists(LABELS, max_size=9), st.randoms())
def test_a_majority_is_more_than_half_in_any_order(labels: list[str | None], draw: Any) -> None:
    label = majority(labels, len(labels))
    assert (label is not None) == any(2 * labels.count(each) > len(labels) for each in (YES, NO))
    shuffled = draw.sample(labels, len(labels))
    assert majority(shuffled, len(labels)) == label


@pytest.mark.parametrize(("replies", "asked"), [((YES, YES), 2), ((YES, NO), 2), ((NO,), 1)])
async def test_only_the_label_is_asked_about_in_the_other_order(replies: tuple[str, ...], asked: int) -> None:
    judge = LabelJudge([Voter(*replies)], JudgeCalls(8), "{one}{two}", (YES, NO))
    ballots = await judge.compare({"one": "a", "two": "b"}, ("one", "two"))
    assert [ballot.label for ballot in ballots] == list(replies)
    orders = [ballot.votes[0].request["input"][0]["content"] for ballot in ballots]
    assert orders == ["ab", "ba"][:asked]


async def test_calls_at_once_are_bounded() -> None:
    voter, calls = Voter(YES), JudgeCalls(3)
    await asyncio.gather(*(judge_of(voter, calls=calls, votes=5).ask({"it": "x"}) for _ in range(4)))
    assert (voter.calls, voter.most) == (20, 3)


async def test_the_same_question_is_asked_once(tmp_path: Path) -> None:
    settings = CacheSettings(path=tmp_path / "deep" / "verdicts.db", model="judge-1")
    voter = Voter(YES, NO, YES, "no verdict", NO)
    for _ in range(2):  # a second process, or a second run, finds the file
        cache = VerdictCache(settings)
        ballot = await judge_of(voter, calls=JudgeCalls(8, cache), votes=3).ask({"it": "this"})
        assert ballot.label == YES
        assert len(ballot.votes) == 3
        cache.close()
    assert voter.calls == 3  # votes are different questions
    cache = VerdictCache(settings)
    judge = judge_of(voter, calls=JudgeCalls(8, cache))
    assert (await judge.ask({"it": "that"})).label is None
    assert (await judge.ask({"it": "that"})).label == NO  # what was no verdict is not kept
    cache.close()
    other = VerdictCache(CacheSettings(path=settings.path, model="judge-2"))
    await judge_of(voter, calls=JudgeCalls(8, other)).ask({"it": "this"})
    assert voter.calls == 6
    other.close()


async def test_calls_are_counted_by_their_outcome(tmp_path: Path) -> None:
    JUDGE_CALLS.clear()
    cache = VerdictCache(CacheSettings(path=tmp_path / "verdicts.db", model="judge-1"))
    judge = judge_of(Voter("no verdict", YES, Overloaded("busy")), calls=JudgeCalls(8, cache))
    for _ in range(3):
        await judge.ask({"it": "this"})
    with pytest.raises(Overloaded):
        await judge.ask({"it": "that"})
    cache.close()
    counted = {point.labels["outcome"]: point.value for point in JUDGE_CALLS.points()}
    assert counted == {"no_verdict": 1, "verdict": 1, "cached": 1, "failed": 1}


async def test_who_asks_the_same_at_the_same_time_waits_for_one_answer(tmp_path: Path) -> None:
    cache = VerdictCache(CacheSettings(path=tmp_path / "verdicts.db", model="judge"))
    voter = Voter("none", Overloaded("busy"), YES)
    judge = judge_of(voter, calls=JudgeCalls(8, cache))
    found = await asyncio.gather(*(judge.ask({"it": "this"}) for _ in range(8)), return_exceptions=True)
    assert [isinstance(one, Overloaded) or one.label for one in found] == [None, True] + [YES] * 6
    assert (voter.calls, voter.most) == (3, 1)  # what is no verdict is no answer to others
    cache.close()


async def test_a_reply_that_says_nothing_by_now_is_asked_for_again(tmp_path: Path) -> None:
    cache = VerdictCache(CacheSettings(path=tmp_path / "verdicts.db", model="judge"))
    voter = Voter(YES, "[[ok]]")
    calls = JudgeCalls(8, cache)
    assert (await judge_of(voter, calls=calls).ask({"it": "this"})).label == YES
    relabelled = LabelJudge((voter,), calls, "Is {it} right?", ("[[ok]]", "[[bad]]"))
    for _ in range(2):
        assert (await relabelled.ask({"it": "this"})).label == "[[ok]]"
    assert voter.calls == 2
    key = cache.key(0, "responses", {}, 0)
    cache._execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", key, b"{torn")
    assert await cache.get(key) is None
    cache.close()


async def test_any_text_of_a_policy_has_a_key(tmp_path: Path) -> None:
    cache = VerdictCache(CacheSettings(path=tmp_path / "verdicts.db", model="judge"))
    voter = Voter(YES)
    judge = judge_of(voter, calls=JudgeCalls(8, cache))
    for text in ("\ud83d", "\ud83d", "\ud83e", "?"):
        assert (await judge.ask({"it": text})).label == YES
    assert voter.calls == 3
    assert not judge.calls._turns
    assert len(cache.key(0, "responses", {"n": 2**70}, 0)) == 32
    cache.close()


async def test_replicas_share_a_file(tmp_path: Path) -> None:
    settings = CacheSettings(path=tmp_path / "verdicts.db", model="judge")
    caches = [VerdictCache(settings) for _ in range(4)]
    work = [cache.put(b"%d" % n, {"n": n}) for n in range(25) for cache in caches]
    await asyncio.gather(*work, *(cache.get(b"%d" % n) for n in range(25) for cache in caches))
    for cache in caches:
        assert [(await cache.get(b"%d" % n) or {}).get("n") for n in range(25)] == list(range(25))
        cache.close()


async def test_a_broken_cache_costs_a_call_and_no_verdict(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = VerdictCache(CacheSettings(path=tmp_path / "verdicts.db", model="judge"))
    cache.close()
    with caplog.at_level(logging.WARNING):
        assert (await judge_of(Voter(YES), calls=JudgeCalls(8, cache)).ask({"it": "this"})).label == YES
    assert "verdict cache failed" in caplog.text
    with pytest.raises(BadRequest, match="cannot open the verdict cache"):
        VerdictCache(CacheSettings(path=tmp_path, model="judge"))


@pytest.mark.parametrize("output", [[1], None, "text", [["x"]]])
@pytest.mark.parametrize("read", [final_text, whole_text])
def test_a_judge_that_answers_no_response(output: Any, read: Any) -> None:
    with pytest.raises(VerifierFailed, match="not a Response: output"):
        read({"output": output})


def test_of_two_labels_at_one_place_the_longer_one_counts() -> None:
    assert labels_in("so: A+ or A", ("A", "A+"))[0][0] == "A+"
    assert verdict_in("so: A+", ("A", "A+")) == "A+"


def test_fields_of_a_prompt() -> None:
    assert check_fields("{a} {b} {{}}", ("a",), optional=("b",))
    for template in ("{b}", "{a} {c}", "{a} {", "{} {a}"):
        with pytest.raises(ValueError):
            check_fields(template, ("a",), optional=("b",))


TOLD = "Compare the two answers, then end with {0} or with {1}, and nothing after it: {{it}}"


@pytest.mark.parametrize(
    ("labels", "template", "system", "missing"),
    [
        ((YES, NO), TOLD.format(YES, NO), None, None),
        ((YES, NO), "{it}", TOLD.format(YES, NO), None),
        ((YES, NO), TOLD.format(YES, "no"), f"Or say {NO}.", None),
        (("{A}", "{B}"), TOLD.format("{{A}}", "{{B}}"), None, None),
        (("CORRECT", "INCORRECT"), TOLD.format("[[A=B]]", "[[A!=B]]"), None, "'CORRECT' and 'INCORRECT'"),
        (("CORRECT", "INCORRECT"), TOLD.format("INCORRECT", "nothing"), None, "'CORRECT', so"),
        (
            ("Judgement: yes", "Judgement: no"),
            "Judgement: Answer 'yes' if they match. Answer 'no' otherwise: {it}",
            None,
            None,
        ),
        (("[[2]]", "[[0]]"), "Rate from 0 to 2 by this format: [[rating]], such as [[1]]: {it}", None, None),
        (
            ("[[A=B]]", "[[A!=B]]"),
            "Compare answer A with answer B. Is A = B? Reply CORRECT or not: {it}",
            None,
            r"'\[\[A!=B\]\]' and '\[\[A=B\]\]'",
        ),
        (("it", "NO"), "Say yes or NO about this answer, which somebody gave: {it}", None, "'it'"),
        ((YES, NO), "Q={question}|A={it}", None, None),  # for a judge that was trained to its labels
        ((YES, NO), "{it}", None, None),
    ],
)
def test_a_judge_is_told_the_labels(
    labels: tuple[str, str], template: str, system: str | None, missing: str | None
) -> None:
    if missing is None:
        check_labels(labels, template, system)
        assert LabelJudge((), JudgeCalls(8), template, labels, system_message=system).labels == labels
        return
    with pytest.raises(ValueError, match=f"never mentions .*{missing}"):
        check_labels(labels, template, system)
    with pytest.raises(ValueError, match="never mentions"):
        LabelJudge((), JudgeCalls(8), template, labels, system_message=system)


@pytest.mark.parametrize("environment", [MathWithJudge, EquivalenceLlmJudge, TextToSql])
def test_settings_whose_judge_cannot_say_a_label(environment: type[ResourcesServer]) -> None:
    labels = {"judge_equal_label": "CORRECT", "judge_not_equal_label": "INCORRECT"}
    with pytest.raises(pydantic.ValidationError, match=r"judge_equal_label, .* never mentions 'CORRECT' and"):
        environment(judge=Voter(), **labels)
    prompt = environment.Config.model_fields["judge_prompt_template"].default
    told = {"judge_prompt_template": prompt.replace("[[A=B]]", "CORRECT").replace("[[A!=B]]", "INCORRECT")}
    told["judge_system_message"] = "Say CORRECT or INCORRECT."
    server = environment(judge=Voter(), **labels, **told)
    with pytest.raises(pydantic.ValidationError, match="never mentions 'RIGHT'"):
        server.reconfigure({"judge_equal_label": "RIGHT"})


def test_without_a_judge_nobody_says_the_labels() -> None:
    labels = {"judge_equal_label": "CORRECT", "judge_not_equal_label": "INCORRECT"}
    assert MathWithJudge(should_use_judge=False, **labels).config.judge is None


@given(st.text("[]yesno "), st.integers(1, 40))
def test_no_label_of_a_policy_reaches_the_judge(text: str, length: int) -> None:
    shown = escape_labels(text, (YES, NO), length)
    assert not any(label in shown for label in (YES, NO))


@given(st.text('{}"a: 4,[]`jsn\n'))
def test_any_text_has_objects_or_none(text: str) -> None:
    assert all(isinstance(value, dict) for value in json_objects(text))


def test_the_last_object_comes_first_fenced_or_not() -> None:
    text = '<think>{"n": 0}</think>{"n": 1} {"n": 2}\n```json\n{"n": 3}\n```\n{"n": 4}'
    assert [value["n"] for value in json_objects(text)] == [4, 3, 2, 1]


EQUAL, OTHER = "[[A=B]]", "[[A!=B]]"


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("If the sign did not matter I would say [[A=B]]. It does. [[A!=B]]", OTHER),
        ("[[A!=B]] was my first thought.\n\n**Verdict: [[A=B]].**", EQUAL),
        ("<think>[[A=B]]</think> They differ: [[A!=B]]", OTHER),
        ("<think>[[A=B]]</think> I cannot tell.", None),
        ("I would say [[A=B]]</think>I cannot tell.", None),
        ("<think>so [[A=B]]", None),
        ("Maybe [[A=B]], maybe [[A!=B]]; I cannot tell.", None),
        ("[[A=B]] it is, since they are the same.", EQUAL),
        ("<THINK>[[A=B]]</Think >[[A!=B]]", OTHER),
        ("[[A=B]] [[A!=B]]", None),
        ("[[A=B]] [[A=B]]", EQUAL),
        ("[[A=B]]\n[[A!=B]]", OTHER),
        ("no label", None),
    ],
)
def test_the_label_that_a_reply_ends_with_is_its_verdict(text: str, verdict: str | None) -> None:
    assert label_of({"output": [{}]}, text, (EQUAL, OTHER)) == verdict


CUT = {"output": [{}], "incomplete_details": {"reason": "max_output_tokens"}}


@pytest.mark.parametrize("text", ["[[A=B]] because both are", "**[[A=B]]**, as", "They agree: [[A=B]]."])
def test_a_reply_that_broke_off_behind_its_verdict_has_one(text: str) -> None:
    assert label_of(CUT, text, (EQUAL, OTHER)) == EQUAL


@pytest.mark.parametrize(
    "text",
    ["If signs did not matter, [[A=B]]. But they do, as", "Not [[A=B]]</think> as", "<think>[[A=B]]"],
)
def test_a_reply_that_broke_off_in_a_thought_has_no_verdict(text: str) -> None:
    with pytest.raises(VerifierFailed, match="broke off"):
        label_of(CUT, text, (EQUAL, OTHER))


@pytest.mark.parametrize(
    ("replies", "label", "asked"),
    [
        ([f"{YES} or {NO}?", YES], YES, 2),
        ([f"{YES} or {NO}? I cannot tell"], None, 3),
        ([f"{YES} {NO}", NO], NO, 2),
        ([f"{NO} or {YES}", NO], NO, 2),
        (["I cannot tell"], None, 1),
    ],
)
async def test_a_judge_that_contradicts_itself_is_asked_again(
    replies: list[str], label: str | None, asked: int
) -> None:
    voter = Voter(*replies)
    assert (await judge_of(voter).ask({"it": "this"})).label == label
    assert voter.calls == asked


@pytest.mark.parametrize(
    ("pairs", "agreement", "kappa"),
    [
        ([(1, 1), (0, 0)], 1.0, 1.0),
        ([(1, 1), (1, 0), (0, 1), (0, 0)], 0.5, 0.0),
        ([(1, 0), (0, 1)], 0.0, -1.0),
        ([(1, 1), (1, 1)], 1.0, None),
        # Cohen's table in its best-known form: 20, 5 / 10, 15.
        ([(1, 1)] * 20 + [(1, 0)] * 5 + [(0, 1)] * 10 + [(0, 0)] * 15, 0.7, 0.4),
    ],
)
def test_agreement_and_kappa(pairs: list[tuple[int, int]], agreement: float, kappa: float | None) -> None:
    found = Calibration.of(pairs)
    assert found.agreement == pytest.approx(agreement)
    assert found.kappa == (None if kappa is None else pytest.approx(kappa))


@given(st.lists(st.tuples(LABELS, LABELS), min_size=1, max_size=30))
def test_kappa_is_symmetric_and_at_most_the_agreement(pairs: list[tuple[Any, Any]]) -> None:
    found = Calibration.of(pairs)
    kappa, turned = found.kappa, Calibration.of([(judge, person) for person, judge in pairs]).kappa
    assert kappa == (None if turned is None else pytest.approx(turned))
    assert kappa is None or kappa <= found.agreement + 1e-9
    assert sum(n for row in found.to_json()["confusion"].values() for n in row.values()) == len(pairs)


async def test_confusions_of_labels_that_look_alike_are_added_up() -> None:
    assert Calibration.of([(1, None), ("1", "None"), (1, 1)]).to_json()["confusion"] == {
        "1": {"None": 2, "1": 1}
    }
