"""The figures of runs, and what changed between two: as `gym_serve.metrics` computes them, from the index."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

from gym_serve.metrics.estimators import Clusters, Figure, pass_curve, stdev
from gym_serve.view.costs import costs_of, recorded_prices
from gym_serve.view.expression import Node, parse
from gym_serve.view.queries import read_facets
from gym_serve.view.runs import Reading, Run

_BINS = 20
_MOMENTS = 60
_BESIDE = ThreadPoolExecutor(4, "gym-serve-figures")
_SHARE = 0.1  # of the time, at most, that a growing run's figures may take
_TASKS = 500
_PLACES = 2000  # among which the seconds are dealt out, to find the quantiles


def read_summary(runs: Sequence[Run], where: str = "") -> dict[str, Any]:
    """The figures of each run, and the facets of all.

    Raises:
        BadExpression: the filter cannot be understood.
    """
    node = parse(where)
    found, sides = [], []
    for run in runs:
        with run.reading() as reading:
            summary, side = _kept(reading, node)
            found.append(summary)
            sides.append(side)
    joined: dict[str, dict[str, int]] = {}
    for side in sides:
        for name, counts in side.items():
            into = joined.setdefault(name, {})
            for value, count in counts.items():
                into[value] = into.get(value, 0) + count
    tags = {tag: len(run.annotations.tagged(tag)) for run in runs for tag in run.annotations.all_tags()}
    return {"runs": found, "facets": {**joined, "tag": tags}}


def _kept(reading: Reading, node: Node | None) -> tuple[dict[str, Any], dict[str, dict[str, int]]]:
    """The figures of a run; while it grows, some that are a little old."""
    key = ("summary", node)
    kept = reading.run.kept(key, 0)
    if kept is not None:
        revision, until, result = kept
        growing = not reading.state.get("done", True)
        if revision == reading.revision or (growing and time.monotonic() < until):
            return result  # type: ignore[no-any-return]
    began = time.monotonic()
    beside = _BESIDE.submit(_groups, reading.run, node)
    figures = _figures(reading, node)
    groups = beside.result()
    result = _summary(figures, groups), groups.facets
    now = time.monotonic()
    reading.run.keep(key, 0, (reading.revision, now + (now - began) / _SHARE, result))
    return result


class _Groups(NamedTuple):
    """What is counted group by group."""

    facets: dict[str, dict[str, int]]
    tasks: dict[str, Any]
    """The 95% interval of the mean reward, and pass@k with the reward as the score."""
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
    told = {"failures": failures, "versions": versions, "straddling": groups.straddling}
    return {**figures, **groups.tasks, **told}


def _figures(reading: Reading, node: Node | None) -> dict[str, Any]:
    where, values = reading.where(node)
    totals = reading.sql(
        "SELECT count(*), count(reward), count(failure), total(reward), min(reward), max(reward),"
        " total(input_tokens), total(output_tokens), avg(turns), avg(seconds), min(seconds), max(seconds),"
        " min(at), max(at), avg(behind), max(behind), total(reward IN (0, 1))"
        f" FROM rollouts WHERE {where}",
        values,
    )
    totals = totals or [(0, 0, 0, 0.0, None, None, 0, 0, *[None] * 8, 0)]
    count, scored, failed, total, low, high, given, made, turns, seconds, *rest = totals[0]
    quickest, slowest, first, last, behind, most_behind, binary = rest
    p50, p90 = _quantiles(reading, where, values, (quickest, slowest))
    prices = {**recorded_prices(reading.run.files), **reading.run.prices}
    return {
        "id": reading.run.id,
        "rollouts": count,
        "scored": scored,
        "failed": failed,
        "mean_reward": total / scored if scored else None,
        "histogram": _binary_histogram(scored - int(total), int(total))
        if binary == scored
        else _histogram(reading, where, values, low, high),
        "behind": None if behind is None else {"mean": behind, "most": most_behind},
        "cost": costs_of(reading, where, values, prices),
        "tokens": {"input": int(given), "output": int(made)},
        "turns_mean": turns,
        "seconds": {"mean": seconds, "p50": p50, "p90": p90},
        "over_time": _over_time(reading, where, values, first, last),
    }


def _groups(run: Run, node: Node | None) -> _Groups:
    """Asked beside `_figures`, by a connection of its own: SQLite uses a second processor for it."""
    with run.reading() as reading:
        where, values = reading.where(node)
        facets, straddling = read_facets(reading, where, values)
        rows = reading.sql(
            "SELECT task, count(reward), total(reward), sum(reward IN (0, 1)), total(reward = 1),"
            " max(reward) >= 1 FROM rollouts"
            f" WHERE reward IS NOT NULL AND {where} GROUP BY task",
            values,
        )
        if not rows:
            return _Groups(facets, {"interval": None, "pass_at_k": {}}, 0, straddling)
        odd = [task for task, count, _, binary, *_ in rows if binary != count]
        scores = _scores(reading, where, values, odd)
    clusters = _clusters(len(rows))
    mean = Figure(clusters)
    for position, (_, count, total, *_) in enumerate(rows):
        mean.add(clusters.of(position), total, count)
    told = mean.confidence()
    tasks = {
        "interval": [told["low"], told["high"]] if "low" in told else None,
        "pass_at_k": _pass_at_k(rows, scores),
    }
    return _Groups(facets, tasks, sum(row[5] for row in rows), straddling)


def _pass_at_k(rows: Sequence[Sequence[Any]], scores: dict[Any, list[float]]) -> dict[str, float]:
    """The mean over the tasks with so many rollouts.

    Args:
        rows: of `_groups`.
        scores: of tasks with rewards besides 0 and 1.
    """
    sizes = sorted(row[1] for row in rows)
    most = sizes[len(sizes) // 2]  # what half of the tasks reach
    curves: Counter[tuple[float, ...]] = Counter(tuple(pass_curve(of)) for of in scores.values())
    for (count, ones), tasks in Counter(
        (row[1], int(row[4])) for row in rows if row[0] not in scores
    ).items():
        curves[tuple(pass_curve([1.0] * ones + [0.0] * (count - ones)))] += tasks
    found = {}
    for k in sorted({most, *(1 << power for power in range(11))}):
        if k <= most:
            passed = [(curve[k - 1] * tasks, tasks) for curve, tasks in curves.items() if k <= len(curve)]
            found[str(k)] = math.fsum(value for value, _ in passed) / sum(tasks for _, tasks in passed)
    return found


def _scores(reading: Reading, where: str, values: Sequence[Any], tasks: list[Any]) -> dict[Any, list[float]]:
    """The rewards, in order, of tasks that have others than 0 and 1."""
    if not tasks:
        return {}
    chosen = set(tasks)
    found: dict[Any, list[float]] = {}
    query = f"SELECT task, reward FROM rollouts WHERE reward IS NOT NULL AND {where} ORDER BY attempt, n"
    for task, reward in reading.sql(query, values):
        if task in chosen:
            found.setdefault(task, []).append(reward)
    return found


def _binary_histogram(zeros: int, ones: int) -> dict[str, Any]:
    counts = [zeros, *[0] * (_BINS - 2), ones]
    return {"edges": [step / _BINS for step in range(_BINS + 1)], "counts": counts}


def _histogram(
    reading: Reading, where: str, values: Sequence[Any], low: float | None, high: float | None
) -> dict[str, Any]:
    """Rollouts by reward: from 0 to 1, or farther if rewards are outside of it."""
    start, end = min(low or 0.0, 0.0), max(high or 0.0, 1.0)
    width = (end - start) / _BINS
    counts = [0] * _BINS
    query = (
        "SELECT min(max(CAST((reward - ?) / ? AS INTEGER), 0), ?), count(*) FROM rollouts"
        f" WHERE reward IS NOT NULL AND {where} GROUP BY 1"
    )
    if math.isfinite(width):
        for place, count in reading.sql(query, (start, width, _BINS - 1, *values)):
            counts[place] = count
    else:
        width = end / _BINS - start / _BINS
    return {"edges": [start + width * step for step in range(_BINS)] + [end], "counts": counts}


def _quantiles(
    reading: Reading, where: str, values: Sequence[Any], span: tuple[float | None, float | None]
) -> list[float | None]:
    """The median and the 90% quantile of the seconds: exact, but only those near them are sorted.

    Args:
        span: the least and the most seconds.
    """
    low, high = span
    if low is None or high is None:
        return [None, None]
    place = "CAST((seconds - ?) / ? AS INTEGER)"
    bounds = (low, (high - low) / _PLACES or 1.0)
    chosen = f"FROM rollouts WHERE seconds IS NOT NULL AND {where}"
    sizes = reading.sql(f"SELECT {place}, count(*) {chosen} GROUP BY 1 ORDER BY 1", (*bounds, *values))
    count = sum(size for _, size in sizes)
    wanted = [_at(sizes, min(int(share * count), count - 1)) for share in (0.5, 0.9)]
    near: dict[int, list[float]] = {}
    query = f"SELECT {place} AS place, seconds {chosen} AND place IN (?, ?)"
    for at, seconds in reading.sql(query, (*bounds, *values, *(at for at, _ in wanted))):
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


def _over_time(
    reading: Reading, where: str, values: Sequence[Any], first: float | None, last: float | None
) -> list[dict[str, Any]]:
    """Rollouts, mean reward and failures up to each of some moments; without times, in the file's order."""
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
        (*bounds, *values),
    )
    found: list[dict[str, Any]] = []
    count, scored, total, failed = 0, 0, 0.0, 0
    for at, some, rewarded, sum_, lost in rows:
        count, scored, total, failed = count + some, scored + rewarded, total + sum_, failed + lost
        moment = first + (last - first) * min(at + 1, _MOMENTS) / _MOMENTS if timed else None  # type: ignore[operator]
        mean = total / scored if scored else None
        found.append({"at": moment, "rollouts": count, "mean_reward": mean, "failed": failed})
    return found


