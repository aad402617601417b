"""Runs a collection at the terminal: progress while it runs, Ctrl-C, the report at the end, the exit status.

`collect`, whose help has the exit status, and `reverify` share it.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer
import uvloop
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from typing_extensions import Self

from gym_serve.cli.printing import (
    Unprintable,
    echo,
    give_up_reports,
    is_quiet,
    new_console,
    packed,
    shortened,
)
from gym_serve.cli.run_report import print_report
from gym_serve.metrics import Failures
from gym_serve.rollouts import Outputs, Progress, Report, Rows
from gym_serve.servers.runner import tune_process

if TYPE_CHECKING:
    from gym_serve.client import Gym
    from gym_serve.client.core import CollectOptions

_FAILURES = 3
_BUDGET = 4
_OPERATOR = 5
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_WINDOW = 60.0  # seconds that the rate is taken over
_LINE_EVERY = 10.0  # seconds between two lines without a terminal
_REFRESHES = 4  # of the bar, per second
_CLASSES = 3  # of failures that are shown
_CLASS_WIDTH = 20  # a class of a foreign agent may have any name
_REASON_WIDTH = 160

Collect = Callable[[Callable[[Progress], None], asyncio.Event], Awaitable[Report]]
"""A collection to run: it gets a callback for progress, and the event that stops it."""


def run_collection(collect: Collect, output: Path) -> tuple[Report | None, int | None]:
    """Run a collection with a progress display; SIGINT and SIGTERM stop it.

    Returns:
        the report (None if the run was cancelled before the first rollout), and the exit status of the
        signal that stopped the run, or None.

    Raises:
        GymError: what the collection raises.
    """
    display = ProgressDisplay(new_console(stderr=True, quiet=is_quiet()))
    announced = False

    def on_progress(progress: Progress) -> None:
        nonlocal announced
        display(progress)
        if progress.stopping and not announced:
            announced = True
            display.say(f"Stopping ({progress.stopping}): waiting for running rollouts.")

    def on_signal() -> None:
        display.say("Stopping: waiting for running rollouts. Press Ctrl-C again to cancel them.")

    async def work() -> tuple[Report | None, int | None]:
        with Interrupts(on_signal) as interrupts, display:
            try:
                report: Report | None = await collect(on_progress, interrupts.stop)
            except asyncio.CancelledError:
                if interrupts.exit_code is None:
                    raise
                report = _cancelled(display.last, output)
            return report, interrupts.exit_code

    tune_process()
    return uvloop.run(work())


def collect_into(
    output: Path, gym: Gym, rows: Rows, options: CollectOptions
) -> tuple[Report | None, int | None]:
    """`run_collection` of the rollouts of a graph."""
    from gym_serve.client import AsyncGym

    def collect(progress: Callable[[Progress], None], stop: asyncio.Event) -> Awaitable[Report]:
        watched: CollectOptions = {**options, "progress": progress, "stop": stop}
        return AsyncGym.of(gym).collect(rows, output, **watched)

    return run_collection(collect, output)


def report_and_exit(
    report: Report | None, signalled: int | None, *, as_json: bool, failures: Failures = "mask"
) -> NoReturn:
    """Print the report that `run_collection` returned, and exit with the status of the run (see above)."""
    if report is not None:
        with report_of(report.outputs.rollouts):
            print_report(report, as_json=as_json, failures=failures)
    exit_of(report, signalled)
    raise typer.Exit(0)


@contextmanager
def report_of(output: Path) -> Iterator[None]:
    """A report that nobody reads to its end, or that cannot be printed, leaves the exit status as it is."""
    try:
        yield
    except (BrokenPipeError, Unprintable) as error:
        if isinstance(error, Unprintable):
            echo(f"The report of {output} is not printed: {error}", err=True)
        give_up_reports()


def exit_of(report: Report | None, signalled: int | None) -> None:
    """Say why a run is not complete, and exit with its status; return if all of its rollouts are scored."""
    if report is None:
        echo("Stopped before the first rollout.", err=True)
    if report is not None and report.exhausted and signalled is None:
        echo(
            f"Stopped: {report.exhausted}. Run the command with --resume and a higher limit to continue.",
            err=True,
        )
        raise typer.Exit(_BUDGET)
    if report is not None and report.operator_error is not None:
        where = f" ({report.operator_error.server})" if report.operator_error.server else ""
        echo(f"Stopped: {report.operator_error.message}{where}", err=True)
        left = f"{remaining:,} rollouts remain. " if (remaining := report.progress.remaining) else ""
        echo(f"{left}Fix the problem, then run the same command with --resume.", err=True)
        raise typer.Exit(signalled or _OPERATOR)
    if report is None or not report.complete:
        echo("Run the same command with --resume to continue.", err=True)
        raise typer.Exit(signalled or (_FAILURES if report is not None and report.uncompared else 1))
    if report.unusable:
        echo(
            f"{report.unusable:,} rows could not be used, as was found when the run had begun. It has the "
            "others; once these are mended, make their rollouts in another run.",
            err=True,
        )
    if report.progress.failed or report.unusable:
        raise typer.Exit(_FAILURES)


def _cancelled(progress: Progress | None, output: Path) -> Report | None:
    if progress is None:
        return None
    return Report(Outputs.of(output), progress, metrics=[], problems=[], notes=[], complete=False)


class Interrupts:
    """Handles SIGINT and SIGTERM in the task that enters it.

    The first signal calls ``on_signal`` and lets running rollouts end, the second cancels them; the files can
    be resumed after both.
    """

    def __init__(self, on_signal: Callable[[], None]) -> None:
        self.stop = asyncio.Event()
        """Set by the first signal: no further rollout starts. The second signal cancels the task."""
        self.exit_code: int | None = None
        """128 + the number of the first signal, as in shells; None without a signal."""
        self._on_signal = on_signal
        self._task: asyncio.Task[object] | None = None

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._handle, number)
        return self

    def __exit__(self, *raised: object) -> None:
        self._restore()

    def _handle(self, number: int) -> None:
        if self.exit_code is None:
            self.exit_code = 128 + number
            self.stop.set()
            self._on_signal()
            return
        self._restore()  # a third signal ends the process at once
        if self._task is not None:
            self._task.cancel()

    def _restore(self) -> None:
        for number in _SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)


class Rate:
    """How fast a count grows, over the last minute."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def add(self, now: float, count: int) -> None:
        """Record the count at time ``now`` (seconds, monotonic)."""
        while self._samples and self._samples[0][0] < now - _WINDOW:
            self._samples.popleft()
        # One sample per second is enough.
        if len(self._samples) >= 2 and now - self._samples[-2][0] < 1.0:
            self._samples.pop()
        self._samples.append((now, count))

    def per_second(self) -> float | None:
        if not self._samples:
            return None
        (begin, before), (end, after) = self._samples[0], self._samples[-1]
        return (after - before) / (end - begin) if end > begin and after > before else None


