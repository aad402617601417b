"""`MathWithCode`: mathematical problems with a Python interpreter that lasts for the episode.

Whatever the model's code does is a tool output; only a sandbox that cannot be started is a failure.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, AliasChoices, BaseModel, Field, PositiveFloat, PositiveInt

from gym_serve.grading import (
    MathVerifyPool,
    boxed_gold,
    ending,
    excerpt,
    last_box,
    replace_surrogates,
    same_text,
    stated,
    why_unequal,
)
from gym_serve.metrics import MetricSpec, Score
from gym_serve.sandbox import (
    Limits,
    SandboxDied,
    SandboxedPython,
    SandboxName,
    SandboxPool,
    find_sandbox,
    sandbox_problems,
)
from gym_serve.servers import ResourcesServer, Response, Verdict, VerifyRequest, tool
from gym_serve.servers.context import current
from gym_serve.types.requests import message_text
from gym_serve.workers import give_up_at

_LOST = "variables, functions and imports are lost"


class ExecutionResult(BaseModel):
    """What the tool answers."""

    success: bool
    stdout: str = ""
    stderr: str = ""  # warnings, and the traceback of an exception
    error_message: str | None = None  # the exception in one line, or what became of the interpreter
    result: str | None = None  # value of the last expression, unless it is None


class PythonSession:
    """An interpreter that is started when needed."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._python: SandboxedPython | None = None

    async def execute(
        self, code: str, pool: SandboxPool, turns: asyncio.Semaphore, *, timeout: float, output_limit: int
    ) -> ExecutionResult:
        """Execute code in the episode's namespace; waiting for a turn does not count as the code's time.
        Raises Unavailable: an interpreter does not start, or the machine is too busy for it.
        """
        async with self._lock:
            python, notice = self._python, ""
            if python is not None and not python.running:  # its last call was cancelled
                python, notice = None, f"(the interpreter was started anew: {_LOST})\n"
            async with turns:
                self._python = python = python or await pool.take()
                try:
                    done = await python.execute(code, timeout=timeout, output_limit=output_limit)
                except SandboxDied as error:
                    self._python = None
                    message = f"the interpreter ended ({error}); the next call starts a new one: {_LOST}"
                    return ExecutionResult(success=False, error_message=message)
        return ExecutionResult(
            success=done.error is None,
            stdout=done.stdout,
            stderr=notice + done.stderr,
            error_message=done.error,
            result=done.result,
        )

    async def close(self) -> None:
        async with self._lock:
            python, self._python = self._python, None
            if python is not None:
                await python.stop()


_WORKER_MEMORY = 2 << 30


class MathCodeRequest(VerifyRequest):
    """A mathematical problem with the response to it."""

    expected_result: Annotated[str, AfterValidator(stated)] = Field(
        validation_alias=AliasChoices("expected_result", "expected_answer")
    )  # the right answer: LaTeX or a plain number, with or without math delimiters


class MathCodeVerdict(Verdict):
    """The reward and what it was given for."""

    extracted_answer: str | None  # what the last ``\boxed{}`` holds; None if there is none
    accuracy: bool


