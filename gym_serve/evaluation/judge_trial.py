"""`JudgeTrial`: whether a judge can be trusted, before a policy is trained on what it says.

People have labelled questions. The environment puts each of them to its judge as it does in an episode: as it
is, with the two texts swapped, with other words for the labels, and again. A sound judge says the same each
time, and what people said. Judges are known to prefer the first of two texts (Wang et al., "Large Language
Models are not Fair Evaluators", 2023).
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, StrictBool

from gym_serve.judging import Calibration
from gym_serve.metrics.estimators import wilson
from gym_serve.servers.usage import COUNTS, USAGE_FIELD, UsageMeter
from gym_serve.types.errors import Retryable
from gym_serve.types.protocols.items import message_item
from gym_serve.types.requests import JSON, input_items
from gym_serve.types.rows import with_prompt

Way = Literal["as it is", "swapped", "labels 1 and 2", "labels 2 and 1"]
"""How a question is asked."""

NEUTRAL = ("[[1]]", "[[2]]")
"""Labels that mean nothing by themselves."""

_UNSTABLE = 0.10  # share of questions with another verdict, from which a judge is called unstable
_SILENT = 0.05  # share of calls without a verdict
_EQUAL = 0.5  # the least reward of a right answer


class Preference(BaseModel):
    """Two responses to a prompt, of which people prefer one."""

    model_config = ConfigDict(extra="allow")

    prompt: str | list[JSON]
    chosen: str
    rejected: str


class Labelled(BaseModel):
    """A row of the environment, a response to it, and whether people find that right."""

    model_config = ConfigDict(extra="allow")

    response: str
    label: StrictBool


Question = Preference | Labelled


class Verdict(NamedTuple):
    """What a judge said to a question.

    Attributes:
        question: its number, from 0.
        right: whether people say the same; None if the judge gave no verdict.
        first: whether it chose the text that it saw first, or the first of the neutral labels; None if it had
            no such choice, or found both texts equal.
        tied: whether it found two texts equal, of which people prefer one.
        usage: the model calls that it took, see `USAGE_FIELD`.
        failure: why there is no verdict, if the call failed.
    """

    question: int
    way: Way
    right: bool | None
    first: bool | None
    usage: Sequence[JSON] = ()
    tied: bool = False
    failure: str | None = None


Ask = Callable[[str, str, JSON], Awaitable[JSON]]
"""Calls an operation of a server of the graph, by the server's name."""


def read_question(row: JSON) -> Question:
    """A row of the trial. Raises pydantic's ValidationError: it has neither form."""
    return Preference.model_validate(row) if "chosen" in row else Labelled.model_validate(row)


def other_labels(settings: JSON) -> dict[Way, JSON]:
    """The settings of an environment with other labels for its judge, in its prompts too; none for one whose
    judge is not asked for labels."""
    names = ("judge_equal_label", "judge_not_equal_label")
    if not all(name in settings for name in names):
        return {}
    current = [settings[name] for name in names]
    pattern = re.compile("|".join(map(re.escape, sorted(current, key=len, reverse=True))))

    def renamed(text: str | None, labels: Sequence[str]) -> str | None:
        new = dict(zip(current, labels, strict=True))
        return text and pattern.sub(lambda label: new[label[0]], text)  # at once: both may change places

    ways: dict[Way, Sequence[str]] = {"labels 1 and 2": NEUTRAL, "labels 2 and 1": NEUTRAL[::-1]}
    prompts = ("judge_prompt_template", "judge_system_message")
    return {
        way: {
            **dict(zip(names, labels, strict=True)),
            **{name: renamed(settings.get(name), labels) for name in prompts},
        }
        for way, labels in ways.items()
    }


