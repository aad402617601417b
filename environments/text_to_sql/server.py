"""`TextToSql`: queries that a model wrote, checked by running them where that is possible, then by a judge.

Running goes first, and can only refute: a query that fails, or gives something else than the expected one on
the row's own database, is wrong whatever a judge could be talked into, and costs no call of one. The judge
decides on the others, as on a handful of rows a wrong query often gives the right result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, PositiveFloat, PositiveInt

from gym_serve.environments.text_to_sql.execution import Execution, SqlRunner
from gym_serve.environments.text_to_sql.extraction import extract_sql
from gym_serve.environments.text_to_sql.judge import MAX_QUERY_CHARS, PROMPT_TEMPLATE, check_template
from gym_serve.judging import (
    Ballot,
    JudgeCalls,
    JudgeSettings,
    LabelJudge,
    both_orders,
    escape_labels,
    open_cache,
    whole_text,
)
from gym_serve.metrics import MetricSpec, Score
from gym_serve.sandbox import SandboxName, find_sandbox, sandbox_problems
from gym_serve.servers import ModelClient, ResourcesServer, Verdict, VerifyRequest

__all__ = ["SqlRequest", "SqlVerdict", "TextToSql"]

_ALIASES = {"postgres": "postgresql", "pg": "postgresql", "sqlite3": "sqlite"}

FailureReason = Literal[
    "none", "no_sql_extracted", "execution_failed", "execution_differs", "judge_evaluation_failed"
]


def _dialect(name: Any) -> Any:
    if not isinstance(name, str):
        return name
    name = name.strip().lower()
    return _ALIASES.get(name, name)


class SqlRequest(VerifyRequest):
    """A row with the response to it."""

    sql: str
    """The right query."""
    sql_dialect: Annotated[Literal["mysql", "postgresql", "sqlite"], BeforeValidator(_dialect)]
    """The dialect; ``postgres``, ``pg`` and ``sqlite3`` will do too."""
    sql_prompt: str
    """The question."""
    sql_context: str = ""
    """The database: CREATE and INSERT statements."""


class SqlVerdict(Verdict):
    """The reward and what it was given for."""

    sql_dialect: str
    """The row's."""
    model_output: str
    """The text of the response."""
    extracted_sql: str | None
    """The query in it."""
    judge_passed: bool
    """The judge found the query equal to the expected one."""
    failure_reason: FailureReason
    """What took the reward away; ``none`` where nothing did."""
    execution: dict[str, Any] | None
    """``{"outcome", "detail"}`` of running the query; None if it was not run."""
    judge_evaluations: list[dict[str, Any]]
    """The judge's calls: ``{"responses_create_params", "response", "verdict_label"}``."""


