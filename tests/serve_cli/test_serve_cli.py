"""Ray's own command line on graph files: run, status, config, deploy; and what it may show."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from support.processes import RAY_TOKEN, environment

from gym_serve.cluster.starting import free_port

# A Ray of its own, and a process for each command: on a slow machine each of them takes half a minute.
pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SECRET = "sk-not-for-anyones-eyes"

GRAPH = """
http_options: {host: 127.0.0.1, port: HTTP_PORT}
applications:
  - name: cli
    route_prefix: /cli
    import_path: gym_serve.graph:app
    args:
      auth_token: "${CLI_TOKEN}"
      models:
        policy: {type: scripted_model, environments: [mcqa]}
        remote: {type: chat_model, base_url: "http://127.0.0.1:9", model: none, api_key: "${CLI_KEY}"}
      resources:
        mcqa: {type: mcqa, num_replicas: 2}
      agents:
        agent: {type: simple_agent, model: policy, resources: mcqa, max_steps: 3}
        lonely: {type: simple_agent, model: remote, resources: mcqa, max_retries_none: 1}
"""


class Cluster:
    """A Ray of its own, as ``ray start --head`` makes it, with graphs deployed from a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temp = Path(os.environ["RAY_TMPDIR"], "cli", "ray")
        self.http, self.gcs, self.dashboard = free_port(), free_port(), free_port()
        self.env = {
            **environment("RAY_"),
            **RAY_TOKEN,
            "RAY_TMPDIR": str(self.temp.parent),
            "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{self.dashboard}",
            "CLI_TOKEN": SECRET,
            "CLI_KEY": SECRET,
        }
        options = {
            "port": self.gcs,
            "dashboard-port": self.dashboard,
            "ray-client-server-port": free_port(),
            "num-cpus": 8,
        }
        self("ray", "start", "--head", "--disable-usage-stats", *(f"--{k}={v}" for k, v in options.items()))

    def __call__(self, *command: str, fails: bool = False) -> str:
        done = subprocess.run(
            [BIN / command[0], *command[1:]], cwd=self.folder, env=self.env, capture_output=True, text=True,
            timeout=240, check=False,
        )  # fmt: skip
        output = done.stdout + done.stderr
        assert (done.returncode != 0) == fails, output
        return output

    def ask(self, path: str) -> httpx.Response:
        """What the dashboard answers to one who has Ray's token."""
        headers = {"Authorization": f"Bearer {RAY_TOKEN['RAY_AUTH_TOKEN']}"}
        return httpx.get(self.env["RAY_DASHBOARD_ADDRESS"] + path, headers=headers, timeout=60)

    def status(self) -> dict:
        # What `serve status` asks as well; a process for every look would take longer than the look.
        return self.ask("/api/serve/applications/").json().get("applications", {}).get("cli", {})

    def deploy(self, text: str) -> dict:
        """Deploy a graph; the status of the application once it has settled."""
        (self.folder / "graph.yaml").write_text(text.replace("HTTP_PORT", str(self.http)))
        before = self.status().get("last_deployed_time_s")
        self("serve", "deploy", "graph.yaml")
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            status = self.status()
            fresh = status and status["last_deployed_time_s"] != before
            if fresh and status["status"] in ("RUNNING", "DEPLOY_FAILED"):
                return status
            time.sleep(0.5)
        raise AssertionError(f"not deployed in time: {status}")

    def replicas(self) -> dict[str, set[int]]:
        """Pids of the replicas by deployment."""
        found: dict[str, set[int]] = {}
        for process in psutil.process_iter(["cmdline"]):
            name = " ".join(process.info["cmdline"] or [])
            if name.startswith("ray::ServeReplica:cli:") and str(self.temp) in _environment(process):
                # Without the method that runs, if one does.
                found.setdefault(name.split(":")[4].split()[0].partition(".")[0], set()).add(process.pid)
        return found

    def stop(self) -> None:
        mine = [p for p in psutil.process_iter(["cmdline"]) if f"{self.temp}/" in _text(p)]
        for process in mine:
            for one in [*_children(process), process]:
                with suppress(psutil.NoSuchProcess):  # it ended with another one
                    one.kill()


def _text(process: psutil.Process) -> str:
    return " ".join(process.info["cmdline"] or []) if process.pid != os.getpid() else ""


def _children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