class JudgeTrial:
    """Puts questions to the judge of an environment.

    Args:
        ask: calls the graph.
        servers: names of the environment, by the way in which it asks; "as it is" and "swapped" are one.
        compares: whether it compares the responses of a group; else it scores each by itself.
        repeats: how often each question is asked as it is.
        concurrency: questions that are asked at the same time.
    """

    def __init__(
        self, ask: Ask, servers: dict[Way, str], *, compares: bool, repeats: int = 2, concurrency: int = 16
    ) -> None:
        self._ask, self._servers, self._compares = ask, servers, compares
        self._repeats = repeats
        self._slots = asyncio.Semaphore(concurrency)

    async def run(self, questions: Sequence[Question]) -> list[Verdict]:
        """Ask everything. Raises GymError that is not `Retryable`: the judge cannot be asked at all."""
        asked = [
            asyncio.create_task(self._verdict(number, question, way))
            for number, question in enumerate(questions)
            for way in self._ways(question)
        ]
        try:
            return list(await asyncio.gather(*asked))
        finally:
            for task in asked:
                task.cancel()

    def _ways(self, question: Question) -> Iterator[Way]:
        for _ in range(self._repeats):
            yield "as it is"
        if self._is_pair(question):
            yield "swapped"
        if isinstance(question, Labelled):
            yield from (way for way in self._servers if way.startswith("labels"))

    def _is_pair(self, question: Question) -> bool:
        """Whether the judge sees two texts that can change places."""
        if isinstance(question, Preference):
            return self._compares
        return isinstance((question.model_extra or {}).get("expected_answer"), str)

    async def _verdict(self, number: int, question: Question, way: Way) -> Verdict:
        server = self._servers.get(way, self._servers["as it is"])
        async with self._slots:
            try:
                if isinstance(question, Labelled):
                    return await self._labelled(server, number, question, way)
                return await self._preference(server, number, question, way)
            except Retryable as error:
                return Verdict(number, way, None, None, failure=error.message)

    async def _labelled(self, server: str, number: int, question: Labelled, way: Way) -> Verdict:
        row, text = dict(question.model_extra or {}), question.response
        if way == "swapped":
            row["expected_answer"], text = text, row["expected_answer"]
        verdict = await self._verify(server, row, text)
        usage, calls = [verdict.get(USAGE_FIELD) or {}], verdict.get("judge_evaluations") or ()
        if any(call.get("verdict_label", "") is None for call in calls):
            return Verdict(number, way, None, None, usage)
        equal = verdict["reward"] >= _EQUAL
        first = equal == (way == "labels 1 and 2") if way.startswith("labels") else None
        return Verdict(number, way, equal == question.label, first, usage)

    async def _preference(self, server: str, number: int, question: Preference, way: Way) -> Verdict:
        texts = [question.chosen, question.rejected]
        own = question.model_extra or {}
        if not self._compares:
            row = {**own, "prompt": question.prompt}
            verdicts = [await self._verify(server, row, text) for text in texts]
            usage = [verdict.get(USAGE_FIELD) or {} for verdict in verdicts]
            chosen, rejected = (verdict["reward"] for verdict in verdicts)
            return Verdict(number, way, chosen > rejected, None, usage, tied=chosen == rejected)
        if way == "swapped":
            texts.reverse()
        group = {
            **own,
            "conversation_history": input_items(question.prompt),
            "response_objs": [{"output": [message_item(text)]} for text in texts],
        }
        comparison = await self._ask(server, "compare", group)
        usage = [comparison.get(USAGE_FIELD) or {}]
        if (comparison.get("metrics") or {}).get("default_score_rate"):
            return Verdict(number, way, None, None, usage)
        first, second = comparison["rewards"]
        if first == second:
            return Verdict(number, way, False, None, usage, tied=True)
        right = (first > second) == (way == "as it is")
        return Verdict(number, way, right, first > second, usage)

    async def _verify(self, server: str, row: JSON, text: str) -> JSON:
        response = {"output": [message_item(text)]}
        return await self._ask(server, "verify", {**with_prompt(row), "response": response})


@dataclass(frozen=True)
class Share:
    """A share of ``of`` cases, from 0 to 1, with Wilson's 95% interval."""

    share: float
    low: float
    high: float
    of: int

    @classmethod
    def among(cls, cases: Iterable[float]) -> Share | None:
        """The mean of cases, each a share of its own; None if there is no case."""
        shares = list(cases)
        if not shares:
            return None
        share = fmean(shares)
        return cls(share, *wilson(share, len(shares)), len(shares))


