"""The figures of runs, and what changed between two, from the index.

The definitions are those of `gym_serve.metrics` and `gym_serve.rollouts.analysis`.

What the rollouts of a run have cost, where prices are known.

`collect` writes the prices of the graph's models into the header of a run; ``gym-serve view --price`` has
those of other models, or others. A model without a price has no cost, which is said and never shown as zero.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

import orjson
from pydantic import ValidationError

from gym_serve.metrics import MASKED, Coverage, Failures
from gym_serve.metrics.estimators import Clusters, Figure, pass_curve, stdev
from gym_serve.rollouts.analysis.comparison import Comparison, Scores, Side
from gym_serve.rollouts.journal import Outputs
from gym_serve.servers.usage import Prices
from gym_serve.view.facts import Usage
from gym_serve.view.queries import read_facets, reading_all
from gym_serve.view.runs import Reading, Run
from gym_serve.view.sources import RunFiles, open_regular
from gym_serve.view.tables import MOST_MODELS, usage_columns

_LARGEST_HEADER = 16 << 20  # bytes


def recorded_prices(files: RunFiles) -> dict[str, Prices]:
    """The prices in the header of a run; none if there is no header, or no price in it."""
    path = Outputs.of(files.main).header
    try:
        if path.resolve().parent != files.main.parent or path.stat().st_size > _LARGEST_HEADER:
            return {}
        with open(open_regular(path.resolve()), "rb") as file:
            prices_by_model = orjson.loads(file.read())["prices"]
        return {str(name): Prices.model_validate(prices) for name, prices in prices_by_model.items()}
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError, ValidationError):
        return {}  # RuntimeError: links form a loop


def costs_of(reading: Reading, where: str, prices: Mapping[str, Prices]) -> dict[str, Any] | None:
    """What rollouts have cost, judges included; None if no price of a model that they used is known."""
    models = reading.models
    if not models or len(models) >= MOST_MODELS or not prices:
        return None
    sums = ", ".join(f"total({name})" for number in models.values() for name in usage_columns(number))
    rows = reading.sql(f"SELECT {sums} FROM rollouts WHERE {where}")
    counts = iter(rows[0] if rows else ())
    used = {name: {key: int(next(counts)) for key in Usage._fields} for name in models}
    used = {name: usage for name, usage in used.items() if any(usage.values())}
    costs = {name: prices[name].cost(usage) for name, usage in used.items() if name in prices}
    if not costs:
        return None
    return {
        "total": sum(costs.values()),
        "models": costs,
        "unpriced": [name for name in used if name not in prices],
        "unreported": sum(usage["unreported"] for usage in used.values()),
    }


_BINS = 20
_MOMENTS = 60
_BESIDE = ThreadPoolExecutor(4, "gym-serve-figures")
_SHARE = 0.1  # of the time, at most, that a growing run's figures may take
_TASKS = 500
_PLACES = 2000  # among which the seconds are dealt out, to find the quantiles


def read_summary(runs: Sequence[Run], where: str = "", failures: Failures = "mask") -> dict[str, Any]:
    """The figures of each run, and the facets of all.

    Args:
        runs: the runs.
        where: which rollouts.
        failures: what a failed rollout counts as in the mean reward and in pass@k.

    Raises:
        BadExpression: the filter cannot be understood.
    """
    with reading_all(runs, where) as readings:
        parts = [_kept(reading, where, failures) for reading in readings]
    joined: dict[str, dict[str, int]] = {}
    for _, facets in parts:
        for name, counts in facets.items():
            into = joined.setdefault(name, {})
            for value, count in counts.items():
                into[value] = into.get(value, 0) + count
    tags = {tag: len(run.annotations.tagged(tag)) for run in runs for tag in run.annotations.all_tags()}
    return {"runs": [summary for summary, _ in parts], "facets": {**joined, "tag": tags}}


def _kept(
    reading: Reading, where: str, failures: Failures
) -> tuple[dict[str, Any], dict[str, dict[str, int]]]:
    key = ("summary", where, failures)
    kept = reading.run.kept(key, 0)
    if kept is not None:
        revision, until, result = kept
        growing = not reading.state.get("done", True)
        if revision == reading.revision or (growing and time.monotonic() < until):
            return result  # type: ignore[no-any-return]
    began = time.monotonic()
    beside = _BESIDE.submit(_groups, reading.run, where, failures)
    figures = _figures(reading, reading.where(where))
    groups = beside.result()
    result = _summary(figures, groups), groups.facets
    now = time.monotonic()
    reading.run.keep(key, 0, (reading.revision, now + (now - began) / _SHARE, result))
    return result


class _Groups(NamedTuple):
    """What is counted group by group."""

    facets: dict[str, dict[str, int]]
    tasks: dict[str, Any]
    """The mean reward over tasks, its 95% interval and the method of that, pass@k, and how many rollouts were
    asked for."""
    solved: int
    """Tasks with a reward of 1 or more."""
    straddling: int
    """Rollouts whose last model call is of another version than their first one."""


def _summary(figures: dict[str, Any], groups: _Groups) -> dict[str, Any]:
    costs = figures["cost"]
    if costs is not None:
        costs["per_rollout"] = costs["total"] / figures["rollouts"] if figures["rollouts"] else None
        costs["per_solved_task"] = costs["total"] / groups.solved if groups.solved else None
    failures, versions = groups.facets["failure"], groups.facets["version"]
    extra = {"failures": failures, "versions": versions, "straddling": groups.straddling}
    return {**figures, **groups.tasks, **extra}


def _figures(reading: Reading, where: str) -> dict[str, Any]:
    totals = reading.sql(
        "SELECT count(*), count(reward), total(failure != ?), total(failure = ?),"
        " total(reward), min(reward), max(reward),"
        " total(input_tokens), total(output_tokens), avg(turns), avg(seconds), min(seconds), max(seconds),"
        " min(at), max(at), avg(behind), max(behind), total(reward IN (0, 1))"
        f" FROM rollouts WHERE {where}",
        (MASKED, MASKED),
    )
    totals = totals or [(0, 0, 0, 0, 0.0, None, None, 0, 0, *[None] * 8, 0)]
    count, scored, failed, masked, total, low, high, input_tokens, output_tokens, turns, seconds, *rest = (
        totals[0]
    )
    quickest, slowest, first, last, behind, most_behind, binary = rest
    p50, p90 = _quantiles(reading, where, (quickest, slowest))
    prices = {**recorded_prices(reading.run.files), **reading.run.prices}
    return {
        "id": reading.run.id,
        "rollouts": count,
        "scored": scored,
        "failed": int(failed),
        "masked": int(masked),
        "histogram": _binary_histogram(scored - int(total), int(total))
        if binary == scored
        else _histogram(reading, where, low, high),
        "behind": None if behind is None else {"mean": behind, "most": most_behind},
        "cost": costs_of(reading, where, prices),
        "tokens": {"input": int(input_tokens), "output": int(output_tokens)},
        "turns_mean": turns,
        "seconds": {"mean": seconds, "p50": p50, "p90": p90},
        "over_time": _over_time(reading, where, first, last),
    }


def _groups(run: Run, expression: str, failures: Failures) -> _Groups:
    """Asked beside `_figures`, by a connection of its own: SQLite uses a second processor for it."""
    with run.reading() as reading:
        where = reading.where(expression)
        facets, straddling = read_facets(reading, where)
        rows = reading.sql(
            "SELECT count(reward), total(reward), sum(reward IN (0, 1)), max(reward) >= 1, task FROM rollouts"
            f" WHERE reward IS NOT NULL AND {where} GROUP BY task"
        )
        lost = lost_rollouts(reading, where)
    sums = {task: (count, total) for count, total, _, _, task in rows}
    expected = sum(row[0] for row in rows) + facets["failure"].get(MASKED, 0) + lost.total()
    for task, count in lost.items() if failures == "zero" else ():
        scored, total = sums.get(task, (0, 0.0))
        sums[task] = scored + count, total
    over_tasks = _over_tasks(list(sums.values()), binary=all(row[0] == row[2] for row in rows))
    return _Groups(facets, {**over_tasks, "asked": expected}, sum(row[3] for row in rows), straddling)


def lost_rollouts(reading: Reading, where: str) -> Counter[Any]:
    """How many rollouts of each task failed for good, or have no score yet: their attempts alone are in the
    index, any number of each."""
    failed = "failure IS NOT NULL AND failure != ?"
    rollout = "task, ifnull(attempt, -1 - n)"
    rows = reading.sql(
        f"SELECT task, count(*) FROM (SELECT {rollout} FROM rollouts WHERE {failed} AND {where} EXCEPT"
        f" SELECT {rollout} FROM rollouts WHERE (failure IS NULL OR failure = ?)"
        f" AND task IN (SELECT task FROM rollouts WHERE {failed})) GROUP BY task",
        (MASKED, MASKED, MASKED),
    )
    return Counter(dict(rows))


def _over_tasks(sums: Sequence[tuple[int, float]], *, binary: bool) -> dict[str, Any]:
    if not sums:
        return {"mean_reward": None, "interval": None, "interval_method": None, "pass_at_k": {}}
    clusters = _clusters(len(sums))
    mean = Figure(clusters, binary=binary)
    for position, (count, total) in enumerate(sums):
        mean.add(clusters.of(position), total / count, rollouts=count)
    confidence = mean.confidence()
    return {
        "mean_reward": mean.value,
        "interval": [confidence["low"], confidence["high"]] if "low" in confidence else None,
        "interval_method": confidence.get("method"),
        "pass_at_k": _pass_at_k(sums) if binary else {},
    }


def _pass_at_k(sums: Sequence[tuple[int, float]]) -> dict[str, float]:
    """The mean over the tasks with so many rollouts."""
    most = sorted(count for count, _ in sums)[len(sums) // 2]  # what half of the tasks reach
    curves: Counter[tuple[float, ...]] = Counter()
    for (count, ones), tasks in Counter((count, int(total)) for count, total in sums).items():
        curves[tuple(pass_curve([1.0] * ones + [0.0] * (count - ones)))] += tasks
    shares = {}
    for k in sorted({most, *(1 << power for power in range(11))}):
        if k <= most:
            passed = [(curve[k - 1] * tasks, tasks) for curve, tasks in curves.items() if k <= len(curve)]
            shares[str(k)] = math.fsum(value for value, _ in passed) / sum(tasks for _, tasks in passed)
    return shares


def _binary_histogram(zeros: int, ones: int) -> dict[str, Any]:
    counts = [zeros, *[0] * (_BINS - 2), ones]
    return {"edges": [step / _BINS for step in range(_BINS + 1)], "counts": counts}


def _histogram(reading: Reading, where: str, low: float | None, high: float | None) -> dict[str, Any]:
    """Rollouts by reward: from 0 to 1, or farther if rewards are outside of it."""
    start, end = min(low or 0.0, 0.0), max(high or 0.0, 1.0)
    width = (end - start) / _BINS
    counts = [0] * _BINS
    query = (
        "SELECT min(max(CAST((reward - ?) / ? AS INTEGER), 0), ?), count(*) FROM rollouts"
        f" WHERE reward IS NOT NULL AND {where} GROUP BY 1"
    )
    if math.isfinite(width):
        for place, count in reading.sql(query, (start, width, _BINS - 1)):
            counts[place] = count
    else:
        width = end / _BINS - start / _BINS
    return {"edges": [start + width * step for step in range(_BINS)] + [end], "counts": counts}


def _quantiles(reading: Reading, where: str, span: tuple[float | None, float | None]) -> list[float | None]:
    """The median and the 90% quantile of the seconds: exact, but only those near them are sorted."""
    low, high = span
    if low is None or high is None:
        return [None, None]
    place = "CAST((seconds - ?) / ? AS INTEGER)"
    bounds = (low, (high - low) / _PLACES or 1.0)
    chosen = f"FROM rollouts WHERE seconds IS NOT NULL AND {where}"
    sizes = reading.sql(f"SELECT {place}, count(*) {chosen} GROUP BY 1 ORDER BY 1", bounds)
    count = sum(size for _, size in sizes)
    wanted = [_at(sizes, min(int(share * count), count - 1)) for share in (0.5, 0.9)]
    near: dict[int, list[float]] = {}
    query = f"SELECT {place} AS place, seconds {chosen} AND place IN (?, ?)"
    for at, seconds in reading.sql(query, (*bounds, *(at for at, _ in wanted))):
        near.setdefault(at, []).append(seconds)
    return [sorted(near[at])[rank] for at, rank in wanted]


def _at(sizes: Sequence[tuple[int, int]], rank: int) -> tuple[int, int]:
    """The place where a rank of the whole is, and its rank there."""
    for place, size in sizes:
        if rank < size:
            return place, rank
        rank -= size
    raise AssertionError("the rank must be below the sum of the sizes")


@lru_cache(maxsize=8)
def _clusters(tasks: int) -> Clusters:
    return Clusters(tasks)


def _over_time(reading: Reading, where: str, first: float | None, last: float | None) -> list[dict[str, Any]]:
    """Rollouts, their mean, and failures up to each of some moments; without times, in the file's order."""
    timed = first is not None and last is not None and last > first
    if timed:
        place, bounds = "CAST((at - ?) / ? * ? AS INTEGER)", (first, last - first, _MOMENTS)  # type: ignore[operator]
        condition = "at IS NOT NULL"
    else:
        most = reading.sql("SELECT max(n) FROM rollouts WHERE n < 1000000000")
        place, bounds = "n * ? / ?", (_MOMENTS, 1 + ((most[0][0] if most else 0) or 0))  # type: ignore[assignment]
        condition = "n < 1000000000"
    rows = reading.sql(
        f"SELECT {place}, count(*), count(reward), total(reward), count(failure) FROM rollouts"
        f" WHERE {condition} AND {where} GROUP BY 1 ORDER BY 1",
        bounds,
    )
    points: list[dict[str, Any]] = []
    count, scored, total, failed = 0, 0, 0.0, 0
    for at, some, rewarded, sum_, lost in rows:
        count, scored, total, failed = count + some, scored + rewarded, total + sum_, failed + lost
        moment = first + (last - first) * min(at + 1, _MOMENTS) / _MOMENTS if timed else None  # type: ignore[operator]
        mean = total / scored if scored else None
        points.append({"at": moment, "rollouts": count, "mean_reward": mean, "failed": failed})
    return points


