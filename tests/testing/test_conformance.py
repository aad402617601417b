"""`gym-serve conform` finds what is wrong with a server, and nothing in one that does what the page says."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.any_language import FIXTURES, FOLDER, needs_node, running
from support.in_process import serving
from typer.testing import CliRunner

from gym_serve import Gym
from gym_serve.cli import main
from gym_serve.graph import load_graph, resolve
from gym_serve.testing import foreign, load_fixtures
from gym_serve.testing.conformance import CHECKS, KINDS, Result, check_conformance
from gym_serve.testing.foreign import Kind
from gym_serve.types.exact import exact_json
from gym_serve.types.protocols import message_item
from gym_serve.types.requests import JSON

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
PROGRAM = (FOLDER / "environment.mjs").read_text(encoding="utf-8")

runner = CliRunner()


async def failed(results: AsyncIterator[Result]) -> list[str]:
    return [result.name async for result in results if result.state == "failed"]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_the_page_says_what_is_checked(check: Any) -> None:
    section = re.search(rf"^#+ {check.heading}$(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert section is not None
    assert check.says in " ".join(section[1].split())


# Servers that do what the page says


@needs_node
@pytest.mark.parametrize("fixtures", [(), ("--fixtures", str(FIXTURES))], ids=["alone", "with fixtures"])
def test_the_environment_in_javascript(fixtures: tuple[str, ...]) -> None:
    with running() as url:
        done = runner.invoke(main, ["conform", url, "--kind", "environment", *fixtures, "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["ok"]
    states = {check["name"]: check["state"] for check in report["checks"]}
    assert {name for name, state in states.items() if state != "passed"} == {"metrics are computed"}


@pytest.fixture(scope="module")
def ours() -> Iterator[str]:
    """A graph of our own servers over HTTP: an environment with tools and state, an agent and a model."""
    source = load_graph("session_counter")
    with serving(lambda url: {"": resolve(source.spec, source=source.path, literal_secrets=False)}) as url:
        yield url


ENVIRONMENT = ROOT / "environments" / "session_counter"


@pytest.mark.parametrize(
    ("server", "arguments"),
    [
        ("policy", ["--kind", "model"]),
        ("session_counter", ["--kind", "environment", "--fixtures", str(ENVIRONMENT / "fixtures.jsonl")]),
        ("session_counter_agent", ["--kind", "agent", "--row", str(ENVIRONMENT / "data" / "example.jsonl")]),
    ],
)
def test_our_own_servers(ours: str, server: str, arguments: list[str]) -> None:
    done = runner.invoke(main, ["conform", f"{ours}/{server}", *arguments])
    assert done.exit_code == 0, done.output
    assert re.search(r"^\d+ passed$", done.stdout.splitlines()[-1])


@needs_node
def test_a_graph_runs_it_by_its_url(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as url:
        monkeypatch.setenv("GUESS_URL", url)
        with Gym.from_graph(FOLDER / "graph.yaml", ray=False) as gym:
            found, other = gym.run(FOLDER / "rows.jsonl")
    assert (found.reward, found["guesses"], other.reward) == (1.0, 6, 0.0)
    assert found["response"]["tools"][0]["name"] == "guess"
    outputs = [i["output"] for i in found["response"]["output"] if i["type"] == "function_call_output"]
    assert [json.loads(output)["answer"] for output in outputs] == [
        *("lower", "higher", "higher", "lower", "higher", "right"),
    ]


@needs_node
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
async def test_behind_the_gateway_of_a_graph_it_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as node:
        monkeypatch.setenv("GUESS_URL", node)
        with serving(lambda url: {"/web": resolve(load_graph(FOLDER / "graph.yaml").spec)}) as url:
            fixtures = load_fixtures(FIXTURES)
            assert await failed(check_conformance(f"{url}/web/guess", "environment", None, fixtures)) == []


# Servers that do not

ID = 'request.headers["x-session-id"]'
BODY = "  const body = await"
LAST = "[...sessions.values()].pop()"
BROKEN: list[tuple[str, dict[str, str]]] = [
    ("a row opens a session", {"if (session) Object": "if (false) Object"}),
    ("session ids cannot be guessed", {"randomUUID();": "`session-${1_000_000 + sessions.size}`;"}),
    ("a route that is not there is not found", {"!Object.hasOwn(routes, name)": "!(name in routes)"}),
    ("a body that is no object is refused", {" || body === null || Array.isArray(body)": ""}),
    ("whatever is asked is answered or refused", {"!Number.isInteger(number)": "number.toFixed() === 'x'"}),
    ("a body of 8 megabytes is taken", {"64 * 2 ** 20": "100_000"}),
    ("the tools that it offers are functions", {'  name: "guess"': '  name: "verify"'}),
    (
        "a tool refuses arguments that do not fit",
        {'422, "invalid_request", "num': '500, "unavailable", "num'},
    ),
    ("the same episode gets the same reward", {"{ reward, guesses": "{ reward: Math.random(), guesses"}),
    ("the same episode gets the same reward", {"{ reward, guesses": "{ reward: String(reward), guesses"}),
    ("whatever a model wrote gets a reward", {"const { found,": "body.response.output[0].x; const { found,"}),
    ("sessions share no state", {"= sessions.get(id);": f"= sessions.has(id) ? {LAST} : undefined;"}),
    ("a closed session is gone", {"    sessions.delete(id);\n": ""}),
    (
        "an id that a client made up opens nothing",
        {"(row)": "(row, given)", "randomUUID();": "given ?? randomUUID();"},
    ),
    ("its reverify mode is true", {'["unsupported"]': '["stateless"]'}),
    (
        "sixty four at once are answered as one alone",
        {
            BODY: f"let o = globalThis; o.now = {ID}; await new Promise((go) => setTimeout(go, 9));\n{BODY}",
            f"(body, {ID})": "(body, o.now)",
        },
    ),
    (
        "a client that leaves harms nobody",
        {"(request.destroyed && !request.complete) return": "(error.code === 'ECONNRESET') process.exit()"},
    ),
]


@needs_node
@pytest.mark.parametrize(
    ("check", "changes"), BROKEN, ids=[f"{i} {check}" for i, (check, _) in enumerate(BROKEN)]
)
def test_what_is_broken_is_found(check: str, changes: dict[str, str], tmp_path: Path) -> None:
    text = PROGRAM
    for right, wrong in changes.items():
        assert text.count(right) == 1, right
        text = text.replace(right, wrong)
    (tmp_path / "broken.mjs").write_text(text, encoding="utf-8")
    with running(tmp_path / "broken.mjs") as url:
        found = asyncio.run(failed(check_conformance(url, "environment", None, load_fixtures(FIXTURES))))
    assert check in found


RESPONSE: JSON = {"id": "resp_1", "output": [message_item("Hi")], "status": "completed"}
TOKENS = {"prompt_token_ids": [1], "generation_token_ids": [2, 3], "generation_log_probs": [-1.0]}
AGENTS_AND_MODELS: list[tuple[Kind, str | None, JSON]] = [
    ("agent", None, {}),
    ("agent", "a row becomes a rollout", {"source": None}),
    ("agent", "a row becomes a rollout", {"reward": None}),
    ("agent", "a row becomes a rollout", {"response": {"output": "Hi"}}),
    ("agent", "a row becomes a rollout", {"_ng_failure_class": "unavailable", "mask_sample": True}),
    ("agent", "a body of 8 megabytes is taken", {"responses_create_params": {}}),
    ("model", None, {}),
    ("model", "a prompt gets a response", {"output": None}),
    ("model", "a history with calls is taken", {"status": "failed"}),
    ("model", "tokens are whole", {"output": [{**message_item("Hi"), **TOKENS}]}),
    ("model", "a body that is no object is refused", {"always": True}),
    ("model", "a route that is not there is not found", {"always": True}),
]


@pytest.mark.parametrize(("kind", "check", "wrong"), AGENTS_AND_MODELS)
async def test_agents_and_models_that_answer_something_wrong(
    kind: Kind, check: str | None, wrong: JSON
) -> None:
    async def answer(request: web.Request) -> web.Response:
        runs = request.path == "/run"
        known = runs or request.path == "/v1/responses"
        try:
            body = {} if "always" in wrong else exact_json(await request.read())
            assert "always" in wrong or (known and (runs or isinstance(body["input"], str | list)))
            assert isinstance(body, dict)
        except Exception:
            code, status = ("bad_request", 400) if known else ("not_found", 404)
            return web.json_response({"error": {"code": code, "message": "no"}}, status=status)
        right = {**body, "reward": 1.0, "response": RESPONSE} if runs else RESPONSE
        return web.json_response({**right, **wrong})

    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        found = await failed(check_conformance(str(server.make_url("")), kind))
    assert (check in found) if check is not None else not found, found


ODD = [
    b"<html>",
    b"[1]",
    b'{"tools": [{"type": "function", "name": "f", "parameters": {"properties": {"x": 3}, "required": [[]]}}]'
    b', "output": [{"type": 1}], "content": 5, "data": 5, "reward": true, "response": [], "error": []}',
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("body", ODD)
async def test_a_server_may_answer_anything(kind: Kind, body: bytes) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=body, headers={"x-session-id": "\u20ac"})

    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        found = await failed(check_conformance(str(server.make_url("")), kind))
    assert "a route that is not there is not found" in found


def test_nothing_answers_and_no_such_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "_START_SECONDS", 0.1)
    done = runner.invoke(main, ["conform", "http://127.0.0.1:9", "--kind", "agent"])
    assert (done.exit_code, done.stderr[:41]) == (1, "nothing answers at http://127.0.0.1:9: no")
    done = runner.invoke(main, ["conform", "http://127.0.0.1:9", "--kind", "tool"])
    assert done.exit_code == 2


def test_a_report_fits_a_terminal_and_says_what_to_mend(ours: str) -> None:
    done = runner.invoke(main, ["conform", f"{ours}/nobody", "--kind", "model"])
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "failed   a prompt gets a response"
    first = lines[lines.index("", 1) + 2 :]
    assert [line[2:17].strip() for line in first if line[2:3].strip()][:4] == [
        *("asked", "came", "wanted", "the page says"),
    ]
