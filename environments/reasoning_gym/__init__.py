"""`ReasoningGym`: items of the reasoning-gym package, scored by the package's own verifiers.

An answer on which the verifier fails scores 0. No answer is ever run: see families.py and expressions.py.

Scoring by the package's verifiers, in a process of its own.

None of them runs an answer: in the package's modules ``eval``, ``exec`` and SymPy's ``parse_expr`` refuse
(five families get a reader of literals for ``eval``). As a second barrier, an audit hook refuses to run code
that is made of text, to start programs and to connect, from the moment that an answer is there. Each answer
is scored in a child that is forked for it, and can be killed.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, model_validator
from typing_extensions import Self

from gym_serve.environments.reasoning_gym.families import (
    LITERALS,
    REFUTED,
    SCORED_HERE,
    WITHOUT_ANSWER,
    as_spelled,
    hedged,
    score_here,
    strange_number,
)
from gym_serve.grading import excerpt, last_box_text, replace_surrogates
from gym_serve.metrics import Breakdown, MetricSpec, Score
from gym_serve.sandbox import (
    Confinement,
    Limits,
    PlainProcess,
    ProgramRun,
    SandboxDied,
    SandboxedPython,
    SandboxName,
    find_sandbox,
    sandbox_problems,
)
from gym_serve.servers import ResourcesServer, Verdict, VerifyRequest
from gym_serve.types.errors import GraphError, InvalidRequest, VerifierFailed

PRELUDE = (
    f"_LITERALS = {sorted(LITERALS)!r}"
    + '''
import ast
import sys

import sympy

import reasoning_gym
from reasoning_gym.factory import DATASETS

_parse_expr = sympy.parse_expr


def _refuse(*args, **kwargs):
    raise ValueError("an answer is not run")


for _name, _module in list(sys.modules.items()):
    if _name.startswith("reasoning_gym."):
        _module.eval = _module.exec = _refuse
        if getattr(_module, "parse_expr", None) is _parse_expr:
            _module.parse_expr = _refuse
for _name in _LITERALS:
    sys.modules[DATASETS[_name][0].__module__].eval = ast.literal_eval
sympy.parse_expr = sympy.sympify = _refuse

_answered = []
_REFUSED = {
    "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.system", "socket.connect", "subprocess.Popen"
}


def _barrier(event, args):
    if _answered and (
        event in _REFUSED or (event == "exec" and args[0].co_filename in ("<string>", "<unknown>", ""))
    ):
        raise ValueError("an answer is not run")


sys.addaudithook(_barrier)


class Given(dict):
    """A part of the row, which remembers what a verifier looked for in vain."""

    missing = []

    def __missing__(self, key):
        self.missing.append(key)
        raise KeyError(key)
'''
)  # run once in each process; `score` below finds its names

_SCORE = """
def score(task, answer, entry):
    if task not in DATASETS or task == "composite":  # an item of which names the family that it is of
        return {"unknown": True}
    metadata = entry["metadata"] = Given(entry["metadata"])
    if task in ("arc_agi", "rearc"):  # their boards are tuples of tuples, which JSON makes lists of
        for board in {"input", "output"} & metadata.keys():
            metadata[board] = tuple(map(tuple, metadata[board]))
    entry = Given(entry)
    score_answer = reasoning_gym.get_score_answer_fn(task)
    _answered.append(True)
    try:
        score, reason = float(score_answer(answer=answer, entry=entry)), None
    except Exception as error:
        score, reason = 0.0, f"{type(error).__name__}: {error}"[:500]
    return {"score": score, "reason": reason, "missing": Given.missing[:1]}
"""

_OUTPUT_LIMIT = 10_000


class Scored(NamedTuple):
    """The library's score of an answer; 0.0 with a reason if there is none."""

    score: float
    reason: str | None


