"""Write the Grafana boards that `gym-serve monitoring` hands out: gym_serve/observe/monitoring/*.json.

    python docs/boards.py

It needs Grafana's Foundation SDK (in the extra ``test``); users of the boards do not. `make dist` puts them
into the wheel; the repository has none. `docs/board_pictures.py` draws them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueGraphMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DynamicConfigValue,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
    VariableOption,
    VariableRefresh,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

FOLDER = Path(__file__).parents[1] / "gym_serve" / "observe" / "monitoring"
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_RATE = "[$__rate_interval]"
_COLORS = {"scored": "green", "failed": "red", "cancelled": "gray"}
"""Colors of series by the end of their legend."""
_DASHED = ("wanted", "oldest")
"""Series that are dashed, as they often lie on another one, by the end of their legend."""


class Panel(NamedTuple):
    """A panel: a title, what a reader needs to know about it, and its queries with their legends."""

    title: str
    about: str
    unit: str
    queries: Sequence[tuple[str, str]]
    kind: str = "lines"
    """``lines``, ``areas`` (stacked), ``number``, ``heatmap``, or ``states`` (0: down, 1: up)."""
    width: int = 8
    alarming: float | None = None
    """Of a number: the value from which on it is red."""
    whole: bool = False
    """Whether its values are whole numbers."""


def _rate(metric: str, by: str, where: str = "", of: str = "$graph") -> str:
    return f"sum by ({by}) (rate({_series(metric, where, of)}{_RATE}))"


def _series(metric: str, where: str = "", of: str = "$graph") -> str:
    labels = ", ".join(filter(None, (f'graph=~"{of}"', where)))
    return f"ray_gym_serve_{metric}{{{labels}}}"


def _grown(metric: str, window: str, where: str = "") -> str:
    """By how much a counter has grown; one that is new counts as well, as `increase` begins with the second
    value of a series."""
    series = _series(metric, where)
    return f"clamp_min({series} - {series} offset {window}, 0) or {series}"


def _quantile(share: float, metric: str, by: str, where: str = "") -> str:
    return f"histogram_quantile({share}, {_rate(f'{metric}_bucket', f'{by}, le', where)})"


def _quantiles(metric: str, by: str, where: str = "") -> list[tuple[str, str]]:
    name = f"{{{{{by}}}}} "
    return [(_quantile(s / 100, metric, by, where), f"{name}p{s}") for s in (50, 95)]


def _mean(metric: str, by: str, where: str = "") -> str:
    return f"{_rate(f'{metric}_sum', by, where)} / {_rate(f'{metric}_count', by, where)}"


def _share(metric: str, by: str, part: str, whole: str = "") -> str:
    """Share of ``part``; 0 where there is none of it yet."""
    every = _rate(metric, by, whole)
    return f"({_rate(metric, by, part)} or {every} * 0) / {every}"


_ENDED = 'outcome!="cancelled"'
_SCORED = 'outcome="scored"'
_INPUT, _CACHED = 'kind="input"', 'kind="cached"'
_SERVER = 'server=~"$server"'

OVERVIEW = [
    Panel(
        "Rollouts per second",
        "Rollouts that ended, of all agents.",
        "short",
        [(f"sum(rate({_series('rollouts_total')}{_RATE}))", "rollouts/s")],
        "number",
        4,
    ),
    Panel(
        "Failed",
        "Share of the rollouts that ended with a failure; cancelled ones left out.",
        "percentunit",
        [
            (
                f"1 - sum(rate({_series('rollouts_total', _SCORED)}{_RATE}))"
                f" / sum(rate({_series('rollouts_total', _ENDED)}{_RATE}))",
                "failed",
            )
        ],
        "number",
        4,
        alarming=0.1,
    ),
    Panel(
        "Mean reward",
        "Of scored rollouts.",
        "short",
        [
            (
                f"sum(rate({_series('rollout_reward_sum')}{_RATE}))"
                f" / sum(rate({_series('rollout_reward_count')}{_RATE}))",
                "reward",
            )
        ],
        "number",
        4,
    ),
    Panel(
        "In flight",
        "Rollouts that drivers have started and that have not ended.",
        "short",
        [(f"sum({_series('driver_in_flight')})", "rollouts")],
        "number",
        4,
        whole=True,
    ),
    Panel(
        "Endpoints down",
        "Endpoints of models that calls skip, as they failed.",
        "short",
        [
            (
                f"count(min by (model, endpoint) ({_series('endpoint_up')}) == 0)"
                f" or count({_series('endpoint_up')}) * 0",
                "endpoints",
            )
        ],
        "number",
        4,
        alarming=1,
        whole=True,
    ),
    Panel(
        "Calls that wait",
        "At the replicas of all servers.",
        "short",
        [(f"sum({_series('calls_queued')})", "calls")],
        "number",
        4,
        whole=True,
    ),
    Panel(
        "Rollouts per second by outcome",
        "Scored, failed and cancelled rollouts.",
        "short",
        [(_rate("rollouts_total", "outcome"), "{{outcome}}")],
        "areas",
    ),
    Panel(
        "Failures in 5 minutes",
        "By the failure's class and the episode's stage. docs/errors.md says what to do about each.",
        "short",
        [
            (
                f"topk(8, sum by (class, stage) ({_grown('failures_total', '5m')}) > 0)",
                "{{class}} in {{stage}}",
            )
        ],
        "areas",
        whole=True,
    ),
    Panel(
        "Mean reward by agent",
        "Of scored rollouts.",
        "short",
        [(_mean("rollout_reward", "agent"), "{{agent}}")],
    ),
    Panel(
        "Duration of a rollout", "Median and 95th percentile.", "s", _quantiles("rollout_seconds", "agent")
    ),
    Panel(
        "Duration of a call, p95",
        "In its server, without the wait for its turn.",
        "s",
        [(_quantile(0.95, "call_seconds", "server"), "{{server}}")],
    ),
    Panel(
        "Time to first token",
        "Of streams, and of engines in the graph.",
        "s",
        _quantiles("time_to_first_token_seconds", "model"),
    ),
    Panel(
        "Calls that run",
        "By server, over all of its replicas.",
        "short",
        [(f"sum by (server) ({_series('calls_running')})", "{{server}}")],
        "areas",
        whole=True,
    ),
    Panel(
        "Calls that wait, by server",
        "A queue that grows says which server is too small.",
        "short",
        [(f"sum by (server) ({_series('calls_queued')})", "{{server}}")],
        whole=True,
    ),
    Panel(
        "Replicas",
        "That publish metrics.",
        "short",
        [(f"count by (server) ({_series('calls_running')})", "{{server}}")],
        "areas",
        whole=True,
    ),
    Panel(
        "Tokens per second",
        "Input (of which cached were in a prefix cache) and output.",
        "short",
        [(_rate("tokens_total", "model, kind"), "{{model}} {{kind}}")],
    ),
    Panel(
        "Endpoints",
        "Up: calls go to it. Down: calls skip it, as it failed.",
        "short",
        [(f"min by (model, endpoint) ({_series('endpoint_up')})", "{{model}} {{endpoint}}")],
        "states",
    ),
    Panel(
        "Endpoints that refuse calls",
        "Until they take calls again, as they said.",
        "s",
        [(f"max by (model, endpoint) ({_series('endpoint_wait_seconds')})", "{{model}} {{endpoint}}")],
    ),
    Panel(
        "Model requests that were repeated",
        "Per second, by endpoint and reason.",
        "short",
        [(_rate("model_retries_total", "endpoint, reason"), "{{endpoint}} {{reason}}")],
        "areas",
    ),
]

SERVER = [
    Panel(
        "Calls per second",
        "By operation.",
        "short",
        [(_rate("calls_total", "server, op", _SERVER), "{{server}} {{op}}")],
        "areas",
    ),
    Panel(
        "Calls that failed",
        "Share with a status of 500 or more: the server, or what it calls, failed.",
        "percentunit",
        [(_share("calls_total", "server", f'{_SERVER}, status=~"5.."', _SERVER), "{{server}}")],
    ),
    Panel(
        "CPU by stage",
        "Cores that a server uses, by what it does: 1 is a full event loop, and wants more replicas.",
        "short",
        [(_rate("cpu_seconds_total", "server, stage", _SERVER), "{{server}} {{stage}}")],
        "areas",
    ),
    Panel(
        "Duration of a call, median",
        "By operation, without the wait for its turn.",
        "s",
        [(_quantile(0.5, "call_seconds", "server, op", _SERVER), "{{server}} {{op}}")],
    ),
    Panel(
        "Duration of a call, p95",
        "By operation, without the wait for its turn.",
        "s",
        [(_quantile(0.95, "call_seconds", "server, op", _SERVER), "{{server}} {{op}}")],
    ),
    Panel(
        "Durations",
        "Calls by their duration.",
        "s",
        [(f"sum by (le) (increase({_series('call_seconds_bucket', _SERVER)}{_RATE}))", "{{le}}")],
        "heatmap",
    ),
    Panel(
        "Calls that run, by replica",
        "An uneven picture is normal where sessions hold calls to their replica.",
        "short",
        [(f"sum by (server, replica) ({_series('calls_running', _SERVER)})", "{{server}} {{replica}}")],
        whole=True,
    ),
    Panel(
        "Calls that wait, by replica",
        "For their turn, as max_ongoing_requests run already.",
        "short",
        [(f"sum by (server, replica) ({_series('calls_queued', _SERVER)})", "{{server}} {{replica}}")],
        whole=True,
    ),
    Panel(
        "Sessions, by replica",
        "Live sessions of environments.",
        "short",
        [(f"sum by (server, replica) ({_series('sessions', _SERVER)})", "{{server}} {{replica}}")],
        whole=True,
    ),
    Panel(
        "Boxes, by state",
        "Live, kept warm, starting, and takes that wait for one; most: that there may be.",
        "short",
        [(f"sum by (server, state) ({_series('boxes', _SERVER)})", "{{server}} {{state}}")],
        whole=True,
    ),
    Panel(
        "Tool calls per second",
        "By tool and status.",
        "short",
        [(_rate("tool_calls_total", "tool, status", _SERVER), "{{tool}} {{status}}")],
        "areas",
    ),
    Panel(
        "Verification", "Median and 95th percentile.", "s", _quantiles("verify_seconds", "server", _SERVER)
    ),
    Panel(
        "Judge calls per second",
        "By judge and outcome.",
        "short",
        [(_rate("judge_calls_total", "judge, outcome", _SERVER), "{{judge}} {{outcome}}")],
        "areas",
    ),
    Panel(
        "Sessions lost",
        "In the last 10 minutes, with a replica that died.",
        "short",
        [(f"sum by (server) ({_grown('sessions_lost_total', '10m', _SERVER)})", "{{server}}")],
        whole=True,
    ),
    Panel(
        "Sandboxed processes",
        "By replica; those that wait for a program included.",
        "short",
        [(f"sum by (server, replica) ({_series('sandbox_running', _SERVER)})", "{{server}} {{replica}}")],
        whole=True,
    ),
    Panel(
        "Replicas: there, and wanted by autoscaling",
        "Serve's own series; a server without autoscaling wants none. gym-serve status says why.",
        "short",
        [
            (
                "sum by (deployment)"
                ' (ray_serve_deployment_replica_healthy{application=~"$graph", deployment=~"$server"})',
                "{{deployment}}",
            ),
            (
                "max by (deployment)"
                ' (ray_serve_autoscaling_desired_replicas{application=~"$graph", deployment=~"$server"})',
                "{{deployment}} wanted",
            ),
        ],
        whole=True,
    ),
]

TRAINING = [
    Panel(
        "Mean reward",
        "Of scored rollouts, by agent.",
        "short",
        [(_mean("rollout_reward", "agent"), "{{agent}}")],
    ),
    Panel(
        "Rewards",
        "Rollouts by their reward.",
        "short",
        [(f"sum by (le) (increase({_series('rollout_reward_bucket')}{_RATE}))", "{{le}}")],
        "heatmap",
    ),
    Panel(
        "Rollouts without a sample",
        "Share that failed: they are masked, and nothing is learnt from them.",
        "percentunit",
        [(_share("rollouts_total", "agent", 'outcome="failed"', _ENDED), "{{agent}}")],
    ),
    Panel(
        "Policy version",
        "Number at the end of the version of a model's weights. Replicas that differ are being updated.",
        "short",
        [
            (f"max by (model) ({_series('policy_version')})", "{{model}} newest"),
            (f"min by (model) ({_series('policy_version')})", "{{model}} oldest"),
        ],
        whole=True,
    ),
    Panel(
        "Update of the weights",
        "Median and 95th percentile, seen by the driver.",
        "s",
        _quantiles("weights_update_seconds", "model"),
    ),
    Panel(
        "Staleness",
        "Versions of the policy from the beginning of a group until the trainer took it, with Gym.stream.",
        "short",
        [
            (_mean("staleness", "graph"), "{{graph}} mean"),
            (_quantile(0.95, "staleness", "graph"), "{{graph}} p95"),
        ],
    ),
    Panel(
        "In flight",
        "Rollouts that drivers have started and that have not ended.",
        "short",
        [(f"sum by (graph) ({_series('driver_in_flight')})", "{{graph}}")],
        whole=True,
    ),
    Panel(
        "Rollouts per second",
        "By agent and outcome.",
        "short",
        [(_rate("rollouts_total", "agent, outcome"), "{{agent}} {{outcome}}")],
        "areas",
    ),
    Panel(
        "Duration of a rollout", "Median and 95th percentile.", "s", _quantiles("rollout_seconds", "agent")
    ),
    Panel(
        "Model calls of a rollout",
        "Mean, by agent.",
        "short",
        [(_mean("rollout_turns", "agent"), "{{agent}}")],
    ),
    Panel(
        "Output tokens per second",
        "What the policy writes, by model.",
        "short",
        [(_rate("tokens_total", "model", 'kind="output"'), "{{model}}")],
    ),
    Panel(
        "Input tokens from the prefix cache",
        "Share of the input.",
        "percentunit",
        [
            (
                f"({_rate('tokens_total', 'model', _CACHED)} or {_rate('tokens_total', 'model', _INPUT)} * 0)"
                f" / {_rate('tokens_total', 'model', _INPUT)}",
                "{{model}}",
            )
        ],
    ),
]

BOARDS = {
    "overview": (
        "gym_serve: overview",
        "What the graphs of a cluster do, and whether they are well.",
        OVERVIEW,
    ),
    "server": ("gym_serve: servers", "One server of a graph, or some of them.", SERVER),
    "training": ("gym_serve: training", "What a trainer learns from: rewards, samples, weights.", TRAINING),
}


def board(name: str) -> str:
    """A board as Grafana's JSON."""
    title, about, panels = BOARDS[name]
    made = (
        dashboard.Dashboard(title)
        .uid(f"gym-serve-{name}")
        .description(about)
        .tags(["gym_serve"])
        .refresh("10s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("gym_serve")
            .type(DashboardLinkType.DASHBOARDS)
            .tags(["gym_serve"])
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(_variable("graph", "label_values(ray_gym_serve_calls_running, graph)"))
    )
    if name == "server":
        labels = 'label_values(ray_gym_serve_calls_running{graph=~"$graph"}, server)'
        made.with_variable(_variable("server", labels))
    for number, panel in enumerate(panels, start=1):
        made.with_panel(_panel(panel).id(number))
    return JSONEncoder(sort_keys=True, indent=2).encode(made.build()) + "\n"


def _variable(name: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(name.capitalize())
        .datasource(_SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .include_all(True)
        .all_value(".*")
        .multi(True)
        .current(VariableOption(text="All", value="$__all"))
    )


def _panel(panel: Panel) -> Any:
    made = _KINDS[panel.kind](panel)
    made.title(panel.title).description(panel.about).unit(panel.unit).datasource(_SOURCE)
    made.span(panel.width).height(4 if panel.kind == "number" else 8)
    if panel.whole:
        made.decimals(0)
    for letter, (query, legend) in zip("ABCD", panel.queries, strict=False):
        target = prometheus.Dataquery().expr(query).legend_format(legend).ref_id(letter).datasource(_SOURCE)
        made.with_target(target.format(PromQueryFormat.HEATMAP) if panel.kind == "heatmap" else target)
    return made


def _number(panel: Panel) -> stat.Panel:
    made = stat.Panel().graph_mode(BigValueGraphMode.AREA)
    made.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    steps = [Threshold(value=None, color="green")]
    if panel.alarming is not None:
        steps.append(Threshold(value=panel.alarming, color="red"))
    return made.thresholds(dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))


def _heatmap(panel: Panel) -> heatmap.Panel:
    colors = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Blues").steps(64)
    return heatmap.Panel().color(colors.exponent(0.5).fill("blue")).calculate(False)


def _lines(panel: Panel) -> timeseries.Panel:
    legend = common.VizLegendOptions().show_legend(True)
    legend.display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM).calcs([])
    tooltip = common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI)
    made = timeseries.Panel().legend(legend).tooltip(tooltip).show_points(VisibilityMode.NEVER)
    made.line_width(1).fill_opacity(0)
    for name, color in _COLORS.items():
        fixed = {"mode": "fixed", "fixedColor": color}
        made.override_by_regexp(f"/{name}$/", [DynamicConfigValue(id_val="color", value=fixed)])
    for name in _DASHED:
        dashes = {"fill": "dash", "dash": [6, 6]}
        made.override_by_regexp(f"/{name}$/", [DynamicConfigValue(id_val="custom.lineStyle", value=dashes)])
    return made.min(0) if panel.unit in ("s", "percentunit") else made


def _areas(panel: Panel) -> timeseries.Panel:
    return _lines(panel).fill_opacity(60).stacking(common.StackingConfig().mode(StackingMode.NORMAL))


def _states(panel: Panel) -> statetimeline.Panel:
    up = {"0": ValueMappingResult("down", "red", index=0), "1": ValueMappingResult("up", "green", index=1)}
    hidden = common.VizLegendOptions().show_legend(False)
    hidden.display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM).calcs([])
    made = statetimeline.Panel().mappings([ValueMap(up)]).legend(hidden)
    return made.show_value(VisibilityMode.NEVER).row_height(0.8).fill_opacity(70).line_width(0)


_KINDS = {"lines": _lines, "areas": _areas, "number": _number, "heatmap": _heatmap, "states": _states}

if __name__ == "__main__":
    for name in BOARDS:
        (FOLDER / f"{name}.json").write_text(board(name), encoding="utf-8")
