"""Servers of one graph whose pins differ: each has a `runtime_env`, a folder or an interpreter of its own."""

import os
import site
import sys
import venv
from pathlib import Path
from typing import Any

import httpx
import pytest

from gym_serve import Gym

TESTS = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


def parcels(folder: Path, version: str) -> str:
    """A folder with one version of the package, as ``pip install --target`` leaves it."""
    package = folder / "gs_parcels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"VERSION = {version!r}\n")
    return str(folder)


def layered(folder: Path, version: str) -> str:
    """The interpreter of a venv with one version of the package, over all packages of this one."""
    venv.create(folder, with_pip=False, symlinks=True)
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / name / "site-packages"
    parcels(packages, version)
    lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (packages / "_over.pth").write_text("\n".join(lines))
    return str(folder / "bin" / "python")


@pytest.fixture(scope="module")
def gym(deploy: Any, tmp_path_factory: pytest.TempPathFactory) -> Gym:
    folder = tmp_path_factory.mktemp("pins")
    old, new = (
        {"env_vars": {"PYTHONPATH": os.pathsep.join([parcels(folder / version, version), str(TESTS)])}}
        for version in ("1.0", "2.0")
    )
    environments = {
        "old": old,
        "new": new,
        "own": {"py_executable": layered(folder / "venv", "3.0"), "env_vars": {"PYTHONPATH": str(TESTS)}},
    }
    graph = {
        "models": {"policy": {"type": "scripted_model"}},
        "resources": {
            name: {"type": "support.parcels:Parcels", "runtime_env": environment}
            for name, environment in environments.items()
        },
        "agents": {"agent": {"type": "simple_agent", "model": "policy", "resources": "own"}},
    }
    return deploy(graph, name="pins")


def test_each_server_has_its_own_version(gym: Gym) -> None:
    found = {
        name: httpx.post(f"{gym.url}/{name}/version", json={}, timeout=60).json()
        for name in ("old", "new", "own")
    }
    assert {name: told["version"] for name, told in found.items()} == {
        "old": "1.0",
        "new": "2.0",
        "own": "3.0",
    }
    assert found["old"]["python"] == found["new"]["python"] != found["own"]["python"]


def test_a_rollout_goes_through_another_interpreter(gym: Gym) -> None:
    (rollout,) = gym.run([{"responses_create_params": {"input": "Hello."}}])
    assert rollout["reward"] == 1.0
