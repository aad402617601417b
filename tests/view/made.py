"""Rollouts for the tests of the viewer, and a viewer that runs as people start it."""

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson


def rollout(task: int, index: int, **more: Any) -> dict[str, Any]:
    """A rollout of two turns in the form of `collect`."""
    reward = float((task + index) % 2)
    call = {
        "type": "function_call",
        "name": "get_weather",
        "call_id": "c1",
        "arguments": '{"city": "Paris"}',
        "prompt_token_ids": [1, 2, 3],
        "generation_token_ids": [4, 5],
        "generation_log_probs": [-0.1, -0.2],
    }
    said = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": f"It rains in task {task}."}],
        "prompt_token_ids": [1, 2, 3, 4, 5, 6],
        "generation_token_ids": [7],
        "generation_log_probs": [-0.3],
        "weight_version": "17",
    }
    return {
        "responses_create_params": {"input": [{"role": "user", "content": f"Question {task}: rain?"}]},
        "agent_ref": {"name": "weather_agent"},
        "own": {"line": task},
        "_ng_task_index": task,
        "_ng_rollout_index": index,
        "_ng_rollout_id": f"{task}-{index}",
        "response": {
            "output": [call, {"type": "function_call_output", "call_id": "c1", "output": "rain"}, said],
            "tools": [{"type": "function", "name": "get_weather", "description": "?", "parameters": {}}],
        },
        "reward": reward,
        "score": reward / 2,
        "extracted": f"answer {index}",
        "model_usage": {"model": {"policy": {"calls": 2, "input_tokens": 10 * task, "output_tokens": index}}},
        "_ng_latency_s": 0.5 + task,
        "_ng_timeline": {
            "began": 1_795_413_975.0 + task,
            "dur": 400_000,
            "agent": "weather_agent/x",
            "servers": ["weather/a", "policy/b"],
            "steps": [
                ["seed", 1, 2, 0, 0],
                ["model", 3, 100_000, 0, 1, 3, None, 2, None, {"version": "17"}],
                ["tool", 110_000, 9, 0, 0, "get_weather", None, None],
                ["model", 120_000, 100_000, 0, 1, None, None, None, None, {"version": "18"}],
                ["verify", 300_000, 9, 0, 0],
                [
                    *("model", 300_001, 8, 0, 1, None, None, None, None),
                    {"stage": "verify", "prompt": "Is it right?", "answer": "Yes."},
                ],
            ],
        },
        **more,
    }


def failed(task: int, index: int) -> dict[str, Any]:
    """A failed attempt, as in NAME_failures.jsonl."""
    told = {"kind": "model_timeout", "stage": "model", "status": 504, "retryable": True, "detail": "too slow"}
    kept = rollout(task, index)
    for key in ("response", "score", "extracted"):
        kept.pop(key)
    return {**kept, "reward": 0.0, "_ng_failure_class": "model_timeout", "failure": told, "mask_sample": True}


def write(path: Path, rollouts: list[dict[str, Any]]) -> Path:
    """A file of rollouts."""
    path.write_bytes(b"".join(orjson.dumps(made) + b"\n" for made in rollouts))
    return path


@contextmanager
def start(
    *arguments: str | Path, cache: Path, stderr: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """`gym-serve view` in a process and a process group of its own."""
    program = "from gym_serve.cli import main; main()"
    command = [sys.executable, "-c", program, "view", "--no-browser", "--json", "--port", "0"]
    with subprocess.Popen(
        [*command, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=stderr,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def url_of(process: subprocess.Popen[bytes]) -> str:
    """Where a viewer answers, once it does."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], 60)
    assert ready, "the viewer printed no URL"
    url: str = orjson.loads(b"".join(iter(process.stdout.readline, b"}\n")) + b"}")["url"]
    return url


@contextmanager
def viewer(*arguments: str | Path, cache: Path) -> Iterator[httpx.Client]:
    """A viewer as people start it, and a client of it."""
    with start(*arguments, cache=cache) as process:
        url, _, token = url_of(process).partition("#token=")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        with httpx.Client(base_url=url, headers=headers, timeout=30) as client:
            yield client


def until_indexed(client: httpx.Client, rollouts: int) -> list[dict[str, Any]]:
    """The runs, once they have so many rollouts."""
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        runs: list[dict[str, Any]] = client.get("api/runs").raise_for_status().json()["runs"]
        if sum(run["rollouts"] for run in runs) >= rollouts and all(run["done"] for run in runs):
            return runs
        time.sleep(0.1)
    raise AssertionError(f"not indexed: {runs}")
