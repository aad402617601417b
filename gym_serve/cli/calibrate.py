"""`gym-serve calibrate`: how far the verdicts of stored rollouts agree with labels that people gave."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_serve.cli.graph_file import JsonOption
from gym_serve.cli.printing import print_json, print_table
from gym_serve.cli.target import stop
from gym_serve.types.errors import GymError, InvalidRequest

if TYPE_CHECKING:
    from gym_serve.judging import Calibration
    from gym_serve.types.requests import JSON

__all__ = ["calibrate"]


def calibrate(
    rollouts: Annotated[
        Path, typer.Argument(help="Rollouts, as of collect or reverify, with labels in them.")
    ],
    *,
    label: Annotated[str, typer.Option(help="The field with the person's label: human, metadata.human, ...")],
    score: Annotated[str, typer.Option(help="The field with the verifier's.")] = "reward",
    at: Annotated[
        float | None,
        typer.Option(help="Compare whether both are at least this number; else the values as they are."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare a verifier's verdicts with people's: agreement, Cohen's kappa, and who said what.

    Kappa is the agreement beyond chance: 0 for a judge that guesses, 1 for one
    that always says what people say. Rollouts without a label are left out.

    Exit status: 0, or 1 if no rollout has a label, or a value cannot be compared.

    Example: gym-serve calibrate out.jsonl --label human --at 0.5
    """
    from gym_serve.judging import Calibration
    from gym_serve.rollouts.records import read_records

    try:
        if not rollouts.exists():
            raise InvalidRequest(f"{rollouts}: there is no such file")
        found = Calibration.of(_pairs(read_records(rollouts), label, score, at))
    except GymError as error:
        stop(error, as_json=as_json)
    if as_json:
        print_json({"ok": True, **found.to_json()})
    else:
        _print(found)


def _pairs(records: Iterator[JSON], label: str, score: str, at: float | None) -> Iterator[tuple[Any, Any]]:
    for record in records:
        person = _field(record, label)
        if person is not None:
            yield _value(person, label, at), _value(_field(record, score), score, at)


def _field(record: JSON, path: str) -> Any:
    value: Any = record
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _value(value: Any, field: str, at: float | None) -> Any:
    """The label that a value stands for."""
    if at is not None:
        if not isinstance(value, int | float):
            raise InvalidRequest(f"{field}: {str(value)[:50]!r} is no number to compare with --at")
        return value >= at
    if isinstance(value, list | dict):
        raise InvalidRequest(f"{field}: a {type(value).__name__} is no label")
    return value


def _print(found: Calibration) -> None:
    print_table(
        ("people", "verifier", "rollouts"),
        ((str(person), str(judge), f"{n:,}") for (person, judge), n in sorted(found.pairs.items(), key=repr)),
    )
    kappa = "undefined, as both say one thing only" if found.kappa is None else f"{found.kappa:.3f}"
    typer.echo(f"\n{found.rows:,} rollouts: agreement {100 * found.agreement:.1f} %, kappa {kappa}")
