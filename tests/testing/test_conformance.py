"""`gym-serve conform` finds what is wrong with a server, and nothing in one that does what the page says."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.any_language import FIXTURES, FOLDER, needs_node, running
from support.in_process import serving
from typer.testing import CliRunner

from gym_serve import Gym
from gym_serve.cli import main
from gym_serve.graph import load_graph, resolve
from gym_serve.testing import load_fixtures
from gym_serve.testing.conformance import CHECKS, Result, check_conformance

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
PROGRAM = (FOLDER / "environment.mjs").read_text(encoding="utf-8")

runner = CliRunner()


def failed(results: list[Result]) -> list[str]:
    return [result.name for result in results if result.state == "failed"]


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
        results = asyncio.run(check_conformance(url, "environment", None, load_fixtures(FIXTURES)))
    assert check in failed(results), failed(results)