def _environment(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        parent = process.parent()
        return " ".join(parent.cmdline()) if parent else ""
    return ""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # A folder outside the repository: what a user with the wheel has.
    cluster = Cluster(tmp_path_factory.mktemp("elsewhere"))
    try:
        yield cluster
    finally:
        cluster.stop()


GOOD = GRAPH.replace(", max_retries_none: 1", "")


def test_every_server_is_a_deployment_under_its_own_name(cluster: Cluster) -> None:
    status = cluster.deploy(GOOD)
    assert status["status"] == "RUNNING", status["message"]
    shown = yaml.safe_load(cluster("serve", "status"))["applications"]["cli"]["deployments"]
    running = {name: deployment["replica_states"]["RUNNING"] for name, deployment in shown.items()}
    assert running == {"policy": 1, "remote": 1, "mcqa": 2, "agent": 1, "lonely": 1, "gateway": 1}


def test_http_works_with_the_token_only(cluster: Cluster) -> None:
    url = f"http://127.0.0.1:{cluster.http}/cli"
    assert httpx.get(f"{url}/graph", timeout=60).status_code == 401
    headers = {"authorization": f"Bearer {SECRET}"}
    assert httpx.get(f"{url}/health", headers=headers, timeout=60).json()["status"] == "ok"
    row = {"responses_create_params": {"input": "?"}, "options": [{"A": "1"}], "expected_answer": "A"}
    rollout = httpx.post(f"{url}/agent/run", json=row, headers=headers, timeout=60).json()
    assert rollout["reward"] == 0.0
    assert "failure" not in rollout


def test_a_deploy_with_problems_is_refused_with_all_of_them_and_leaves_the_graph_healthy(
    cluster: Cluster,
) -> None:
    """A secret that is written out is one of them: `serve config` would show it.

    Serve does not name the graph's servers any more; they go on, and what has failed is said.
    """
    broken = GRAPH.replace("model: policy", "model: polcy").replace("${CLI_KEY}", "sk-literal")
    refused = cluster.deploy(broken.replace("mcqa: {type: mcqa,", "mcqa: {type: mcqaa,"))
    assert refused["status"] == "DEPLOY_FAILED"
    for problem in (
        "agents.agent.model",
        "did you mean 'policy'",
        "agents.lonely.max_retries_none",
        "models.remote.api_key: write a secret as ${NAME}",
        "resources.mcqa.type: unknown type 'mcqaa'; did you mean 'mcqa'?",
    ):
        assert problem in refused["message"]
    assert "sk-literal" not in refused["message"]
    assert SECRET not in refused["message"]
    headers = {"authorization": f"Bearer {SECRET}"}
    url = f"http://127.0.0.1:{cluster.http}/cli"
    health = httpx.get(f"{url}/health", headers=headers, timeout=60)
    assert health.status_code == 200, health.text
    assert health.json()["servers"]["mcqa"] == {"state": "ready", "replicas": {"RUNNING": 2}}
    row = {"responses_create_params": {"input": "?"}, "options": [{"A": "1"}], "expected_answer": "A"}
    rollout = httpx.post(f"{url}/agent/run", json=row, headers=headers, timeout=60)
    assert "failure" not in rollout.json(), rollout.text

    status = cluster("gym-serve", "status", fails=True)  # which looks for the Ray by itself
    lines = [" ".join(line.split()) for line in status.splitlines()]
    assert f"cli DEPLOY_FAILED {url}" in lines
    assert "mcqa READY 2 running" in lines
    (why,) = (line for line in lines if line.startswith("cli: "))
    assert re.search(r"GraphError: \d problems: .*unknown type 'mcqaa'; did you mean 'mcqa'", why), why
    assert "Traceback" not in status


def test_a_changed_setting_restarts_its_server_alone(cluster: Cluster) -> None:
    """And more replicas are added to those that run."""
    before = cluster.replicas()
    changed = GOOD.replace("max_steps: 3", "max_steps: 5").replace("num_replicas: 2", "num_replicas: 3")
    assert cluster.deploy(changed)["status"] == "RUNNING"
    while (after := cluster.replicas())["agent"] & before["agent"]:  # the time limit of the test ends it
        time.sleep(0.5)
    assert before["mcqa"] < after["mcqa"]
    assert len(after["mcqa"]) == 3
    others = before.keys() - {"agent", "mcqa"}
    assert {name: after[name] for name in others} == {name: before[name] for name in others}
    headers = {"authorization": f"Bearer {SECRET}"}
    graph = httpx.get(f"http://127.0.0.1:{cluster.http}/cli/graph", headers=headers, timeout=60).json()
    assert graph["agents"]["agent"]["max_steps"] == 5


def test_no_secret_is_shown_anywhere(cluster: Cluster) -> None:
    headers = {"authorization": f"Bearer {SECRET}"}
    url = f"http://127.0.0.1:{cluster.http}/cli"
    for path in ("graph", "docs", "openapi.json", "health", "global_config_dict_yaml"):
        assert SECRET not in httpx.get(f"{url}/{path}", headers=headers, timeout=60).text, path
    row = {"responses_create_params": {"input": "?"}, "options": [{"A": "1"}], "expected_answer": "A"}
    wrong = httpx.post(f"{url}/lonely/run", json=row, headers=headers, timeout=60)
    assert wrong.json()["_ng_failure_class"] == "unavailable"
    assert SECRET not in wrong.text
    assert SECRET not in cluster("serve", "config")
    assert "${CLI_TOKEN}" in cluster("serve", "config")
    assert SECRET not in cluster("serve", "status")
    for path in ("/api/serve/applications/", "/api/v0/actors?detail=true", "/api/v0/tasks?detail=true"):
        answer = cluster.ask(path)
        assert answer.status_code == 200, path
        assert "mcqa" in answer.text or "tasks" in path
        assert SECRET not in answer.text, path
    logs = cluster.temp / "session_latest" / "logs"
    texts = [p for p in logs.rglob("*") if p.is_file() and p.stat().st_size < 50_000_000]
    assert any("serve" in str(p) for p in texts)
    assert [str(p) for p in texts if SECRET.encode() in p.read_bytes()] == []