@dataclass(frozen=True)
class Trial:
    """What a trial showed.

    Attributes:
        questions: how many there were.
        agreement: verdicts that people share, the mean over questions as they are.
        chance: the agreement of one who always says the more common label, or tosses a coin for pairs.
        kappa: Cohen's kappa with the labels of people; None for preferences.
        tied: verdicts that find two texts equal, of which people prefer one.
        first: verdicts for the text that stood first, of pairs in both orders.
        swapped: questions whose verdict changed with the order of the texts.
        label_one: verdicts for the label "1", of questions that were asked with it for either meaning.
        relabelled: questions whose verdict changed with the labels.
        repeated: questions that got several verdicts, asked the same.
        silent: calls to the environment without a verdict.
        failures: how many calls failed, by the reason.
        usage: counts of the judge's model calls, by server, see `COUNTS`.
    """

    questions: int
    agreement: Share | None
    chance: float
    kappa: float | None
    tied: Share | None
    first: Share | None
    swapped: Share | None
    label_one: Share | None
    relabelled: Share | None
    repeated: Share | None
    silent: Share | None
    failures: dict[str, int]
    usage: dict[str, dict[str, int]]

    @classmethod
    def of(cls, questions: Sequence[Question], verdicts: Sequence[Verdict]) -> Trial:
        """The figures of some verdicts."""
        by_way: dict[Way, dict[int, list[Verdict]]] = {}
        for verdict in verdicts:
            by_way.setdefault(verdict.way, {}).setdefault(verdict.question, []).append(verdict)
        plain = by_way.get("as it is", {})
        judged = [one for ones in plain.values() for one in ones if one.right is not None]
        people = [one.label for one in questions if isinstance(one, Labelled)]
        kappa = None
        if people and judged:
            labels = [(_label(questions[one.question]), one.right) for one in judged]
            kappa = Calibration.of((label, label == right) for label, right in labels).kappa
        pairs = list(_both(plain, by_way.get("swapped", {})))
        named = list(_both(by_way.get("labels 1 and 2", {}), by_way.get("labels 2 and 1", {})))
        return cls(
            questions=len(questions),
            agreement=Share.among(
                fmean(bool(one.right) for one in ones if one.right is not None)
                for ones in plain.values()
                if any(one.right is not None for one in ones)
            ),
            chance=max(people.count(True), people.count(False)) / len(people) if people else 0.5,
            kappa=kappa,
            tied=Share.among(one.tied for one in judged if isinstance(questions[one.question], Preference)),
            first=Share.among(one.first for pair in pairs for one in pair if one.first is not None),
            swapped=Share.among(one.right != other.right for one, other in pairs),
            label_one=Share.among(one.first for pair in named for one in pair if one.first is not None),
            relabelled=Share.among(one.right != other.right for one, other in named),
            repeated=Share.among(
                len({one.right for one in ones}) > 1 for ones in plain.values() if len(ones) > 1
            ),
            silent=Share.among(one.right is None for one in verdicts if one.failure is None),
            failures=dict(Counter(one.failure for one in verdicts if one.failure is not None)),
            usage=_usage(verdicts),
        )

    def doubts(self) -> Iterator[str]:
        """Why nobody should train on the judge's verdicts; nothing if the trial shows no reason."""
        if self.agreement is None:
            yield "it gave no verdict"
        elif self.agreement.low <= self.chance:
            yield (
                f"it agrees with people in {_percent(self.agreement)}, which is not certainly more than the "
                f"{100 * self.chance:.0f}% of one who does not read the texts"
            )
        for share, what in (
            (self.swapped, "changes its verdict with the order of the two texts"),
            (self.relabelled, "changes its verdict with the names of the labels"),
            (self.repeated, "gives the same question different verdicts"),
        ):
            if share is not None and share.share > _UNSTABLE:
                yield f"it {what} in {_percent(share)} of the questions"
        for share, what in ((self.first, "the text that stands first"), (self.label_one, "the label 1")):
            if share is not None and not share.low <= 0.5 <= share.high:
                yield f"it chooses {what} in {_percent(share)}, where a fair judge does in 50%"
        if self.silent is not None and self.silent.share > _SILENT:
            yield f"it gives no verdict in {_percent(self.silent)} of the calls"
        for reason, count in self.failures.items():
            yield f"{count:,} calls failed: {reason}"


def _percent(share: Share) -> str:
    return f"{100 * share.share:.1f}%"


def _label(question: Question) -> bool:
    assert isinstance(question, Labelled)
    return question.label


def _both(
    one: dict[int, list[Verdict]], other: dict[int, list[Verdict]]
) -> Iterator[tuple[Verdict, Verdict]]:
    """The first verdicts of each question that has a verdict in both ways."""
    for question in one.keys() & other.keys():
        pair = one[question][0], other[question][0]
        if all(verdict.right is not None for verdict in pair):
            yield pair


def _usage(verdicts: Iterable[Verdict]) -> dict[str, dict[str, int]]:
    meter = UsageMeter()
    for verdict in verdicts:
        for usage in verdict.usage:
            meter.merge(usage)
    totals: dict[str, dict[str, int]] = {}
    for _, server, counts in meter:
        total = totals.setdefault(server, dict.fromkeys(COUNTS, 0))
        for name, count in counts.items():
            total[name] += count
    return totals
