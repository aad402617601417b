"""`gym-serve monitoring`: what Prometheus and Grafana need to watch the graphs of a cluster.

`gym-serve top`: what a running graph does, by its ``/stats``, drawn anew every second.

The page is a pure function of the latest answer and the one before (`page`).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

import gym_serve.observe
from gym_serve.cli import local_ray
from gym_serve.cli.lifecycle import ClusterOption, running
from gym_serve.cli.options import JsonOption, Running, TokenOption, UrlOption
from gym_serve.cli.printing import echo, new_console, print_json, shortened, table_of
from gym_serve.types.errors import GymError, NotFound

if TYPE_CHECKING:
    from gym_serve.client import Gym


_SHIPPED = Path(gym_serve.observe.__file__).parent / "monitoring"
_SCRAPE = "10s"
"""How often Ray's nodes pass on what replicas publish: to ask more often gives the same numbers."""
_SOURCE = "Prometheus"
"""Name of the data source; Ray's own boards look for this one."""


def monitoring(
    folder: Annotated[
        Path,
        typer.Argument(metavar="[FOLDER]", help="Where to write. Files of an earlier call are replaced."),
    ] = Path("monitoring"),
    *,
    address: ClusterOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a configuration for Prometheus, with recording rules and alerts, and boards for Grafana.

    They watch all graphs of a running Ray cluster.

    Exit status: 0, or 1 if there is no Ray.

    Example: gym-serve monitoring
    """
    local_ray.connect(address)
    from gym_serve.cluster.serve_compat import metrics_targets, ray_boards

    discovery, targets = metrics_targets()
    folder = folder.absolute()
    _write(folder, discovery, targets, ray_boards())
    if as_json:
        print_json({"ok": True, "folder": str(folder), "follows_nodes": discovery is not None})
        return
    echo(f"prometheus --config.file={folder}/prometheus.yml")
    echo(f"GF_PATHS_PROVISIONING={folder}/grafana grafana server")
    if not any(folder.glob("boards/*.json")):
        echo("This checkout has no boards: `python docs/boards.py` makes those that the wheel has.", err=True)
    if discovery is None:
        echo(
            "Prometheus will ask the nodes of now: this machine has no list of Ray's that follows them. "
            "Call this again on the head node, with its dashboard, or after a node has joined.",
            err=True,
        )


def _write(folder: Path, discovery: Path | None, targets: list[str], ray_boards: Path | None) -> None:
    boards = folder / "boards"
    boards.mkdir(parents=True, exist_ok=True)
    for file in _SHIPPED.glob("*.json"):
        shutil.copy(file, boards)
    shutil.copy(_SHIPPED / "rules.yml", folder)
    _write_yaml(folder / "prometheus.yml", _prometheus(discovery, targets))
    source = {"name": _SOURCE, "type": "prometheus", "url": "http://127.0.0.1:9090", "isDefault": True}
    source["jsonData"] = {"timeInterval": _SCRAPE}
    _write_yaml(folder / "grafana/datasources/prometheus.yml", {"apiVersion": 1, "datasources": [source]})
    providers = [
        {"name": name, "folder": name, "options": {"path": str(place)}}
        for name, place in {"gym_serve": boards, "Ray": ray_boards}.items()
        if place is not None
    ]
    _write_yaml(folder / "grafana/dashboards/boards.yml", {"apiVersion": 1, "providers": providers})


def _prometheus(discovery: Path | None, targets: list[str]) -> dict[str, Any]:
    discovery_config: dict[str, Any] = {"static_configs": [{"targets": targets}]}
    if discovery is not None:
        discovery_config = {"file_sd_configs": [{"files": [str(discovery)]}]}
    return {
        "global": {"scrape_interval": _SCRAPE, "evaluation_interval": _SCRAPE},
        "rule_files": ["rules.yml"],
        "scrape_configs": [{"job_name": "ray", **discovery_config}],
    }


def _write_yaml(file: Path, content: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


_PATIENCE = 30.0  # seconds without an answer after which a graph is gone
_BOLD, _BAD, _FAINT = "bold", "bold red", "dim"
_FULL = 0.9  # load from which a server is marked
_MOST_FAILURES = 6
_COLUMNS = ("server", "replicas", "load", "by", "running", "queued", "calls/s", "sessions", "cores")


def top(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="A running graph; not needed if only one runs."),
    ] = None,
    *,
    address: Annotated[
        str | None,
        typer.Option(
            "--address", metavar="HOST:PORT", help="Ray cluster; by default the one that runs here."
        ),
    ] = None,
    url: UrlOption = None,
    auth_token: TokenOption = None,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two updates.")] = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Show what a running graph does: rollouts, failures, and the load of each server.

    The page ends with Ctrl-C, or if the graph is gone. Without a terminal it is printed once; with --json,
    the numbers behind it.

    Exit status: 0, or 1 if the graph does not answer at the start, or any more.

    Example: gym-serve top math
    """
    if url is None and name is None:
        name = _only_graph(address)
    with Running(name, address, url, auth_token).open() as gym:
        if as_json:
            print_json({"ok": True, "name": gym.name, **gym.stats()})
            return
        _watch(gym, interval)


def _only_graph(address: str | None) -> str:
    local_ray.connect(address)
    names = list(running())
    if len(names) != 1:
        raise NotFound(f"choose a running graph by its NAME: {', '.join(names) or 'none runs'}")
    return names[0]


def _watch(gym: Gym, interval: float) -> None:
    """Draw the page until Ctrl-C ends it; without a terminal, once."""
    console = new_console()
    before, stats = gym.stats(), None
    answered = time.monotonic()
    with (
        Live(console=console, screen=console.is_terminal, auto_refresh=False) as live,
        suppress(KeyboardInterrupt),
    ):
        while True:
            time.sleep(interval)
            now, problem = time.monotonic(), ""
            try:
                before, stats = stats or before, gym.stats()
            except GymError as error:
                if isinstance(error, NotFound) or now - answered > _PATIENCE:
                    raise NotFound(f"{gym.name} is gone: {error.message}") from None
                problem = error.message
            seconds, answered = (now - answered, now) if not problem else (0.0, answered)
            live.update(Group(*page(gym.name, before, stats or before, seconds, problem)), refresh=True)
            if not console.is_terminal:
                return


def page(
    name: str, before: dict[str, Any], stats: dict[str, Any], seconds: float, problem: str = ""
) -> list[RenderableType]:
    """The parts of the page. ``before``: the answer of ``/stats`` that rates are taken from."""

    def rates(series: str, by: str) -> dict[str, float]:
        earlier = _sums(before, series, by)
        # A sum falls when a replica ends.
        grown = {
            key: max(0.0, value - earlier.get(key, 0.0)) for key, value in _sums(stats, series, by).items()
        }
        return {key: value / seconds if seconds else 0.0 for key, value in grown.items()}

    outcomes = _sums(stats, "gym_serve_rollouts_total", "outcome")
    rollouts = sum(rates("gym_serve_rollouts_total", "outcome").values())
    counts = [f"{count:,.0f} {outcome}" for outcome, count in sorted(outcomes.items(), reverse=True)]
    rewards, scored = (
        sum(_sums(stats, f"gym_serve_rollout_reward_{part}", "agent").values()) for part in ("sum", "count")
    )
    tokens = rates("gym_serve_tokens_total", "kind")
    failures = sorted(
        _sums(stats, "gym_serve_failures_total", "class").items(), key=lambda item: (-item[1], item[0])
    )
    classes = "  ".join(f"{count:,.0f} {shortened(kind, 24)}" for kind, count in failures[:_MOST_FAILURES])
    suits = f", {stats['concurrency']:,} rollouts suit the graph" if stats.get("concurrency") else ""
    limit = (
        f"{stats['bottleneck']} ({stats['reason']} {stats['load']:.2f}){suits}"
        if stats.get("bottleneck")
        else "idle"
    )
    calls = rates("gym_serve_calls_total", "server")
    return [
        Text(name, _BOLD),
        *([Text(f"no answer: {problem}", _BAD)] if problem else []),
        _fact(
            "rollouts", "  ".join([f"{rollouts:,.1f}/s", f"{stats.get('rollouts', 0):,} running", *counts])
        ),
        _fact("reward", f"{rewards / scored:.3f} mean" if scored else "-"),
        _fact("tokens", "  ".join(f"{rate:,.0f} {kind}/s" for kind, rate in sorted(tokens.items())) or "-"),
        _fact("failures", classes or "none", _BAD if classes else ""),
        _fact("limit", limit),
        Text(),
        _servers(stats.get("servers", {}), calls),
        *_models(stats),
    ]


def _fact(name: str, value: str, style: str = "") -> Text:
    return Text.assemble((f"{name:<10}", _FAINT), (value, style))


def _servers(servers: dict[str, Any], calls: dict[str, float]) -> Table:
    rows = [
        (
            shortened(name, 24),
            f"{server['replicas']}" + (f"+{server['draining']}" if server.get("draining") else ""),
            f"{server['load']:.2f}",
            server.get("reason") or "-",
            *(f"{server[count]:,}" for count in ("running", "waiting")),
            f"{calls.get(name, 0.0):,.1f}",
            f"{server['sessions']:,}",
            f"{server['cpu']:.2f}",
        )
        for name, server in servers.items()
    ]
    table = table_of(_COLUMNS, rows)
    for row, server in zip(table.rows, servers.values(), strict=True):
        row.style = _BAD if server["load"] >= _FULL else ""
    return table


def _models(stats: dict[str, Any]) -> Iterator[Text]:
    waits = _values(stats, "gym_serve_endpoint_wait_seconds", "model", "endpoint")
    for (model, endpoint), values in sorted(
        _values(stats, "gym_serve_endpoint_up", "model", "endpoint").items()
    ):
        up, wait = sum(value > 0 for value in values), max(waits.get((model, endpoint), [0.0]))
        state = "up" if up == len(values) else f"down at {len(values) - up} of {len(values)} replicas"
        state = f"refuses calls for {wait:,.0f} s" if wait else state
        yield _fact(
            shortened(model, 10), f"{shortened(endpoint, 80)}  {state}", "" if state == "up" else _BAD
        )
    for (model,), values in sorted(_values(stats, "gym_serve_policy_version", "model").items()):
        versions = " to ".join(f"{value:g}" for value in sorted({min(values), max(values)}))
        yield _fact(shortened(model, 10), f"policy version {versions}")


def _sums(stats: dict[str, Any], series: str, by: str) -> dict[str, float]:
    return {labels[0]: sum(values) for labels, values in _values(stats, series, by).items()}


def _values(stats: dict[str, Any], series: str, *by: str) -> dict[tuple[str, ...], list[float]]:
    """The values of a series by some of its labels: for a gauge, one of each replica."""
    values: dict[tuple[str, ...], list[float]] = {}
    for point in stats.get("metrics", {}).get(series, ()):
        values.setdefault(tuple(point["labels"].get(label, "") for label in by), []).append(point["value"])
    return values
