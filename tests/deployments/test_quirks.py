"""Every model type at the quirky endpoint, streamed and not; docs/models.md has the table of outcomes.

``UPDATE_DOCS=1`` writes the table.
"""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.letters import LettersSglang
from support.quirks import QUIRKS, handler
from support.threaded import ThreadedServer

from gym_serve.deployments import http_client
from gym_serve.deployments.chat_model import ChatModel
from gym_serve.deployments.openai_model import OpenAIModel
from gym_serve.deployments.pooling_model import PoolingModel
from gym_serve.judging import JudgeCalls, LabelJudge
from gym_serve.servers import ModelClient, ServerRunner
from gym_serve.transports import InlineTransport
from gym_serve.types.errors import GymError

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- quirks: tests/deployments/test_quirks.py -->", "<!-- end of quirks -->"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ASK = {"input": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadedServer({"/{path:.*}": handler()}) as server:
        yield server.url


async def last(events: AsyncIterator[Any]) -> Any:
    found = [event async for event in events]
    return found[-1]["response"]


async def outcome(server: Any, url: str, ask: str) -> str:
    """What comes of a call at an address."""
    server.reconfigure({"base_url": url})
    try:
        if ask == "score":
            await server.score("pooling", CHAT)
            return "answer"
        if ask == "chat":
            completion = await server.chat_completions(CHAT)
            return _of(completion["choices"][0]["finish_reason"] == "length", [])
        response = await (last(server.stream_responses(ASK)) if ask == "stream" else server.responses(ASK))
        return _of(response["incomplete_details"] is not None, response["output"])
    except GymError as error:
        return error.code


def _of(empty: bool, output: list[Any]) -> str:
    if empty:
        return "empty answer"
    calls = [item for item in output if item["type"] == "function_call"]
    return "two calls" if len(calls) == 2 and all(c["arguments"] == "{}" for c in calls) else "answer"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "_PAUSE", 0.0)


def test_there_are_many() -> None:
    assert len(QUIRKS) >= 80


async def test_what_comes_of_each(url: str) -> None:
    settings = {"base_url": url, "model": "m", "api_key": "k", "max_retries": 1}
    chat, openai, scores = (kind(**settings) for kind in (ChatModel, OpenAIModel, PoolingModel))
    sglang = LettersSglang(**settings, tokenizer="letters")
    for server in (chat, openai, scores, sglang):
        await server.start()
    wrong = []
    for number, quirk in enumerate(QUIRKS):
        base = f"{url}/{number}/v1"
        asked = ["stream"] if quirk.streamed else ["responses", "stream"]
        calls = [(chat, ask) for ask in asked]
        if not quirk.streamed:
            calls.append((openai, "chat"))
        if quirk.universal:
            calls += [(scores, "score"), *((server, ask) for server in (openai, sglang) for ask in asked)]
        for server, ask in calls:
            if (found := await outcome(server, base, ask)) != quirk.outcome:
                wrong.append((quirk.name, type(server).__name__, ask, found))
    for server in (chat, openai, scores, sglang):
        await server.stop()
    assert wrong == []


JUDGED = {
    "answer": "no verdict",
    **dict.fromkeys(("empty answer", "bad_request"), "verifier_failed"),
    **{
        same: same
        for same in ("overloaded", "unavailable", "endpoint_access_denied", "endpoint_misconfigured")
    },
}
"""What comes of a judge's call, by what comes of a call of its model: never a score."""


async def test_what_comes_of_each_for_a_judge(url: str) -> None:
    model = ChatModel(name="judge", base_url=url, model="m", max_retries=0)
    client = ModelClient(InlineTransport(ServerRunner(model)))
    judge, wrong = LabelJudge([client], JudgeCalls(8), "Is {it} right?", ("[[A]]", "[[B]]")), []
    await model.start()
    for number, quirk in enumerate(QUIRKS):
        if quirk.streamed:
            continue
        model.reconfigure({"base_url": f"{url}/{number}/v1"})
        try:
            ballot = await judge.ask({"it": "this"})
            found = "no verdict" if ballot.label is None else "a score"
        except GymError as error:
            found = error.code
        if found != JUDGED[quirk.outcome]:
            wrong.append((quirk.name, found))
    await model.stop()
    assert wrong == []


def _table() -> str:
    lines = ["| the endpoint | models | what comes of it |", "|---|---|---|"]
    for quirk in QUIRKS:
        models = (
            "all"
            if quirk.universal
            else "chat_model, streamed"
            if quirk.streamed
            else "chat_model, openai_model"
        )
        shown = quirk.name.replace("|", "\\|").replace("`", "'")
        shown = shown if len(shown) <= 100 else f"{shown[:99]}…"
        lines.append(f"| `{shown}` | {models} | {quirk.outcome.replace('_', ' ')} |")
    return "\n".join(lines)


def test_the_table_of_the_documentation() -> None:
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    made = f"{before}{BEGIN}\n\n{_table()}\n\n{END}{after}"
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(made)
        return
    assert page == made, "run this test with UPDATE_DOCS=1"
