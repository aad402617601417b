"""`gym-serve play`: runs one episode in this process and prints it for people to read.

It is for authors: what does the model see, what does it call, what comes back, and why is the reward
what it is? The graph runs without Ray (`gym_serve.assembly`); each call between its servers is
observed.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Collection
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from gym_serve.cli.examples import default_agent, example_rows, row_of
from gym_serve.cli.options import (
    MODEL_HELP,
    ApplicationOption,
    JsonOption,
    PromptOption,
    SetOption,
    YesOption,
    read_model,
)
from gym_serve.cli.printing import ask, new_console, print_json
from gym_serve.graph.loading import load_graph
from gym_serve.graph.resolving import resolve
from gym_serve.graph.spec import Graph
from gym_serve.metrics import MASKED, failure_class
from gym_serve.rollouts.expansion import PromptTemplate
from gym_serve.servers.clients import AgentClient
from gym_serve.servers.model import ModelServer
from gym_serve.servers.transport import Call, Reply, Transport
from gym_serve.types.errors import BadRequest, NotFound
from gym_serve.types.exact import exact_bytes, exact_json
from gym_serve.types.protocols.items import message_item, new_id
from gym_serve.types.requests import JSON, input_items, message_text
from gym_serve.types.rows import agent_name, with_prompt

_ENVIRONMENT, _MODEL, _AGENT = "environment", "policy", "agent"
_LINES = 30  # shown of one message or output
_NOT_OF_THE_VERIFIER = {"response", "reward", "reason", "agent_ref", "model_usage"}
_NOT_OF_THE_ROW = {"responses_create_params", "prompt", "agent_ref", "mask_sample"}
_WIDTH = 80  # where the output is no terminal


def play(
    source: Annotated[
        str,
        typer.Argument(
            metavar="ENV_OR_GRAPH",
            help="A graph file; or an environment: its type, or package.module:Class.",
        ),
    ],
    row: Annotated[
        str | None,
        typer.Argument(
            metavar="[ROW]",
            help="The task: a JSON object, or FILE.jsonl[:LINE]. Default: the environment's first example.",
        ),
    ] = None,
    *,
    model: Annotated[
        str | None, typer.Option("-m", "--model", metavar="MODEL", help=f"The policy: {MODEL_HELP}")
    ] = None,
    yes: YesOption = False,
    human: Annotated[bool, typer.Option("--human", help="Be the policy yourself, at the keyboard.")] = False,
    prompt: PromptOption = None,
    set_: SetOption = None,
    application: ApplicationOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run one episode without Ray and print it: messages, tool calls with their results, the verdict.

    Without --model and --human, a graph file's own model is the policy, and an
    environment gets the scripted one, which calls the first tool once.

    Exit status: 0 if the episode has a reward, 1 if it failed or could not begin.

    Example: gym-serve play simple_weather
    """
    if model is not None and human:
        raise typer.BadParameter("give either --model or --human")
    console = new_console()
    if not console.is_terminal:
        console.width = _WIDTH
    policy = _policy(model, human=human, yes=yes)
    graph, agent = _graph(source, policy, set_ or [], application)
    row_text = row_of(row or str(example_rows(graph, agent, "ROW")))
    task = {"_ng_rollout_id": "play", **_prompted(row_text, prompt)}
    if not _is_file(source):
        task["agent_ref"] = {"name": agent}  # the example rows name the agent of another graph
    chosen = agent_name(task) or agent
    if chosen not in graph.nodes or graph.nodes[chosen].kind != "agent":
        raise NotFound(f"`agent_ref.name` must be an agent of the graph, got {chosen!r}")
    transcript = _Transcript(console if not as_json else new_console(quiet=True))
    rollout = asyncio.run(_episode(graph, chosen, task, transcript))
    if as_json:
        print_json(rollout)
    else:
        transcript.verdict(rollout, task)
    if failure_class(rollout) not in (None, MASKED):
        raise typer.Exit(1)


async def _episode(graph: Graph, agent: str, row: JSON, transcript: _Transcript) -> JSON:
    from gym_serve.assembly import LocalGraph

    node = graph.nodes[agent]
    model, environment = node.references.get("model"), node.references.get("resources")

    def around(transport: Transport) -> Transport:
        if transport.server == model:
            return _Watched(transport, transcript.asked, transcript.answered)
        return _Watched(transport, after=transcript.tool) if transport.server == environment else transport

    local = LocalGraph(graph, around)
    await local.start()
    try:
        transcript.prompt(row)
        return await AgentClient(local.transport(agent)).run(row)
    finally:
        await local.stop()


