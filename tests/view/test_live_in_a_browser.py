"""The page of a running graph in Chromium: episodes appear, go on, end and are stopped while somebody looks.

Slow as the tests of the viewer (test_page_in_a_browser.py). With VIEWER_PICTURES=1 it writes the pictures of
docs/viewer.md.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("playwright", reason="make test-browser installs it")
pytest.importorskip("axe_playwright_python", reason="make test-browser installs it")

from playwright.sync_api import Browser, expect
from pydantic import SecretStr
from support.in_process import serving
from support.watched import Held
from view.browser import NARROW, SIZES, visit
from view.hostile import IMAGE, LINK, MIXED, REMOTE, SVG

from gym_serve.assembly import ThisProcess
from gym_serve.graph import GraphSpec, resolve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

JSON = dict[str, Any]
HOSTILE = [
    MIXED,
    f"{SVG}\n\n[a link]({LINK}) ![]({REMOTE}x.png) <{REMOTE}>",
    f"\u202ereversed {IMAGE}",
    "```html\n" + MIXED + "\n```\n\n$\\href{javascript:window.attacked=1}{x}$",
]
TIDES = (
    "Why are there two high tides a day, although the Moon passes overhead only once? Explain it to a child."
)


class Graph:
    """A graph that is served, and the rollouts that it was asked for."""

    def __init__(self, base: str, held: Held, headers: dict[str, str]) -> None:
        self.base = base
        self.held = held
        self.client = httpx.Client(base_url=base, timeout=120, headers=headers)
        self._threads: list[threading.Thread] = []
        self.rollouts: dict[str, JSON] = {}

    def run(self, prompt: str, **row: Any) -> None:
        """Ask for a rollout. The first word of the prompt is its key."""

        def ask() -> None:
            self.rollouts[prompt.split(maxsplit=1)[0]] = self.client.post(
                "run", json={"prompt": prompt, **row}
            ).json()

        thread = threading.Thread(target=ask)
        thread.start()
        self._threads.append(thread)

    def end(self) -> None:
        """Let all of them end, and wait for that."""
        for episode in self.client.get("episodes").json()["episodes"]:
            self.client.delete(f"episodes/{episode['id']}")
        for thread in self._threads:
            thread.join(60)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Graph]]:
    stops: list[Callable[[], object]] = []

    def start(token: str | None = None) -> Graph:
        held = Held(tmp_path)
        resolved = resolve(GraphSpec.model_validate(held.graph()))
        if token is not None:
            resolved = replace(resolved, auth_tokens=(SecretStr(token),))
        context = serving(lambda url: {"/library": resolved})
        graph = Graph(
            f"{context.__enter__()}/library/", held, {"authorization": f"Bearer {token}"} if token else {}
        )
        stops.extend([lambda: context.__exit__(None, None, None), graph.client.close, graph.end])
        return graph

    yield start
    for stop in reversed(stops):
        stop()


@pytest.fixture(autouse=True)
def loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What replicas would tell of their load; a graph without Ray has none."""

    def replica(**counts: Any) -> JSON:
        own = {"draining": False, "running": 0, "waiting": 0, "limit": 64, "sessions": 0, "max_replicas": 0}
        return {**own, "target_sessions": None, "autoscaling": None, "cpu": 0.1, "refused": 0.0, **counts}

    async def reports(self: ThisProcess, op: str) -> dict[str, list[JSON]]:
        return {
            "policy": [replica(running=58, waiting=3)],
            "library": [replica(running=2, sessions=14), replica(running=1, sessions=12)],
            "reader": [replica(running=31, limit=4096), replica(running=29, limit=4096)],
        }

    monkeypatch.setattr(ThisProcess, "reports", reports)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("name", "size"), SIZES)
