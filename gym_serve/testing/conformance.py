"""What docs/formats.md promises of a server, checked over HTTP: what `gym-serve conform` runs.

The server may be written in any language. A check is a function of `CHECKS`: its name says what must hold,
and its docstring is the sentence of the page that says so. It asks as a graph does
(`gym_serve.transports`), and raises a `Mismatch` for the first answer that is not right.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, get_args

import httpx

from gym_serve.servers.transport import encode
from gym_serve.testing.client import Fixture
from gym_serve.testing.foreign import ForeignServer, Kind, Mismatch, Skipped, is_function
from gym_serve.transports import new_client
from gym_serve.types.protocols import TOKEN_KEYS, check_completion, check_response, message_item
from gym_serve.types.requests import JSON
from gym_serve.types.rows import with_prompt

KINDS: tuple[Kind, ...] = get_args(Kind)

_SECONDS = 30.0  # for one answer
_LONG = 8_000_000  # bytes
_GONE = ("session_not_found", "session_lost")


class Result(NamedTuple):
    """How a check has ended.

    Attributes:
        name: what must hold.
        state: ``passed``, ``failed`` or ``skipped``.
        heading, says: a heading of docs/formats.md, and the sentence below it.
        details: ``asked``, ``came`` and ``wanted`` of a failed check, ``why`` of one that was skipped.
    """

    name: str
    state: str
    heading: str
    says: str
    details: dict[str, str]


async def check_conformance(
    url: str,
    kind: Kind,
    row: JSON | None = None,
    fixtures: Sequence[Fixture] = (),
    headers: Mapping[str, str] | None = None,
) -> AsyncIterator[Result]:
    """Run the checks of a kind, one after the other, and yield how each has ended.

    Args:
        url: base URL of the server; its routes are ``{url}/seed_session`` and so on.
        row: a row that it takes.
        fixtures: episodes of an environment whose rewards are known.

    Raises:
        Unavailable: nothing answers at the URL.
    """
    row = with_prompt(row or (fixtures[0].row if fixtures else {"prompt": "Hello"}))
    async with new_client({"content-type": "application/json", **(headers or {})}) as client:
        client.timeout = httpx.Timeout(_SECONDS)
        server = ForeignServer(url.rstrip("/"), kind, client, row, fixtures)
        await server.start()
        for check in CHECKS:
            if kind in check.kinds:
                yield await _result(check, server)


async def _result(check: Check, server: ForeignServer) -> Result:
    state, details = "passed", dict[str, str]()
    try:
        if server.gone:
            raise Skipped("the server does not answer any more")
        await check.run(server)
    except Skipped as skipped:
        state, details = "skipped", {"why": str(skipped)}
    except Mismatch as mismatch:
        state, details = "failed", mismatch.details
    return Result(check.name, state, check.heading, check.says, details)


# The checks

_Run = Callable[[ForeignServer], Awaitable[None]]


class Check(NamedTuple):
    """A check: its name, the kinds of servers that it is for, where the page says so, and the function."""

    name: str
    kinds: tuple[Kind, ...]
    heading: str
    says: str
    run: _Run


CHECKS: list[Check] = []
"""In the order in which they run."""


def _check(heading: str, *kinds: Kind) -> Callable[[_Run], _Run]:
    def add(run: _Run) -> _Run:
        name, says = run.__name__.replace("_", " "), " ".join((run.__doc__ or "").split())
        CHECKS.append(Check(name, kinds or KINDS, heading, says, run))
        return run

    return add


_HERE = "Servers in other languages"


@_check("Rollouts", "agent")
async def a_row_becomes_a_rollout(server: ForeignServer) -> None:
    """A rollout contains all keys of the row"""
    await server.work()


@_check("Models", "agent", "model")
async def a_prompt_gets_a_response(server: ForeignServer) -> None:
    """Environments and agents see OpenAI's Response object"""
    ask = server.ask if server.kind == "model" else server.ask_if_there
    (await ask("v1/responses", server.row["responses_create_params"])).value(check=check_response)
    for wrong in ({}, {"input": 5}):
        (await server.ask("v1/responses", wrong)).refused()


