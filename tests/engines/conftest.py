"""Engines that the tests share, as each takes its time to start: one of each kind, and a graph of both."""

from __future__ import annotations

import os
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.engines import CPU_ARGS

from gym_serve import Gym
from gym_serve.deployments.hf_engine import HFEngine
from gym_serve.deployments.hf_engine.tiny_model import make_tiny_model, tiny_model
from gym_serve.deployments.vllm_engine import VLLMEngine

# As in replicas: with two threads on two busy cores, torch is ten times as slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure() -> None:
    """vLLM leaves its sockets' context to the garbage collector, which may come when pytest itself ends."""
    warnings.filterwarnings("ignore", "Unclosed context <zmq", ResourceWarning)


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The tiny model."""
    return tiny_model()


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return make_tiny_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def hf() -> AsyncIterator[HFEngine]:
    """An hf_engine that takes weights; HF_DEVICE=cuda runs it on a GPU."""
    engine = HFEngine(name="policy", weight_updates=True, device=os.environ.get("HF_DEVICE", "cpu"))
    await engine.start()
    yield engine
    await engine.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm(tiny: Path) -> AsyncIterator[VLLMEngine]:
    """A vllm_engine that takes weights."""
    engine = VLLMEngine(
        name="policy",
        model=str(tiny),
        tool_call_parser="hermes",
        weight_updates=True,
        engine_args=CPU_ARGS,
    )
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture(scope="session")
def judged(cluster: str, tiny: Path) -> Iterator[Gym]:
    """The graph of the judge on a CPU; its policy is an hf_engine."""
    os.environ["TINY_MODEL"] = str(tiny)
    changes = {
        "models.policy": {"type": "hf_engine", "weight_updates": True, "extra_body": {"max_tokens": 32}},
        "models.gpu_judge.weight_updates": True,
        # Random weights give no verdict by themselves.
        "models.gpu_judge.extra_body": {"structured_outputs": {"choice": ["[[A=B]]", "[[A!=B]]"]}},
        "models.gpu_judge.health_check_period_s": 2,
    }
    with Gym.from_graph(Path(__file__).with_name("cpu_judge.yaml"), overrides=changes) as running:
        yield running
