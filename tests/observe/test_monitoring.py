"""`gym-serve monitoring` against a real Prometheus, in a run with load and faults."""

import asyncio
import json
import math
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from support.monitored import Endpoint, Monitored
from typer.testing import CliRunner

from gym_serve import Gym
from gym_serve.cli import local_ray, main
from gym_serve.client import loop
from gym_serve.cluster.starting import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's prometheus"),
    pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning"),
]

NAME = "monitored"
SECONDS = 80
FIRING = {"GymServeFailureRate", "GymServeEndpointDown", "GymServeSessionsLost"}
"""Alerts whose faults the first run has."""
QUICKER = {
    **{f"[{minutes}m]": "[30s]" for minutes in (5, 10, 15)},
    "[6h] offset 30m": "[60s] offset 30s",
    "offset 10m": "offset 30s",
}
"""Time spans of the rules, and those that the tests have; tests/observe/alerts.yml tests them as they are."""


class Prometheus:
    """A Prometheus with a configuration of ours, only quicker."""

    def __init__(self, folder: Path) -> None:
        config = folder / "prometheus.yml"
        config.write_text(config.read_text().replace("10s", "3s"))  # busy nodes take a second
        rules = folder / "rules.yml"
        text = re.sub(r"for: \w+", "for: 0s", rules.read_text()).replace("> 0.1", "> 0.01")
        for slow, quick in QUICKER.items():
            text = text.replace(slow, quick)
        rules.write_text(text)
        address = f"127.0.0.1:{free_port()}"
        command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder}/data"]
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen([*command, f"--web.listen-address={address}"], stderr=log)
        self._http = httpx.Client(base_url=f"http://{address}/api/v1", trust_env=False)

    def stop(self) -> None:
        self._http.close()
        self._process.terminate()
        self._process.wait()

    def ask(self, path: str, **params: str) -> Any:
        try:
            answer = self._http.get(path, params=params)
        except httpx.TransportError:  # it is starting
            return None
        assert answer.status_code in (200, 503), answer.text
        return answer.json()["data"] if answer.status_code == 200 else None

    def query(self, query: str) -> dict[str, float]:
        """The values of an instant query by the labels of their series, without those that are no number."""
        found = (self.ask("query", query=query) or {"result": []})["result"]
        values = {json.dumps(series["metric"]): float(series["value"][1]) for series in found}
        return {labels: value for labels, value in values.items() if not math.isnan(value)}

    def firing(self) -> set[str]:
        """Names of the alerts that fire."""
        alerts = (self.ask("alerts") or {"alerts": []})["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    with Monitored(tmp_path_factory.mktemp("monitored")) as made:
        yield made


@pytest.fixture(scope="module")
def gym(deploy: Any, monitored: Monitored) -> Gym:
    return deploy(monitored.graph(), name=NAME)


@pytest.fixture(scope="module")
def folder(gym: Gym, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `gym-serve monitoring` writes for the cluster of the tests."""
    folder = tmp_path_factory.mktemp("monitoring")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_ray, "connect", lambda address: None)
        result = CliRunner().invoke(main, ["monitoring", str(folder), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["follows_nodes"] is False  # the cluster of the tests has no dashboard
    return folder


@pytest.fixture(scope="module")
def prometheus(folder: Path) -> Iterator[Prometheus]:
    started = Prometheus(folder)
    try:
        yield started
    finally:
        started.stop()


def wanted(folder: Path) -> dict[str, str]:
    """Every query that must have data, by its place."""
    found = {}
    for file in folder.glob("boards/*.json"):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel["targets"]:
                place = f"{file.stem}: {panel['title']} {target['refId']}"
                found[place] = re.sub(r"\$(graph|server)", ".*", target["expr"]).replace(
                    "$__rate_interval", "1m"
                )
    rules = [
        rule
        for group in yaml.safe_load((folder / "rules.yml").read_text())["groups"]
        for rule in group["rules"]
    ]
    return found | {rule["record"]: rule["record"] for rule in rules if "record" in rule}


def serves_own() -> dict[str, str]:
    """The queries of Ray's own boards that are fed, by their titles."""
    from ray.dashboard.modules.metrics.dashboards import serve_dashboard_panels as applications
    from ray.dashboard.modules.metrics.dashboards import serve_deployment_dashboard_panels as deployments

    panels = [
        *next(value for name, value in vars(applications).items() if name.endswith("_GRAFANA_PANELS")),
        *deployments.SERVE_DEPLOYMENT_GRAFANA_PANELS,
    ]
    fed = re.compile(r"(qps|latency|queue size|running requests) .*(deployment|replica)")
    return {
        panel.title: target.expr.replace("{{", "{")
        .replace("}}", "}")
        .replace("{global_filters}", f'application="{NAME}",deployment!="gateway"')
        .replace('route=~"$Route",', "")
        .replace('application=~"$Application",', "")
        for panel in panels
        if fed.search(panel.title.lower()) and "multiplexed" not in panel.title.lower()
        for target in panel.targets[:1]
    }


def test_every_query_has_data_and_alerts_fire(
    gym: Gym, monitored: Monitored, folder: Path, prometheus: Prometheus
) -> None:
    queries, own = wanted(folder), serves_own()
    assert len(queries) > 40
    assert len(own) >= 8
    missing = {**queries, **own}
    firing: set[str] = set()
    busiest: dict[str, float] = {}

    async def run() -> None:
        looking = asyncio.create_task(asyncio.to_thread(look))
        await monitored.run(gym, SECONDS, looking.done)
        await looking

    def look() -> None:
        ends = time.monotonic() + SECONDS
        while (missing or not firing >= FIRING) and time.monotonic() < ends:
            time.sleep(1)
            for place, query in list(missing.items()):
                values = prometheus.query(query)
                if place in own:  # no false zero: all are under load
                    values = {labels: value for labels, value in values.items() if value > 0}
                    busiest[place] = max(values.values(), default=0)
                if values:
                    del missing[place]
            firing.update(prometheus.firing())

    loop.wait(run())
    assert missing == {}
    assert firing >= FIRING


def test_serves_own_counter_counts_every_call(gym: Gym, prometheus: Prometheus) -> None:
    """After the run: what Serve's board sums up is what the servers have counted."""
    # The judge is inline, and so no deployment. A replica of sums was killed, perhaps between two numbers.
    # A route with a slash in front, or none, is of the one call with which a process finds the replicas.
    ours = f'sum by (server) (ray_gym_serve_calls_total{{graph="{NAME}", server!~"judge|sums"}})'
    serves = (
        "sum by (deployment) (ray_serve_deployment_request_counter_total"
        f'{{application="{NAME}", deployment!~"gateway|sums", route=~"[^/].*"}})'
    )
    ends = time.monotonic() + 40
    while True:
        counted = [sorted(prometheus.query(query).values()) for query in (ours, serves)]
        if (counted[0] == counted[1] and counted[0]) or time.monotonic() > ends:
            break
        time.sleep(1)
    assert counted[0] == counted[1]
    assert len(counted[0]) == 2


async def test_a_wrong_answer_key_and_a_model_that_hangs_fire(
    gym: Gym, monitored: Monitored, prometheus: Prometheus
) -> None:
    """The faults of the other alerts: rewards collapse; then nothing ends, and calls queue."""
    error = 0
    over = False

    def rows() -> Iterator[dict[str, Any]]:
        while not over:
            yield {"responses_create_params": {"input": "What is 20 + 3?"}, "sum": 23 + error}

    async def load(concurrency: int) -> None:
        async for _ in gym.rollouts(rows(), concurrency=concurrency):
            pass

    async def until(condition: Callable[[], bool]) -> None:
        ends = time.monotonic() + 150
        while not await asyncio.to_thread(condition):
            assert time.monotonic() < ends
            await asyncio.sleep(1)

    for endpoint in monitored.endpoints.values():  # the first run may have ended with one of them down
        endpoint.kill()
        endpoint.start()
    loads = [asyncio.create_task(load(8))]
    reward = "agent:gym_serve_rollout_reward:mean15m"
    good = f"{reward} > 0.2 and avg_over_time({reward}[60s] offset 30s) > 0.2"
    hanging: list[Endpoint] = []
    try:
        await until(lambda: bool(prometheus.query(good)))
        error = 1
        await until(lambda: "GymServeRewardCollapsed" in prometheus.firing())
        for name in ("first", "second"):
            hanging.append(monitored.endpoints[name])
            hanging[-1].hang()
        loads.append(asyncio.create_task(load(40)))
        await until(lambda: "GymServeQueueGrowing" in prometheus.firing())
        await until(lambda: "GymServeNoRollouts" in prometheus.firing())
    finally:
        over = True
        for endpoint in hanging:
            endpoint.hang()  # goes on
        await asyncio.gather(*loads)