def compare_runs(
    left: Run,
    right: Run,
    where: str = "",
    left_where: str = "",
    right_where: str = "",
    *,
    failures: Failures = "mask",
) -> dict[str, Any]:
    """Two runs, task by task, as `gym_serve.rollouts.analysis.comparison` compares them. Raises
    BadExpression: a filter cannot be understood."""
    sides, coverage = [], []
    with reading_all([left, right], where, left_where, right_where) as readings:
        for reading, own in zip(readings, (left_where, right_where), strict=True):
            scores, of = _scores(reading, f"{reading.where(where)} AND {reading.where(own)}", failures)
            sides.append(scores)
            coverage.append(of._asdict())
    comparison = Comparison(lambda: sides[0], lambda: sides[1])
    summary = comparison.summary(0)
    reward = summary.estimates[0] if summary.estimates else None
    tasks = [
        {
            "task": str(task.task_index),
            **{
                name: {"mean": side.mean, "attempts": side.rollouts, "solved": side.solved}
                for name, side in (("left", task.a), ("right", task.b))
            },
            "flipped": {"fixed": "better", "broken": "worse", None: None}[task.flip],
            "_key": task.task_index,
        }
        for task in comparison.first(_TASKS)
    ]
    with left.reading() as reading:
        for entry in tasks:
            entry["prompt"] = _prompt(reading, entry.pop("_key"))
    return {
        "tasks": tasks,
        "counts": {
            "better": summary.fixed,
            "worse": summary.broken,
            "same": summary.paired_tasks - summary.fixed - summary.broken,
            "only_left": summary.only_a,
            "only_right": summary.only_b,
        },
        "other_prompt": summary.different_prompts,
        "coverage": {"left": coverage[0], "right": coverage[1]},
        "difference": {
            "mean": None if reward is None else reward.difference,
            "interval": None if reward is None or reward.low is None else [reward.low, reward.high],
        },
        "interval_method": None if reward is None else reward.method,
    }