class ProgressDisplay:
    """A context manager that shows progress: a bar on a terminal, otherwise a line every 10 seconds.

    Call it with each `Progress`. ``clock`` gives monotonic seconds.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.last: Progress | None = None
        """The latest counts."""
        self._console = console
        self._clock = clock
        self._rollouts = Rate()
        self._tokens = Rate()
        self._live = Live(console=console, get_renderable=self._page, refresh_per_second=_REFRESHES)
        self._lined = -_LINE_EVERY

    def __call__(self, progress: Progress) -> None:
        self.last = progress
        now = self._clock()
        self._rollouts.add(now, progress.finished)
        self._tokens.add(now, progress.tokens)
        if self._console.is_terminal:
            return  # the page is drawn a few times a second
        if now >= self._lined + _LINE_EVERY or not (
            progress.remaining or progress.reading or progress.comparing
        ):
            self._lined = now
            text = "  ".join(self._parts(progress))
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._live.stop()

    def _page(self) -> RenderableType:
        """The bar, and below it the counts, in as many lines as the terminal's width takes."""
        progress = self.last
        if progress is None:
            return "checking rows"
        page = Table.grid(expand=True)
        page.add_row(ProgressBar(total=max(progress.total, 1), completed=progress.finished))
        for line in packed(self._parts(progress), self._console.width):
            page.add_row(Text(line))
        return page

    def _parts(self, progress: Progress) -> list[str]:
        rate, tokens = self._rollouts.per_second(), self._tokens.per_second()
        parts = [f"{progress.finished:,}/{progress.total:,}{' or more' if progress.reading else ''}"]
        if rate is not None:
            parts.append(f"{rate:,.1f}/s")
        if tokens is not None:
            parts.append(f"{tokens:,.0f} tokens/s")
        if progress.mean_reward is not None:
            parts.append(f"reward {progress.mean_reward:.3f}")
        if progress.masked:
            parts.append(f"masked {progress.masked:,}")
        parts.append(f"failed {progress.failed:,}{_failures(progress.failed_attempts)}")
        if progress.left_out:
            parts.append(f"unusable rows {progress.left_out:,}")
        parts.append(f"running {progress.running:,}")
        if (waiting := progress.waiting) is not None:
            reason = shortened(waiting.reason, _REASON_WIDTH)
            parts.append(f"waiting until {waiting.until} for {waiting.server or 'the graph'}: {reason}")
        if rate is not None and progress.remaining and not progress.reading:
            parts.append(f"ETA {timedelta(seconds=round(progress.remaining / rate))}")
        if progress.comparing:
            parts.append(f"comparing {progress.comparing:,} groups")
        return parts


def _failures(attempts: Mapping[str, int]) -> str:
    """The commonest classes of failed attempts, and how many others there are."""
    if not attempts:
        return ""
    ranked = sorted(attempts.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{count:,} {shortened(name, _CLASS_WIDTH)}" for name, count in ranked[:_CLASSES]]
    if others := sum(count for _, count in ranked[_CLASSES:]):
        shown.append(f"{others:,} others")
    return f" (attempts: {', '.join(shown)})"
