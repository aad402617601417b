"""The arguments of `vllm_engine`, without vLLM."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gym_serve.deployments.vllm_engine import VLLMEngine, _vllm
from gym_serve.deployments.vllm_engine._vllm import command_line
from gym_serve.servers import Call, ServerRunner
from gym_serve.types.errors import BadRequest

_SOURCE = """
class EngineArgs:
    max_model_len: int = 1
    _hidden: int = 2

class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A vLLM with two arguments, of which only the source can be read."""
    package = tmp_path / "vllm"
    (package / "engine").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('not imported')")
    (package / "engine" / "arg_utils.py").write_text(_SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    _vllm.known_names.cache_clear()
    yield
    _vllm.known_names.cache_clear()


@pytest.mark.usefixtures("installed")
def test_names_are_those_of_the_installed_vllm() -> None:
    assert _vllm.known_names() == {"max_model_len", "enable_log_requests"}
    assert VLLMEngine(model="m", engine_args={"max_model_len": 8})
    with pytest.raises(ValueError, match="no engine argument 'max_modellen'; did you mean 'max_model_len'"):
        VLLMEngine(model="m", engine_args={"max_modellen": 8, "_hidden": 1})


def test_what_a_setting_stands_for_is_no_engine_argument() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size is set by 'tensor_parallel_size'"):
        VLLMEngine(model="m", engine_args={"tensor_parallel_size": 2})


def test_the_command_line() -> None:
    arguments = {
        "a_b": 1,
        "on": True,
        "off": False,
        "none": None,
        "many": ["x", {"y": 1}],
        "object": {"z": [1]},
    }
    assert command_line(arguments) == [
        *("--a-b", "1", "--on", "--no-off", "--many", "x", '{"y":1}', "--object", '{"z":[1]}')
    ]


def test_settings_become_arguments() -> None:
    engine = VLLMEngine(
        name="judge",
        model="m",
        tool_call_parser="hermes",
        lora_adapters={"math": "/adapters/math"},
        weight_updates=True,
        engine_args={"logprobs_mode": "raw_logprobs"},
    )
    words = engine.command_line()
    given = dict(itertools.pairwise(words))
    assert given["--served-model-name"] == "judge"
    assert given["--tool-call-parser"] == "hermes"
    assert given["--lora-modules"] == '{"name":"math","path":"/adapters/math"}'
    assert given["--logprobs-mode"] == "raw_logprobs"
    assert given["--worker-extension-cls"].endswith("WeightsExtension")
    assert engine.model_names() == ["judge", "math"]


def test_a_reward_model_answers_what_it_can() -> None:
    operations = VLLMEngine(model="m", runner="pooling").operations()
    assert {"classify", "pooling", "v1/models"} <= set(operations)
    assert "v1/responses" not in operations


class Sleeper:
    """What `vllm_engine` asks of an `AsyncLLM` that sleeps; it keeps what it was asked."""

    def __init__(self) -> None:
        self.done: list[str] = []

    async def sleep(self, level: int, mode: str) -> None:
        self.done.append(f"sleep {level} {mode}")

    async def wake_up(self) -> None:
        self.done.append("wake")

    async def pause_generation(self, mode: str) -> None:
        self.done.append(f"pause {mode}")

    async def resume_generation(self) -> None:
        self.done.append("resume")


async def test_a_sleeping_engine_takes_no_weights_and_wakes_as_it_was() -> None:
    engine = VLLMEngine(model="m", weight_updates=True, engine_args={"enable_sleep_mode": True})
    llm = Sleeper()
    engine._running = SimpleNamespace(llm=llm, frozen_head=False)
    host = ServerRunner(engine)
    assert (await host.dispatch(Call("weights/sleep", b"{}"))).status == 200
    with pytest.raises(BadRequest, match="wake it first"):
        await engine.update_weights(b"", "1")
    assert llm.done == ["sleep 1 keep", "pause keep"]  # and nothing resumed it
    await engine.hold("keep")
    assert (await host.dispatch(Call("weights/wake", b"{}"))).status == 200
    assert llm.done[-2:] == ["wake", "pause keep"]  # it is held still
    await engine.release()
    assert llm.done[-1] == "resume"


def test_only_an_engine_with_sleep_mode_sleeps() -> None:
    assert "weights/sleep" not in VLLMEngine(model="m").operations()
