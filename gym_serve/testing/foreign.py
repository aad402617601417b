"""A server in whatever language, as the checks of `gym_serve.testing.conformance` ask it: `ForeignServer`.

It is asked as a graph asks it (`gym_serve.transports`). An `Answer` that is not as it must be raises a
`Mismatch`, with texts for people.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import httpx

from gym_serve.servers.tools import WANTS_TOOLS, is_tool_name
from gym_serve.servers.transport import encode
from gym_serve.testing.client import Fixture, ToolCall
from gym_serve.transports import session_headers, session_of
from gym_serve.types.endings import is_failure
from gym_serve.types.errors import GymError, Rejected, Unavailable, error_class
from gym_serve.types.exact import foreign_json
from gym_serve.types.protocols import check_response, message_item
from gym_serve.types.requests import JSON
from gym_serve.types.rows import with_prompt

Kind = Literal["environment", "agent", "model"]

_START_SECONDS = 5.0  # for a server that has just been started
_SHOWN = 200  # characters of a request or an answer


class Mismatch(Exception):
    """Something is not as it must be: ``asked``, ``came`` and ``wanted`` are texts for people."""

    def __init__(self, asked: str, came: str, wanted: str) -> None:
        super().__init__(f"{asked}: {wanted} was wanted, not {came}")
        self.details = {"asked": asked, "came": came, "wanted": wanted}


class Skipped(Exception):
    """The server has nothing that could be asked."""


class Answer(NamedTuple):
    """What was asked, and what came; a status of 0 for nothing."""

    asked: str
    status: int
    content: bytes
    session: str | None = None

    def must(self, holds: bool, wanted: str) -> None:
        """Raise a `Mismatch` unless the answer is right."""
        if not holds:
            came = f"{self.status} {_text(self.content)}" if self.status else _text(self.content)
            raise Mismatch(self.asked, came, wanted)

    def value(self, kind: type = dict, check: Callable[[Any], Any] = lambda value: None) -> Any:
        """What a success answers, if ``check`` raises no error of it."""
        value, fits, wanted = None, self.status == 200, "200, and JSON" + ": an object" * (kind is dict)
        try:
            value = foreign_json(self.content)
            check(value)
        except ValueError:
            fits = False
        except GymError as error:
            fits, wanted = False, error.message
        self.must(fits and isinstance(value, kind), wanted)
        return value

    def refused(self, *codes: str) -> None:
        """That the server refuses the request, by one of these codes; by any, if none is given."""
        wanted = f'{{"error": {{"code", "message"}}}} with {" or ".join(codes)}'
        wanted = wanted if codes else "a refusal, such as 422 with " + wanted + "invalid_request"
        try:
            error = foreign_json(self.content)["error"]
            code, cls = error["code"], error_class(error["code"]) or GymError
            fits = code in codes if codes else issubclass(cls, Rejected)
            fits = fits and self.status == cls.status and isinstance(error["message"], str)
        except (ValueError, LookupError, TypeError):
            fits = False
        self.must(fits, wanted)

    def handled(self) -> None:
        """That the request was answered or refused: the server has not broken."""
        self.value(object) if self.status == 200 else self.refused()

    def reward(self) -> float:
        reward = self.value().get("reward")
        fits = isinstance(reward, int | float) and not isinstance(reward, bool) and math.isfinite(reward)
        self.must(fits, "a `reward` that is a finite number")
        return float(reward or 0)

    def rollout(self, row: JSON) -> None:
        """That it is a rollout of a row, with a reward."""
        rollout = self.value()
        self.must({key: rollout.get(key) for key in row} == row, "every key of the row, unchanged")
        self.must(not is_failure(rollout), "a rollout with a reward, not a failure")
        self.reward()
        self.value(check=lambda value: check_response(value.get("response"), "the agent"))


class Tool(NamedTuple):
    """A tool: the names of its arguments, and of those that it requires right values and wrong ones."""

    names: list[str]
    right: JSON
    wrong: JSON


class ForeignServer:
    """The server under test, with a row that it takes; ``client`` keeps no cookies (`new_client`).

    Attributes:
        offered: what it answers as its tools.
        gone: whether it has stopped to answer.
        fixtures: episodes of an environment whose rewards are known, at least one.
    """

    def __init__(
        self, url: str, kind: Kind, client: httpx.AsyncClient, row: JSON, fixtures: Sequence[Fixture]
    ) -> None:
        self.url, self.kind, self.row, self._client = url, kind, row, client
        self.gone = False
        self.offered: Any = row["responses_create_params"].get("tools")
        self.tools: dict[str, Tool] = {}
        # Those of judges and of errors are for `gym-serve test`.
        self.fixtures = [fixture for fixture in fixtures if fixture.error is None and not fixture.judge]

    async def start(self) -> None:
        """Wait until it answers, and learn its tools."""
        late = time.monotonic() + _START_SECONDS
        while not (first := await self.ask("v1/models", verb="GET")).status:
            if time.monotonic() > late:
                raise Unavailable(f"nothing answers at {self.url}: {_text(first.content)}")
            await asyncio.sleep(0.1)
        self.gone = False
        if self.kind == "environment" and self.offered is None:
            with suppress(Mismatch):
                self.offered = (await self.ask(*self.usual)).value().get("tools")
        offered = self.offered if isinstance(self.offered, list) else []
        self.tools = {tool["name"]: _tool(tool["parameters"]) for tool in offered if is_function(tool)}
        if not self.fixtures:  # nobody knows the reward of this one
            calls = [ToolCall(name=n, arguments=t.right) for n, t in [*self.tools.items()][:1]]
            output = [message_item("Hello")]
            fixture = Fixture.model_construct(name="of the row", row=self.row, calls=calls, output=output)
            self.fixtures = [fixture]

    @property
    def usual(self) -> tuple[str, JSON]:
        """Route and body of a request that every server of the kind takes."""
        if self.kind == "environment":
            return "seed_session", {**self.row, WANTS_TOOLS: True}
        return (
            ("run", self.row)
            if self.kind == "agent"
            else ("v1/responses", self.row["responses_create_params"])
        )

    async def ask(self, op: str, body: Any = b"", session: str | None = None, verb: str = "POST") -> Answer:
        """One request; ``body`` is bytes, or becomes JSON."""
        content = body if isinstance(body, bytes) else encode(body)
        request = f"{verb} /{op} {_text(content)}".rstrip() + (
            f" (session {session[:40]})" if session else ""
        )
        try:
            answer = await self._send(verb, op, _chunks(content), len(content), session_headers(session))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            self.gone = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            cause = error.__cause__ or error
            return Answer(request, 0, f"no answer: {type(cause).__name__} {cause}".encode())
        return Answer(request, answer.status_code, answer.content, session_of(answer, None))

    async def leave(self, op: str, body: bytes, sent: int) -> None:
        """Send the first bytes of a body, and close the connection."""
        with suppress(_Left, httpx.HTTPError):
            await self._send("POST", op, _chunks(body[:sent], _Left()), len(body), {})

    async def _send(
        self, verb: str, op: str, body: AsyncIterator[bytes], length: int, headers: dict[bytes, bytes]
    ) -> httpx.Response:
        headers = {**headers, b"content-length": str(length).encode()}
        content = body if length else None
        return await self._client.request(verb, f"{self.url}/{op}", content=content, headers=headers)

    async def ask_if_there(self, op: str, body: Any = b"", verb: str = "POST") -> Answer:
        """`ask` for a route that a server may do without."""
        answer = await self.ask(op, body, verb=verb)
        if answer.status == 404:
            answer.refused("not_found")
            raise Skipped(f"it has no /{op}")
        return answer

    async def open(self, row: JSON | None = None) -> str:
        opened = await self.ask("seed_session", with_prompt(row or self.row))
        opened.value()
        opened.must(opened.session is not None, "a session id, in the header X-Session-Id or in a cookie")
        return str(opened.session)

    async def use(self, fixture: Fixture, *sessions: str) -> None:
        """Make the tool calls of an episode, each in all of these sessions."""
        for call in fixture.calls:
            for session in sessions:
                (await self.ask(call.name, call.arguments, session)).handled()

    async def score(self, fixture: Fixture, session: str | None) -> Answer:
        body = {**with_prompt(fixture.row), "response": {"output": fixture.output}}
        return await self.ask("verify", body, session)

    async def close(self, session: str, body: Any = b"{}") -> None:
        (await self.ask("close_session", body, session)).value()

    async def work(self, number: int = 0) -> Any:
        """What a server of the kind does all the time; of an environment, a whole episode and its reward."""
        if self.kind == "model":
            return len((await self.ask(*self.usual)).value(check=check_response)["output"]) > 0
        if self.kind == "agent":
            row = {**self.row, "source": {"line": number, "é": [None, 1.5, "\u2028"]}}
            return (await self.ask("run", row)).rollout(row)
        fixture = self.fixtures[number % len(self.fixtures)]
        session = await self.open(fixture.row)
        await self.use(fixture, session)
        reward = (await self.score(fixture, session)).reward()
        await self.close(session)
        return reward


class _Left(Exception):
    """A client leaves in the middle of its request."""


async def _chunks(body: bytes, error: Exception | None = None) -> AsyncIterator[bytes]:
    yield body
    if error is not None:
        raise error


def is_function(tool: Any) -> bool:
    """Whether a tool is a function in OpenAI's form, with a name that can be a route."""
    if not (isinstance(tool, dict) and tool.get("type") == "function" and isinstance(tool.get("name"), str)):
        return False
    return is_tool_name(tool["name"]) and isinstance(tool.get("parameters"), dict)


def _tool(schema: JSON) -> Tool:
    properties, required = schema.get("properties"), schema.get("required")
    values = {"string": "tea", "integer": 1, "number": 1, "boolean": True, "array": [], "object": {}}
    properties = properties if isinstance(properties, dict) else {}
    tool = Tool(list(properties), {}, {})
    for name, prop in properties.items():
        if isinstance(prop, dict) and isinstance(required, list) and name in required:
            kind, choices = str(prop.get("type")), prop.get("enum")
            tool.right[name] = choices[0] if isinstance(choices, list) and choices else values.get(kind)
            if kind in values:
                tool.wrong[name] = 7.5 if kind in ("array", "object") else {"a": [None]}
    return tool


def _text(content: bytes) -> str:
    text = content[: 4 * _SHOWN].decode("utf-8", "replace")
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