@_check("Sessions", "environment")
async def a_row_opens_a_session(server: ForeignServer) -> None:
    """The answer has the session id in the header `X-Session-Id` and in the cookie `gym_session`"""
    await server.open()


@_check("Sessions", "environment")
async def session_ids_cannot_be_guessed(server: ForeignServer) -> None:
    """the rest cannot be guessed"""
    ids = [await server.open() for _ in range(8)]
    unlike = sum(len(set(column)) > 1 for column in zip(*ids, strict=False))
    if len(set(ids)) < 8 or unlike < 12:
        raise Mismatch(
            "POST /seed_session, 8 times", ", ".join(ids), "ids with 12 random characters at least"
        )


@_check(_HERE)
async def a_route_that_is_not_there_is_not_found(server: ForeignServer) -> None:
    """A route or tool that a server does not have is a 404 with the code `not_found`."""
    session = await server.open() if server.kind == "environment" else None
    for name in ("no_such_route", "constructor", "__proto__", "toString"):
        (await server.ask(name, {}, session)).refused("not_found")


@_check(_HERE)
async def a_body_that_is_no_object_is_refused(server: ForeignServer) -> None:
    """A body that is no JSON, or no object, is refused."""
    for body in (b'{"a":', b"[]", b"7", b'"x"', b"null"):
        (await server.ask(server.usual[0], body)).refused()


@_check(_HERE)
async def whatever_is_asked_is_answered_or_refused(server: ForeignServer) -> None:
    """Whatever stands in a request, the answer is a success or a refusal."""
    op, body = server.usual
    targets, session = [(op, body, "input" if server.kind == "model" else "source")], None
    if server.kind == "environment":
        session = await server.open()
        targets += [(tool, JSON(), name) for tool in server.tools for name in server.tools[tool].names]
    for op, body, name in targets:
        others = encode({key: body[key] for key in body if key != name})
        for value in _HOSTILE:
            request = b"%s%s%s:%s}" % (others[:-1], b"," * (others != b"{}"), encode(name), value)
            (await server.ask(op, request, session)).handled()
    await server.work()


_HOSTILE = (
    *(b'"\\ud800"', b'"\\u0000\\u001b[2J"', '"é日本 \U0001f600 \u2028"'.encode(), b'"%s"' % (b"(" * 100_000)),
    *(b'"\xff"', b"NaN", b"1e400", b"-1", b"9" * 400, b"null", b"[" * 100_000 + b"]" * 100_000),
    b'{"__proto__": {"reward": 1}, "constructor": {"prototype": {"reward": 1}}, "then": 1, "length": -1}',
)
"""JSON texts, and some that only look like it."""


