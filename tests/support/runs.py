"""Stored runs, written as `collect` writes them, for tests of what reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gym_serve.rollouts import Outputs

__all__ = ["failure_of", "rollout_of", "row_of", "write_lines", "write_run"]


def row_of(task: int, index: int = 0, agent: str = "math_agent", **keys: Any) -> dict[str, Any]:
    """A materialized row."""
    return {
        "responses_create_params": {"input": [{"role": "user", "content": f"Question {task}?"}]},
        "agent_ref": {"type": "responses_api_agents", "name": agent},
        "_ng_task_index": task,
        "_ng_rollout_index": index,
        "_ng_rollout_id": f"{task}-{index}",
        **keys,
    }


def rollout_of(task: int, index: int, reward: float, **keys: Any) -> dict[str, Any]:
    """A scored rollout."""
    response = {"output": [], "usage": {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15}}
    return {**row_of(task, index, **keys), "response": response, "reward": reward}


def failure_of(task: int, index: int) -> dict[str, Any]:
    """A failed attempt."""
    return {
        **row_of(task, index),
        "reward": 0.0,
        "mask_sample": True,
        "_ng_failure_class": "model_timeout",
        "_ng_failure_terminal": True,
    }


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> Path:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def write_run(
    path: Path,
    rewards: Mapping[int, Sequence[float]],
    *,
    failed: Sequence[int] = (),
    inputs: bool = True,
    **keys: Any,
) -> Path:
    """Write a run: the rewards of each task's rollouts, and tasks with a failed rollout besides."""
    rollouts = [
        rollout_of(task, index, reward, **keys)
        for task, of_task in rewards.items()
        for index, reward in enumerate(of_task)
    ]
    write_lines(path, rollouts)
    outputs = Outputs.of(path)
    failures = [failure_of(task, len(rewards.get(task, ()))) for task in failed]
    if failures:
        write_lines(outputs.failures, failures)
    if inputs:
        rows = [
            {key: value for key, value in rollout.items() if key not in ("response", "reward")}
            for rollout in rollouts
        ]
        write_lines(outputs.inputs, rows)
    return path
