"""Runs a collection at the terminal: progress while it runs, Ctrl-C, the report at the end, the exit status.

`collect` and `reverify` share it. Exit status: 0 all rollouts are scored; 3 the run is complete, but some
rollouts have failed for good, or some groups could not be compared; 4 the budget is spent; 5 only the
operator can help (`OperatorError`); 130 (SIGINT) or 143 (SIGTERM) it was stopped. After 4, 5, 130 and 143 the
run can be resumed; after 3, `--resume` compares the remaining groups.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from typing_extensions import Self

from gym_serve.cli.printing import new_console, print_json
from gym_serve.cli.report import print_report, report_json
from gym_serve.servers.runner import relax_garbage_collection

if TYPE_CHECKING:
    from gym_serve.rollouts import Progress, Report

__all__ = ["Collect", "Interrupts", "ProgressDisplay", "Rate", "report_and_exit", "run_collection"]

_FAILURES = 3
_BUDGET = 4
_FAULT = 5

Collect = Callable[["Callable[[Progress], None]", asyncio.Event], "Awaitable[Report]"]
"""Collects, given whom to tell of progress, and the event that stops it."""


def run_collection(collecting: Collect, output: Path) -> tuple[Report | None, int | None]:
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
    live = ProgressDisplay(Console(stderr=True))
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


def report_and_exit(report: Report | None, signalled: int | None, *, as_json: bool) -> NoReturn:
    """Print the report, and exit with the status that says what came of it."""
    if report is None:
        typer.echo("stopped before anything ran", err=True)
    else:
        print_outcome(report, as_json=as_json)
    if report is not None and report.exhausted and signalled is None:
        typer.echo(f"stopped: {report.exhausted}; to go on: --resume and a higher limit", err=True)
        raise typer.Exit(_BUDGET)
    if report is not None and report.operator_error is not None:
        where = f" ({report.operator_error.server})" if report.operator_error.server else ""
        typer.echo(f"stopped: {report.operator_error.message}{where}", err=True)
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


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Takes SIGINT and SIGTERM for the task in which it is entered.

    Args:
        draining: told of the first signal.
    """

    def __init__(self, draining: Callable[[], None]) -> None:
        self.stop = asyncio.Event()
        """Set by the first signal: start nothing more. The second one cancels the task."""
        self.exit_code: int | None = None
        """128 + the number of the first signal, as shells have it; None if there was none."""
        self._draining = draining
        self._task: asyncio.Task[object] | None = None

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._take, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back()

    def _take(self, number: int) -> None:
        if self.exit_code is None:
            self.exit_code = 128 + number
            self.stop.set()
            self._draining()
            return
        self._give_back()  # a third one ends the process at once
        if self._task is not None:
            self._task.cancel()

    def _give_back(self) -> None:
        for number in _SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)


_WINDOW = 60.0  # seconds that the rate is taken over
_LINE_EVERY = 10.0  # seconds between two lines where there is no terminal


class Rate:
    """Rollouts per second over the last minute."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def add(self, now: float, finished: int) -> None:
        """Note how many are finished at a moment, in seconds; moments do not go back."""
        while self._samples and self._samples[0][0] < now - _WINDOW:
            self._samples.popleft()
        # One sample a second is enough, however often there is news.
        if len(self._samples) >= 2 and now - self._samples[-2][0] < 1.0:
            self._samples.pop()
        self._samples.append((now, finished))

    def per_second(self) -> float | None:
        """The rate; None as long as nothing was finished."""
        if not self._samples:
            return None
        (begin, before), (end, after) = self._samples[0], self._samples[-1]
        return (after - before) / (end - begin) if end > begin and after > before else None


class ProgressDisplay:
    """Shows progress while it is entered; call it with each `Progress`.

    Args:
        console: where to.
        clock: seconds that never go back.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.last: Progress | None = None
        """The newest counts."""
        self._console = console
        self._clock = clock
        self._rate = Rate()
        self._bar = Bar(
            TextColumn("{task.description}"), BarColumn(), console=console, disable=not console.is_terminal
        )
        self._task = self._bar.add_task("checking rows", total=None)
        self._lined = -_LINE_EVERY

    def __call__(self, progress: Progress) -> None:
        """Show the counts."""
        self.last = progress
        now = self._clock()
        self._rate.add(now, progress.finished)
        if self._console.is_terminal:
            self._bar.update(
                self._task,
                description=self._text(progress),
                total=progress.total,
                completed=progress.finished,
            )
        elif now >= self._lined + _LINE_EVERY or not (progress.remaining or progress.comparing):
            self._lined = now
            self._console.print(self._text(progress), markup=False, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def _text(self, progress: Progress) -> str:
        parts = [f"{progress.finished:,}/{progress.total:,}"]
        rate = self._rate.per_second()
        if rate is not None:
            parts.append(f"{rate:,.1f}/s")
        if progress.mean_reward is not None:
            parts.append(f"reward {progress.mean_reward:.3f}")
        parts.append(f"failed {progress.failed:,}")
        if attempts := sum(progress.failed_attempts.values()):
            parts[-1] += f" ({attempts:,} attempts)"
        parts.append(f"running {progress.running:,}")
        if rate is not None and progress.remaining:
            parts.append(f"ETA {timedelta(seconds=round(progress.remaining / rate))}")
        if progress.comparing:
            parts.append(f"comparing {progress.comparing:,} groups")
        return "  ".join(parts)
