"""Tasks of Inspect as they are: ``gym-serve eval inspect:FILE.py@task inspect:inspect_evals/gsm8k``.

The task's own solver makes the prompt, up to the moment in which it asks the model; gym_serve asks, and
solver and scorer go on from the answer, in a process of their own. So the same completions get the same
scores. That holds for every solver that asks once (`prompt_template`, `system_message`, `chain_of_thought`,
`multiple_choice`, `generate`). Tasks with several model calls, tools, agents or a sandbox, and scorers that
ask a model, are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from gym_serve.interop.scored_by_worker import Scorer, ScorerConfig
from gym_serve.metrics import MetricSpec, Score
from gym_serve.servers import ResourcesServer, Verdict, VerifyRequest
from gym_serve.types.errors import InvalidRequest
from gym_serve.types.requests import JSON

_EXTRA = "pip install 'gym-serve[inspect]'"


class InspectRow(VerifyRequest):
    """A row of a task, with the response to it."""

    inspect_task: str
    """The task, ``FILE.py@NAME`` or ``PACKAGE/NAME``."""
    sample: JSON
    """The sample, as the task's data set has it."""


class InspectTasks(ResourcesServer):
    """Tasks of Inspect: the reward is the value of the first scorer; others are fields."""

    requires: ClassVar[Mapping[str, str]] = {"inspect_ai": "gym-serve[inspect]"}
    reverify_mode: ClassVar[Literal["stateless"]] = "stateless"
    restorable: ClassVar[bool] = True  # there is no state
    metrics: ClassVar[MetricSpec] = MetricSpec(scores=(Score("accuracy"),))

    Config = ScorerConfig
    config: ScorerConfig

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._scorer = Scorer("inspect", Path(__file__).with_name("worker.py"), self.config)
        self.manage(self._scorer.pool)

    async def verify(self, request: InspectRow) -> Verdict:
        task, text = request.inspect_task, request.response.output_text
        return await self._scorer.verdict(task, [task, request.sample, text])


def inspect_benchmark(name: str, **settings: Any) -> JSON:
    """What a benchmark file would say of a task. Raises InvalidRequest: it cannot be run."""
    try:
        from gym_serve.interop.inspect_tasks.tasks import load, refused
    except ImportError as error:
        raise InvalidRequest(f"{error}: {_EXTRA}") from None
    task = load(name)
    if problem := refused(task):
        raise InvalidRequest(f"inspect:{name} {problem}")
    file, _, function = name.rpartition("@")
    return {
        "name": f"{Path(file).stem}_{function}" if file else name,
        "version": str(task.version),
        "description": f"{name} of Inspect, by its own code.",
        "license": "that of the data set",
        "rows": {"function": f"{__name__}:task_rows", "arguments": {"name": name}},
        "environment": {"type": "inspect", **settings},
        "repeats": task.epochs or 1,
        "metric": settings.get("metric") or "the value of the task's first scorer",
    }


def task_rows(split: str, *, name: str) -> Iterator[JSON]:
    """The rows of a task. Raises InvalidRequest: there is none, or it cannot be run."""
    try:
        from gym_serve.interop.inspect_tasks.tasks import rows_of
    except ImportError as error:
        raise InvalidRequest(f"{error}: {_EXTRA}") from None
    return rows_of(name)
