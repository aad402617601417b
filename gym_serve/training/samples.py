"""`TrainingSample`: what a trainer learns from, cut from a rollout once and for every trainer.

Text is never tokenized anew, tokens of the environment are never trained on, and a failure is no zero:

- Every token that the model produced is in exactly one sample, with its mask at 1, or in a sample that is
  masked as a whole because the rollout failed.
- A sample is a sequence that the model really saw: its prompt and response are the tokens of its last call.
  Where a call's prompt does not continue the tokens before it, another sample begins.
- A sample is never empty, and a rollout always gives at least one, so that batches keep their shape.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from gym_serve.training.rollout import Rollout, TokenTurn, number, token_parts, token_turns
from gym_serve.types.errors import InvalidRequest
from gym_serve.types.media import opened, pictures_in
from gym_serve.types.requests import JSON

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = [
    "TrainingSample",
    "advantages",
    "collate",
    "fitted",
    "picture_tensors",
    "sample_of",
    "samples",
    "verified",
]

logger = logging.getLogger("gym_serve")

_MEDIA = frozenset({"input_image", "input_audio", "input_file", "image_url", "file"})  # also in chat form


@dataclass(frozen=True)
class TrainingSample:
    """One conversation to train on: a prompt, and everything after it.

    The four lists of the response have the same length, which is at least 1.
    """

    prompt_ids: list[int]  # tokens that the model was given first
    response_ids: list[int]  # tokens after the prompt: the model's, and between them those of tools and users
    loss_mask: list[int]  # per response token: 1 if the model produced it and it may be trained on, else 0
    logprobs: list[float]
    """Per response token: its natural-log probability when it was sampled; 0.0 if the model did not produce
    it."""
    versions: list[str | None]
    """Per response token: version of the policy that produced it; None for tokens of the
    environment, and where the model server tells no version."""
    reward: float  # reward of the rollout; 0.0 if it failed
    group: str  # what the rollouts share that its advantage is compared with; by default the task
    task: str  # the task: ``_ng_task_index`` of the row, or a digest of its prompt
    rollout_id: str
    branch: int = 0  # which conversation of the rollout it is: 0 is the one that was verified
    part: int = 0  # which part of the conversation, where its tokens do not continue from call to call
    truncated: bool = False  # whether the last answer was cut off by a limit of tokens
    failure: str | None = None
    """Why it must not be trained on: the failure's code, ``masked`` (its environment said so) or
    ``no_tokens``; None for a sample to train on. Where it is set, ``loss_mask`` is all 0."""
    media: list[JSON] = field(default_factory=list)
    """Images, audio and files that the tokens show, as the parts of messages, in their order."""

    @property
    def pictures(self) -> list[str]:
        """The URLs of the pictures, for trainers that read no other media. Raises InvalidRequest: there are
        others."""
        urls = list(pictures_in(self.media))
        if len(urls) < len(self.media):
            kinds = {str(part.get("type")) for part in self.media if not list(pictures_in([part]))}
            raise InvalidRequest(
                f"rollout {self.rollout_id}: this trainer is given text and pictures, not "
                f"{', '.join(sorted(kinds))}"
            )
        return urls

    @property
    def input_ids(self) -> list[int]:
        return self.prompt_ids + self.response_ids


def samples(
    rollout: Mapping[str, Any], *, pad_token_id: int = 0, group: str | None = None
) -> list[TrainingSample]:
    """What there is to train on in a rollout: the verified conversation first, then its branches.

    Args:
        pad_token_id: stands in for prompt and response of a rollout without tokens.
        group: what its advantage is compared within. By default its task, which is enough for the rollouts of
            one call of `Gym.rollouts`; name one where a batch has rollouts of several calls.

    Returns:
        At least one sample. A failed rollout gives its tokens with ``loss_mask`` 0.

    Raises:
        InvalidRequest: it is no rollout, its reward is no finite number, or its tokens are malformed
            (lengths that differ, a value that is no token id).
    """
    read = Rollout.read(dict(rollout))
    failure = read.failure_class or ("masked" if read.masked else None)
    reward = (number(read.raw.get("reward")) or 0.0) if read.masked else read.reward
    cut = [
        _sample(turns, conversation, part, reward, failure, group)
        for conversation in read.conversations()
        for part, turns in enumerate(token_parts(conversation))
    ]
    if cut:
        return cut
    if failure is None:
        hint = "rollout %s has no tokens and is masked: set `return_token_ids: true` on its model server"
        logger.warning(hint, read.id)
    return [_placeholder(read, reward, failure or "no_tokens", pad_token_id, group)]


def sample_of(conversation: Rollout) -> TrainingSample:
    """The one sample of a conversation, for formats that hold no parts and no failures; or
    `NotExportable`."""
    return _sample(token_turns(conversation), conversation, 0, conversation.reward, None, None)


def verified(chosen: Sequence[TrainingSample]) -> TrainingSample:
    """The sample for a trainer that takes one: the end of the verified conversation, which the reward is
    for."""
    first = min(sample.branch for sample in chosen)
    return [sample for sample in chosen if sample.branch == first][-1]


def fitted(sample: TrainingSample, longest_prompt: int, longest_response: int) -> TrainingSample:
    """A sample within a trainer's limits, in tokens: a longer response is cut.

    A longer prompt fails (``prompt_too_long``): what the model was asked is not what would be trained on. So
    does a longer response with pictures (``response_too_long``), which would be cut off or in two.
    """
    if len(sample.prompt_ids) > longest_prompt:
        sample = _failed(sample, "prompt_too_long")
        sample = replace(sample, prompt_ids=sample.prompt_ids[-longest_prompt:])
    if len(sample.response_ids) <= longest_response:
        return sample
    if sample.media:
        sample = _failed(sample, "response_too_long")
    kept = slice(longest_response)
    return replace(
        sample,
        response_ids=sample.response_ids[kept],
        loss_mask=sample.loss_mask[kept],
        logprobs=sample.logprobs[kept],
        versions=sample.versions[kept],
        truncated=True,
    )


def picture_tensors(processor: Any, sample: TrainingSample) -> JSON:
    """What a model is given for the pictures of a sample, by the policy's processor of ``transformers``.

    Raises InvalidRequest: it has other media too."""
    return dict(processor.image_processor(list(map(opened, sample.pictures)), return_tensors="pt"))


def _failed(sample: TrainingSample, failure: str) -> TrainingSample:
    mask = [0] * len(sample.loss_mask)
    return replace(sample, loss_mask=mask, reward=0.0, failure=sample.failure or failure, media=[])


def advantages(batch: Sequence[TrainingSample], *, scale: bool = True) -> list[float]:
    """Advantage of each sample within its group, as GRPO has it (arXiv:2402.03300, section 4.1.2).

    A rollout counts once in its group's mean however many samples it has; rollouts that failed do not
    count, and have the advantage 0.0.
    """
    rewards: dict[str, dict[str, float]] = {}
    for sample in batch:
        if sample.failure is None:
            rewards.setdefault(sample.group, {})[sample.rollout_id] = sample.reward
    baselines = {group: _moments(list(of.values())) for group, of in rewards.items()}
    values = []
    for sample in batch:
        if sample.failure is not None:
            values.append(0.0)
            continue
        mean, deviation = baselines[sample.group]
        values.append((sample.reward - mean) / ((deviation + 1e-4) if scale else 1.0))
    return values


def collate(
    batch: Sequence[TrainingSample],
    *,
    pad_token_id: int = 0,
    max_length: int | None = None,
    library: Literal["numpy", "torch"] = "torch",
) -> dict[str, np.ndarray[Any, Any] | torch.Tensor]:
    """A batch as arrays: prompts padded on the left, responses on the right, as trainers of policies have
    them.

    Args:
        max_length: most tokens of prompt and response together; what is longer loses the end of its response.

    Returns:
        ``input_ids``, ``attention_mask`` (n x (p + r), int64), ``prompt_ids`` (n x p), ``response_ids``,
        ``loss_mask`` (n x r, int64), ``logprobs`` (n x r, float32), ``rewards`` and ``advantages`` (n,
        float32), where p and r are the lengths of the longest prompt and response.

    Raises:
        InvalidRequest: no sample, or a prompt leaves no room for a response.
        ModuleNotFoundError: the library is not installed: ``pip install 'gym-serve[train]'`` has numpy, and
            torch comes with the trainer.
    """
    if not batch:
        raise InvalidRequest("collate needs at least one sample, got none")
    rooms = [len(s.response_ids) if max_length is None else max_length - len(s.prompt_ids) for s in batch]
    if min(rooms) < 1:
        longest = max(len(s.prompt_ids) for s in batch)
        raise InvalidRequest(f"`max_length` must exceed the longest prompt ({longest}), got {max_length}")
    cut = [min(room, len(s.response_ids)) for s, room in zip(batch, rooms, strict=True)]
    left, right = max(len(s.prompt_ids) for s in batch), max(cut)

    def prompts(pad: int, of: Iterable[list[int]]) -> list[list[int]]:
        return [[pad] * (left - len(row)) + row for row in of]

    def responses(pad: Any, of: Iterable[list[Any]]) -> list[list[Any]]:
        return [row[:n] + [pad] * (right - n) for row, n in zip(of, cut, strict=True)]

    prompt_ids = prompts(pad_token_id, (s.prompt_ids for s in batch))
    response_ids = responses(pad_token_id, (s.response_ids for s in batch))
    attended = prompts(0, ([1] * len(s.prompt_ids) for s in batch))
    answered = responses(0, ([1] * len(s.response_ids) for s in batch))
    arrays: dict[str, tuple[list[Any], str]] = {
        "input_ids": (_beside(prompt_ids, response_ids), "int64"),
        "attention_mask": (_beside(attended, answered), "int64"),
        "prompt_ids": (prompt_ids, "int64"),
        "response_ids": (response_ids, "int64"),
        "loss_mask": (responses(0, (s.loss_mask for s in batch)), "int64"),
        "logprobs": (responses(0.0, (s.logprobs for s in batch)), "float32"),
        "rewards": ([s.reward for s in batch], "float32"),
        "advantages": (advantages(batch), "float32"),
    }
    make = _maker(library)
    return {name: make(values, kind) for name, (values, kind) in arrays.items()}


def _sample(  # noqa: PLR0917
    turns: list[TokenTurn], of: Rollout, part: int, reward: float, failure: str | None, group: str | None
) -> TrainingSample:
    response: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[str | None] = []
    for number_, turn in enumerate(turns):
        prompt = turn.prompt if number_ else []  # the first one's is the sample's
        response += prompt + turn.generation
        mask += [0] * len(prompt) + [int(failure is None)] * len(turn.generation)
        logprobs += [0.0] * len(prompt) + turn.logprobs
        versions += [None] * len(prompt) + turn.versions
    return TrainingSample(
        turns[0].prompt, response, mask, logprobs, versions, reward, group or of.task, of.task,
        of.id.rpartition(".")[0] if of.branch else of.id, of.branch, part,
        _is_truncated(of), failure, _media(of, turns[-1].item),
    )  # fmt: skip


def _placeholder(of: Rollout, reward: float, failure: str, pad: int, group: str | None) -> TrainingSample:
    return TrainingSample(
        [pad], [pad], [0], [0.0], [None], reward, group or of.task, of.task, of.id, failure=failure
    )  # fmt: skip


def _is_truncated(of: Rollout) -> bool:
    details = of.response.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, dict) else None
    return of.response.get("status") == "incomplete" and reason == "max_output_tokens"


def _media(of: Rollout, end: int) -> list[JSON]:
    """The media of the prompt, and of the output before an item."""
    items = of.params.get("input")
    return list(media_in([*(items if isinstance(items, list) else ()), *of.output[:end]]))


def media_in(items: Iterable[JSON]) -> Iterator[JSON]:
    """The parts of messages and outputs that are pictures, sound or files."""
    for item in items:
        content = item.get("content") if item.get("type", "message") == "message" else item.get("output")
        parts = content if isinstance(content, list) else ()
        yield from (part for part in parts if isinstance(part, dict) and part.get("type") in _MEDIA)


def _moments(values: list[float]) -> tuple[float, float]:
    """Mean and (sample) standard deviation, as torch.std has it; 0.0 for one value."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _beside(left: list[list[int]], right: list[list[int]]) -> list[list[int]]:
    return [a + b for a, b in zip(left, right, strict=True)]


def _maker(library: Literal["numpy", "torch"]) -> Any:
    try:
        if library == "numpy":
            import numpy as np

            return lambda values, kind: np.asarray(values, dtype=kind)
        import torch

        return lambda values, kind: torch.tensor(values, dtype=getattr(torch, kind))
    except ModuleNotFoundError as error:
        needed = {"numpy": "'gym-serve[train]'", "torch": "torch"}[library]
        problem = f"collate(library={library!r}) needs {library}: pip install {needed}"
        raise ModuleNotFoundError(problem, name=library) from error
