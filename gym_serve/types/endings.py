"""How an episode can end, and what follows from it: one table, which everything else reads.

A *stage* is where the episode was: ``seed``, ``model``, ``tool``, ``harness``, ``verify``, ``close``, or
``episode`` for all of it. A *cause* says whose doing the end was. Stage and cause give an `Ending`:

    cause        who                                            graded  counts   retried  stops the run
    ---------------------------------------------------------------------------------------------------
    FINISHED     the policy: it answered, or was at a limit      yes    reward     no     never
    DEADLINE     the policy: it used up its time, and
      grade        is graded by what there is                    yes    reward     no     never
      zero         gets a 0 without a verifier                    no    zero       no     never
      mask         is left out                                    no    nothing    no     never
    WITHHELD     the environment: it masks the sample            yes    nothing    no     never
    MACHINE      a machine, a service, or waiting for one         no    nothing    yes    never
    ROW          the row: what is needed is not in it             no    nothing    no     20 alike in a row
    AUTHOR       the code of an environment or agent              no    nothing    no     20 alike in a row
    OPERATOR     a setting: a refused key, a wrong address        no    nothing    no     5 in a row; a key: 1
    PERSON       somebody who stopped the episode                 no    nothing    no     never
One cell depends on the stage as well: a verifier that still waits for the policy's own tool has nothing that
it could grade, so a DEADLINE in ``verify`` is a zero unless it is to be masked.

The agent, which ends episodes, uses `cause_of` and `ending`; readers of rollouts use `ending_of`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal

from gym_serve.types.errors import (
    AuthorError,
    GymError,
    OperatorError,
    PolicyDeadline,
    Rejected,
    Retryable,
    Stopped,
    error_class,
)

OnDeadline = Literal["grade", "zero", "mask"]
"""What a policy gets that has used up its time: the verdict on what there is, a 0, or no reward at all."""


class Cause(Enum):
    """Whose doing the end of an episode was; see the module."""

    FINISHED = "finished"
    """The policy came to its end, or to a limit: steps, bytes, tokens, its context, a refused
    history, a harness that ended with an error."""
    DEADLINE = "deadline"  # the policy used up the time of a tool, of its harness or of the episode
    WITHHELD = "withheld"
    """The environment gave a verdict, and said that nothing may be learned from it (``mask_sample``)."""
    MACHINE = "machine"  # a machine or service failed, was too slow, or let the episode wait
    ROW = "row"  # the row cannot be run or verified
    AUTHOR = "author"  # the code of the environment or agent is wrong
    OPERATOR = "operator"  # a setting is wrong, and no rollout can succeed before it is mended
    PERSON = "person"  # somebody stopped the episode


@dataclass(frozen=True)
class Ending:
    """What follows from a cause.

    Attributes:
        counts: what the rollout is in every mean: its reward, a zero, or nothing (it is masked).
        stops_after: how many alike in a row stop the run, whose rows stay open; None for never.
    """

    cause: Cause
    graded: bool
    counts: Literal["reward", "zero", "nothing"]
    retried: bool = False
    stops_after: int | None = None

    @property
    def masked(self) -> bool:
        """Whether nothing may be learned from the rollout, and no mean has it."""
        return self.counts == "nothing"

    @property
    def failed(self) -> bool:
        return self.masked and not self.graded


_FINISHED = Ending(Cause.FINISHED, graded=True, counts="reward")
_WITHHELD = Ending(Cause.WITHHELD, graded=True, counts="nothing")

DEADLINES: Mapping[OnDeadline, Ending] = {
    "grade": Ending(Cause.DEADLINE, graded=True, counts="reward"),
    "zero": Ending(Cause.DEADLINE, graded=False, counts="zero"),
    "mask": Ending(Cause.DEADLINE, graded=False, counts="nothing"),
}

FAILURES: Mapping[Cause, Ending] = {
    Cause.MACHINE: Ending(Cause.MACHINE, graded=False, counts="nothing", retried=True),
    Cause.ROW: Ending(Cause.ROW, graded=False, counts="nothing", stops_after=20),
    Cause.AUTHOR: Ending(Cause.AUTHOR, graded=False, counts="nothing", stops_after=20),
    Cause.OPERATOR: Ending(Cause.OPERATOR, graded=False, counts="nothing", stops_after=5),
    Cause.PERSON: Ending(Cause.PERSON, graded=False, counts="nothing"),
}

_CAUSES: tuple[tuple[type[GymError], Cause], ...] = (
    (PolicyDeadline, Cause.DEADLINE),
    (Retryable, Cause.MACHINE),
    (Rejected, Cause.ROW),
    (AuthorError, Cause.AUTHOR),
    (OperatorError, Cause.OPERATOR),
    (Stopped, Cause.PERSON),
    (GymError, Cause.AUTHOR),  # an exception that nobody foresaw
)


def cause_of(error: type[GymError]) -> Cause:
    """The cause that a class of errors stands for."""
    return next(cause for cls, cause in _CAUSES if issubclass(error, cls))


def ending(error: GymError, on_deadline: OnDeadline = "grade") -> Ending:
    """The ending of an episode that met an error."""
    cause = cause_of(type(error))
    if cause is not Cause.DEADLINE:
        return FAILURES[cause]
    if error.stage == "verify" and on_deadline == "grade":
        return DEADLINES["zero"]
    return DEADLINES[on_deadline]


def ending_of(rollout: Mapping[str, Any]) -> Ending:
    """The ending of a finished rollout, as its keys tell it (docs/formats.md, Failures).

    A failure of a kind that is not ours, as other programs write, is the machine's if it is not said to be
    terminal, else the row's.
    """
    kind = _kind_of(rollout)
    if kind is None:
        return _WITHHELD if is_withheld(rollout) else _FINISHED
    terminal = bool(rollout.get("_ng_failure_terminal"))
    if kind.endswith("_timeout"):
        cause = Cause.ROW if terminal else Cause.MACHINE
    elif kind.endswith("_deadline"):
        return DEADLINES["mask"]
    else:
        cls = error_class(kind)
        cause = cause_of(cls) if cls is not None else Cause.ROW if terminal else Cause.MACHINE
    rule = FAILURES[cause]
    return replace(rule, retried=False) if terminal and rule.retried else rule


def is_failure(rollout: Mapping[str, Any]) -> bool:
    """Whether a rollout has no verdict; one that is only masked has one."""
    return ending_of(rollout).failed


def failure_class(rollout: Mapping[str, Any]) -> str | None:
    """What kept a rollout out of the means: the class of its failure, or ``masked``; None for a score."""
    end = ending_of(rollout)
    if not end.masked:
        return None
    return (_kind_of(rollout) or "unknown") if end.failed else "masked"


def _kind_of(rollout: Mapping[str, Any]) -> str | None:
    """The kind of a rollout's failure; None for one with a verdict, whatever else its row calls a failure."""
    kind, record = rollout.get("_ng_failure_class"), rollout.get("failure")
    if not kind and isinstance(record, Mapping):
        kind = record.get("kind")
    return (kind if isinstance(kind, str) else "unknown") if kind else None


def is_withheld(rollout: Mapping[str, Any]) -> bool:
    """Whether an environment masked the sample: ``mask_sample``, at the top or in ``instance_config``."""
    config = rollout.get("instance_config")
    nested = config.get("mask_sample") if isinstance(config, Mapping) else None
    return rollout.get("mask_sample") is True or nested is True
