"""The environment as a whole: fixtures, rows, the search API against a real server, cassettes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError
from support.environments import Bench, examples, said
from support.websites import Names, rerouted, website

from gym_serve.environments.google_search import GoogleSearch, pages
from gym_serve.environments.google_search.pages import PageText, WebPages
from gym_serve.environments.google_search.web import EXAMPLE, Cassette, CustomSearch, LiveWeb
from gym_serve.types.errors import GraphError

KEY, ENGINE = "AIza-nobody-may-read-this", "engine-nobody-may-read-this"
PARAGRAPH = "<p>The otter swims in the river Oskel, and eats what it finds there.</p>"
ROWS = examples(GoogleSearch)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_PAUSE", 0.0)


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
async def test_an_example_row_can_be_solved_offline(row: dict[str, Any]) -> None:
    assert row["responses_create_params"]["tools"] == [spec.openai() for spec in GoogleSearch.tools.values()]
    bench = Bench(GoogleSearch(mode="replay"))
    await bench.host.start()
    await bench.call("seed_session", row)
    question = row["responses_create_params"]["input"][0]["content"].splitlines()[0]
    found = json.loads((await bench.tool("search", query=f" {question.upper()}  "))["search_results"])
    page = await bench.tool("browse", url=found["items"][0]["link"] + "#top")
    assert not page["page_content"].startswith("Error")
    right = await bench.verify(row, said(f"So \\boxed{{{row['expected_answer']}}}."))
    assert (right["reward"], right["failed_calls"]) == (1.0, 0)
    assert (await bench.verify(row, said("\\boxed{E}")))["reward"] == 0.0
    await bench.host.stop()


@given(st.text(max_size=200), st.text(max_size=5))
def test_any_text_is_scored(text: str, expected: str) -> None:
    from gym_serve.environments.google_search import boxed_option, same_option
    from gym_serve.servers import Response

    option = boxed_option(Response(output=said(text)))
    assert option is None or isinstance(same_option(expected, option), bool)


@pytest.mark.parametrize(
    ("expected", "text", "right"),
    [
        ("B", "\\boxed{\\textbf{(B)}}", True),
        ("B", "\\boxed{$(B)$}", True),
        ("B", "\\boxed{**B.**}", True),
        ("B", "\\boxed{A} or \\boxed{B}", False),
        ("B", "\\boxed{\\text{(A, B)}}", False),
        ("B", "\\boxed{\\neg B}", False),
    ],
)
async def test_the_letter_in_the_box(expected: str, text: str, right: bool) -> None:
    verdict = await Bench(GoogleSearch(mode="replay")).verify({"expected_answer": expected}, said(text))
    assert verdict["reward"] == right


# Settings


@pytest.mark.parametrize("settings", [{}, {"google_api_key": KEY}, {"mode": "record"}])
def test_live_needs_a_key_and_says_so_without_it(settings: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="needs `google_api_key` and `google_cx`") as caught:
        GoogleSearch(**settings)
    assert KEY not in str(caught.value)


def test_recording_needs_a_file() -> None:
    with pytest.raises(ValidationError, match="needs `cassette`"):
        GoogleSearch(google_api_key=KEY, google_cx=ENGINE, mode="record")


def test_the_key_is_not_shown() -> None:
    config = repr(GoogleSearch(google_api_key=KEY, google_cx=ENGINE).config)
    assert KEY not in config
    assert ENGINE not in config


# The live web


class Google:
    """Google's API on this machine: answers in turn, the last one for ever."""

    def __init__(self, *answers: web.Response | Any) -> None:
        self.answers = answers
        self.asked: list[dict[str, str]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path != "/customsearch/v1":
            return web.Response(text=f"<article>{PARAGRAPH * 3}</article>", content_type="text/html")
        answer = self.answers[min(len(self.asked), len(self.answers) - 1)]
        self.asked.append(dict(request.query))
        status, body, headers = answer
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status, text=text, headers=headers)


def ok(*items: dict[str, Any], **more: Any) -> tuple[int, Any, dict[str, str]]:
    return 200, {"items": list(items), "queries": {"request": [{"cx": ENGINE}]}, **more}, {}


