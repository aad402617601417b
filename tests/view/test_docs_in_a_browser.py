"""The documentation of a graph in Chromium: a person signs in, tries routes, and reads what comes back.

Slow, as test_page_in_a_browser.py is, and for the same reasons.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("playwright", reason="make test-browser installs it")
pytest.importorskip("axe_playwright_python", reason="make test-browser installs it")

from playwright.sync_api import Browser, Locator, Page, expect
from pydantic import SecretStr
from support.in_process import serving
from view.browser import NARROW, WIDE, Visit, visit

from gym_serve import ResourcesServer, Verdict, VerifyRequest, tool
from gym_serve.graph import resolve
from gym_serve.graph.spec import GraphSpec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOKEN = "a-token-for-this-test"
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"


class Market(ResourcesServer):
    """What a tool is called and says is as bad as it can be."""

    @tool
    async def price(self, item: str) -> str:
        """<img src=x onerror=alert(3)> The price of a thing."""
        return f"{HOSTILE} {item}"

    async def verify(self, request: VerifyRequest) -> Verdict:
        return Verdict(reward=12345678901234567890.0)


GRAPH = {
    "models": {"policy": {"type": "scripted_model", "environments": []}},
    "resources": {"market": {"type": Market}},
    "agents": {"buyer": {"type": "simple_agent", "model": "policy", "resources": "market"}},
}


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    def graphs(url: str) -> Any:
        graph = resolve(GraphSpec.model_validate(GRAPH))
        return {"/open": graph, "/closed": replace(graph, auth_tokens=(SecretStr(TOKEN),))}

    with serving(graphs) as url:
        yield url


def opened(page: Page, route: str) -> Locator:
    """A route of the page, opened: ``POST /buyer/run``."""
    found = page.locator("details.route").filter(has=page.locator("summary", has_text=re.compile(route)))
    found.locator("summary").first.click()
    return found


def sent(route: Locator, status: str = "200") -> str:
    """Send a route's request; its answer."""
    route.get_by_role("button", name="Send").click()
    expect(route.get_by_role("status")).to_contain_text(status)
    expect(route.get_by_role("button", name="Send")).to_be_enabled()
    return route.locator(".answer pre").inner_text()


def at(visited: Visit, path: str) -> Page:
    visited.page.goto(visited.base + path)
    visited.page.locator("main h1").wait_for()
    return visited.page


def test_a_row_is_run_and_a_session_goes_on(browser: Browser, base: str) -> None:
    with visit(browser, base) as visited:
        page = at(visited, "/open/docs")
        answer = sent(opened(page, r"POST /buyer/run"))
        assert "content-type: application/json" in answer
        assert "x-request-id: " in answer
        assert "12345678901234567000" not in answer  # the number as it was sent
        seeded = sent(opened(page, r"POST /market/seed_session"))
        assert "x-session-id: " in seeded
        price = opened(page, r"POST /market/price")
        price.locator("textarea").fill('{"item": "tea"}')
        told = sent(price)
        assert HOSTILE in told
        assert seeded.partition("x-session-id: ")[2].split()[0] in told  # the browser keeps the session
        assert visited.complaints == []  # no dialog, no error, nothing from elsewhere


def test_a_stream_is_read_as_it_comes(browser: Browser, base: str) -> None:
    with visit(browser, base) as visited:
        route = opened(at(visited, "/open/docs"), r"POST /buyer/v1/chat/completions")
        route.get_by_label("as a stream").check()
        assert '"stream": true' in route.locator("textarea").input_value()
        answer = sent(route)
        assert "content-type: text/event-stream" in answer
        assert answer.rstrip().endswith("data: [DONE]")


def test_a_refusal_and_a_path_are_shown(browser: Browser, base: str) -> None:
    with visit(browser, base) as visited:
        page = at(visited, "/open/docs")
        route = opened(page, r"POST /buyer/run")
        route.locator("textarea").fill("no JSON")
        assert "bad_request" in sent(route, "400")
        run = opened(page, r"GET /rollouts/\{id\}")
        run.get_by_label("id").first.fill("../graph")  # stays one part of the path
        assert "not_found" in sent(run, "404")
        # Chromium logs each failed request of a page.
        assert [told for told in visited.complaints if "Failed to load resource" not in told] == []


def test_a_person_signs_in_and_out(browser: Browser, base: str) -> None:
    with visit(browser, base) as visited:
        page = at(visited, "/closed/docs")
        page.get_by_label("token").fill(TOKEN)
        page.get_by_role("button", name="Sign in").click()
        page.locator("details.route").first.wait_for()
        assert page.url == f"{base}/closed/docs"
        assert "buyer" in sent(opened(page, r"GET /graph"))
        assert '"reward"' in sent(opened(page, r"POST /run"))
        assert TOKEN not in page.content()
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("token")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_axe_finds_nothing_and_nothing_is_wider_than_the_window(
    browser: Browser, base: str, size: tuple[int, int], scheme: str
) -> None:
    with visit(browser, base, size, scheme) as visited:
        at(visited, "/open/")
        visited.check("the graph's page")
        page = at(visited, "/open/docs")
        sent(opened(page, r"POST /buyer/run"))
        opened(page, r"POST /market/price")
        visited.check("the documentation")
        assert visited.complaints == []