def _scores(reading: Reading, where: str, failures: Failures) -> tuple[list[Scores], Coverage]:
    """The tasks of one side in order, and how many of its rollouts have a score."""
    rows = reading.sql(
        "SELECT task, min(ifnull(agent, '-')), min(prompt_digest), count(reward), total(reward),"
        " total(reward >= 1), total(failure = ?) FROM rollouts JOIN details USING (n)"
        f" WHERE {where} GROUP BY task ORDER BY task",
        (MASKED,),
    )
    lost = lost_rollouts(reading, where)
    scores = []
    for task, agent, prompt, scored, total, solved, _ in rows:
        count = scored + (lost[task] if failures == "zero" else 0)
        if count:
            scores.append(Scores(task, agent, prompt, Side(count, int(solved), total / count)))
    scored, masked = sum(row[3] for row in rows), sum(int(row[6]) for row in rows)
    return scores, Coverage(scored, scored + masked + lost.total())


def _prompt(reading: Reading, task: Any) -> str:
    query = "SELECT details.prompt FROM rollouts JOIN details USING (n) WHERE task = ? LIMIT 1"
    rows = reading.sql(query, (task,))
    return rows[0][0] if rows else ""


def advantage(rewards: Sequence[float], reward: float) -> float | None:
    """GRPO's advantage of a reward among those of its task; None for a task with one."""
    if len(rewards) < 2:
        return None
    mean = math.fsum(rewards) / len(rewards)
    return (reward - mean) / (stdev(rewards) + 1e-4)