def compare_runs(
    left: Run, right: Run, where: str = "", left_where: str = "", right_where: str = ""
) -> dict[str, Any]:
    """Two runs, task by task; every task that both have scored has the same weight.

    A run solves a task if more than half of its rollouts have a reward of 1 or more; a task is flipped if one
    run solves it and the other does not.

    Args:
        where: of both sides.
        left_where, right_where: of one, to compare two versions in a run.

    Raises:
        BadExpression: a filter cannot be understood.
    """
    sides = []
    for run, own in ((left, left_where), (right, right_where)):
        with run.reading() as reading:
            sides.append(_sides(reading, [parse(where), parse(own)]))
    both = [task for task in sides[0] if task in sides[1]]
    counts = {"better": 0, "worse": 0, "same": 0}
    clusters = _clusters(len(both)) if both else None
    difference = Figure(clusters) if clusters is not None else None
    tasks = []
    for position, task in enumerate(both):
        (n, mean, solved), (m, other, passed) = sides[0][task], sides[1][task]
        flipped = None
        if (2 * solved > n) != (2 * passed > m):
            flipped = "better" if 2 * passed > m else "worse"
        counts[flipped or "same"] += 1
        if difference is not None and clusters is not None:
            difference.add(clusters.of(position), other - mean)
        tasks.append(
            {
                "task": str(task),
                "left": {"mean": mean, "attempts": n, "solved": int(solved)},
                "right": {"mean": other, "attempts": m, "solved": int(passed)},
                "flipped": flipped,
                "_key": task,
            }
        )
    tasks.sort(key=lambda t: (t["flipped"] is None, -abs(t["right"]["mean"] - t["left"]["mean"])))
    del tasks[_TASKS:]
    with left.reading() as reading:
        for found in tasks:
            found["prompt"] = _prompt(reading, found.pop("_key"))
    told = difference.confidence() if difference is not None else {}
    return {
        "tasks": tasks,
        "counts": {
            **counts,
            "only_left": len(sides[0]) - len(both),
            "only_right": len(sides[1]) - len(both),
        },
        "difference": {
            "mean": difference.value if difference is not None else None,
            "interval": [told["low"], told["high"]] if "low" in told else None,
        },
    }


def _sides(reading: Reading, nodes: Sequence[Node | None]) -> dict[Any, tuple[int, float, float]]:
    parts = [reading.where(node) for node in nodes]
    where = " AND ".join(sql for sql, _ in parts)
    rows = reading.sql(
        "SELECT task, count(reward), avg(reward), total(reward >= 1) FROM rollouts"
        f" WHERE reward IS NOT NULL AND {where} GROUP BY task",
        [value for _, values in parts for value in values],
    )
    return {task: (count, mean, solved) for task, count, mean, solved in rows}


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
