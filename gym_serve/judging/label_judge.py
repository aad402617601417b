"""`LabelJudge`: one or several models that answer a question with one of a few labels.

With several votes the label of more than half of them counts, else none: a tie is no verdict. A vote that
failed may be outvoted; where it could have decided, the question has failed (`VerifierFailed`).

Models favour an answer for its place, so a comparison can be asked in both orders (`LabelJudge.both_orders`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gym_serve.judging.calls import Answer, JudgeCalls
from gym_serve.judging.prompts import check_labels, judge_messages
from gym_serve.judging.verdicts import final_text, label_of
from gym_serve.servers.clients import ModelClient
from gym_serve.types.errors import VerifierFailed
from gym_serve.types.requests import JSON

__all__ = ["Ballot", "LabelJudge", "both_orders", "majority"]


@dataclass(frozen=True)
class Ballot:
    """What came of one question.

    Attributes:
        label: the label that counts; None if none does.
        votes: the calls that were made and did not fail, in the order of the judges.
    """

    label: str | None
    votes: tuple[Answer[str], ...]


@dataclass(frozen=True)
class LabelJudge:
    """How to ask.

    Attributes:
        models: the judges.
        calls: makes the calls.
        prompt_template: the prompt, for `str.format`; see `check_fields`.
        labels: what they may answer with; the first one in a reply is its verdict.
        params: Responses body of every call, less ``input``.
        system_message: message before each prompt, or None.
        read: the part of a reply that counts.
        votes: how often each of them is asked.

    Raises:
        ValueError: neither the prompt nor the system message mentions a label, see `check_labels`.
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
        """Ask a question.

        Args:
            fields: the texts of the prompt's fields; what a policy wrote goes through `defused` first.

        Raises:
            VerifierFailed: calls failed, and those that did not are no majority.
        """
        prompt = self.prompt_template.format(**fields)
        request = {**self.params, "input": judge_messages(prompt, self.system_message)}
        asked = [
            asyncio.create_task(self.calls.ask(model, request, self._label, judge=judge, vote=vote))
            for judge, model in enumerate(self.models)
            for vote in range(self.votes)
        ]
        try:
            await asyncio.wait(asked)
        finally:
            for call in asked:
                call.cancel()
        failures = [failure for call in asked if (failure := call.exception()) is not None]
        votes = tuple(call.result() for call in asked if call.exception() is None)
        verdicts = [vote.verdict for vote in votes]
        label = majority(verdicts, len(asked))
        unforeseen = [failure for failure in failures if not isinstance(failure, VerifierFailed)]
        could_decide = label is None and any(
            majority([*verdicts, *[one] * len(failures)], len(asked)) for one in self.labels
        )
        if failures and (could_decide or unforeseen):
            raise (unforeseen or failures)[0]
        return Ballot(label, votes)

    def _label(self, response: JSON) -> str | None:
        return label_of(response, self.read(response), self.labels)


async def both_orders(
    ask: Callable[[str, str], Awaitable[Ballot]], first: str, second: str, label: str
) -> list[Ballot]:
    """Ask about two texts, and once more with their places swapped if the answer was ``label``.

    Args:
        ask: asks about two texts in the order given.
        first, second: the texts.
        label: the answer that has to stand both times.

    Returns:
        one ballot, or two; it stands if all of them have the label.
    """
    ballot = await ask(first, second)
    return [ballot, await ask(second, first)] if ballot.label == label else [ballot]


def majority(labels: Sequence[str | None], asked: int) -> str | None:
    """The label of more than half of ``asked`` votes; None if there is none.

    Args:
        labels: the votes that were given; None for one without a verdict.
        asked: how many were asked for.
    """
    counts = Counter(label for label in labels if label is not None)
    for label, count in counts.most_common(1):
        if 2 * count > asked:
            return label
    return None