class _Watched:
    """A transport that calls ``before`` before each call, and ``after`` with the reply and its seconds."""

    def __init__(
        self,
        transport: Transport,
        before: Callable[[Call], None] = lambda call: None,
        after: Callable[[Call, Reply, float], None] = lambda call, reply, seconds: None,
    ) -> None:
        self.server = transport.server
        self._transport = transport
        self._before = before
        self._after = after

    async def call(self, call: Call) -> Reply:
        self._before(call)
        start = time.perf_counter()
        reply = await self._transport.call(call)
        self._after(call, reply, time.perf_counter() - start)
        return reply

    def stream(self, call: Call) -> AsyncGenerator[bytes, None]:
        return self._transport.stream(call)

    async def close(self) -> None:
        await self._transport.close()


class _Transcript:
    """Prints an episode while it runs. A model may have written any part: it is text, never markup."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._known: int | None = None

    def prompt(self, row: JSON) -> None:
        """The task as the model gets it."""
        params = row.get("responses_create_params") or {}
        if params.get("instructions"):
            self._block("system", str(params["instructions"]))
        for item in input_items(params.get("input") or ""):
            self._item(item)

    def asked(self, call: Call) -> None:
        """A model call begins: what is new for the model since its last turn."""
        if call.op != "v1/responses":
            return
        sent = exact_json(call.body)
        items = input_items(sent["input"])
        if self._known is None:
            self._tools(sent.get("tools") or [])
        else:  # outputs of tools are shown with their calls
            for item in items[self._known :]:
                if item.get("type", "message") == "message" and item.get("role") != "assistant":
                    self._item(item)
        self._known = len(items)

    def answered(self, call: Call, reply: Reply, seconds: float) -> None:
        """A model call has ended; a failed one ends the episode, whose failure says why."""
        if call.op != "v1/responses" or reply.status >= 400:
            return
        answer = exact_json(reply.body)
        items = answer.get("output") or []
        self._head("model", _tokens(answer.get("usage") or {}), seconds)
        for item in items:
            self._body(item)
        if answer.get("incomplete_details"):
            self._write(f"(cut off: {answer['incomplete_details'].get('reason')})", "yellow")
        self._known = (self._known or 0) + len(items)

    def tool(self, call: Call, reply: Reply, seconds: float) -> None:
        if not call.op.startswith("tools/"):
            return
        failed = reply.status >= 400
        name = call.op.removeprefix("tools/")
        self._head("tool", f"{name} failed" if failed else name, seconds)
        self._write(reply.body.decode("utf-8", "replace"), "red" if failed else None)

    def verdict(self, rollout: JSON, row: JSON) -> None:
        """The row's own keys, the reward and why, and what else the verifier says; or the failure."""
        ending = failure_class(rollout)
        if ending not in (None, MASKED):
            failure = rollout["failure"]
            self._head("failure", f"{failure['kind']}, stage {failure['stage']}: no reward, not a zero")
            self._write(str(failure["detail"]), "red")
            return
        if any(key not in _NOT_OF_THE_ROW and not key.startswith("_ng_") for key in row):
            self._head("row", "its own keys, such as the right answer")
            self._fields(row, _NOT_OF_THE_ROW)
        self._head("verdict", f"reward {rollout['reward']:g}")
        if ending == MASKED:
            self._write("masked: the environment leaves this rollout out of scores", "yellow")
        if isinstance(reason := rollout.get("reason"), str) and reason != row.get("reason"):
            self._write(f"reason: {reason}", "yellow")
        self._fields(rollout, _NOT_OF_THE_VERIFIER | row.keys())

    def _fields(self, fields: JSON, without: Collection[str]) -> None:
        for key, value in fields.items():
            if key not in without and not key.startswith("_ng_"):
                self._write(f"{key}: {value if isinstance(value, str) else exact_bytes(value).decode()}")

    def _tools(self, tools: list[JSON]) -> None:
        names = [str(tool.get("name", tool.get("type"))) for tool in tools]
        self._block("tools", ", ".join(names) or "none: this row offers no tool")

    def _item(self, item: JSON) -> None:
        kind = item.get("type", "message")
        self._block(str(item.get("role", kind)) if kind == "message" else str(kind), _text(item))

    def _body(self, item: JSON) -> None:
        if item.get("type") == "function_call":
            self._write(f"calls {item.get('name')}({item.get('arguments')})", "cyan")
        elif item.get("type") == "reasoning":
            self._write(_text(item), "dim")
        else:
            self._write(_text(item))

    def _block(self, title: str, text: str) -> None:
        self._head(title)
        self._write(text)

    def _head(self, title: str, detail: str = "", seconds: float | None = None) -> None:
        timed = "" if seconds is None else f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
        rest = "  ".join(filter(None, [detail, timed]))
        self._console.print(
            Rule(Text.assemble((title, "bold"), f"  {rest}" if rest else ""), align="left", style="dim")
        )

    def _write(self, text: str, style: str | None = None) -> None:
        lines = text.splitlines() or [""]
        for line in lines[:_LINES]:
            self._console.print(Text(line, style=style or ""))
        if (more := len(lines) - _LINES) > 0:
            self._console.print(Text(f"... {more} more lines", style="dim"))


