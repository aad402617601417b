"""What a machine lacks for a graph is said before a Ray is started, or one that runs is touched."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gym_serve.cluster.preflight import problems_here
from gym_serve.graph.resolving import resolve
from gym_serve.graph.spec import GraphSpec
from gym_serve.servers import ResourcesServer

ENGINE = "pip install 'gym-serve[vllm]'"


class NeedsFile(ResourcesServer):
    requires: ClassVar[dict[str, str]] = {"no_such_module": "no-such-package>=2"}

    class Config(ResourcesServer.Config):
        data: Path = Path("/no/such/file")

    config: Config

    @classmethod
    def preflight(cls, config: Config) -> Iterator[str]:
        yield from super().preflight(config)
        if not config.data.exists():
            yield f"data: there is no {config.data}"

    async def verify(self, row: dict[str, Any]) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("mode", "insecure", "refused"),
    [("disabled", None, True), ("Disabled", False, True), ("disabled", True, False), ("token", None, False)],
)
def test_a_ray_without_a_token_is_started_only_where_the_file_says_so(
    monkeypatch: pytest.MonkeyPatch, mode: str, insecure: bool | None, refused: bool
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    given = {"models": {"policy": {"type": "scripted_model"}}, "insecure": insecure}
    found = problems_here(resolve(GraphSpec(**given), env={}))
    assert ["write insecure: true" in problem for problem in found] == [True] * refused


def problems(section: str, **settings: Any) -> list[str]:
    policy = {"type": "scripted_model"}
    sections: dict[str, Any] = {"models": {"policy": policy}, "resources": {}}
    sections[section]["one"] = settings
    return problems_here(resolve(GraphSpec(**sections), env={}))


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the packages of extras, and without bubblewrap."""
    monkeypatch.setattr("gym_serve.servers.base.find_spec", lambda module: None)
    monkeypatch.setenv("PATH", "/nowhere")


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("section", "settings", "said"),
    [
        ("resources", {"type": "math_with_judge", "should_use_judge": False}, "math_verify is not installed"),
        ("resources", {"type": "code_gen"}, "sandbox: bubblewrap: there is no bwrap on the PATH"),
        ("resources", {"type": "math_with_code"}, "sandbox: bubblewrap: there is no bwrap on the PATH"),
        (
            "resources",
            {"type": "google_search", "mode": "replay", "cassette": "/nope.jsonl"},
            "cassette: /nope.jsonl does not exist",
        ),
        (
            "resources",
            {"type": "google_search", "google_api_key": "k", "google_cx": "x"},
            "trafilatura is not installed where its replicas run: pip install 'gym-serve[google_search]'",
        ),
        ("resources", {"type": "mcp", "command": ["nope", "-x"]}, "command: there is no program nope"),
        ("resources", {"type": "mcp", "command": ["python"], "cwd": "/nope"}, "cwd: /nope does not exist"),
        ("resources", {"type": "nemo_gym", "server": "a.b"}, "nemo_gym is not installed"),
        ("resources", {"type": "verifiers", "taskset": "a"}, "verifiers is not installed"),
        ("resources", {"type": "openenv", "env": "a:B", "action": "a:C"}, "openenv is not installed"),
        ("models", {"type": "hf_engine"}, "torch is not installed where its replicas run"),
    ],
)
def test_of_the_shipped_types(section: str, settings: dict[str, Any], said: str) -> None:
    first, *_ = problems(section, **settings)
    assert first.startswith(f"{section}.one: {said}")


def test_the_engine_on_vllm() -> None:
    """Its arguments are checked by vLLM's own sources, if there are any: here there are none."""
    found = problems("models", type="vllm_engine", model="/no/such/model", lora_adapters={"a": "./nope"})
    packages = (
        []
        if importlib.util.find_spec("vllm")
        else [f"vllm is not installed where its replicas run: {ENGINE}"]
    )
    assert found == [
        f"models.one: {problem}"
        for problem in [
            *packages,
            "model: /no/such/model does not exist where its replicas run",
            "lora_adapters.a: nope does not exist where its replicas run",
        ]
    ]


def test_of_a_users_class(tmp_path: Path) -> None:
    lacking = "no_such_module is not installed where its replicas run: pip install 'no-such-package>=2'"
    missing = f"resources.one: {lacking}"
    assert problems("resources", type=NeedsFile) == [
        missing,
        "resources.one: data: there is no /no/such/file",
    ]
    (tmp_path / "data").touch()
    assert problems("resources", type=NeedsFile, data=str(tmp_path / "data")) == [missing]
    elsewhere = {"runtime_env": {"pip": ["no-such-package"]}}
    assert problems("resources", type=NeedsFile, **elsewhere) == []  # there it may well be


def test_what_works_here_lacks_nothing() -> None:
    assert problems("resources", type="math_with_judge", should_use_judge=False) == []
    assert problems("resources", type="google_search", mode="replay") == []
    assert problems("resources", type="mcp", command=["sh"]) == []
