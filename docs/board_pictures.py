"""Draw the Grafana boards from a Prometheus: docs/board-NAME.png, each panel with the answers to its queries.

    python docs/board_pictures.py http://127.0.0.1:9090 --minutes 10

It needs matplotlib. Grafana itself is in no package registry: the pictures show what it shows, in its order
and units. Those in docs/ are of `python -m support.monitored`, in tests/.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.gridspec import GridSpec
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

DOCS = Path(__file__).parent
BOARDS = sorted((DOCS.parent / "gym_serve" / "observe" / "monitoring").glob("*.json"))
COLORS = [
    "#73bf69",
    "#f2cc0c",
    "#5794f2",
    "#ff780a",
    "#f2495c",
    "#b877d9",
    "#37872d",
    "#fade2a",
    "#8ab8ff",
    "#ffa6b0",
]
NAMED = {"green": "#73bf69", "red": "#f2495c", "gray": "#9fa7b3"}
BACK, PANEL, TEXT, LINE = "#111217", "#181b1f", "#d0d3db", "#2c3038"
_LEGEND_ROWS = 4
_INCHES = 0.42  # of a unit of a board's height

Series = tuple[str, list[float], list[float]]


class Prometheus:
    """Answers of a Prometheus over a window that ends now."""

    def __init__(self, url: str, minutes: float) -> None:
        self._url = url
        self._end = time.time()
        self._start = self._end - minutes * 60
        self.step = max(5.0, minutes * 60 / 200)

    def series(self, target: dict[str, Any]) -> list[Series]:
        """The series of a panel's query: legend, times, values."""
        query = re.sub(r"\$(graph|server)", ".*", target["expr"]).replace("$__rate_interval", "1m")
        params = {"query": query, "start": self._start, "end": self._end, "step": self.step}
        with urllib.request.urlopen(
            f"{self._url}/api/v1/query_range?{urllib.parse.urlencode(params)}"
        ) as answer:
            found = json.load(answer)["data"]["result"]
        legend = target["legendFormat"].replace("{{", "{").replace("}}", "}")
        return [
            (
                legend.format_map(one["metric"]),
                [float(t) for t, _ in one["values"]],
                [float(v) for _, v in one["values"]],
            )
            for one in found
        ]

    @property
    def times(self) -> np.ndarray:
        """The moments of which each series has a value, or a gap."""
        return self._start + self.step * np.arange(int((self._end - self._start) / self.step) + 1)


def text_of(value: float, unit: str) -> str:
    """A value as Grafana writes it."""
    if math.isnan(value):
        return ""
    if unit == "percentunit":
        return f"{value * 100:.3g}%"
    if unit == "s":
        for least, name in ((3600, "h"), (60, "min"), (1, "s"), (0.001, "ms")):
            if abs(value) >= least:
                return f"{value / least:.3g} {name}"
        return "0"
    if abs(value) >= 10_000:
        return f"{value / 1000:.3g} K"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def draw_all(url: str, minutes: float) -> None:
    """Draw all boards, over a window that ends now."""
    for file in BOARDS:
        draw(file, Prometheus(url, minutes))


def draw(file: Path, prometheus: Prometheus) -> None:
    """Draw a board."""
    board = json.loads(file.read_text())
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    figure = plt.figure(figsize=(16, _INCHES * height + 0.7), facecolor=BACK)
    inches = figure.get_figheight()
    figure.text(0.012, 1 - 0.35 / inches, board["title"], color=TEXT, size=17, weight="bold", va="center")
    grid = GridSpec(
        height, 24, figure, left=0.008, right=0.992, top=1 - 0.7 / inches, bottom=0.1 / inches,
        wspace=0.12, hspace=0.35,
    )  # fmt: skip
    for panel in board["panels"]:
        place = panel["gridPos"]
        frame = figure.add_subplot(
            grid[place["y"] : place["y"] + place["h"], place["x"] : place["x"] + place["w"]]
        )
        frame.set(facecolor=PANEL, xticks=[], yticks=[], xlim=(0, 1), ylim=(0, 1))
        for spine in frame.spines.values():
            spine.set_color(LINE)
        frame.text(
            0.2 / _width(panel), 1 - 0.22 / _height(panel), panel["title"],
            color=TEXT, size=11, weight="bold", va="center",
        )  # fmt: skip
        found = [series for target in panel["targets"] for series in prometheus.series(target)]
        assert found, f"{file.stem}: {panel['title']} has no data"
        _DRAW[panel["type"]](frame, panel, sorted(found), prometheus)
    figure.savefig(DOCS / f"board-{file.stem}.png", dpi=80, facecolor=BACK)
    plt.close(figure)


