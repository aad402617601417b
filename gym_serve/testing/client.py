"""`TestClient`: an environment in a unit test, called as a graph calls it, without Ray.

    with TestClient(Account(overdraft=10)) as client, client.episode(opening=100, closing=70) as episode:
        assert episode.call("pay", amount=30, to="Ada") == "Paid 30 to Ada."
        assert episode.verify("Done.").reward == 1.0

Rows, arguments and verdicts pass through JSON and are validated, and every episode has a session of its
own, as in a graph. What fails there raises the same `GymError` here.

Verifier fixtures: what a verifier must say to given responses, one case a line of ``fixtures.jsonl``.

    {"name": "full: ...",        the part before ":" is its kind
     "row": {...},               the row
     "calls": [{"name", "arguments"}],   tools called in the session before (optional)
     "output": [...],            the output items of the response to score
     "judge": [...],             replies of the models that the verifier asks, in order (optional):
                                 a text, a list of output items, or a whole response
     "reward": 1.0,              what the verifier answers, with these ``fields`` among others;
     "fields": {...},
     "error": null}              or the code of its error, and then no reward

Every case runs twice, each time in a session of its own, and the whole verdict must be the same: a reward
that depends on chance or on what came before cannot be learned from.

`check_fixtures`: runs the fixtures of an environment, without Ray; what `gym-serve test` does.

    results = asyncio.run(check_fixtures(MyEnvironment, load_fixtures("fixtures.jsonl")))
    assert [result.problems for result in results if result.problems] == []

The environment is called as in a graph, by a `ServerRunner`. Where it has settings that name model servers, a
stand-in is put that gives the replies of the case and no others.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from typing_extensions import Self

from gym_serve.graph.classes import check, references_of
from gym_serve.rollouts.rows import read_rows
from gym_serve.servers import Call, Reply, ResourcesServer, Response, ServerRunner
from gym_serve.servers.transport import encode
from gym_serve.types.errors import BadRequest, GymError, InvalidRequest
from gym_serve.types.requests import JSON, Verdict, problems_of
from gym_serve.types.rows import with_prompt

T = TypeVar("T")


class TestClient:
    """Runs an environment for a test; use it as a context manager.

    It is blocking, and works in synchronous and in asynchronous tests: the environment runs on an event
    loop in a thread of its own.

    Args:
        environment: the environment, constructed with its settings.
        timeout: seconds for one call.
    """

    __test__ = False  # pytest: this is no test class

    def __init__(self, environment: ResourcesServer, *, timeout: float = 60.0) -> None:
        self.environment = environment
        self.timeout = timeout
        self._runner = ServerRunner(environment)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="TestClient", daemon=True)

    @property
    def tools(self) -> dict[str, JSON]:
        """The tools by name, as functions of OpenAI's Responses API: what a model sees of them."""
        return {name: spec.openai() for name, spec in self.environment.tools.items()}

    def episode(self, row: Mapping[str, Any] | None = None, /, **keys: Any) -> EpisodeClient:
        """Open a session for a row.

        Args:
            row: the row; one without a prompt gets an empty one.
            **keys: the row's own keys, beside or instead of ``row``.

        Raises:
            GymError: `seed` failed.
        """
        return EpisodeClient(self, with_prompt({"prompt": "", **(row or {}), **keys}))

    def call(self, op: str, body: Any = None, *, session: str | None = None) -> Reply:
        """One call of an operation (``tools/pay``, ``compare``, ...); the reply, failed or not."""
        content = b"" if body is None else encode(body)
        return self._run(self._runner.dispatch(Call(op, content, session, timeout=self.timeout)))

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._runner.start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._run(self._runner.stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class EpisodeClient:
    """One episode of a `TestClient`; leaving its context closes the session.

    Attributes:
        row: its row.
        session: id of its session.
        fields: what `seed` answered.
    """

    def __init__(self, client: TestClient, row: JSON) -> None:
        self.row = row
        self._client = client
        reply = client.call("seed_session", row)
        self.fields: JSON = reply.json()
        self.session = reply.session

    def call(self, tool: str, /, **arguments: Any) -> Any:
        """Call a tool; what it returned, as JSON.

        Raises:
            InvalidRequest: the arguments do not fit the tool.
            NotFound: the environment has no such tool.
            ToolFailed: the tool raised.
        """
        reply = self._client.call(f"tools/{tool}", arguments, session=self.session)
        self.session = reply.session or self.session
        return reply.json()

    def verify(self, response: str | list[JSON] | Mapping[str, Any] = "") -> Verdict:
        """Score the model's last message, output items, or a whole Response object. The verifier's own fields
        are attributes of the verdict.

        Raises:
            GymError: `verify` failed.
        """
        body = {**self.row, "response": _response(response)}
        return Verdict.model_validate(self._client.call("verify", body, session=self.session).json())

    def close(self) -> None:
        """Close the session; safe to call twice."""
        self._client.call("close_session", {}, session=self.session).json()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        try:
            self.close()
        except GymError:
            if kind is None:  # else the test has failed already, and says why
                raise


def _response(content: str | list[JSON] | Mapping[str, Any]) -> JSON:
    if isinstance(content, Mapping):
        return dict(content)
    if isinstance(content, list):
        return {"output": content}
    text = {"type": "output_text", "text": content, "annotations": []}
    return {"output": [{"type": "message", "role": "assistant", "content": [text]}]}


Kind = Literal["full", "zero", "malformed", "other"]

KINDS: tuple[Kind, ...] = ("full", "zero", "malformed")
"""The kinds that every verifier needs: the full reward, none, and a row or response that is broken."""


class ToolCall(BaseModel):
    """A tool that is called in the session before the response is scored."""

    model_config = ConfigDict(extra="forbid")

    name: str
    arguments: JSON = {}


class Fixture(BaseModel):
    """One case; the keys are explained at the top of the module."""

    model_config = ConfigDict(extra="forbid")

    name: str
    row: JSON
    output: list[JSON]
    reward: float | None = None
    fields: JSON = {}
    error: str | None = None
    calls: list[ToolCall] = []
    judge: list[Any] = []

    @model_validator(mode="after")
    def _one_expectation(self) -> Self:
        if (self.reward is None) == (self.error is None):
            raise ValueError("either a reward or an error is expected")
        return self

    @property
    def kind(self) -> Kind:
        """The part of the name before ``:``, else derived from the expected verdict."""
        prefix = self.name.partition(":")[0].strip().lower()
        for kind in KINDS:
            if prefix == kind:
                return kind
        if ":" in self.name:
            return "other"
        if self.reward is None:
            return "malformed"
        return "full" if self.reward >= 1 else "other" if self.reward > 0 else "zero"


def load_fixtures(path: str | Path) -> list[Fixture]:
    """The cases of a file.

    Raises:
        InvalidRequest: it cannot be read, has no cases, or lines that are none; all of them.
    """
    fixtures, problems = [], []
    for where, line, problem in read_rows(Path(path)):
        try:
            if line is None:
                problems.append(f"{where}: {problem}")
            else:
                fixtures.append(Fixture.model_validate(line))
        except ValidationError as error:
            problems += [f"{where}: {problem}" for problem in problems_of(error, "the case")]
    if problems:
        raise InvalidRequest("\n".join(problems))
    if not fixtures:
        raise InvalidRequest(f"{path}: no fixtures")
    return fixtures


def missing_kinds(fixtures: Iterable[Fixture]) -> list[Kind]:
    """The kinds of `KINDS` that no case is of."""
    there = {fixture.kind for fixture in fixtures}
    return [kind for kind in KINDS if kind not in there]


def expectation_problems(
    fixture: Fixture, verdict: Mapping[str, Any] | None, error: str | None
) -> Iterator[str]:
    """How a verdict, or the code of an error, differs from what a case expects."""
    if fixture.error is not None:
        if error != fixture.error:
            got = f"the error {error!r}" if error else f"the reward {(verdict or {}).get('reward')}"
            yield f"the error {fixture.error!r} was expected, not {got}"
        return
    if verdict is None:
        yield f"the reward {fixture.reward} was expected, not the error {error!r}"
        return
    if not _same(fixture.reward, verdict.get("reward")):
        yield f"reward: {fixture.reward} was expected, not {verdict.get('reward')}"
    for name, value in fixture.fields.items():
        if not _same(value, verdict.get(name)):
            yield f"{name}: {value!r} was expected, not {verdict.get(name)!r}"


def _same(expected: Any, actual: Any) -> bool:
    if isinstance(expected, float) and isinstance(actual, int | float) and not isinstance(actual, bool):
        return math.isclose(expected, actual, rel_tol=1e-9, abs_tol=1e-12)
    return bool(expected == actual)


@dataclass(frozen=True)
class FixtureResult:
    """The result of one case.

    Attributes:
        name, kind: the case's.
        problems: differences from the expected verdict; empty for a case that passed.
    """

    name: str
    kind: Kind
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.problems


class ScriptedReplies:
    """A model that answers from a list; it stands in for every model that a verifier asks."""

    def __init__(self) -> None:
        self.replies: list[Any] = []
        self.asked_too_often = False

    async def responses(self, params: dict[str, Any]) -> dict[str, Any]:
        """The next reply as a Response object; `BadRequest` if there is none."""
        if not self.replies:
            self.asked_too_often = True
            raise BadRequest("the fixture's judge has no reply left")
        reply = self.replies.pop(0)
        if isinstance(reply, dict):
            return reply
        if isinstance(reply, list):
            return {"id": "resp_fixture", "output": reply}
        text = {"type": "output_text", "text": str(reply), "annotations": []}
        message = {"type": "message", "id": "msg_fixture", "role": "assistant", "content": [text]}
        return {"id": "resp_fixture", "output": [message]}

    async def chat_completions(self, body: dict[str, Any]) -> dict[str, Any]:
        """The next reply as a completion; the reply is a text or a whole completion."""
        response = await self.responses(body)
        if "choices" in response:
            return response
        message = {"role": "assistant", "content": Response.model_validate(response).output_text}
        return {"id": "chatcmpl_fixture", "choices": [{"index": 0, "message": message}]}

    async def fetch(self, op: str, body: Any = None, *, session: str | None = None) -> Any:
        """The next reply to any other operation; the reply is a whole answer."""
        return await self.responses(body)


async def check_fixtures(
    environment: type[ResourcesServer],
    fixtures: Iterable[Fixture],
    settings: Mapping[str, Any] | None = None,
    *,
    timeout: float | None = 60.0,
) -> list[FixtureResult]:
    """Run cases, each twice, with the settings of the environment by name, and ``timeout`` seconds for a
    call.

    Raises:
        InvalidRequest: the settings do not fit; all of their problems.
    """
    judge = ScriptedReplies()
    bench = _Bench(ServerRunner(_server(environment, settings or {}, judge)), judge, timeout)
    await bench.host.start()
    try:
        return [await bench.check(fixture) for fixture in fixtures]
    finally:
        await bench.host.stop()


def _server(
    environment: type[ResourcesServer], settings: Mapping[str, Any], judge: ScriptedReplies
) -> ResourcesServer:
    names = dict.fromkeys(environment.Config.model_fields, "fixture")
    references = references_of(environment.Config, names)
    models = {
        path: judge
        for path, leaves in references.items()
        if any(getattr(leaf.annotation, "kind", None) == "model" for leaf in leaves)
    }
    values = {**models, **settings}
    _, problems = check(environment.Config, values, "")
    if problems:
        lines = "; ".join(f"{path}: {message}" if path else message for path, message in problems)
        raise InvalidRequest(f"settings of {environment.__name__}: {lines}")
    return environment(**values)


class _Bench:
    def __init__(self, host: ServerRunner, judge: ScriptedReplies, timeout: float | None) -> None:
        self.host = host
        self.judge = judge
        self.timeout = timeout

    async def check(self, fixture: Fixture) -> FixtureResult:
        problems: list[str] = []
        outcomes = []
        for _ in range(2):
            self.judge.replies, self.judge.asked_too_often = list(fixture.judge), False
            verdict, error = await self._score(fixture)
            outcomes.append((verdict, error.code if error else None))
            if problems:
                continue
            problems += expectation_problems(fixture, verdict, error.code if error else None)
            if problems and error is not None and error.code != fixture.error:
                problems.append(error.message)
            if self.judge.replies:
                problems.append(f"the judge was not asked for {len(self.judge.replies)} of its replies")
            if self.judge.asked_too_often:
                problems.append(f"the judge was asked more than {len(fixture.judge)} times")
        if outcomes[0] != outcomes[1]:
            problems.append(f"not deterministic: first {_shown(outcomes[0])}, then {_shown(outcomes[1])}")
        return FixtureResult(fixture.name, fixture.kind, tuple(problems))

    async def _score(self, fixture: Fixture) -> tuple[JSON | None, GymError | None]:
        session: str | None = None
        try:
            seeded = await self._call("seed_session", fixture.row, None)
            session = seeded.session
            seeded.json()
            for call in fixture.calls:
                # What a tool answers, an error included, is for the model alone.
                await self._call(f"tools/{call.name}", call.arguments, session)
            body = {**fixture.row, "response": {"output": fixture.output}}
            verdict: JSON = (await self._call("verify", body, session)).json()
        except GymError as error:
            return None, error
        finally:
            if session is not None:
                await self._call("close_session", {}, session)
        return verdict, None

    async def _call(self, op: str, body: Any, session: str | None) -> Reply:
        return await self.host.dispatch(Call(op, encode(body), session, timeout=self.timeout))


def _shown(outcome: tuple[JSON | None, str | None]) -> str:
    verdict, error = outcome
    return f"the error {error!r}" if verdict is None else str(verdict)[:200]