def refusal(status: int, message: str, **headers: str) -> tuple[int, Any, dict[str, str]]:
    return status, {"error": {"code": status, "message": message}}, headers


@asynccontextmanager
async def live(google: Google, **settings: Any) -> AsyncIterator[Bench]:
    async with website(google.answer) as port:
        engine = CustomSearch(
            SecretStr(KEY), SecretStr(ENGINE), 20, 2, endpoint=f"http://127.0.0.1:{port}/customsearch/v1"
        )
        names = Names({"rivers.example": [["93.184.216.34"]]})
        web_pages = WebPages(10_000, 20, 0, resolver=names, open_socket=rerouted(port, []))
        web_of_test = LiveWeb(engine, web_pages, PageText(100, 60, 1))
        server = GoogleSearch(web=web_of_test, google_api_key=KEY, google_cx=ENGINE, **settings)
        bench = Bench(server)
        await bench.host.start()
        try:
            yield bench
        finally:
            await bench.host.stop()


async def found(bench: Bench, query: str = "otter") -> str:
    text: str = (await bench.tool("search", query=query))["search_results"]
    return text


async def test_results_are_what_a_model_needs() -> None:
    item = {"title": "Otters", "link": "http://rivers.example/", "snippet": "An otter", "pagemap": {"x": [1]}}
    google = Google(ok(item, spelling={"correctedQuery": "otter"}))
    async with live(google) as bench:
        text = await found(bench, "oter")
    shown = {key: item[key] for key in ("title", "link", "snippet")}
    assert json.loads(text) == {"items": [shown], "correctedQuery": "otter"}
    assert google.asked == [{"key": KEY, "cx": ENGINE, "q": "oter"}]


async def test_no_results() -> None:
    async with live(Google((200, {"kind": "customsearch#search"}, {}))) as bench:
        assert await found(bench) == '{"items":[]}'


async def test_a_summary_that_is_cut_within_a_character() -> None:
    async with live(Google((200, '{"items": [{"title": "\\ud83e", "snippet": "An otter"}]}', {}))) as bench:
        assert json.loads(await found(bench)) == {"items": [{"title": "\ufffd", "snippet": "An otter"}]}


async def test_a_busy_google_is_asked_again() -> None:
    google = Google(refusal(429, "slow down"), refusal(503, "away"), ok())
    async with live(google) as bench:
        assert await found(bench) == '{"items":[]}'
    assert len(google.asked) == 3


@pytest.mark.parametrize(
    ("answer", "message", "asked"),
    [
        (refusal(429, f"Quota exceeded for {KEY}"), "Error: Google answers 429: Quota exceeded for ***", 3),
        (refusal(429, "Tomorrow", **{"Retry-After": "3600"}), "Error: Google answers 429: Tomorrow", 1),
        (refusal(403, "Daily limit"), "Error: Google answers 403: Daily limit", 1),
        (refusal(400, "API key not valid"), "Error: Google answers 400: API key not valid", 1),
        ((500, "<html>", {}), "Error: Google answers 500: no reason was given", 3),
        ((200, "<html>", {}), "Error: Google's answer is not a JSON object", 3),
        ((200, "[1]", {}), "Error: Google's answer is not a JSON object", 3),
        ((200, '{"items": 3}', {}), "Error: Google's answer has no list of results", 3),
        (refusal(429, "Never", **{"Retry-After": "9" * 400}), "Error: Google answers 429: Never", 1),
    ],
)
async def test_a_refusal_is_an_answer_of_the_tool(answer: Any, message: str, asked: int) -> None:
    google = Google(answer)
    async with live(google) as bench:
        assert await found(bench) == message
        output = {"type": "function_call_output", "call_id": "c", "output": json.dumps({"x": 1})}
        failed = {**output, "output": f'{{"search_results":"{message}"}}'}
        verdict = await bench.verify(ROWS[0], [output, {**failed, "call_id": "d"}, *said("\\boxed{B}")])
    assert len(google.asked) == asked
    assert (verdict["reward"], verdict["failed_calls"]) == (1.0, 1)