class ScoringPool:
    """A fixed number of warm processes, each using one core while it works."""

    def __init__(self, sandbox: Confinement, limits: Limits, *, size: int) -> None:
        self._processes = [SandboxedPython(sandbox, limits, PRELUDE) for _ in range(size)]
        self._free: asyncio.Queue[SandboxedPython] = asyncio.Queue()

    async def start(self) -> None:
        try:
            await asyncio.gather(*(process.start() for process in self._processes))
        except BaseException:
            await self.stop()
            raise
        for process in self._processes:
            self._free.put_nowait(process)

    async def stop(self) -> None:
        await asyncio.gather(*(process.stop() for process in self._processes))

    async def score(self, task: str, answer: str, entry: dict[str, Any], *, timeout: float) -> Scored:
        """The library's score of an answer to an item; 0.0 with a reason if it cannot be scored, or not in
        time. Raises InvalidRequest: there is no such family, or the item lacks what it needs; VerifierFailed:
        the process died, or the machine is too busy to tell.
        """
        process = await self._free.get()
        try:
            run = await self._run(process, [task, answer, entry], timeout)
        finally:
            self._free.put_nowait(process)
        if run.starved:
            raise VerifierFailed("the machine is overloaded: scoring got less than a tenth of a processor")
        if run.timed_out:
            return Scored(0.0, f"it takes more than {timeout:g} s to score")
        if run.value is None:
            how = run.stderr.strip().rpartition("\n")[2][:500] or f"its process ended with {run.status}"
            return Scored(0.0, f"the verifier fails on it: {how}")
        result = json.loads(run.value)
        if "unknown" in result:
            raise InvalidRequest(f"metadata.source_dataset: reasoning-gym has no task {task[:100]!r}")
        if result["missing"]:
            raise InvalidRequest(f"the row lacks {str(result['missing'][0])[:100]!r}, which {task} needs")
        if result["reason"] is not None:
            return Scored(0.0, f"the verifier fails on it: {result['reason']}")
        score = float(result["score"])
        if not math.isfinite(score):
            return Scored(0.0, f"the verifier scores it {score}")
        return Scored(score, None)

    async def _run(self, process: SandboxedPython, arguments: list[Any], timeout: float) -> ProgramRun:
        for _ in range(2):
            if not process.running:
                await process.start()
            try:
                return await process.run(
                    _SCORE, timeout=timeout, output_limit=_OUTPUT_LIMIT, function="score", arguments=arguments
                )
            except SandboxDied as error:
                end = error  # not by the answer, which has a process of its own
        raise VerifierFailed(f"two scoring processes died: {end}")


class ItemMetadata(BaseModel):
    """``metadata`` of an item; its further keys are the family's own."""

    model_config = ConfigDict(extra="allow")

    source_dataset: str  # the family, e.g. ``knights_knaves``


class ReasoningRequest(VerifyRequest):
    """An item with the response to it."""

    question: str
    answer: str | None = None  # a right answer; None in the families whose items have none
    metadata: ItemMetadata

    @model_validator(mode="after")
    def _has_an_answer(self) -> Self:
        if self.answer is None and self.metadata.source_dataset not in WITHOUT_ANSWER:
            raise ValueError(f"`answer` is missing: an item of {self.metadata.source_dataset[:100]} has one")
        return self


class ReasoningVerdict(Verdict):
    """The reward and what it was given for."""

    task_name: str
    score: float
    extracted_answer: str


