"""The arguments of `vllm_engine`, without vLLM."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from gym_serve.deployments.vllm_engine import VLLMEngine, engine_args
from gym_serve.deployments.vllm_engine.engine_args import command_line

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
    engine_args.known_names.cache_clear()
    yield
    engine_args.known_names.cache_clear()


@pytest.mark.usefixtures("installed")
def test_names_are_those_of_the_installed_vllm() -> None:
    assert engine_args.known_names() == {"max_model_len", "enable_log_requests"}
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
