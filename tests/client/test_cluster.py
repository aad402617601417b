"""Joining a Ray cluster: what is said where it cannot be joined."""

import os
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import ray

from gym_serve.client import cluster as cluster_module
from gym_serve.client.cluster import join
from gym_serve.types.errors import Unauthorized, Unavailable

REFUSED = (
    "ray.exceptions.AuthenticationError: RPC error: InvalidAuthToken: Authentication token is missing ..."
)


def fails(monkeypatch: pytest.MonkeyPatch, error: Exception, cause: str | None = None) -> None:
    monkeypatch.setattr(cluster_module, "_check_reachable", lambda address: None)

    def init(**_: Any) -> None:
        raise error from (RuntimeError(cause) if cause else None)

    monkeypatch.setattr(ray, "init", init)


@pytest.mark.parametrize(
    ("mode", "advice"),
    [
        (None, "RAY_AUTH_MODE=token: set it in the environment"),
        ("disabled", "RAY_AUTH_MODE=token: set it in the environment"),
        ("token", "refuses this token"),
    ],
)
def test_a_refused_token(monkeypatch: pytest.MonkeyPatch, mode: str | None, advice: str) -> None:
    if mode is None:
        monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    else:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    fails(monkeypatch, ConnectionError("Failed to connect to Ray cluster at x:6379"), REFUSED)
    with pytest.raises(Unauthorized, match=advice):
        join("x:6379")


def test_no_token_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, ray.exceptions.AuthenticationError("no authentication token was found"))
    with pytest.raises(Unauthorized, match="ray get-auth-token"):
        join("x:6379")


def test_any_other_failure_is_no_matter_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, ConnectionError("Failed to connect"), "Timed out while waiting for GCS")
    with pytest.raises(Unavailable, match="no Ray cluster at 'x:6379'"):
        join("x:6379")


@pytest.mark.parametrize(
    ("variable", "address", "told"),
    [
        ("127.0.0.1:1", "auto", "no Ray cluster at RAY_ADDRESS=127.0.0.1:1: .*refused; unset RAY_ADDRESS"),
        ("127.0.0.1:1", "127.0.0.1:1", "at RAY_ADDRESS=127.0.0.1:1: .*refused; unset RAY_ADDRESS"),
        (None, "127.0.0.1:1", "at 127.0.0.1:1: .*refused; start one with `ray start --head`"),
        (None, "ray://127.0.0.1:1", "at ray://127.0.0.1:1: "),
        (None, "[::1]:1", "no Ray cluster at"),
        (None, "no-such-host.invalid:6379", "no Ray cluster at no-such-host.invalid:6379"),
        (None, "127.0.0.1:99999", "no Ray cluster at 127.0.0.1:99999"),
    ],
)
def test_a_dead_cluster_is_told_in_seconds(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, address: str, told: str
) -> None:
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray would try for over a minute"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    with pytest.raises(Unavailable, match=told):
        join(address)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", None])
def test_what_is_no_ray_is_told_in_seconds(monkeypatch: pytest.MonkeyPatch, answer: bytes | None) -> None:
    """Another server, or one that accepts connections and says nothing."""
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray would try for over a minute"))
    monkeypatch.setattr(cluster_module, "_CONNECT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with ExitStack() as connections, suppress(OSError):
                while True:
                    connection = connections.enter_context(server.accept()[0])
                    if answer is not None:
                        connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(Unavailable, match="what listens there is not Ray; start one"):
            join(f"127.0.0.1:{server.getsockname()[1]}")
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_real_cluster_that_asks_for_a_token(cluster: str) -> None:
    if os.environ.get("RAY_AUTH_MODE") != "token":
        pytest.skip("this Ray starts local clusters without a token")
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", "from gym_serve.cli import main; main()", "status", "--address", address]
    # Ray tries this often, a second each.
    environment = {**os.environ, "RAY_NUM_REDIS_GET_RETRIES": "1"}
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert told.returncode == 0, told.stderr
    del environment["RAY_AUTH_MODE"]
    silent = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert silent.returncode == 1
    assert "RAY_AUTH_MODE=token: set it" in silent.stderr
    assert "Traceback" not in silent.stderr


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_one_local_ray_after_the_other() -> None:
    """Serve's own memory of the first one must not be taken for the second."""
    code = (
        "from ray import serve\n"
        "from gym_serve.client.cluster import Cluster\n"
        "for _ in range(2):\n"
        "    cluster = Cluster()\n"
        "    serve.status()\n"
        "    cluster.leave()\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=350
    )
    assert ran.returncode == 0, ran.stderr


CONSOLE = """
import ray
ray.init(num_cpus=2, include_dashboard=False)
from gym_serve import Gym
print("BEGIN", flush=True)
with Gym.from_graph({"models": {"policy": {"type": "scripted_model"}}}, name="quiet"):
    print("up", flush=True)
print("END", flush=True)
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_console_of_a_trainer_shows_nothing_of_ray_and_serve() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", CONSOLE],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=350,
    )
    assert ran.returncode == 0, ran.stdout
    assert ran.stdout.partition("BEGIN\n")[2] == "up\nEND\n"
