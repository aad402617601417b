"""``serve run`` after what came before it on the same machine: nothing leaves traces of a Ray that ended."""

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import httpx
import psutil
import pytest
import yaml
from support.processes import environment

from gym_serve.client.reaper import marked
from gym_serve.cluster.starting import free_port

# A Ray or two for each test: on a slow machine each of them takes half a minute.
pytestmark = [pytest.mark.ray, pytest.mark.timeout(500)]

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
ROWS = ROOT / "environments" / "mcqa" / "data" / "example.jsonl"


class Machine:
    """A user's machine: a folder with a graph file, and what programs find of others in the environment."""

    def __init__(self, folder: Path, temporary: str) -> None:
        self.folder = folder
        self.ray = Path(temporary, "ray")
        self.env = {
            # The embedded policy answers without POLICY_BASE_URL.
            **environment("RAY_", "POLICY_", "PYTEST_"),
            "RAY_TMPDIR": temporary,
            "XDG_STATE_HOME": str(folder / "state"),
        }
        self.port = free_port()
        shipped = yaml.safe_load((ROOT / "graphs" / "mcqa.yaml").read_text())
        (folder / "graph.yaml").write_text(
            json.dumps({**shipped, "http_options": {**shipped["http_options"], "port": self.port}})
        )

    def start(self, *command: str, **variables: str) -> subprocess.Popen[bytes]:
        with (self.folder / "said.log").open("w") as log:  # a pipe that nobody reads would stop it
            return subprocess.Popen(
                # What a shell starts in the background ignores Ctrl-C, and so do its children.
                ["env", "--default-signal=INT", BIN / command[0], *command[1:]],
                cwd=self.folder, env=self.env | variables, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def run(self, *command: str) -> None:
        process = self.start(*command)
        assert process.wait(timeout=300) == 0, self.said

    @property
    def said(self) -> str:
        return (self.folder / "said.log").read_text()

    def serve_run(self) -> None:
        """Serve the graph, and get a rollout of it."""
        run = self.start("serve", "run", "graph.yaml")
        try:
            url = f"http://127.0.0.1:{self.port}/mcqa"
            deadline = time.monotonic() + 240
            while time.monotonic() < deadline and run.poll() is None:
                try:
                    if httpx.get(f"{url}/health", timeout=60).status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                time.sleep(0.5)
            listening = [s.laddr for s in psutil.net_connections("tcp") if s.status == psutil.CONN_LISTEN]
            assert [at.ip for at in listening if at.port == self.port] == ["127.0.0.1"]
            rollout = httpx.post(f"{url}/run", json=json.loads(ROWS.read_text().splitlines()[0]), timeout=60)
            assert rollout.json()["extracted_answer"], rollout.text
        finally:
            run.send_signal(signal.SIGINT)
            try:
                run.wait(timeout=90)
            finally:
                run.kill()
                run.wait()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    short = tempfile.mkdtemp(prefix="gs", dir="/tmp")  # it holds the paths of sockets
    try:
        yield Machine(tmp_path, short)
    finally:
        shutil.rmtree(short, ignore_errors=True)


@pytest.mark.slow
def test_after_up_and_down(machine: Machine) -> None:
    machine.run("gym-serve", "up", "graph.yaml", "--port", str(machine.port))
    assert list(machine.ray.parent.rglob("ray_current_cluster"))
    machine.run("gym-serve", "down", "--all")
    assert not list(machine.ray.parent.rglob("ray_current_cluster"))
    machine.serve_run()


def test_after_a_collect_that_was_killed(machine: Machine) -> None:
    """At its worst moment: Ray's agents have just started, and do not watch yet whether they are alone."""
    mark = {"GYM_SERVE_TEST": uuid4().hex}
    (variable,) = ("=".join(item) for item in mark.items())
    collect = machine.start("gym-serve", "collect", "graph.yaml", str(ROWS), "-o", "out.jsonl", **mark)
    while not any("dashboard/agent.py" in command for command in marked(variable).values()):
        assert collect.poll() is None, machine.said
    collect.kill()
    collect.wait()
    while marked(variable):  # the time limit of the test ends it
        time.sleep(0.1)
    machine.serve_run()


@pytest.mark.slow
def test_after_a_suite_of_tests(machine: Machine) -> None:
    machine.run(
        "python",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(ROOT / "tests/client/test_capacity_on_a_cluster.py"),
    )
    assert list(machine.ray.parent.iterdir()) == []
    machine.serve_run()