async def test_nobody_answers() -> None:
    engine = CustomSearch(SecretStr(KEY), SecretStr(ENGINE), 20, 1, endpoint="http://127.0.0.1:9/")
    web_of_test = LiveWeb(engine, WebPages(10, 1, 0), PageText(100, 60, 1))
    bench = Bench(GoogleSearch(web=web_of_test, google_api_key=KEY, google_cx=ENGINE))
    await bench.host.start()
    assert await found(bench) == "Error: Google cannot be reached (ClientConnectorError)"
    await bench.host.stop()


async def test_pages_are_read() -> None:
    async with live(Google(ok())) as bench:
        page = await bench.tool("browse", url="http://rivers.example/otter")
        assert page["page_content"].startswith("The otter swims in the river Oskel")
        inside = await bench.tool("browse", url="http://127.0.0.1/")
        assert inside == {"page_content": "Error: this address is not on the public internet"}


# Cassettes


async def test_what_was_recorded_is_replayed(tmp_path: Path) -> None:
    tape, google = tmp_path / "tape.jsonl", Google(ok({"title": "Otters"}), refusal(403, "Daily limit"))
    async with live(google, mode="record", cassette=tape) as bench:
        first = await found(bench)
        assert await found(bench, "OTTER ") == first
        assert await found(bench, "seal") == "Error: Google answers 403: Daily limit"
        page = await bench.tool("browse", url="http://rivers.example/otter#swims")
    assert len(google.asked) == 2
    assert len(tape.read_text("utf-8").splitlines()) == 2  # a failure is not recorded
    assert KEY not in tape.read_text("utf-8")
    bench = Bench(GoogleSearch(mode="replay", cassette=tape))
    await bench.host.start()
    assert await found(bench, "otter") == first
    assert await bench.tool("browse", url="http://rivers.example/otter") == page
    assert await found(bench, "seal") == "Error: this search was not recorded"
    gone = await bench.tool("browse", url="http://rivers.example/seal")
    assert gone == {"page_content": "Error: this page was not recorded"}
    await bench.host.stop()


def test_two_recorders_share_a_file(tmp_path: Path) -> None:
    one, other = (Cassette(tmp_path / "tape.jsonl", record=True) for _ in range(2))
    for number in range(20):
        one.put("search", f"one {number}", "ä" * number)
        other.put("search", f"other {number}", "ö" * number)
    assert one.get("search", "one 7") == "ä" * 7
    assert other.get("search", "OTHER  7") == "ö" * 7
    one.close()
    other.close()
    both = Cassette(tmp_path / "tape.jsonl", record=False)
    assert [both.get("search", f"{who} 19") for who in ("one", "other")] == ["ä" * 19, "ö" * 19]
    both.close()


@given(st.text(), st.text(), st.text())
def test_any_answer_is_kept(query: str, url: str, answer: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        tape = Cassette(Path(folder, "tape"), record=True)
        tape.put("search", query, answer)
        tape.put("browse", url, answer[::-1])
        assert (tape.get("search", query), tape.get("browse", url)) == (answer, answer[::-1])
        tape.close()


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"tool": "search", "argument": "x"}',
        '{"tool": 1, "argument": 2, "answer": "x"}',
        '{"tool": "search", "argument": "x", "answer": 1}',
    ],
)
def test_a_broken_cassette_names_the_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "tape").write_text(f'{{"tool": "search", "argument": "a", "answer": "b"}}\n{line}\n', "utf-8")
    with pytest.raises(GraphError, match="line 2 of"):
        Cassette(tmp_path / "tape", record=False)


def test_a_cassette_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="No such file"):
        Cassette(tmp_path / "tape", record=False)


def test_the_shipped_cassette_is_sound() -> None:
    cassette = Cassette(EXAMPLE, record=False)
    recorded = [json.loads(line) for line in EXAMPLE.read_text().splitlines()]
    assert recorded
    for call in recorded:
        assert cassette.get(call["tool"], call["argument"]) == call["answer"]
    cassette.close()
