"""`InstructionFollowing`: instructions whose following a program can check, as in IFEval.

A row with an unknown instruction, or without one of its arguments, is `InvalidRequest`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator
from typing_extensions import Self

from gym_serve.environments.instruction_following.worker import Checked
from gym_serve.grading import listed
from gym_serve.metrics import MetricSpec, Score
from gym_serve.servers import ResourcesServer, Verdict, VerifyRequest
from gym_serve.types.errors import InvalidRequest
from gym_serve.workers import WorkerPool, WorkFailed

_WORK = Path(__file__).with_name("worker.py")
_WORKER_MEMORY = 4 << 30  # address space; lm-eval brings NumPy and pandas
_OLD_PLACES = ("instruction_id_list", "kwargs", "grading_mode", "prompt")


class InstructionMetadata(BaseModel):
    """What a response has to follow; further keys (the prompt, say) are kept."""

    model_config = ConfigDict(extra="allow")

    instruction_id_list: Annotated[list[str], Field(min_length=1)]
    kwargs: list[dict[str, Any] | None]  # the arguments of each; None for none
    grading_mode: Literal["binary", "fraction"] = "binary"
    """Reward for following all of them, or the share of them that is followed."""

    @model_validator(mode="after")
    def _one_each(self) -> Self:
        entries, names = len(self.kwargs), len(self.instruction_id_list)
        if entries != names:
            wanted = "an entry for each of instruction_id_list"
            raise ValueError(f"`kwargs` must have {wanted}, got {entries} for {names}")
        return self


class InstructionRequest(VerifyRequest):
    """A row with the response to it."""

    verifier_metadata: InstructionMetadata
    """The instructions. In older rows its keys stand at the top level of the row."""

    @model_validator(mode="before")
    @classmethod
    def _from_the_top_level(cls, row: Any) -> Any:
        metadata = (row.get("verifier_metadata") or {}) if isinstance(row, dict) else None
        if not isinstance(metadata, dict):
            return row
        return {**row, "verifier_metadata": {key: row[key] for key in _OLD_PLACES if key in row} | metadata}


class InstructionVerdict(Verdict):
    """The reward and what it was given for."""

    follow_all_instructions: bool
    follow_instruction_list: list[bool]  # whether each is, in the order of the row
    reason: str | None = None  # which instructions are not followed, or why the response could not be checked


class InstructionFollowing(ResourcesServer):
    """Verifiable instructions: reward for following all, or the share that is followed."""

    reverify_mode: ClassVar[Literal["stateless"]] = "stateless"
    metrics: ClassVar[MetricSpec] = MetricSpec(scores=(Score("accuracy"),))

    class Config(ResourcesServer.Config):
        max_response_chars: PositiveInt = 100_000
        """A longer response follows nothing."""
        check_timeout_seconds: PositiveFloat = 5.0
        """Seconds of CPU time that checking one response may take; one that takes longer follows nothing."""
        num_workers: PositiveInt = 1
        """Processes that check, each using up to one core and 330 MB; read at the start only."""

    config: Config

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._pool = self.manage(
            WorkerPool("lm-eval", _WORK, self.config.num_workers, memory_bytes=_WORKER_MEMORY)
        )

    async def verify(self, request: InstructionRequest) -> InstructionVerdict:
        """Check each instruction on the last message."""
        metadata = request.verifier_metadata
        names, text, reason = metadata.instruction_id_list, request.response.last_text, None
        if len(text) > self.config.max_response_chars:
            text, reason = "", f"it is longer than {self.config.max_response_chars} characters"
        try:
            followed = await self._followed(metadata, text)
        except WorkFailed as failure:
            followed, reason = [False] * len(names), str(failure)
        share = sum(followed) / len(followed)
        if reason is None and not all(followed):
            broken = [name for name, done in zip(names, followed, strict=True) if not done]
            reason = f"not followed: {listed(broken)}"
        return InstructionVerdict(
            reward=share if metadata.grading_mode == "fraction" else float(all(followed)),
            follow_all_instructions=all(followed),
            follow_instruction_list=followed,
            reason=reason,
        )

    async def _followed(self, metadata: InstructionMetadata, text: str) -> list[bool]:
        checked: Checked = await self._pool.run(
            [metadata.instruction_id_list, metadata.kwargs, text],
            cpu_seconds=self.config.check_timeout_seconds,
        )
        if checked["invalid"] is not None:
            raise InvalidRequest(checked["invalid"])
        return checked["followed"]
