"""The boards, rules and alerts that ship: of metrics that exist, and they fire."""

import json
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from gym_serve.observe.catalogue import METRICS

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "gym_serve" / "observe" / "monitoring"
GENERATOR = runpy.run_path(str(ROOT / "docs" / "boards.py")) if find_spec("grafana_foundation_sdk") else {}
BOARDS: dict[str, Any] = {name: json.loads(GENERATOR["board"](name)) for name in GENERATOR.get("BOARDS", ())}
"""By name; none on Python 3.10, which lacks the generator's library."""
ADDED = {"graph", "server", "replica"}
"""Labels that the publisher adds."""

_SERIES = re.compile(r"ray_(gym_serve_\w+)(?:\{([^}]*)\})?")
_BY = re.compile(r"by \(([\w, ]+)\)")

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's prometheus")


def queries() -> Iterator[tuple[str, str]]:
    """Every query that ships, with the place where it stands."""
    for name, board in BOARDS.items():
        for panel in board["panels"]:
            for target in panel["targets"]:
                yield f"{name}: {panel['title']}", target["expr"]
    for group in yaml.safe_load((SHIPPED / "rules.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule.get("alert") or rule["record"], rule["expr"]


def published() -> dict[str, set[str]]:
    """The labels of every series that is published."""
    found: dict[str, set[str]] = {}
    for metric in METRICS:
        labels = {*metric.labels, *ADDED}
        found[metric.name] = labels
        if metric.kind == "histogram":
            found |= {f"{metric.name}_{end}": labels for end in ("sum", "count")}
            found[f"{metric.name}_bucket"] = labels | {"le"}
    return found


@pytest.mark.parametrize(("place", "query"), list(queries()))
def test_queries_read_series_that_are_published(place: str, query: str) -> None:
    known = published()
    named = set()
    for name, where in _SERIES.findall(query):
        assert name in known, f"{place}: {name}"
        assert set(re.findall(r"(\w+)[=!]", where)) <= known[name], f"{place}: {where}"
        named |= known[name]
    for by in _BY.findall(query):
        if named:
            assert set(by.split(", ")) - {"deployment"} <= named, f"{place}: {by}"


@pytest.mark.skipif(not BOARDS, reason="it needs Python 3.11")
def test_every_metric_is_shown() -> None:
    shown = {name for _, query in queries() for name, _ in _SERIES.findall(query)}
    assert {m.name for m in METRICS if not any(name.startswith(m.name) for name in shown)} == set()


@pytest.mark.parametrize("name", BOARDS)
def test_panels_are_told_apart_and_explained(name: str) -> None:
    board = BOARDS[name]
    assert board["uid"] == f"gym-serve-{name}"
    panels = board["panels"]
    for key in ("id", "title"):
        assert len({panel[key] for panel in panels}) == len(panels)
    assert all(panel["description"] and panel["targets"] for panel in panels)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


@needs_promtool
def test_each_alert_fires_on_its_fault_and_on_nothing_else() -> None:
    subprocess.run(["promtool", "check", "rules", SHIPPED / "rules.yml"], check=True)
    faults = Path(__file__).parent / "alerts.yml"
    subprocess.run(["promtool", "test", "rules", faults], check=True)
    rules = [
        rule
        for group in yaml.safe_load((SHIPPED / "rules.yml").read_text())["groups"]
        for rule in group["rules"]
    ]
    tried = {
        test["alertname"]
        for scene in yaml.safe_load(faults.read_text())["tests"]
        for test in scene["alert_rule_test"]
        if test.get("exp_alerts")
    }
    assert tried == {rule["alert"] for rule in rules if "alert" in rule}