def _width(panel: dict[str, Any]) -> float:
    """Inches; what is drawn in a panel is placed in shares of it."""
    return 16 / 24 * panel["gridPos"]["w"]


def _height(panel: dict[str, Any]) -> float:
    return _INCHES * panel["gridPos"]["h"]


def _overrides(panel: dict[str, Any], name: str, key: str) -> Any:
    """What the overrides of a panel say of a series; None if nothing."""
    for override in panel["fieldConfig"]["overrides"]:
        if re.search(override["matcher"]["options"].strip("/"), name):
            for each in override["properties"]:
                if each["id"] == key:
                    return each["value"]
    return None


def _color(panel: dict[str, Any], name: str, number: int) -> str:
    """The color of a series: that of an override, else the next one."""
    fixed = _overrides(panel, name, "color")
    return COLORS[number % len(COLORS)] if fixed is None else NAMED[fixed["fixedColor"]]


def _number(frame: Axes, panel: dict[str, Any], found: list[Series], prometheus: Prometheus) -> None:
    [(_, times, values)] = found
    last = [value for value in values if not math.isnan(value)][-1]
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    color = NAMED[[step["color"] for step in steps if step["value"] is None or last >= step["value"]][-1]]
    chart = frame.inset_axes((0, 0, 1, 0.36))
    chart.set_axis_off()
    chart.fill_between(times, values, color=color, alpha=0.25, lw=0)
    chart.plot(times, values, color=color, lw=1)
    chart.set_ylim(0, max([v for v in values if not math.isnan(v)] or [1]) * 1.3 or 1)
    chart.set_xlim(prometheus.times[0], prometheus.times[-1])
    shown = text_of(last, panel["fieldConfig"]["defaults"]["unit"])
    frame.text(0.5, 0.57, shown, color=color, size=26, weight="bold", ha="center", va="center")


def _chart(frame: Axes, panel: dict[str, Any], prometheus: Prometheus, below: float = 0.0) -> Axes:
    """The axes of a chart.

    Args:
        below: inches below the labels of its times.
    """
    width, height = _width(panel), _height(panel)
    bottom = (below + 0.32) / height
    chart = frame.inset_axes((0.62 / width, bottom, 1 - 0.82 / width, 1 - 0.52 / height - bottom))
    chart.set_facecolor(PANEL)
    chart.set_axisbelow(True)
    chart.tick_params(colors=TEXT, labelsize=9.5, length=0)
    chart.grid(color=LINE, lw=0.6)
    for spine in chart.spines.values():
        spine.set_visible(False)
    times = prometheus.times
    chart.set_xlim(times[0], times[-1])
    minutes = (times[-1] - times[0]) / 60
    chart.xaxis.set_major_locator(MultipleLocator(60 * max(1, round(minutes / 5))))
    chart.xaxis.set_major_formatter(FuncFormatter(lambda t, _: time.strftime("%H:%M", time.gmtime(t))))
    return chart


def _lines(frame: Axes, panel: dict[str, Any], found: list[Series], prometheus: Prometheus) -> None:
    below = _legend(frame, panel, [name for name, *_ in found])
    chart = _chart(frame, panel, prometheus, below)
    defaults = panel["fieldConfig"]["defaults"]
    colors = [_color(panel, name, number) for number, (name, *_) in enumerate(found)]
    times = prometheus.times
    if defaults.get("custom", {}).get("stacking", {}).get("mode") == "normal":
        stack = [np.nan_to_num(_at(times, *series[1:])) for series in found]
        chart.stackplot(times, stack, colors=colors, alpha=0.75, lw=0)
        highest = float(np.sum(stack, axis=0).max())
    else:
        for series, color in zip(found, colors, strict=True):
            style = "--" if _overrides(panel, series[0], "custom.lineStyle") else "-"
            chart.plot(times, _at(times, *series[1:]), color=color, lw=1.5, ls=style)
        highest = max((v for *_, values in found for v in values if not math.isnan(v)), default=0)
    chart.set_ylim(0, 1.1 * highest or 1)
    chart.yaxis.set_major_locator(MaxNLocator(4, integer=defaults.get("decimals") == 0))
    chart.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text_of(value, defaults["unit"])))


