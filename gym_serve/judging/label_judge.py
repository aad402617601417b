"""`LabelJudge`: one or several models that answer a question with one of a few labels.

With several votes, the label of more than half of them counts; a tie is no verdict. A failed vote may be
outvoted; if it could have decided, the question fails as that vote did.

`Calibration` compares a judge with people. Agreement alone flatters a judge that always says the more common
label; kappa is the agreement beyond chance, (p_o - p_e) / (1 - p_e) (Cohen, "A coefficient of agreement for
nominal scales", 1960).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field, PositiveInt, model_validator
from typing_extensions import Self

from gym_serve.judging.calls import (
    Answer,
    CacheSettings,
    JudgeCalls,
    VerdictCache,
    check_labels,
    contradicts,
    delimiters_of,
    escape_labels,
    filled_in,
    final_text,
    judge_messages,
    label_of,
)
from gym_serve.servers.clients import ModelClient
from gym_serve.servers.resources import ResourcesServer
from gym_serve.types.errors import InvalidRequest, Retryable
from gym_serve.types.requests import JSON

_CONTRADICTIONS = 2  # how often a judge is asked again that contradicts itself

logger = logging.getLogger(__name__)

Label = Hashable


@dataclass(frozen=True)
class Ballot:
    """The result of one question: the label of the majority, if any, and the calls that succeeded."""

    label: str | None
    votes: tuple[Answer[str], ...]


@dataclass(frozen=True)
class LabelJudge:
    """Asks each judge ``votes`` times for a label; the one that (the part that is ``read`` of) a reply ends
    with is its verdict. Raises ValueError: neither prompt nor system message mentions a label, see
    `check_labels`.
    """

    models: Sequence[ModelClient]
    calls: JudgeCalls
    prompt_template: str
    labels: Sequence[str]
    params: JSON = field(default_factory=dict)
    system_message: str | None = None
    read: Callable[[JSON], str] = final_text
    votes: int = 1

    def __post_init__(self) -> None:
        check_labels(self.labels, self.prompt_template, self.system_message)

    async def ask(self, fields: Mapping[str, str]) -> Ballot:
        """Ask the judges a question. Text of a policy in ``fields`` must go through `escape_labels` first.
        Raises Retryable: calls failed, and the others have no majority.
        """
        prompt = filled_in(self.prompt_template, fields)
        request = {**self.params, "input": judge_messages(prompt, self.system_message)}
        calls = [
            asyncio.create_task(self._vote(model, request, judge, vote))
            for judge, model in enumerate(self.models)
            for vote in range(self.votes)
        ]
        try:
            await asyncio.wait(calls)
        finally:
            for call in calls:
                call.cancel()
        failures = [failure for call in calls if (failure := call.exception()) is not None]
        votes = tuple(call.result() for call in calls if call.exception() is None)
        verdicts = [vote.verdict for vote in votes]
        label = majority(verdicts, len(calls))
        unforeseen = [failure for failure in failures if not isinstance(failure, Retryable)]
        could_decide = label is None and any(
            majority([*verdicts, *[one] * len(failures)], len(calls)) for one in self.labels
        )
        if failures and (could_decide or unforeseen):
            raise (unforeseen or failures)[0]
        return Ballot(label, votes)

    async def compare(
        self, fields: Mapping[str, str], pair: tuple[str, str], *, twice: bool = True
    ) -> list[Ballot]:
        """Ask about two of the texts; if the answer is the first label, and has to be so ``twice``, again
        with the two swapped.
        """
        first, second = pair
        ballots = [await self.ask(fields)]
        if twice and ballots[0].label == self.labels[0]:
            ballots.append(await self.ask({**fields, first: fields[second], second: fields[first]}))
        return ballots

    async def _vote(self, model: ModelClient, request: JSON, judge: int, vote: int) -> Answer[str]:
        """The vote of a judge, which is asked again if it contradicts itself."""
        for again in range(_CONTRADICTIONS + 1):
            answer = await self.calls.ask(model, request, self._label, judge=judge, vote=vote)
            if answer.verdict is not None or not contradicts(self.read(answer.response), self.labels):
                break
            if again < _CONTRADICTIONS:
                logger.info("a judge contradicts itself, and is asked again")
        return answer

    def _label(self, response: JSON) -> str | None:
        return label_of(response, self.read(response), self.labels)


def dissent(ballots: Sequence[Ballot], label: str) -> str | None:
    """What the judges said in place of ``label``, for people; None if all ballots have it."""
    for number, ballot in enumerate(ballots):
        if ballot.label != label:
            words = "gave no verdict" if ballot.label is None else f"said {ballot.label}"
            return f"the judge {words}" + (", with the two texts swapped" if number else "")
    return None


def majority(labels: Sequence[str | None], asked: int) -> str | None:
    """The label of more than half of ``asked`` votes; None if there is none."""
    counts = Counter(label for label in labels if label is not None)
    return next((label for label, count in counts.items() if 2 * count > asked), None)


class JudgeSettings(ResourcesServer.Config):
    """Settings of an environment whose judge says whether two answers are equal. A subclass gives
    `judge_prompt_template` a default, and checks its fields.
    """

    judge: ModelClient | None = None
    """The model that judges."""
    judge_system_message: str | None = None
    """System message before each prompt."""
    judge_prompt_template: str
    """Template of the prompt; it or the system message asks for the labels. ``{mark}`` in it becomes a
    word that no text can contain: write it into the tags around each text."""
    judge_responses_create_params: dict[str, Any] = Field(default_factory=dict)
    """Further fields of each call's Responses body: ``temperature``, ``max_output_tokens``, ..."""
    judge_equal_label: str = Field("[[A=B]]", min_length=2)
    """The judge's verdict "equal"."""
    judge_not_equal_label: str = Field("[[A!=B]]", min_length=2)
    """The judge's verdict "not equal"."""
    further_judges: list[ModelClient] = Field(default_factory=list)
    """Further models that vote; more than half of all votes decide, and a tie is "not equal"."""
    judge_votes: PositiveInt = 1
    """Number of votes of each judge."""
    judge_max_concurrency: PositiveInt | None = 256
    """Maximum number of concurrent judge calls per replica; null sets no limit. Read at start only."""
    judge_cache: CacheSettings | None = None
    """Cache of the judge's replies on disk, so that the same is asked once. Read at start only."""

    @property
    def judge_labels(self) -> tuple[str, str]:
        """The labels for "equal" and "not equal"."""
        return self.judge_equal_label, self.judge_not_equal_label

    def shown(self, text: str, max_chars: int) -> str:
        """The end of a policy's text as the judge sees it, without labels and the prompt's tags."""
        forbidden = (*self.judge_labels, *delimiters_of(self.judge_prompt_template))
        return escape_labels(text, forbidden, max_chars)

    def judge_calls(self) -> JudgeCalls:
        """The limit of concurrent calls, and the cache, that these settings describe. Raises BadRequest: the
        cache's file cannot be opened.
        """
        return JudgeCalls(self.judge_max_concurrency, open_cache(self.judge_cache))

    def label_judge(self, calls: JudgeCalls, read: Callable[[JSON], str] = final_text) -> LabelJudge:
        assert self.judge is not None
        return LabelJudge(
            (self.judge, *self.further_judges),
            calls,
            self.judge_prompt_template,
            self.judge_labels,
            self.judge_responses_create_params,
            self.judge_system_message,
            read,
            self.judge_votes,
        )

    @model_validator(mode="after")
    def _labels_can_be_said(self) -> Self:
        labels = self.judge_labels
        if labels[0] == labels[1]:
            raise ValueError("`judge_equal_label` and `judge_not_equal_label` must differ")
        if self.judge is not None:
            try:
                check_labels(labels, self.judge_prompt_template, self.judge_system_message)
            except ValueError as error:
                where = "judge_prompt_template, judge_system_message"
                raise ValueError(f"judge_equal_label, judge_not_equal_label: {error} ({where})") from None
        return self


