"""What a training run shows: a table while it runs, `metrics.jsonl` with a line per step, and a picture."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
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
        self._console = Console()
        self._live = Live(get_renderable=self._table, console=self._console, refresh_per_second=2)

    def add(self, step: dict[str, Any]) -> None:
        """Take a step: ``step``, ``reward``, ``reward_error`` (half of the mean's 95% interval), ``length``
        (tokens of the model), ``kl``, ``entropy`` (nats a token), ``failures``, ``staleness`` (updates),
        ``seconds`` by `PARTS`."""
        self.steps.append(step)
        with self._file.open("ab") as file:
            file.write(_line(step))
        if not self._console.is_terminal:
            reward = f"{step['reward']:.2f} ± {step['reward_error']:.2f}"
            print(f"step {step['step']}: mean reward {reward}", flush=True)

    def _table(self) -> Table:
        """The last steps, as many as the terminal is high; 80 columns are enough."""
        table = Table(box=None, padding=(0, 1, 0, 0), caption="rollouts, training, weights: seconds")
        for name in ("step", "reward", "length", "KL", "entropy", "failed", "stale", *PARTS):
            table.add_column(name, justify="right", no_wrap=True)
        for step in self.steps[-max(1, self._console.height - 6) :]:
            table.add_row(
                str(step["step"]),
                f"{step['reward']:.2f} ± {step['reward_error']:.2f}",
                f"{step['length']:.1f}",
                f"{step['kl']:.2f}",
                f"{step['entropy']:.2f}",
                f"{step['failures']:.0f}",
                f"{step['staleness']:.1f}",
                *(f"{step['seconds'][part]:.2f}" for part in PARTS),
            )
        return table

    def __enter__(self) -> Report:
        if self._console.is_terminal:
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
    reward.set_ylim(0, 1.02)
    reward.legend(loc="lower right")
    length.plot(x, values("length"))
    kl.plot(x, values("kl"))
    entropy.plot(x, values("entropy"))
    quality.plot(x, values("failures"), label="failed rollouts")
    quality.plot(x, values("staleness"), "--", label="staleness (updates)")
    quality.set_ylim(-0.05, max(1.0, *values("failures"), *values("staleness")) * 1.05)
    quality.legend()
    seconds.stackplot(x, *([step["seconds"][part] for step in steps] for part in PARTS), labels=PARTS)
    later = [sum(step["seconds"].values()) for step in steps[1:]]
    if later:
        seconds.set_ylim(0, 1.4 * max(later))  # the first step has the start of everything in it
    seconds.legend(loc="upper right", ncols=len(PARTS))
    titles = {
        reward: "mean reward", length: "tokens of the model per rollout", kl: "KL to the first policy (nats)",
        entropy: "entropy (nats per token)", quality: "failures and staleness", seconds: "seconds per step",
    }  # fmt: skip
    for axis, title in titles.items():
        axis.set_title(title)
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("step")
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def draw_seeds(runs: list[dict[str, Any]], steps: list[list[dict[str, Any]]], picture: Path) -> None:
    """Draw the trainings of a task: for each seed the rewards of its steps (means of five), and those of the
    held-out rows before and after.

    Args:
        runs: ``seed``, ``before``, ``after`` and ``steps`` of each training.
        steps: the steps of each training.
        picture: the file that is written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for run, made in zip(runs, steps, strict=True):
        rewards = [step["reward"] for step in made]
        means = [fmean(rewards[max(0, i - 4) : i + 1]) for i in range(len(rewards))]
        (line,) = axes.plot(
            [step["step"] for step in made], means, alpha=0.6, label=f"training, seed {run['seed']}"
        )
        ends = ([0, run["steps"]], [run["before"], run["after"]])
        axes.plot(*ends, "--o", color=line.get_color(), label=f"held-out rows, seed {run['seed']}")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.legend(loc="lower right", ncols=len(runs), fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def _line(step: dict[str, Any]) -> bytes:
    return orjson.dumps(step, option=orjson.OPT_APPEND_NEWLINE)