class ReasoningGym(ResourcesServer):
    """Items of reasoning-gym: the reward is the package's score, 0 to 1."""

    reverify_mode: ClassVar[Literal["stateless"]] = "stateless"
    metrics: ClassVar[MetricSpec] = MetricSpec(
        scores=(Score("accuracy"),),
        answer="extracted_answer",
        breakdowns=(Breakdown("task_name", prefix="task_"),),
    )

    class Config(ResourcesServer.Config):
        sandbox: SandboxName | None = None
        """Sandbox that scores answers: ``bubblewrap`` or ``process`` (limits of time and memory); by default
        bubblewrap where it works."""
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
        yield from super().preflight(config)
        if config.sandbox is not None:
            yield from sandbox_problems(config.sandbox, _PACKAGES)

    async def start(self) -> None:
        sandbox = await asyncio.to_thread(_sandbox_of, self.config.sandbox)
        limits = Limits(memory_bytes=self.config.memory_mb << 20)
        self._pool = self.manage(ScoringPool(sandbox, limits, size=self.config.num_processes))
        await super().start()

    async def verify(self, request: ReasoningRequest) -> ReasoningVerdict:
        """Score the answer in the response."""
        task = request.metadata.source_dataset
        answer = answer_in(replace_surrogates(request.response.output_text))
        score, reason = await self._scored(task, answer, request)
        if score < _FULL and len(answer) <= self.config.max_answer_chars:
            plain = as_spelled(request.answer, answer)
            second = Scored(0.0, None) if plain == answer else await self._scored(task, plain, request)
            if second.score >= _FULL:
                answer, (score, reason) = plain, second
        if score < 1.0:
            gold = "" if request.answer is None else f"; a right answer is {excerpt(request.answer)}"
            reason = f"the answer {excerpt(answer)} scores {score:.3g}: {reason or 'it is wrong'}{gold}"
        return ReasoningVerdict(
            reward=score, reason=reason, task_name=task, score=score, extracted_answer=answer
        )

    async def _scored(self, task: str, answer: str, request: ReasoningRequest) -> Scored:
        config = self.config
        item = request.model_dump(include={"question", "metadata", "answer"})
        if request.answer is None:
            del item["answer"]
        if len(answer) > config.max_answer_chars:
            return Scored(0.0, f"it is longer than {config.max_answer_chars} characters")
        if strange_number(answer, item):
            return Scored(0.0, "it has a number that is not finite")
        if task in SCORED_HERE:
            try:
                return Scored(*await asyncio.to_thread(score_here, task, answer, item))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                what = f"{type(error).__name__}: {error}"
                raise InvalidRequest(f"the row is no item of {task}: {what[:200]}") from None
        scored = await self._pool.score(task, answer, item, timeout=config.score_timeout_seconds)
        if scored.score < _FULL and hedged(answer, item):
            return Scored(0.0, "the right answer is in it, but denied or one of several")
        if scored.score < _FULL or task not in REFUTED:
            return Scored(min(max(scored.score, 0.0), 1.0), scored.reason)
        try:
            refuted = REFUTED[task](answer, item)
        except (ArithmeticError, KeyError, TypeError, ValueError, RecursionError) as error:
            refuted = f"it cannot be read: {error}"
        return Scored(1.0, None) if refuted is None else Scored(0.0, refuted)


_PACKAGES = ("reasoning-gym",)
_FULL = 1.0 - 1e-6  # parts of 1 that some verifiers add up


def _sandbox_of(name: SandboxName | None) -> Confinement:
    if name is not None:
        return find_sandbox(name, _PACKAGES)
    try:
        return find_sandbox("bubblewrap", _PACKAGES)
    except GraphError:
        return PlainProcess()  # it runs nothing of an answer, so that this is the second of two barriers


_OPEN, _CLOSE = "<answer>", "</answer>"


def answer_in(text: str) -> str:
    r"""The answer that a model's text gives, without white space around it.

    The last pair ``<answer>...</answer>`` counts, also if it is empty (what is opened before it, and has no
    end, is prose); without one, the last ``\boxed{}`` that is not; without that, the whole text.
    """
    answer, place = None, 0
    while (end := text.find(_CLOSE, place)) >= 0:
        if (start := text.rfind(_OPEN, place, end)) >= 0:
            answer = text[start + len(_OPEN) : end]
        place = end + len(_CLOSE)
    if answer is not None:
        return answer.strip()
    return last_box_text(text.strip()) or text.strip()
