"""Constructing NeMo Gym's servers: secrets, and the neighbours that their code imports."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel, SecretStr

from gym_serve.interop.nemo_gym import construction
from gym_serve.interop.nemo_gym.construction import GraphServers, make_server, with_secrets
from gym_serve.interop.nemo_gym.hosting import NemoGym
from gym_serve.types.errors import GraphError

SERVER = """
from pydantic import BaseModel
from nemo_gym.base_resources_server import SimpleResourcesServer
from {neighbour} import NAME


class Config(BaseModel):
    api_key: str
    rounds: int = 1


class Server(SimpleResourcesServer):
    config: Config
    kind: str = NAME
"""


class Base(BaseModel):
    config: Any
    server_client: Any = None


@pytest.fixture
def nemo_gym(tmp_path, monkeypatch):
    """Folders of servers in the place of NeMo Gym's, and what of NeMo Gym they import."""
    base = ModuleType("nemo_gym.base_resources_server")
    base.SimpleResourcesServer = Base
    for name, module in {"nemo_gym": ModuleType("nemo_gym"), base.__name__: base}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(construction, "_client", lambda servers: servers)
    monkeypatch.setattr(construction, "_FOLDERS", [])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    known = set(sys.modules)

    def add(name, neighbour):
        folder = tmp_path / "hosted_servers" / name
        folder.mkdir(parents=True)
        (folder / f"{neighbour}.py").write_text(f"NAME = {name!r}\n")
        (folder / "app.py").write_text(SERVER.format(neighbour=neighbour))
        return f"hosted_servers.{name}.app"

    yield add
    for name in set(sys.modules) - known:
        del sys.modules[name]


def make(path, **settings):
    return make_server(path, {"api_key": "k", **settings}, "x", GraphServers({}, "servers"))


def test_a_server_finds_its_neighbours(nemo_gym):
    path = nemo_gym("first", "hosted_helpers")
    assert make(path).kind == "first"
    assert make(path, rounds=2).config.rounds == 2, "and again in the same process"
    assert make(nemo_gym("second", "other_hosted_helpers")).kind == "second"


def test_two_servers_with_neighbours_of_one_name_do_not_share_a_process(nemo_gym):
    make(nemo_gym("first", "hosted_helpers"))
    with pytest.raises(GraphError, match=r"module 'hosted_helpers'.*take one of them out of inline"):
        make(nemo_gym("second", "hosted_helpers"))


def test_a_server_may_be_made_of_a_generic_one(nemo_gym):
    path = nemo_gym("first", "hosted_helpers")
    file = Path(importlib.util.find_spec(path).origin)
    lines = [
        "from typing import Generic, TypeVar",
        SERVER.format(neighbour="hosted_helpers").replace("class Server(", "class Base_("),
        "Task = TypeVar('Task')",
        "class Games(Base_, Generic[Task]):",
        "    pass",
        "class Server(Games[int]):",
        "    kind: str = 'derived'",
    ]
    file.write_text("\n".join(lines))
    assert make(path).kind == "derived", "pydantic has put Games[int] into the module, too"


def test_settings_that_do_not_fit_are_not_quoted(nemo_gym):
    path = nemo_gym("first", "hosted_helpers")
    with pytest.raises(GraphError) as caught:
        make(path, api_key=["hush"], rounds="many")
    assert "hush" not in str(caught.value)
    assert "config.rounds" in str(caught.value)
    assert caught.value.__cause__ is None


def test_secrets_are_put_in_their_places():
    settings = {"search": {"limit": 3}, "name": "x", "judge": "none", "all": [{"a": 1}, {}]}
    secrets = {"key": "a", "search.key": "b", "judge.api.key": "c", "all.1.key": "d"}
    filled = with_secrets(settings, {path: SecretStr(value) for path, value in secrets.items()})
    assert filled == {
        "search": {"limit": 3, "key": "b"},
        "name": "x",
        "judge": {"api": {"key": "c"}},
        "key": "a",
        "all": [{"a": 1}, {"key": "d"}],
    }
    assert settings["search"] == {"limit": 3}, "the settings themselves stay as they are"


def test_secrets_are_not_shown():
    host = NemoGym(server="a.app", secrets={"key": "hush"})
    assert "hush" not in repr(host.config)
