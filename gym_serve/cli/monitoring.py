"""`gym-serve monitoring`: what Prometheus and Grafana need to watch the graphs of a cluster."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

import gym_serve.observe
from gym_serve.cli import local_ray
from gym_serve.cli.lifecycle import ClusterOption
from gym_serve.cli.options import JsonOption
from gym_serve.cli.printing import echo, print_json

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
