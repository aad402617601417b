"""From rollouts to records: every rollout that was read is in the output, or counted with a reason.

A rollout with several conversations (`Rollout.conversations`) counts as exported if one of them is in the
output; the others are counted separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import wraps
from typing import Any, TypeVar

from gym_serve.training.rollout import NotExportable, Rollout
from gym_serve.types.requests import JSON

T = TypeVar("T")

_MAX_REASONS = 100  # names of failures come from the file: a hostile one must not fill the memory


@dataclass
class Dropped:
    """The rollouts that were left out for one reason."""

    count: int
    example: str  # id of the first of them
    detail: str  # what was wrong with the first of them


@dataclass
class ExportReport:
    """The account of an export; at its end ``read == exported + sum of dropped counts``."""

    format: str
    path: str
    read: int = 0  # rollouts that came in
    exported: int = 0  # rollouts that are in the output
    masked: int = 0  # of those, how many carry a mask that keeps them out of the loss
    records: int = 0  # lines, rows or files written
    dropped: dict[str, Dropped] = field(default_factory=dict)  # why rollouts were left out, by reason
    dropped_branches: dict[str, Dropped] = field(default_factory=dict)
    """Why conversations of exported rollouts were left out, by reason."""
    notes: list[str] = field(default_factory=list)  # what the reader of the output should know

    def to_json(self) -> JSON:
        return asdict(self)

    def reading(self, rollouts: Iterable[Any], min_reward: float | None = None) -> Iterator[Rollout]:
        for raw in rollouts:
            self.read += 1
            try:
                rollout = Rollout.read(raw)
                if min_reward is not None and not rollout.masked and rollout.reward < min_reward:
                    raise NotExportable("low_reward", f"the reward is lower than {min_reward:g}")
            except NotExportable as error:
                id_ = raw.get("_ng_rollout_id") if isinstance(raw, dict) else None
                _count(self.dropped, error, str(id_ or f"#{self.read}")[:100])
            else:
                yield rollout

    def attempt(self, convert: Callable[..., T], rollout: Rollout, **options: Any) -> T | None:
        """``convert(rollout)``, or None if it is not exportable, which is counted."""
        try:
            return convert(rollout, **options)
        except NotExportable as error:
            _count(self.dropped, error, rollout.id)
            return None


def _count(dropped: dict[str, Dropped], error: NotExportable, rollout_id: str) -> None:
    is_new = error.reason not in dropped
    reason = "other" if is_new and len(dropped) >= _MAX_REASONS else error.reason
    dropped.setdefault(reason, Dropped(0, rollout_id, error.message[:500])).count += 1


Records = Callable[..., Iterator[JSON]]  # ``(rollouts, report, **options)`` -> the records of a format


def each(convert: Callable[..., JSON]) -> Records:
    """The records of a format that turns each conversation into one; its mask is that of its rollout's
    branches.
    """

    @wraps(convert)
    def records(rollouts: Iterable[Rollout], report: ExportReport, **options: Any) -> Iterator[JSON]:
        for rollout in rollouts:
            converted: list[JSON] = []
            failures: list[tuple[NotExportable, str]] = []
            for conversation in rollout.conversations():
                try:
                    converted.append(convert(conversation, **options))
                except NotExportable as error:
                    failures.append((error, conversation.id))
            if not converted:
                _count(report.dropped, failures[0][0], rollout.id)
                continue
            report.exported += 1
            report.masked += rollout.masked
            for failure in failures:
                _count(report.dropped_branches, *failure)
            yield from converted

    return records


def whole(convert: Callable[..., JSON], *, has_mask: bool = False) -> Records:
    """The records of a format that makes one of each rollout; ``has_mask``: a record says if it is masked."""

    @wraps(convert)
    def records(rollouts: Iterable[Rollout], report: ExportReport, **options: Any) -> Iterator[JSON]:
        for rollout in rollouts:
            record = report.attempt(convert, rollout, **options)
            if record is not None:
                report.exported += 1
                report.masked += has_mask and rollout.masked
                yield record

    return records
