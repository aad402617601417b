"""Carrying a collection through: progress while it runs, Ctrl-C, the report at the end, the exit status.

`collect` and `reverify` share it. Exit status: 0 all rollouts are scored; 3 the run is complete, but some
rollouts have failed for good, or groups of them could not be compared; 4 its budget is spent; 5 only its
operator can help (`OperatorError`); 130 (SIGINT) or 143 (SIGTERM) it was stopped. It can be resumed after 4,
5, 130 and 143, and to compare those groups again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer
from rich.console import Console

from gym_serve.cli.interrupts import Interrupts
from gym_serve.cli.live import Live
from gym_serve.cli.outcome import print_report, report_json
from gym_serve.cli.printing import new_console, print_json
from gym_serve.servers.runner import relax_garbage_collection

if TYPE_CHECKING:
    from gym_serve.rollouts import Progress, Report

__all__ = ["Collecting", "carry_out", "conclude", "print_outcome"]

_FAILURES = 3
_BUDGET = 4
_FAULT = 5

Collecting = Callable[["Callable[[Progress], None]", asyncio.Event], "Awaitable[Report]"]
"""Collects, given whom to tell of progress, and the event that stops it."""


def carry_out(collecting: Collecting, output: Path) -> tuple[Report | None, int | None]:
    """Collect.

    Args:
        collecting: does it.
        output: the main file, named in the report.

    Returns:
        the report (None if it was cancelled before anything ran), and the exit status that a
        signal asks for, if one came.

    Raises:
        GymError: what the collection raises.
    """
    live = Live(Console(stderr=True))
    told = False

    def tell(progress: Progress) -> None:
        nonlocal told
        live(progress)
        if progress.stopping and not told:
            told = True
            live.say(f"stopping, waiting for running rollouts: {progress.stopping}")

    def draining() -> None:
        live.say("stopping: what runs may end; Ctrl-C again cancels it")

    async def work() -> tuple[Report | None, int | None]:
        with Interrupts(draining) as interrupts, live:
            try:
                report: Report | None = await collecting(tell, interrupts.stop)
            except asyncio.CancelledError:
                if interrupts.exit_code is None:
                    raise
                report = _stopped(live.last, output)
            return report, interrupts.exit_code

    relax_garbage_collection()
    return asyncio.run(work())


def conclude(report: Report | None, signalled: int | None, *, as_json: bool) -> NoReturn:
    """Print the report, and exit with the status that says what came of it."""
    if report is None:
        typer.echo("stopped before anything ran", err=True)
    else:
        print_outcome(report, as_json=as_json)
    if report is not None and report.exhausted and signalled is None:
        typer.echo(f"stopped: {report.exhausted}; to go on: --resume and a higher limit", err=True)
        raise typer.Exit(_BUDGET)
    if report is not None and report.fault is not None:
        where = f" ({report.fault.server})" if report.fault.server else ""
        typer.echo(f"stopped: {report.fault.message}{where}", err=True)
        left = f"{remaining:,} rollouts stay open; " if (remaining := report.progress.remaining) else ""
        typer.echo(f"{left}fix it, then run the same command with --resume", err=True)
        raise typer.Exit(signalled or _FAULT)
    if report is None or not report.complete:
        typer.echo("to go on: the same command with --resume", err=True)
        raise typer.Exit(signalled or (_FAILURES if report is not None and report.uncompared else 1))
    raise typer.Exit(_FAILURES if report.progress.failed else 0)


def print_outcome(report: Report, *, as_json: bool) -> None:
    """Print the report, as tables or as JSON."""
    if as_json:
        print_json(report_json(report))
        return
    print_report(report, new_console())


def _stopped(progress: Progress | None, output: Path) -> Report | None:
    from gym_serve.rollouts import Outputs, Report

    if progress is None:
        return None
    return Report(Outputs.of(output), progress, metrics=[], problems=[], notes=[], complete=False)