@_check(_HERE, "environment", "agent")
async def a_body_of_8_megabytes_is_taken(server: ForeignServer) -> None:
    """The tokens of an episode are megabytes: a server takes bodies of 8 MB at least."""
    if server.kind == "agent":
        row = {**server.row, "source": "x" * _LONG}
        return (await server.ask("run", row)).rollout(row)
    fixture = server.fixtures[0]
    output = [{"type": "reasoning", "summary": [], "prompt_token_ids": [1] * (_LONG // 2)}, *fixture.output]
    long = fixture.model_copy(update={"output": output})
    (await server.score(long, await server.open(fixture.row))).reward()
    return None


@_check("Tools", "environment")
async def the_tools_that_it_offers_are_functions(server: ForeignServer) -> None:
    """in OpenAI's form: `{"type": "function", "name", "description", "parameters"}`"""
    if server.offered is None:
        raise Skipped("it offers none to this row")
    fits = isinstance(server.offered, list) and all(map(is_function, server.offered))
    (await server.ask(*server.usual)).must(fits, "`tools`: functions, whose names are no routes")


@_check(_HERE, "environment")
async def a_tool_refuses_arguments_that_do_not_fit(server: ForeignServer) -> None:
    """A tool refuses arguments that do not fit its schema, and the model reads why."""
    if not (server.tools or server.fixtures[0].calls):
        raise Skipped("no tool is known")
    session = await server.open()
    await server.use(server.fixtures[0], session)
    for name, tool in server.tools.items():
        for body in (b"[]", b"{", *([{}, tool.wrong] if tool.right else [])):
            (await server.ask(name, body, session)).refused()


@_check(_HERE, "environment")
async def the_same_episode_gets_the_same_reward(server: ForeignServer) -> None:
    """The same episode always gets the same reward."""
    for number, fixture in enumerate(server.fixtures):
        rewards = [await server.work(number) for _ in range(2)]
        wanted = getattr(fixture, "reward", None)
        wanted = rewards[0] if wanted is None else wanted
        if any(not math.isclose(reward, wanted, abs_tol=1e-9) for reward in rewards):
            raise Mismatch(
                f"the episode {fixture.name!r}, twice", f"the rewards {rewards}", f"{wanted} twice"
            )


@_check("Failures", "environment")
async def whatever_a_model_wrote_gets_a_reward(server: ForeignServer) -> None:
    """Whatever the model or its program causes is a score (0 with a reason)"""
    call = {"type": "function_call", "call_id": "", "name": "../verify", "arguments": '{"a": '}
    odd = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": None}]}
    long = message_item("\u2028\0{{[[((" * 10_000)
    for output in ([], [message_item("")], [long], [call], [odd], [{"type": "odd", "content": "x"}]):
        fixture = server.fixtures[0].model_copy(update={"output": output})
        (await server.score(fixture, await server.open(fixture.row))).reward()


@_check(_HERE, "environment")
async def sessions_share_no_state(server: ForeignServer) -> None:
    """Sessions share no state."""
    number, fixture = max(enumerate(server.fixtures), key=lambda pair: len(pair[1].calls))
    alone = await server.work(number)
    sessions = [await server.open(fixture.row) for _ in range(3)]
    await server.use(fixture, *sessions)
    for session in sessions:
        verdict = await server.score(fixture, session)
        verdict.must(verdict.reward() == alone, f"the reward {alone}, as of the same episode alone")


@_check("Sessions", "environment")
async def a_closed_session_is_gone(server: ForeignServer) -> None:
    """A call of a session that is closed, has expired or was never opened is a `session_not_found`"""
    session, other = await server.open(), await server.open()
    await server.close(session)
    await server.close(session, b"")  # safe to call twice
    for call in server.fixtures[0].calls:
        if (await server.ask(call.name, call.arguments, other)).status == 200:
            (await server.ask(call.name, call.arguments, session)).refused(*_GONE)
    (await server.score(server.fixtures[0], session)).refused(*_GONE)


@_check("Sessions", "environment")
async def an_id_that_a_client_made_up_opens_nothing(server: ForeignServer) -> None:
    """An id that a client made up opens nothing"""
    issued = await server.open()
    cookie = issued.partition("=")[0] + "=" if issued.startswith("cookie:") else ""
    for made_up in ("nonsense", "x" * 4000, "../../passwd", "__proto__"):
        session = cookie + made_up
        (await server.score(server.fixtures[0], session)).refused(*_GONE)
        opened = await server.ask("seed_session", server.row, session)
        opened.value()
        opened.must(opened.session not in (None, session), "another id, that the server made")


@_check(_HERE, "environment")
async def a_session_can_be_closed_while_it_is_used(server: ForeignServer) -> None:
    """An episode may be cancelled, so a session may be closed while a call of it runs."""
    session, fixture = await server.open(), server.fixtures[0]
    calls = [asyncio.ensure_future(server.score(fixture, session)) for _ in range(8)]
    await asyncio.sleep(0)  # they begin
    await server.close(session)
    for answer in await asyncio.gather(*calls):
        if answer.status != 200:
            answer.refused(*_GONE)
    await server.work()


@_check("Environments", "environment")
async def its_reverify_mode_is_true(server: ForeignServer) -> None:
    """whether a stored response can be scored again"""
    answer, fixture = await server.ask_if_there("reverify_mode", verb="GET"), server.fixtures[0]
    mode = answer.value(str)
    answer.must(mode in ("stateless", "unsupported", "unknown"), "stateless, unsupported or unknown")
    if mode == "stateless":
        again, wanted = await server.score(fixture, None), await server.work()
        again.must(again.reward() == wanted, f"without a session, the same reward as in one: {wanted}")


@_check("Models", "agent", "model")
async def chats_and_messages_get_answers(server: ForeignServer) -> None:
    """A model answers `POST /v1/responses`, `POST /v1/chat/completions` and `POST /v1/messages`"""
    chat = {"model": "policy", "max_tokens": 64, "messages": [{"role": "user", "content": "Hello"}]}
    (await server.ask_if_there("v1/chat/completions", chat)).value(check=check_completion)
    message, listed = (
        await server.ask_if_there("v1/messages", chat),
        await server.ask("v1/models", verb="GET"),
    )
    message.must(isinstance(message.value().get("content"), list), "`content`: a list of parts")
    listed.must(isinstance(listed.value().get("data"), list), "`data`: a list of models")


@_check("Input items", "model")
async def a_history_with_calls_is_taken(server: ForeignServer) -> None:
    """`input` is a text, or a list of these items."""
    call = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "call_1", "output": "tea"}
    schema = {"type": "object", "properties": {}}
    tool = {"type": "function", "name": "look", "parameters": schema, "strict": False}
    body = {"input": [{"role": "user", "content": "Look."}, call, output], "tools": [tool]}
    (await server.ask("v1/responses", body)).value(check=check_response)


@_check("Training tokens", "model")
async def tokens_are_whole(server: ForeignServer) -> None:
    """The last output item of each model call carries these keys, either all three or none"""
    answer = await server.ask(*server.usual)
    last = (answer.value(check=check_response)["output"] or [{}])[-1]
    if not (there := [last[key] for key in TOKEN_KEYS if last.get(key) is not None]):
        raise Skipped("it tells no tokens")
    lists = len(there) == 3 and all(isinstance(value, list) for value in there)
    answer.must(lists and len(there[1]) == len(there[2]), "three lists, a logarithm for each produced token")


@_check("Metrics", "environment", "agent")
async def metrics_are_computed(server: ForeignServer) -> None:
    """The answer of `POST /aggregate_metrics`"""
    rollouts = [{"_ng_task_index": i % 2, "_ng_rollout_index": i // 2, "reward": i / 4} for i in range(4)]
    answer = await server.ask_if_there("aggregate_metrics", {"verify_responses": rollouts})
    missing = {"agent_metrics", "key_metrics", "group_level_metrics"} - answer.value().keys()
    answer.must(not missing, f"also {', '.join(sorted(missing))}")


@_check(_HERE)
async def sixty_four_at_once_are_answered_as_one_alone(server: ForeignServer) -> None:
    """Many episodes run at the same time, and none changes another."""
    alone = [await server.work(number) for number in range(len(server.fixtures) or 1)]
    together = await asyncio.gather(*map(server.work, range(64)))
    wanted = [alone[number % len(alone)] for number in range(64)]
    if together != wanted:
        raise Mismatch("64 episodes at once", f"the rewards {together}", f"those of the same alone: {wanted}")


@_check(_HERE)
async def a_client_that_leaves_harms_nobody(server: ForeignServer) -> None:
    """A client may leave in the middle of a request, and later ones are answered as before."""
    op, body = server.usual
    content = encode(body)
    for sent in (0, len(content) // 2, len(content)):
        await asyncio.gather(*(server.leave(op, content, sent) for _ in range(8)))
    await server.work()
