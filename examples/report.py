"""What a training run shows: a table while it runs, `metrics.jsonl` with a line per step, and a picture."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.live import Live
from rich.table import Table

PARTS = ("rollouts", "training", "weights")
"""What a step's seconds are spent on."""


class Report:
    """Writes and shows the steps of a run. Use it as a context manager.

    Args:
        output: folder of `metrics.jsonl` and `training.png`.
        after: the step that the run goes on from; lines of later steps are dropped.
    """

    def __init__(self, output: Path, after: int = 0) -> None:
        self._picture = output / "training.png"
        self._file = output / "metrics.jsonl"
        self.steps = [line for line in read_metrics(self._file) if line["step"] <= after]
        self._file.write_bytes(b"".join(map(_line, self.steps)))
        self._table = Table("step", "reward", "length", "KL", "entropy", "failures", "stale", *PARTS)
        console = Console(width=None if sys.stdout.isatty() else 120)  # a log file has no width of its own
        self._live = Live(self._table, console=console, refresh_per_second=2, vertical_overflow="visible")
        for step in self.steps:
            self._show(step)

    def add(self, step: dict[str, Any]) -> None:
        """Take a step: ``step``, ``reward``, ``reward_error`` (half of the mean's 95% interval), ``length``
        (tokens of the model), ``kl``, ``entropy`` (nats a token), ``failures``, ``staleness`` (updates),
        ``seconds`` by `PARTS`."""
        self.steps.append(step)
        with self._file.open("ab") as file:
            file.write(_line(step))
        self._show(step)

    def _show(self, step: dict[str, Any]) -> None:
        self._table.add_row(
            str(step["step"]),
            f"{step['reward']:.2f} ± {step['reward_error']:.2f}",
            f"{step['length']:.1f}",
            f"{step['kl']:.3f}",
            f"{step['entropy']:.2f}",
            f"{step['failures']:.0f}",
            f"{step['staleness']:.1f}",
            *(f"{step['seconds'][part]:.2f} s" for part in PARTS),
        )

    def __enter__(self) -> Report:
        self._live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._live.stop()
        if self.steps:
            draw(self.steps, self._picture)


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The steps of a run; none if it has not begun."""
    return [orjson.loads(line) for line in file.read_bytes().splitlines()] if file.exists() else []


def draw(steps: list[dict[str, Any]], picture: Path) -> None:
    """Draw a run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def values(name: str) -> list[float]:
        return [step[name] for step in steps]

    x = values("step")
    figure, axes = pyplot.subplots(2, 3, figsize=(12, 6), sharex=True, layout="constrained")
    (reward, length, kl), (entropy, quality, seconds) = axes
    mean, error = values("reward"), values("reward_error")
    reward.plot(x, mean)
    low, high = ([m + sign * e for m, e in zip(mean, error, strict=True)] for sign in (-1, 1))
    reward.fill_between(x, low, high, alpha=0.25, label="95% of the mean")
    reward.set_ylim(0, 1)
    reward.legend(loc="lower right")
    length.plot(x, values("length"))
    kl.plot(x, values("kl"))
    entropy.plot(x, values("entropy"))
    quality.plot(x, values("failures"), label="failed rollouts")
    quality.plot(x, values("staleness"), label="staleness (updates)")
    quality.legend()
    seconds.stackplot(x, *([step["seconds"][part] for step in steps] for part in PARTS), labels=PARTS)
    seconds.legend()
    titles = {
        reward: "mean reward", length: "tokens of the model per rollout", kl: "KL to the first policy",
        entropy: "entropy (nats per token)", quality: "failures and staleness", seconds: "seconds per step",
    }  # fmt: skip
    for axis, title in titles.items():
        axis.set_title(title)
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("step")
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def _line(step: dict[str, Any]) -> bytes:
    return orjson.dumps(step, option=orjson.OPT_APPEND_NEWLINE)
