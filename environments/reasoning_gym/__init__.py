"""`ReasoningGym`: items of the reasoning-gym package, scored by the package's own verifiers.

A row is an item as the package makes it, and its score is the reward. An answer on which the verifier fails
scores 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt

from gym_serve.environments.reasoning_gym.scoring import Scored, ScoringPool
from gym_serve.grading import last_closed_box, replace_surrogates
from gym_serve.metrics import Breakdown, MetricSpec, Score
from gym_serve.sandbox import Limits, SandboxName, find_sandbox, sandbox_problems
from gym_serve.servers import ResourcesServer, Verdict, VerifyRequest


class ItemMetadata(BaseModel):
    """``metadata`` of an item; its further keys are the family's own."""

    model_config = ConfigDict(extra="allow")

    source_dataset: str
    """The family: ``knights_knaves``, ``countdown``, ..."""


class ReasoningRequest(VerifyRequest):
    """An item with the response to it."""

    question: str
    """The question, as it stands in the prompt."""
    answer: str | None = None
    """A right answer; None where the family's verifier needs none."""
    metadata: ItemMetadata
    """What the family's verifier needs."""


class ReasoningVerdict(Verdict):
    """The reward and what it was given for."""

    task_name: str
    """The family."""
    score: float
    """The package's score, 0 to 1; the same as the reward."""
    extracted_answer: str
    """The answer that was scored."""
    reason: str | None = None
    """Why it could not be scored, and so is wrong; None if it was."""


class ReasoningGym(ResourcesServer):
    """Items of reasoning-gym: the reward is the package's score, 0 to 1."""

    reverify_mode: ClassVar[Literal["stateless"]] = "stateless"
    metrics: ClassVar[MetricSpec] = MetricSpec(
        scores=(Score("accuracy"),),
        answer="extracted_answer",
        breakdowns=(Breakdown("task_name", prefix="task_"),),
    )

    class Config(ResourcesServer.Config):
        """Settings of the environment."""

        sandbox: SandboxName = "process"
        """Sandbox that scores answers: ``process`` (limits of time and memory) or ``bubblewrap``."""
        num_processes: PositiveInt = 2
        """Answers that are scored at the same time, each using one core; read at the start only."""
        score_timeout_seconds: PositiveFloat = 10.0
        """Seconds that scoring an answer may take (waiting for a processor not included)."""
        memory_mb: PositiveInt = 2048
        """Memory of one scoring process in MiB; read at the start only."""
        max_answer_chars: PositiveInt = 10_000
        """A longer answer is wrong."""

    config: Config

    @classmethod
    def preflight(cls, config: Config) -> Iterable[str]:
        """See `Server.preflight`: whether the sandbox works."""
        yield from super().preflight(config)
        yield from sandbox_problems(config.sandbox, ("reasoning-gym",))

    async def start(self) -> None:
        """Start the processes; returns when the package is imported in them.

        Raises:
            GraphError: the sandbox does not work on this machine.
            Unavailable: a process does not start (the package is not installed, say).
        """
        sandbox = await asyncio.to_thread(find_sandbox, self.config.sandbox, ("reasoning-gym",))
        limits = Limits(memory_bytes=self.config.memory_mb << 20)
        self._pool = self.manage(ScoringPool(sandbox, limits, size=self.config.num_processes))
        await super().start()

    async def verify(self, request: ReasoningRequest) -> ReasoningVerdict:
        """Score the answer in the response.

        Raises:
            InvalidRequest: the package has no such family.
            VerifierFailed: the answer could not be scored now.
        """
        task = request.metadata.source_dataset
        answer = answer_in(replace_surrogates(request.response.output_text))
        scored = Scored(0.0, f"it is longer than {self.config.max_answer_chars} characters")
        if len(answer) <= self.config.max_answer_chars:
            entry: dict[str, Any] = {
                "question": request.question,
                "answer": request.answer,
                "metadata": request.metadata.model_dump(),
            }
            timeout = self.config.score_timeout_seconds
            scored = await self._pool.score(task, answer, entry, timeout=timeout)
        return ReasoningVerdict(
            reward=scored.score,
            task_name=task,
            score=scored.score,
            extracted_answer=answer,
            reason=scored.reason,
        )


_OPEN, _CLOSE = "<answer>", "</answer>"


def answer_in(text: str) -> str:
    r"""The answer that a model's text gives, without white space around it.

    The last ``<answer>...</answer>`` counts, also if it is empty; without one, the last ``\boxed{}`` that
    is not; without that, the whole text. Takes linear time.
    """
    found = None
    start = text.find(_OPEN)
    while start >= 0 and (end := text.find(_CLOSE, start)) >= 0:
        found = text[start + len(_OPEN) : end]
        start = text.find(_OPEN, end)
    if found is not None:
        return found.strip()
    return last_closed_box(text.strip()) or text.strip()
