"""`CodeGen`: programs, graded by unit tests in a sandbox.

A reward of 0 means that the program failed a test, or that the response has no program. If a sandbox does not
start, dies, or gets no CPU time, verification fails and is tried again; it never scores 0.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat, PositiveInt

from gym_serve.environments.code_gen.running import (
    MAX_INPUT,
    PRELUDE,
    TURN_SECONDS,
    TestLimits,
    TestReport,
    UnitTests,
    breaks_reasoning_format,
    extract_code,
    give_up,
    run_tests,
)
from gym_serve.grading import ending, excerpt, replace_surrogates
from gym_serve.metrics import MetricSpec, Score
from gym_serve.sandbox import Limits, SandboxName, SandboxPool, find_sandbox, sandbox_problems
from gym_serve.servers import ResourcesServer, Verdict, VerifyRequest
from gym_serve.servers.context import current
from gym_serve.workers import give_up_at


class CodeMetadata(BaseModel):
    """``verifier_metadata`` of a row; further keys are ignored."""

    model_config = ConfigDict(extra="allow")

    unit_tests: UnitTests
    difficulty: str | None = None  # splits the metrics


class CodeRequest(VerifyRequest):
    """A programming problem with the response to it."""

    verifier_metadata: CodeMetadata


class CodeVerdict(Verdict):
    """The reward and what it was given for."""

    extracted_model_output: str | None = None  # the text of the response; None if it is empty
    extracted_model_code: str | None = None  # the program in it; None if there is none
    result: list[bool | int] | None = None
    """True for each test passed, then the code of the first that was not; None without a program."""
    error_code: int | None = None  # that code: -1 killed, -2 wrong answer, -3 time limit, -4 exception
    metadata: dict[str, Any] | None = None
    """That test, shortened: its input, the expected output and the program's."""
    reasoning_format_violation_rate: float = 0.0
    """1.0 if thinking stands in the answer, or was begun or ended twice."""
    difficulty: str | None = None


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
        sandbox: SandboxName = "bubblewrap"
        """``bubblewrap`` confines programs; ``process`` trusts them, see README.md."""
        num_processes: PositiveInt = 2
        """Programs that are tested at the same time, each using up to one core; read at the start only."""
        unit_test_timeout_secs: PositiveFloat = 10.0
        """Seconds that one test may take (waiting for a processor not included)."""
        answer_timeout_secs: PositiveFloat = 120.0
        """The same for all tests of a program together; keep it below the agent's ``verify_timeout``."""
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

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._rows: OrderedDict[bytes, asyncio.Future[UnitTests]] = OrderedDict()

    @classmethod
    def preflight(cls, config: Config) -> Iterable[str]:
        yield from super().preflight(config)
        yield from sandbox_problems(config.sandbox, config.packages)

    async def start(self) -> None:
        config = self.config
        limits = Limits(memory_bytes=config.memory_mb << 20, file_bytes=MAX_INPUT, disk_bytes=4 * MAX_INPUT)
        sandbox = await asyncio.to_thread(find_sandbox, config.sandbox, config.packages)
        self._pool = self.manage(SandboxPool(sandbox, limits, size=config.num_processes, prelude=PRELUDE))
        await super().start()

    async def verify(self, request: CodeRequest) -> CodeVerdict:
        """Run the tests on the program in the response."""
        difficulty = request.verifier_metadata.difficulty
        text = replace_surrogates(request.response.output_text)
        code = await asyncio.to_thread(extract_code, text)
        if code is None:
            return CodeVerdict(
                reward=0.0,
                extracted_model_output=text if text.strip() else None,
                difficulty=difficulty,
                reason=f"no code block found: {ending(text)}",
            )
        tests = await self._unpacked(request.verifier_metadata.unit_tests)
        report = await self._tested(code, tests)
        violation = breaks_reasoning_format(request.response)
        reason = None if report.fault is None else _why_failed(report, len(tests.inputs))
        if violation:
            reason = "thinking stands in the answer, or was begun or ended twice"
        return CodeVerdict(
            reward=self.config.reasoning_format_penalty if violation else float(report.fault is None),
            extracted_model_output=text,
            extracted_model_code=code,
            result=report.result,
            error_code=report.fault["error_code"] if report.fault else None,
            metadata=report.fault,
            reasoning_format_violation_rate=float(violation),
            difficulty=difficulty,
            reason=reason,
        )

    async def _unpacked(self, tests: UnitTests) -> UnitTests:
        """The tests of a row. Packed ones are unpacked in a thread, and kept for the row's other rollouts."""
        if tests.packed is None:
            return tests
        key = hashlib.sha256(f"{tests.fn_name}\0{tests.packed}".encode()).digest()
        if key not in self._rows:
            self._rows[key] = asyncio.ensure_future(asyncio.to_thread(tests.unpacked))
            if len(self._rows) > _KEPT_ROWS:
                self._rows.popitem(last=False)
        return await asyncio.shield(self._rows[key])

    async def _tested(self, code: str, tests: UnitTests) -> TestReport:
        """The report on a program, in as many turns as it takes."""
        config, report = self.config, TestReport()
        limits = TestLimits(
            config.unit_test_timeout_secs, config.answer_timeout_secs, config.float_tolerance, config.debug
        )
        until = give_up_at(current().deadline)

        async def turns() -> None:
            while not report.done:
                await self._pool.grade(
                    lambda python: run_tests(
                        python, code, tests, report, limits=limits, others_wait=lambda: self._pool.crowded
                    ),
                    "program",
                    used=report.seconds,
                )

        work = asyncio.ensure_future(turns())
        try:
            await asyncio.wait([work], timeout=None if until is None else until - time.monotonic())
            if not work.done() and report.seconds >= TURN_SECONDS:
                give_up(report, tests)
            else:
                await work
        finally:
            work.cancel()
        return report


_KEPT_ROWS = 8  # rows whose unpacked tests are kept


def _why_failed(report: TestReport, count: int) -> str:
    fault = report.fault or {}
    what = f"test {len(report.result)} of {count}: {str(fault['error_message']).lower()}"
    if fault["error"]:
        return f"{what}: {excerpt(str(fault['error']))}"
    expected, output = (excerpt(str(fault[key]).strip()) for key in ("expected", "output"))
    return f"{what}: expected {expected}, got {output}"