def _legend(frame: Axes, panel: dict[str, Any], names: list[str]) -> float:
    """Draw the legend; its inches."""
    longest = max(map(len, names))
    columns = max(1, min(4, int(_width(panel) / (0.45 + 0.085 * longest))))
    rows = min(_LEGEND_ROWS, math.ceil(len(names) / columns))
    shown = names if len(names) <= rows * columns else names[: rows * columns - 1]
    for number, name in enumerate(shown):
        row, column = divmod(number, columns)
        x, y = 0.2 / _width(panel) + column / columns, (0.2 * (rows - row) - 0.06) / _height(panel)
        color = _color(panel, name, number)
        frame.plot([x, x + 0.16 / _width(panel)], [y, y], color=color, lw=3, clip_on=False)
        frame.text(x + 0.24 / _width(panel), y, name, color=TEXT, size=9.5, va="center")
    if len(shown) < len(names):
        x, y = 0.2 / _width(panel) + (columns - 1) / columns, 0.14 / _height(panel)
        frame.text(x, y, f"and {len(names) - len(shown)} more", color=TEXT, size=9.5, va="center")
    return 0.2 * rows + 0.06


def _states(frame: Axes, panel: dict[str, Any], found: list[Series], prometheus: Prometheus) -> None:
    """Grafana's timeline of states: a row for each series."""
    [mapping] = panel["fieldConfig"]["defaults"]["mappings"]
    chart = _chart(frame, panel, prometheus)
    times = prometheus.times
    for row, (name, known, values) in enumerate(reversed(found)):
        states = _at(times, known, values)
        for at, state in zip(times, states, strict=True):
            if not math.isnan(state):
                color = NAMED[mapping["options"][f"{state:g}"]["color"]]
                chart.barh(row, prometheus.step, 0.5, at, color=color, alpha=0.75)
        chart.text(times[0], row + 0.36, name, color=TEXT, size=9.5, va="center")
    chart.set(yticks=[], ylim=(-0.5, len(found) - 0.4))


def _heatmap(frame: Axes, panel: dict[str, Any], found: list[Series], prometheus: Prometheus) -> None:
    """Grafana's heatmap of buckets: each row is what a bucket has more than the one below it."""
    chart = _chart(frame, panel, prometheus)
    ordered = sorted(found, key=lambda series: float(series[0]))
    times = prometheus.times
    rows = np.array([np.nan_to_num(_at(times, *series[1:])) for series in ordered])
    inside = np.clip(np.diff(rows, axis=0, prepend=0), 0, None) ** 0.5
    used = np.flatnonzero(inside.sum(axis=1))
    first, last = max(0, used[0] - 1), min(len(ordered), used[-1] + 2)
    ordered, inside = ordered[first:last], inside[first:last]
    edges = np.arange(len(ordered) + 1)
    chart.pcolormesh(
        [*times, times[-1] + prometheus.step], edges, np.ma.masked_equal(inside, 0), cmap="Blues_r"
    )
    unit = panel["fieldConfig"]["defaults"]["unit"]
    every = 1 if len(ordered) <= 9 else 2
    chart.set_yticks(edges[1::every], [_bound(name, unit) for name, *_ in ordered][::every])


def _bound(name: str, unit: str) -> str:
    return "+Inf" if name == "+Inf" else text_of(float(name), unit)


def _at(times: np.ndarray, known: list[float], values: list[float]) -> np.ndarray:
    """The values on a grid; where a series has none, a gap."""
    found = np.full(len(times), np.nan)
    found[np.round((np.array(known) - times[0]) / (times[1] - times[0])).astype(int)] = values
    return found


_DRAW = {"stat": _number, "timeseries": _lines, "heatmap": _heatmap, "state-timeline": _states}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--minutes", type=float, default=10)
    given = parser.parse_args()
    draw_all(given.url, given.minutes)
