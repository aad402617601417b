"""Tasks of EleutherAI's lm-evaluation-harness as they are: ``gym-serve eval lm_eval:gsm8k``.

Its own code makes the prompts (few-shot examples, chat turns) and scores the answers (filters,
`process_results`); the model is called by gym_serve. So the same completions get the same scores. A group or
tag (``lm_eval:mmlu_pro``) is one benchmark with the rows of all its tasks. Only tasks whose answers are
written can be run: those that compare likelihoods of given answers need the model's own probabilities, and
are refused by name.
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


class LmEvalRow(VerifyRequest):
    """A row of a task, with the response to it."""

    lm_eval_task: str
    """Name of the task."""
    doc: JSON
    """The document, as the task's `process_docs` makes it."""


class LmEval(ResourcesServer):
    """Tasks of lm-eval: the reward is the task's first metric under its first filter; others are fields."""

    requires: ClassVar[Mapping[str, str]] = {"lm_eval": "gym-serve[lm_eval]"}
    reverify_mode: ClassVar[Literal["stateless"]] = "stateless"
    restorable: ClassVar[bool] = True  # there is no state
    metrics: ClassVar[MetricSpec] = MetricSpec(scores=(Score("accuracy"),))

    class Config(ScorerConfig):
        include_path: str | None = None
        """Folder of task files beside those that lm-eval has."""
        metric: str | None = None
        """The metric that is the reward, as lm-eval's tables name it, e.g.
        ``exact_match,flexible-extract``."""

    config: Config

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._scorer = Scorer("lm_eval", Path(__file__).with_name("worker.py"), self.config)
        self.manage(self._scorer.pool)

    async def verify(self, request: LmEvalRow) -> Verdict:
        task, text = request.lm_eval_task, request.response.output_text
        return await self._scorer.verdict(task, [task, self.config.include_path, request.doc, text])


def lm_eval_benchmark(name: str, **settings: Any) -> JSON:
    """What a benchmark file would say of a task, a group or a tag of lm-eval."""
    return {
        "name": name,
        "description": f"{name} of lm-evaluation-harness, by its own code.",
        "license": "that of the data set",
        "rows": {
            "function": f"{__name__}:task_rows",
            "arguments": {"name": name, "include_path": settings.get("include_path")},
        },
        "environment": {"type": "lm_eval", **settings},
        "metric": settings.get("metric") or "the task's first metric",
    }


def task_rows(split: str, *, name: str, include_path: str | None = None) -> Iterator[JSON]:
    """The rows of a task, a group or a tag. Raises InvalidRequest: there is none, or one is not
    generative."""
    try:
        from gym_serve.interop.lm_eval.tasks import rows_of
    except ImportError as error:
        raise InvalidRequest(f"{error}: pip install 'gym-serve[lm_eval]'") from None
    return rows_of(name, include_path)
