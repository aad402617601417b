"""`Live`: how far a collection is, as a bar on a terminal, else as a line now and then.

It goes to stderr, so that what a command reports on stdout can be piped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from typing_extensions import Self

if TYPE_CHECKING:
    from gym_serve.rollouts import Progress

__all__ = ["Live", "Rate"]

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


class Live:
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