class TextToSql(ResourcesServer):
    """SQL queries: reward 1.0 for one that the judge finds equal to the expected one, else 0.0."""

    reverify_mode: ClassVar[Literal["stateless"]] = "stateless"
    metrics: ClassVar[MetricSpec] = MetricSpec(scores=(Score("accuracy"),), subset="sql_dialect")

    class Config(JudgeSettings):
        """Settings of the environment."""

        judge: ModelClient
        """The model that judges."""
        judge_prompt_template: Annotated[str, AfterValidator(check_template)] = PROMPT_TEMPLATE
        """The prompt, with ``{first_answer}`` and ``{second_answer}``, and maybe ``{sql_dialect}``,
        ``{sql_context}`` and ``{sql_prompt}``."""
        check_twice_swap: bool = True
        """Ask about an equal query again with the two sides swapped."""
        reward_if_swap_fails: float = 0.0
        """Reward of a query that is equal one way round only."""
        check_execution: bool = True
        """Run the queries of SQLite rows that have a ``sql_context`` before asking the judge."""
        sandbox: SandboxName = "bubblewrap"
        """Where queries run: ``bubblewrap`` or ``process`` (limits of time and memory); see README.md."""
        num_processes: PositiveInt = 2
        """Queries that are run at the same time, each using up to one core; read at the start only."""
        execution_timeout_secs: PositiveFloat = 5.0
        """Seconds that a query may take (waiting for a processor not included); read at the start only."""
        memory_mb: PositiveInt = 512
        """Memory of one query in MiB; read at the start only."""

    config: Config

    @classmethod
    def preflight(cls, config: Config) -> Iterable[str]:
        """See `Server.preflight`: whether the sandbox works."""
        yield from super().preflight(config)
        if config.check_execution:
            yield from sandbox_problems(config.sandbox)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._cache = open_cache(self.config.judge_cache)
        self._calls = JudgeCalls(self.config.judge_max_concurrency, self._cache)
        self._runner: SqlRunner | None = None

    async def start(self) -> None:
        """Start the sandboxes; returns when they are ready.

        Raises:
            GraphError: the sandbox does not work on this machine.
            Unavailable: a sandbox does not start.
        """
        config = self.config
        if config.check_execution:
            self._runner = SqlRunner(
                await asyncio.to_thread(find_sandbox, config.sandbox),
                memory_bytes=config.memory_mb << 20,
                timeout=config.execution_timeout_secs,
                size=config.num_processes,
            )
            await self._runner.start()
        await super().start()

    async def stop(self) -> None:
        """End the sandboxes."""
        if self._runner is not None:
            await self._runner.stop()
        await super().stop()
        if self._cache is not None:
            self._cache.close()

    async def verify(self, request: SqlRequest) -> SqlVerdict:
        """Compare the query in the response with the expected one.

        Raises:
            VerifierFailed: the judge did not answer, sandboxes died, or the machine is too busy.
            Unavailable: a sandbox does not start.
        """
        text = _sound(request.response.output_text)
        query = await asyncio.to_thread(extract_sql, text)  # a long text of fences takes a while
        if query is None:
            return self._verdict(request, text, None, "no_sql_extracted")
        execution = await self._execution(request, query)
        if execution is not None and execution.outcome in ("failed", "different"):
            reason: FailureReason = (
                "execution_failed" if execution.outcome == "failed" else "execution_differs"
            )
            return self._verdict(request, text, query, reason, execution=execution)
        ballots = await self._ballots(request, query)
        return self._verdict(request, text, query, "none", execution=execution, ballots=ballots)

    async def _execution(self, request: SqlRequest, query: str) -> Execution | None:
        if self._runner is None or request.sql_dialect != "sqlite" or not request.sql_context.strip():
            return None
        return await self._runner.check(request.sql_context, request.sql, query)

    async def _ballots(self, request: SqlRequest, query: str) -> list[Ballot]:
        async def ask(first: str, second: str) -> Ballot:
            return await self._ask(request, first, second)

        if self.config.check_twice_swap:
            return await both_orders(ask, request.sql, query, self.config.judge_equal_label)
        return [await ask(request.sql, query)]

    async def _ask(self, request: SqlRequest, first: str, second: str) -> Ballot:
        config = self.config
        labels = (config.judge_equal_label, config.judge_not_equal_label)
        judge = LabelJudge(
            (config.judge, *config.further_judges),
            self._calls,
            config.judge_prompt_template,
            labels,
            config.judge_responses_create_params,
            config.judge_system_message,
            read=whole_text,
            votes=config.judge_votes,
        )
        return await judge.ask(
            {
                "first_answer": escape_labels(first, labels, MAX_QUERY_CHARS),
                "second_answer": escape_labels(second, labels, MAX_QUERY_CHARS),
                "sql_dialect": request.sql_dialect,
                "sql_context": request.sql_context,
                "sql_prompt": request.sql_prompt,
            }
        )

    def _verdict(
        self,
        request: SqlRequest,
        text: str,
        query: str | None,
        reason: FailureReason,
        *,
        execution: Execution | None = None,
        ballots: list[Ballot] | None = None,
    ) -> SqlVerdict:
        equal = [ballot.label == self.config.judge_equal_label for ballot in ballots or ()]
        passed = bool(equal) and all(equal)
        reward = 1.0 if passed else self.config.reward_if_swap_fails if any(equal) else 0.0
        return SqlVerdict(
            reward=reward,
            sql_dialect=request.sql_dialect,
            model_output=text,
            extracted_sql=query,
            judge_passed=passed,
            failure_reason="judge_evaluation_failed" if equal and not passed else reason,
            execution=None if execution is None else asdict(execution),
            judge_evaluations=[
                {
                    "responses_create_params": vote.request,
                    "response": vote.response,
                    "verdict_label": vote.verdict,
                }
                for ballot in ballots or ()
                for vote in ballot.votes
            ],
        )


def _sound(text: str) -> str:
    # A lone surrogate is no character: SQLite and JSON encoders refuse it.
    return text.encode("utf-8", "replace").decode("utf-8")