def _tokens(usage: JSON) -> str:
    if not usage.get("total_tokens"):
        return ""  # not known
    return f"{usage['input_tokens']} tokens in, {usage['output_tokens']} out"


def _text(item: JSON) -> str:
    kind = item.get("type", "message")
    if kind == "message":
        content = item.get("content")
        others = [p.get("type") for p in content if "text" not in p] if isinstance(content, list) else []
        return "\n".join([message_text(item), *(f"({other})" for other in others)]).strip()
    if kind == "reasoning":
        parts = [*(item.get("summary") or []), *(item.get("content") or [])]
        return "\n".join(str(part.get("text", "")) for part in parts)
    return exact_bytes(item).decode()


# What is played


def _policy(model: str | None, *, human: bool, yes: bool) -> JSON | None:
    if human:
        return {"type": Human}
    if model is None:
        return None
    return read_model(model, yes=yes).settings


def _graph(source: str, policy: JSON | None, sets: list[str], application: str | None) -> tuple[Graph, str]:
    """The graph, and the agent of rows that name none."""

    content: Any = source if _is_file(source) else _around(source)
    loaded = load_graph(content, overrides=sets, application=application)
    if policy is not None:
        for name in loaded.spec.policies():
            loaded.spec.models[name] = policy
    graph = resolve(loaded.spec, source=loaded.path, base_dir=loaded.base_dir)
    return graph, default_agent(graph)


def _is_file(source: str) -> bool:
    return source.endswith((".yaml", ".yml")) or Path(source).is_file()


def _around(environment: str) -> JSON:
    return {
        "models": {_MODEL: {"type": "scripted_model"}},
        "resources": {_ENVIRONMENT: {"type": environment}},
        "agents": {_AGENT: {"type": "simple_agent", "model": _MODEL, "resources": _ENVIRONMENT}},
    }


def _prompted(row: JSON, template: Path | None) -> JSON:
    return with_prompt(row) if template is None else PromptTemplate.of(template).apply(row)


_CALL = re.compile(r"/(\S+)\s*(.*)", re.DOTALL)


class Human(ModelServer):
    """Asks at the terminal. A line is a message; ``/tool {"argument": 1}`` is a tool call."""

    async def responses(self, body: JSON) -> JSON:
        """One turn, as a Response. Raises BadRequest: the input ended."""
        tools = [str(tool.get("name")) for tool in body.get("tools") or []]
        hint = f', or /{tools[0]} {{"argument": ...}}' if tools else ""
        try:
            typed = await asyncio.to_thread(ask, f"your answer{hint}: ")
        except EOFError:
            raise BadRequest("the input ended before the episode") from None
        return {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": "human",
            "output": [_item(typed)],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": body.get("tools") or [],
            "usage": None,
        }


def _item(typed: str) -> JSON:
    if call := _CALL.fullmatch(typed.strip()):
        name, arguments = call.groups()
        return {
            "type": "function_call",
            "id": new_id("fc"),
            "call_id": new_id("call"),
            "name": name,
            "arguments": arguments or "{}",
            "status": "completed",
        }
    return message_item(typed)