class MathWithCode(ResourcesServer):
    """Mathematical problems with an interpreter: reward 1.0 for the right answer in a box, else 0.0."""

    reverify_mode: ClassVar[Literal["stateless"]] = "stateless"
    metrics: ClassVar[MetricSpec] = MetricSpec(
        scores=(Score("accuracy"),),
        answer="extracted_answer",
        key_metrics=(
            "mean/reward",
            "mean/input_tokens",
            "mean/output_tokens",
            "pass@1[avg-of-{k}]/*",
            "pass@{k}/accuracy",
            "majority@{k}/accuracy",
        ),
    )

    class Config(ResourcesServer.Config):
        sandbox: SandboxName = "bubblewrap"
        """``bubblewrap`` confines the model's code; ``process`` trusts it, see README.md."""
        max_execution_time: PositiveFloat = 10.0
        """Seconds that one call may take (waiting for a turn or a processor not included)."""
        num_processes: PositiveInt = 4
        """Calls that run at the same time, each using up to one core; read at the start only."""
        warm_sandboxes: PositiveInt = 2
        """Interpreters that are kept ready for new episodes; read at the start only."""
        memory_mb: PositiveInt = 1024
        """Memory of one interpreter in MiB; read at the start only."""
        packages: tuple[str, ...] = ("numpy", "sympy")
        """Installed packages that code may import, with what they require; read at the start only."""
        prelude: str = ""
        """Trusted code that each interpreter runs first (``import numpy as np``); read at the start only."""
        max_output_chars: PositiveInt = 20_000
        """Characters of each of the tool's texts, the rest is cut off; read at the start only."""
        library_verifier_timeout_seconds: PositiveFloat = 20.0
        """Seconds of CPU time that math-verify may work on one answer; one that takes longer is wrong."""
        num_workers: PositiveInt = 1
        """Processes that run math-verify; read at the start only."""

    config: Config

    @classmethod
    def preflight(cls, config: Config) -> Iterable[str]:
        yield from super().preflight(config)
        yield from sandbox_problems(config.sandbox, config.packages)

    Session = PythonSession

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._verifier = self.manage(MathVerifyPool(self.config.num_workers, memory_bytes=_WORKER_MEMORY))

    async def start(self) -> None:
        config = self.config
        sandbox = await asyncio.to_thread(find_sandbox, config.sandbox, config.packages)
        limits = Limits(memory_bytes=config.memory_mb << 20)
        self._pool = self.manage(
            SandboxPool(sandbox, limits, size=config.warm_sandboxes, prelude=config.prelude)
        )
        self._turns = asyncio.Semaphore(config.num_processes)
        self._output_limit = config.max_output_chars
        await super().start()

    @tool
    async def execute_python(self, code: str, session: PythonSession) -> ExecutionResult:
        """Execute Python code to perform calculations. Variables, functions and imports are kept for later
        calls; the value of a last expression is returned. NumPy and SymPy can be imported; there are no
        network and no files but temporary ones.

        Args:
            code: The Python code to execute.
        """
        config = self.config
        return await session.execute(
            code, self._pool, self._turns, timeout=config.max_execution_time, output_limit=self._output_limit
        )

    @tool
    async def end_session(self, session: PythonSession) -> ExecutionResult:
        """Forget all variables, functions and imports of execute_python."""
        await session.close()
        return ExecutionResult(success=True)

    async def close(self, session: PythonSession) -> None:
        await session.close()

    async def verify(self, request: MathCodeRequest) -> MathCodeVerdict:
        """Compare the response's answer with the expected one."""
        answer = boxed_answer(request.response)
        expected = replace_surrogates(request.expected_result)
        if answer is None:
            wanted, shown_answer = excerpt(expected), ending(request.response.output_text)
            reason = f"expected {wanted} in \\boxed{{}}, but no box found: {shown_answer}"
            return MathCodeVerdict(reward=0.0, extracted_answer=None, accuracy=False, reason=reason)
        answer = replace_surrogates(answer)
        difference = await self._difference(expected, answer)
        equal = difference is None
        return MathCodeVerdict(
            reward=float(equal), extracted_answer=answer, accuracy=equal, reason=difference
        )

    async def _difference(self, expected: str, answer: str) -> str | None:
        """Why an answer is not the expected one; None if it is."""
        if same_text(expected, answer):
            return None
        gold, boxed = boxed_gold(expected), f"\\boxed{{{answer}}}"
        timeout = self.config.library_verifier_timeout_seconds
        comparison = await self._verifier.verify(
            gold, boxed, timeout=timeout, until=give_up_at(current().deadline)
        )
        return None if comparison.equal else why_unequal(gold, boxed, comparison)


def boxed_answer(response: Response) -> str | None:
    """The answer of a response: that of the last message which has one, else of the last tool output."""
    for message in reversed(response.messages):
        if (answer := last_box(message_text(message))) is not None:
            return answer
    for output in reversed(response.tool_outputs.values()):
        if (answer := last_box(_printed(output))) is not None:
            return answer
    return None


def _printed(output: str) -> str:
    """Standard output of an execution; the whole text if it is not an output of `execute_python`."""
    try:
        result = json.loads(output)
    except (ValueError, RecursionError):
        return output
    stdout = result.get("stdout") if isinstance(result, dict) else None
    return stdout if isinstance(stdout, str) else ""