def open_cache(settings: CacheSettings | None) -> VerdictCache | None:
    """The verdict cache of an environment; None without settings. Raises BadRequest: the file cannot be
    opened.
    """
    return None if settings is None else VerdictCache(settings)


@dataclass(frozen=True)
class Calibration:
    """The agreement of a judge with people: the count of each pair (person's label, judge's or None)."""

    pairs: Mapping[tuple[Label, Label], int]

    @classmethod
    def of(cls, labels: Iterable[tuple[Label, Label]]) -> Calibration:
        """The calibration of (person's label, judge's label) pairs. Raises InvalidRequest: there is none."""
        pairs = Counter(labels)
        if not pairs:
            raise InvalidRequest("calibration needs at least one labelled row with a verdict")
        return cls(pairs)

    @property
    def rows(self) -> int:
        return sum(self.pairs.values())

    @property
    def agreement(self) -> float:
        return sum(count for (person, judge), count in self.pairs.items() if person == judge) / self.rows

    @property
    def kappa(self) -> float | None:
        """Cohen's kappa, -1 to 1; None if both gave the same single label to all rows."""
        people, judges = Counter[Label](), Counter[Label]()
        for (person, judge), count in self.pairs.items():
            people[person] += count
            judges[judge] += count
        chance = sum(people[label] * judges[label] for label in people) / self.rows**2
        return None if chance == 1.0 else (self.agreement - chance) / (1.0 - chance)

    def to_json(self) -> JSON:
        """The figures; ``confusion`` is by the person's label, then the judge's."""
        confusion: dict[str, dict[str, int]] = {}
        for (person, judge), count in sorted(self.pairs.items(), key=repr):
            row = confusion.setdefault(str(person), {})
            row[str(judge)] = row.get(str(judge), 0) + count
        figures = {name: getattr(self, name) for name in ("rows", "agreement", "kappa")}
        return {**figures, "confusion": confusion}
