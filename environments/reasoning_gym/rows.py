"""Rows of any families: ``python -m gym_serve.environments.reasoning_gym.rows --task countdown --size 500``.

The same arguments give the same rows, with the same version of the package.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import reasoning_gym
import typer
from reasoning_gym.factory import DATASETS

_INSTRUCTIONS = (
    "Solve the problem step by step. Then give your final answer, and nothing but it, between <answer> and "
    "</answer>."
)


def families() -> list[str]:
    """The names of all families."""
    return sorted(DATASETS)


def rows(
    task: str, *, size: int, seed: int, agent: str, config: dict[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Rows of one family, with its settings (``config``). Raises ValueError: there is no such family."""
    for entry in reasoning_gym.create_dataset(task, size=size, seed=seed, **(config or {})):
        # Through JSON: tuples become lists here as they would on the way to the verifier.
        item = json.loads(json.dumps(entry, default=str))
        yield {
            "responses_create_params": {
                "instructions": _INSTRUCTIONS,
                "input": [{"role": "user", "content": item["question"]}],
            },
            **item,
            "agent_ref": {"type": "responses_api_agents", "name": agent},
        }


def benchmark_rows(
    split: str, *, tasks: list[str] | None = None, size: int, config: dict[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Rows of families, of all of them by default, for a benchmark: ``train`` has other items than
    ``test``."""
    for task in tasks or families():
        yield from rows(
            task, size=size, seed=int(split == "train"), agent="reasoning_gym_agent", config=config
        )


def _main(
    task: Annotated[
        list[str] | None, typer.Option(help="A family; may repeat. All of them by default.")
    ] = None,
    size: Annotated[int, typer.Option(min=1, help="Rows of each family.")] = 10,
    seed: Annotated[int, typer.Option(help="Changes all rows.")] = 0,
    config: Annotated[str, typer.Option(help="Settings of the families, as JSON.")] = "{}",
    agent: Annotated[str, typer.Option(help="Name of the agent.")] = "reasoning_gym_agent",
) -> None:
    """Write rows of reasoning-gym's families to the standard output."""
    for name in task or families():
        for row in rows(name, size=size, seed=seed, agent=agent, config=json.loads(config)):
            typer.echo(json.dumps(row, ensure_ascii=False))


if __name__ == "__main__":
    typer.run(_main)