def test_every_page_in_every_size(
    browser: Browser,
    serve: Callable[..., Graph],
    name: str,
    size: tuple[int, int],
    scheme: str,
) -> None:
    graph = serve()
    held = graph.held
    with visit(browser, f"{graph.base}ui/", size, scheme) as visited:
        page = visited.page
        visited.go("")
        expect(page.locator("h1")).to_have_text("No episode runs")
        expect(page.get_by_text("Waiting for episodes")).to_be_visible()
        visited.check("nothing runs")

        held.say("How", 0, "Seven.")
        graph.run("How much is three and four?", _ng_rollout_id="3-1", _ng_task_index=3)
        graph.run(TIDES, _ng_rollout_id="4-0", _ng_task_index=4)
        graph.run("Which is heavier, a kilogram of iron or a kilogram of feathers?", _ng_rollout_id="5-0")
        graph.run("What is the capital of Australia, and what was it before?", _ng_rollout_id="6-2")
        held.call("Why", 0, "look_up", {"query": "tides", "edition": 11})
        held.call("Which", 0, "look_up", {"query": "kilograms"})
        held.call("Which", 1, "ask_librarian", {"question": "Where are the feathers?"})
        expect(page.locator("h1")).to_have_text("3 episodes run")
        expect(page.get_by_role("heading", name="Ended lately")).to_be_visible()
        rows = page.locator("table").first.locator("tbody tr")
        expect(rows).to_have_count(3)
        expect(rows.filter(has_text="iron")).to_contain_text("tool ask_librarian")
        expect(rows.filter(has_text="tides a day").locator("td").nth(2)).to_have_text("1")
        visited.check("episodes")
        if (name, scheme) == ("wide", "light"):
            visited.picture("live")

        page.get_by_role("link", name="tides a day").click()
        expect(page.get_by_role("region", name="Call of look_up")).to_be_visible()
        expect(page.locator(".going .state")).to_have_text("model")
        visited.check("an episode")
        if (name, scheme) == ("narrow", "dark"):
            visited.picture("live-episode")
        for view in ("2", "4"):
            page.keyboard.press(view)
            visited.settled()
            visited.check(f"view {view}")
        page.keyboard.press("s")
        expect(page.get_by_role("dialog", name="Stop this episode?")).to_be_visible()
        visited.check("the question")
        page.keyboard.press("Escape")
        assert visited.complaints == []


def test_an_episode_appears_turn_by_turn_and_ends(browser: Browser, serve: Callable[..., Graph]) -> None:
    graph = serve()
    with visit(browser, f"{graph.base}ui/") as visited:
        page = visited.page
        visited.go("")
        graph.run("story of a cat")
        page.get_by_role("link", name="story of a cat").click()
        expect(page.get_by_role("region", name="User")).to_contain_text("story of a cat")
        expect(page.locator(".verdict .state")).to_have_text("model")
        for turn in range(3):
            graph.held.call("story", turn, "look_up", {"query": f"cat {turn}"})
            expect(page.get_by_role("region", name="Call of look_up")).to_have_count(turn + 1)
        expect(page.get_by_text("three books about cat 2.")).to_be_visible()
        page.evaluate("window.kept = true")
        graph.held.say("story", 3, "The end of the **story**.")
        expect(page.get_by_role("region", name="Assistant")).to_have_text(re.compile("The end of the story."))
        expect(page.locator(".verdict .reward")).to_have_text("1")
        expect(page.get_by_role("button", name="Stop")).to_have_count(0)
        assert page.evaluate("window.kept"), "nothing was loaded again"
        page.keyboard.press("u")
        ended = page.get_by_role("table", name="Episodes that have ended")
        expect(ended.get_by_role("row")).to_have_count(2)
        expect(page.locator("h1")).to_have_text("No episode runs")
        assert visited.complaints == []


def test_a_reader_at_the_end_stays_there(browser: Browser, serve: Callable[..., Graph]) -> None:
    graph = serve()
    with visit(browser, f"{graph.base}ui/", NARROW) as visited:
        page = visited.page
        graph.run("long talk")
        visited.go("")
        page.get_by_role("link", name="long talk").click()
        for turn in range(6):
            graph.held.call("long", turn, "look_up", {"query": f"{turn} " + "word " * 60})
        calls = page.get_by_role("region", name="Call of look_up")
        expect(calls).to_have_count(6)
        assert page.evaluate("scrollY") == 0, "a reader at the beginning stays there too"
        page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
        for turn in range(6, 9):
            graph.held.call("long", turn, "look_up", {"query": f"{turn} " + "word " * 60})
            expect(calls).to_have_count(turn + 1)
            expect(calls.last).to_be_in_viewport()
        assert visited.complaints == []


