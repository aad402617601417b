r"""`McpEnvironment`: the tools of any MCP server, with a verifier.

The tools are listed when a replica starts. Each session has its own connection, and so its own server
process. Tool errors are tool outputs; only a server that cannot be started or reached is a failure.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from mcp.client.stdio import StdioServerParameters
from mcp.types import (
    AudioContent,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    TextContent,
    TextResourceContents,
    Tool,
)
from pydantic import Field, PositiveFloat, PositiveInt, SecretStr, model_validator
from typing_extensions import Self

from gym_serve.environments.mcp.connection import McpConnection, McpSession, by_http, by_process
from gym_serve.grading import last_box, not_in_the_box, replace_surrogates, same_text
from gym_serve.metrics import MetricSpec, Score
from gym_serve.servers import Operation, Reply, ResourcesServer, Verdict, VerifyRequest
from gym_serve.servers.base import missing_path
from gym_serve.servers.context import current
from gym_serve.servers.tools import RESERVED, ToolDescription, is_tool_name
from gym_serve.servers.transport import encode, text_as_json
from gym_serve.types.errors import GraphError, ToolFailed
from gym_serve.types.media import shown_parts
from gym_serve.types.requests import JSON

logger = logging.getLogger(__name__)


def offered(tools: Iterable[Tool], wanted: Collection[str] | None) -> dict[str, ToolDescription]:
    """The tools of a server that the model gets, by name: the ``wanted`` ones, or all. Raises GraphError: one
    is not there, or has a name that is a route or no plain one; unless nobody named it: then it is left out.
    """
    by_name = {tool.name: tool for tool in tools}
    for name in [] if wanted is not None else [*by_name]:
        if name not in RESERVED and not is_tool_name(name):
            logger.warning("the tool %.100r of an MCP server is left out: its name is not a plain one", name)
            del by_name[name]
    chosen = list(by_name) if wanted is None else list(dict.fromkeys(wanted))
    problems = [
        f"tools: the MCP server has no tool {name!r}; it has {', '.join(sorted(by_name)) or 'none'}"
        for name in chosen
        if name not in by_name
    ]
    problems += [
        f"tools: {name!r} cannot be offered, as it is a route or not a plain name; list the others in tools"
        for name in chosen
        if name in by_name and not is_tool_name(name)
    ]
    if problems:
        raise GraphError(problems)
    return {
        name: ToolDescription(name, by_name[name].description or "", completed(by_name[name].input_schema))
        for name in chosen
    }


class AnswerRequest(VerifyRequest):
    """A task with the response to it."""

    expected_answer: str = Field(pattern=r"\S")


class AnswerVerdict(Verdict):
    """The reward and what it was given for."""

    extracted_answer: str | None
    r"""What the last ``\boxed{}`` of the last message holds; None if there is none."""


class McpEnvironment(ResourcesServer):
    r"""The tools of an MCP server: reward 1.0 for the row's ``expected_answer`` in a box, else 0.0.

    A subclass with a `verify` of its own has its own reward rule; there, `call` asks the server.
    """

    reverify_mode: ClassVar[Literal["stateless", "unsupported", "unknown"]] = "stateless"
    metrics: ClassVar[MetricSpec] = MetricSpec(
        scores=(Score("accuracy", "reward"),), answer="extracted_answer"
    )

    class Config(ResourcesServer.Config):
        """Settings of the environment; all but the times are read at the start only."""

        command: list[str] | None = Field(None, min_length=1)
        """Program of an MCP server that speaks over stdio, with its arguments. ``python`` is the interpreter
        that the replica runs on."""
        env: dict[str, SecretStr] = Field(default_factory=dict)
        """Environment variables of the program, which gets these, ``PATH``, ``HOME`` and the like only."""
        cwd: Path | None = None
        """Folder that the program runs in."""
        url: str | None = Field(None, pattern=r"^https?://")
        """Address of an MCP server that speaks streamable HTTP, instead of a command."""
        headers: dict[str, SecretStr] = Field(default_factory=dict)
        """Headers of every request to it, e.g. ``authorization``."""
        connection: Literal["session", "replica"] = "session"
        """Whether every session has a connection, and a process, of its own, or all of a replica share one:
        for servers that keep no state."""
        tools: list[str] | None = None
        """The tools that the model gets; all by default."""
        start_timeout: PositiveFloat = 30.0
        """Seconds until the server has answered."""
        call_timeout: PositiveFloat = 60.0
        """Timeout of one tool call, in seconds; the model gets it as the tool's error."""
        max_output_chars: PositiveInt = 100_000
        """Characters of a tool's answer; the rest is cut off."""

        @model_validator(mode="after")
        def _one_server(self) -> Self:
            if (self.command is None) == (self.url is None):
                raise ValueError("set either `command` or `url`, not both or neither")
            return self

    config: Config

    Session = McpSession

    @classmethod
    def preflight(cls, config: Config) -> Iterable[str]:
        yield from super().preflight(config)
        if config.cwd is not None:
            yield from missing_path("cwd", config.cwd)
        if config.command is not None and config.command[0] != "python":
            program = config.command[0] if config.cwd is None else os.path.join(config.cwd, config.command[0])
            if not any(map(shutil.which, (program, config.command[0]))) and "PATH" not in config.env:
                yield f"command: there is no program {config.command[0]} where its replicas run"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.offered: dict[str, ToolDescription] = {}
        self._shared = McpSession()

    async def discover(self) -> dict[str, ToolDescription]:
        session = self._of(McpSession())
        try:
            connection = await session.connected(self._connection, self.config.start_timeout)
            return offered(await connection.tools(), self.config.tools)
        finally:
            if session is not self._shared:
                await session.close()

    async def start(self) -> None:
        """Find the tools. Raises Unavailable, GraphError: see `discover`."""
        try:
            self.offered = await self.discover()
        except BaseException:
            await self._shared.close()
            raise
        await super().start()

    async def stop(self) -> None:
        await super().stop()
        await self._shared.close()

    async def seed(self, row: JSON, session: McpSession) -> JSON:
        """Connect the session. Returns ``tools``: the tools as a row has them, for agents whose row brings
        none.
        """
        await self._of(session).connected(self._connection, self.config.start_timeout)
        return {"tools": [tool.openai() for tool in self.offered.values()]}

    async def close(self, session: McpSession) -> None:
        await session.close()

    async def call(self, session: McpSession, name: str, arguments: JSON) -> str:
        """The text that any tool of the server answers, for `seed` and `verify`. Raises ToolFailed: the tool,
        or the call, failed; Unavailable: the server cannot be started or reached.
        """
        return self._text(name, await self._result(session, name, arguments))

    async def _result(self, session: McpSession, name: str, arguments: JSON) -> CallToolResult:
        config = self.config
        connection = await self._of(session).connected(self._connection, config.start_timeout)
        timeout = current().timeout(config.call_timeout) or config.call_timeout
        return await connection.call(name, arguments, timeout)

    def _text(self, name: str, result: CallToolResult) -> str:
        text = text_of(result, self.config.max_output_chars)
        if result.is_error:
            raise ToolFailed(text or f"{name} failed")
        return text

    async def verify(self, request: AnswerRequest) -> AnswerVerdict:
        text = request.response.last_text
        answer = last_box(text)
        right = answer is not None and same_text(request.expected_answer, answer)
        shown = None if answer is None else replace_surrogates(answer)
        reason = None if right else not_in_the_box(request.expected_answer, shown, text)
        return AnswerVerdict(reward=float(right), reason=reason, extracted_answer=shown)

    def operations(self) -> dict[str, Operation]:
        operations = super().operations()
        for name, tool in self.offered.items():
            operations[f"tools/{name}"] = self.described_tool(tool, partial(self._answer, name))
        return operations

    async def _answer(self, name: str, session: McpSession, arguments: JSON) -> Reply:
        result = await self._result(session, name, arguments)
        text = self._text(name, result)
        urls = [f"data:{b.mime_type};base64,{b.data}" for b in result.content if isinstance(b, ImageContent)]
        pictures = [{"type": "input_image", "image_url": url} for url in urls]
        parts = Reply.of([{"type": "input_text", "text": text}, *pictures])
        return parts if shown_parts(parts.body) else Reply(200, text_as_json(text))

    def _of(self, session: McpSession) -> McpSession:
        return session if self.config.connection == "session" else self._shared

    def _connection(self) -> McpConnection:
        config = self.config
        if config.url is not None:
            headers = {name: value.get_secret_value() for name, value in config.headers.items()}
            return McpConnection(by_http(config.url, headers), f"the MCP server of {self.name}")
        assert config.command is not None  # checked with the config
        program, *arguments = config.command
        server = StdioServerParameters(
            command=sys.executable if program == "python" else program,
            args=arguments,
            env={name: value.get_secret_value() for name, value in config.env.items()},
            cwd=config.cwd,
        )
        return McpConnection(by_process(server), f"the MCP server of {self.name}")


def completed(schema: JSON) -> JSON:
    """The schema of arguments with ``properties``, which endpoints ask for and the protocol does not."""
    return {**schema, "properties": schema.get("properties") or {}}


def text_of(result: CallToolResult, max_chars: int) -> str:
    """The text of a result, its blocks one below the other; the end of a longer one is cut off."""
    text = "\n".join(map(_block, result.content))
    if not text and result.structured_content is not None:
        text = encode(result.structured_content).decode()
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}... [{len(text) - max_chars} more characters]"


def _block(block: Any) -> str:
    if isinstance(block, TextContent):
        return block.text
    if isinstance(block, ImageContent | AudioContent):
        return f"[{block.type}, {block.mime_type}]"
    if isinstance(block, EmbeddedResource):
        inner = block.resource
        return inner.text if isinstance(inner, TextResourceContents) else f"[resource {inner.uri}]"
    return f"[resource {getattr(block, 'uri', 'of an unknown kind')}]"
