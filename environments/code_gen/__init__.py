"""`CodeGen`: programs, graded by unit tests in a sandbox.

A reward of 0 means that the program failed a test, or that the response has no program. If a sandbox does not
start, dies, or gets no CPU time, verification fails and is tried again; it never scores 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat, PositiveInt

from gym_serve.environments.code_gen.grading import breaks_reasoning_format, extract_code
from gym_serve.environments.code_gen.running import MAX_INPUT, PRELUDE, UnitTests, run_tests
from gym_serve.grading import replace_surrogates
from gym_serve.metrics import MetricSpec, Score
from gym_serve.sandbox import Limits, SandboxName, SandboxPool, find_sandbox, sandbox_problems
from gym_serve.servers import ResourcesServer, Verdict, VerifyRequest


class CodeMetadata(BaseModel):
    """``verifier_metadata`` of a row; further keys are ignored."""

    model_config = ConfigDict(extra="allow")

    unit_tests: UnitTests
    """The tests that the program has to pass, all of them."""
    difficulty: str | None = None
    """Splits the metrics."""


class CodeRequest(VerifyRequest):
    """A programming problem with the response to it."""

    verifier_metadata: CodeMetadata
    """The tests."""


class CodeVerdict(Verdict):
    """The reward and what it was given for."""

    extracted_model_output: str | None = None
    """The text of the response; None if it is empty."""
    extracted_model_code: str | None = None
    """The program in it; None if there is none."""
    result: list[bool | int] | None = None
    """True for each test passed, then the code of the first that was not; None without a program."""
    error_code: int | None = None
    """That code: -1 killed, -2 wrong answer, -3 time limit, -4 exception."""
    metadata: dict[str, Any] | None = None
    """That test, shortened: its input, the expected output and the program's."""
    reasoning_format_violation_rate: float = 0.0
    """1.0 if thinking stands in the answer, or was begun or ended twice."""
    difficulty: str | None = None
    """The row's."""


class CodeGen(ResourcesServer):
    """Programming problems: reward 1.0 for a Python program that passes all tests, else 0.0."""

    reverify_mode: ClassVar[Literal["stateless"]] = "stateless"
    metrics: ClassVar[MetricSpec] = MetricSpec(
        scores=(Score("accuracy", above=0.0),),
        answer="extracted_model_code",
        subset="difficulty",
        sample_std_dev=True,
        key_metrics=(
            "mean/input_tokens",
            "mean/output_tokens",
            "pass@1[avg-of-{k}]/accuracy",
            "pass@{k}/accuracy",
            "majority@{k}/accuracy",
            "*/pass@1[avg-of-{k}]/accuracy",
        ),
    )

    class Config(ResourcesServer.Config):
        """Settings of the environment."""

        sandbox: SandboxName = "bubblewrap"
        """``bubblewrap`` confines programs; ``process`` trusts them, see README.md."""
        num_processes: PositiveInt = 2
        """Programs that are tested at the same time, each using up to one core; read at the start only."""
        unit_test_timeout_secs: PositiveFloat = 10.0
        """Seconds that one test may take (waiting for a processor not included)."""
        memory_mb: PositiveInt = 2048
        """Memory of one program in MiB; read at the start only."""
        packages: tuple[str, ...] = ("numpy",)
        """Installed packages that programs may import, with what they require; read at the start only."""
        float_tolerance: NonNegativeFloat = 0.0
        """How far a number that is not an integer may be from the expected one, absolutely or relatively."""
        reasoning_format_penalty: float = 0.0
        """Reward of a response that breaks the format of reasoning, whatever its program does."""
        debug: bool = False
        """Keep the end of the program's standard error in ``metadata``."""

    config: Config

    @classmethod
    def preflight(cls, config: Config) -> Iterable[str]:
        """See `Server.preflight`: whether the sandbox works."""
        yield from super().preflight(config)
        yield from sandbox_problems(config.sandbox, config.packages)

    async def start(self) -> None:
        """Start the sandboxes; returns when they are ready.

        Raises:
            GraphError: the sandbox does not work on this machine.
            Unavailable: a sandbox does not start.
        """
        config = self.config
        limits = Limits(
            memory_bytes=config.memory_mb << 20,
            file_bytes=MAX_INPUT,
            disk_bytes=4 * MAX_INPUT,
        )
        sandbox = await asyncio.to_thread(find_sandbox, config.sandbox, config.packages)
        self._pool = self.manage(SandboxPool(sandbox, limits, size=config.num_processes, prelude=PRELUDE))
        await super().start()

    async def verify(self, request: CodeRequest) -> CodeVerdict:
        """Run the tests on the program in the response.

        Raises:
            VerifierFailed: two sandboxes died, or the machine is too busy.
            Unavailable: a sandbox does not start.
        """
        difficulty = request.verifier_metadata.difficulty
        text = replace_surrogates(request.response.output_text)
        if not text.strip():
            return CodeVerdict(reward=0.0, difficulty=difficulty)
        code = extract_code(text)
        if code is None:
            return CodeVerdict(reward=0.0, extracted_model_output=text, difficulty=difficulty)
        config, tests = self.config, request.verifier_metadata.unit_tests
        report = await self._pool.grade(
            lambda python: run_tests(
                python,
                code,
                tests,
                timeout=config.unit_test_timeout_secs,
                tolerance=config.float_tolerance,
                debug=config.debug,
            ),
            "program",
        )
        violation = breaks_reasoning_format(request.response)
        passed = 0.0 if report.fault else 1.0
        return CodeVerdict(
            reward=config.reasoning_format_penalty if violation else passed,
            extracted_model_output=text,
            extracted_model_code=code,
            result=report.result,
            error_code=report.fault["error_code"] if report.fault else None,
            metadata=report.fault,
            reasoning_format_violation_rate=float(violation),
            difficulty=difficulty,
        )