def test_one_is_stopped_by_keys_alone(browser: Browser, serve: Callable[..., Graph]) -> None:
    graph = serve()
    with visit(browser, f"{graph.base}ui/") as visited:
        page = visited.page
        graph.run("first that stays")
        visited.go("")
        expect(page.locator("main tbody tr")).to_have_count(1)
        graph.run("second that waits")
        graph.held.call("second", 0, "ask_librarian", {"question": "How long?"})
        expect(page.locator("main tbody tr").nth(1)).to_contain_text("tool ask_librarian")
        for key in ("j", "j"):
            page.keyboard.press(key)
        expect(page.get_by_role("link", name="second that waits")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator(".verdict .state")).to_have_text("tool ask_librarian")
        page.keyboard.press("s")
        question = page.get_by_role("dialog", name="Stop this episode?")
        question.get_by_role("button", name="Let it run").click()
        expect(question).to_be_hidden()
        page.keyboard.press("s")
        question.get_by_role("button", name="Stop it").click()
        expect(page.locator(".failure")).to_contain_text("stopped")
        expect(page.locator(".failure")).to_contain_text("not tried again")
        page.keyboard.press("g")
        page.keyboard.press("e")
        expect(page.locator("h1")).to_have_text("1 episode runs")
        expect(
            page.get_by_role("table", name="Episodes that have ended").locator("tbody tr")
        ).to_contain_text("failed")
        assert visited.complaints == []
    assert graph.held.has("second", "untold")
    assert graph.held.has("second", "closed")
    graph.end()
    assert graph.rollouts["second"]["_ng_failure_class"] == "stopped"


def test_what_a_model_writes_does_nothing(browser: Browser, serve: Callable[..., Graph]) -> None:
    graph = serve()
    with visit(browser, f"{graph.base}ui/") as visited:
        page = visited.page
        graph.run(f"hostile {MIXED}", _ng_rollout_id=MIXED, _ng_task_index=MIXED)
        visited.go("")
        page.locator("main tbody a").click()
        for turn, text in enumerate(HOSTILE):
            graph.held.call(
                "hostile", turn, "look_up" if turn % 2 else f"look_up{MIXED}", {"query": text, text: text}
            )
            expect(page.locator(".block.call")).to_have_count(turn + 1)
        for key in ("e", "m", "2", "4", "1"):
            page.keyboard.press(key)
            visited.settled()
        graph.held.say("hostile", len(HOSTILE), "\n\n".join(HOSTILE))
        expect(page.locator(".verdict .reward")).to_have_text("1")
        page.keyboard.press("u")
        expect(page.locator("h1")).to_have_text("No episode runs")
        assert page.evaluate("window.attacked") is None
        assert page.url.startswith(graph.base)
        assert visited.complaints == []


def test_a_token_is_asked_for_once(browser: Browser, serve: Callable[..., Graph]) -> None:
    graph = serve("the-token")
    with visit(browser, graph.base) as visited:
        page = visited.page
        page.goto(f"{graph.base}ui/")
        page.get_by_label("token").fill("a-guess")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("alert")).to_contain_text("not a token")
        page.get_by_label("token").fill("the-token")
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_have_text("No episode runs")
        assert page.url == f"{graph.base}ui/"
        graph.run("secret story")
        page.get_by_role("link", name="secret story").click()
        page.get_by_role("button", name="Stop").click()
        page.get_by_role("button", name="Stop it").click()
        expect(page.locator(".failure")).to_contain_text("stopped")
        assert page.evaluate("document.cookie") == ""
        page.goto(graph.base)
        page.get_by_role("link", name="/ui").click()
        expect(page.get_by_role("heading", name="Ended lately")).to_be_visible()
        page.context.clear_cookies()
        expect(page.get_by_role("alert")).to_contain_text("load the page again")
        visited.complaints[:] = [one for one in visited.complaints if "401" not in one]  # Chromium logs them
        assert visited.complaints == []


def test_a_replica_that_is_silent_and_a_graph_that_is_gone(
    browser: Browser, serve: Callable[..., Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(self: ThisProcess, call: Any) -> tuple[list[tuple[str, JSON]], list[str]]:
        return [], ["reader.k3v9x2ab"]

    graph = serve()
    with visit(browser, f"{graph.base}ui/") as visited:
        page = visited.page
        with monkeypatch.context() as patched:
            patched.setattr(ThisProcess, "ask", silent)
            visited.go("")
            expect(page.get_by_role("alert")).to_contain_text("1 replica does not answer")
            expect(page.get_by_role("alert")).to_contain_text("reader.k3v9x2ab")
            visited.check("a silent replica")
        expect(page.get_by_role("alert")).to_have_count(0)
        page.context.set_offline(True)
        expect(page.get_by_role("alert")).to_contain_text("does not answer")
        page.context.set_offline(False)
        expect(page.get_by_role("alert")).to_have_count(0)
        visited.go("#/episode/local.999")
        expect(page.get_by_role("alert")).to_contain_text("gone")
        visited.complaints.clear()  # Chromium logs what failed
