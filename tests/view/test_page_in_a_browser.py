"""The page in Chromium, as people use it: nothing it shows, loads or logs is wrong, and everyone can use it.

Slow, because a browser draws some hundred pages, and nothing else needs playwright and Chromium, which
`make test-browser` installs. With VIEWER_PICTURES=1 it writes the pictures of docs/viewer.md.
"""

from __future__ import annotations

import functools
import http.server
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("playwright", reason="make test-browser installs it")
pytest.importorskip("axe_playwright_python", reason="make test-browser installs it")

import orjson
from playwright.sync_api import Browser, expect
from view.browser import NARROW, SIZES, Visit, visit
from view.hostile import write_hostile
from view.made import failed, rollout, until_indexed, viewer, write
from view.showcase import showcase

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

VIEWS = ["conversation", "timeline", "tokens", "judge", "branches", "raw"]
GRAPHS = [
    *("blackjack", "cliff_walking", "code_gen", "equivalence_llm_judge", "frozen_lake", "genrm_compare"),
    *(
        "google_search",
        "instruction_following",
        "math",
        "math_with_code",
        "mcp",
        "mcqa",
        "multi_step_synonyms",
    ),
    *("reasoning_gym", "refinement_agent", "session_counter", "single_turn_agent", "string_match"),
    *("structured_outputs", "text_to_sql", "tool_argument_comparison", "tool_call_multireward", "weather"),
    *("workplace_assistant", "xlam_fc"),
]
PICTURES = [
    *((page, "wide", "light") for page in ("runs", "tasks", "rollouts", "picture", "timeline", "attempts")),
    ("tokens", "wide", "dark"),
    ("conversation", "narrow", "dark"),
]
"""The pages that docs/viewer.md shows, with width and colours."""


class Site:
    """A viewer that runs: where, and the ids of its runs by name."""

    def __init__(self, client: httpx.Client, rollouts: int) -> None:
        self.base = str(client.base_url)
        self.runs = {run["name"].removesuffix(".jsonl"): run["id"] for run in until_indexed(client, rollouts)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("showcase")
    showcase(folder)
    return folder


@pytest.fixture(scope="module")
def shown(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with viewer(folder, cache=tmp_path_factory.mktemp("cache")) as client:
        yield Site(client, 394)


def pages_of(site: Site) -> dict[str, str]:
    """Every page, with the runs of the showcase."""
    old, new = site.runs["step-100"], site.runs["step-200"]
    return {
        "runs": "#/runs",
        "tasks": f"#/tasks?run={new}",
        "rollouts": f"#/rollouts?run={new}",
        "compare": "#/compare",
        "attempts": f"#/attempts/{new}/3/{new}/2",
        "picture": f"#/rollout/{new}/16",
        "filter": "#/rollouts?where=reward%20%3E%3D%200.8%20and%20tool('run_python')&sort=-seconds",
        "nothing": "#/rollouts?where=reward%20%3E%205",
        **{view: f"#/rollout/{old}/3?run={old}&at=3&view={view}" for view in VIEWS if view != "branches"},
        "branches": f"#/rollout/{new}/191?view=branches",
        "branch-tokens": f"#/rollout/{new}/191?view=tokens",
        "versions": f"#/compare?left={new}&right={new}&left_version=41&right_version=43&show=all",
    }


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("name", "size"), SIZES)
def test_axe_finds_nothing_and_nothing_is_wider_than_the_window(
    browser: Browser, shown: Site, name: str, size: tuple[int, int], scheme: str
) -> None:
    with visit(browser, shown.base, size, scheme) as visited:
        for page, fragment in pages_of(shown).items():
            visited.go(fragment)
            visited.check(page)
            if (page, name, scheme) in PICTURES:
                visited.picture(page)
        assert visited.complaints == []


@pytest.mark.parametrize("graph", GRAPHS)
def test_pages_of_every_environment(browser: Browser, tmp_path: Path, graph: str) -> None:
    file = tmp_path / f"{graph}.jsonl"
    command = ["collect", graph, "-o", str(file), "--no-ray", "--repeats", "2", "--limit", "4"]
    program = [sys.executable, "-c", "from gym_serve.cli import main; main()", *command]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout, done.stderr)
    with viewer(file, cache=tmp_path / "cache") as client:
        site = Site(client, 8)
        run = site.runs[graph]
        with visit(browser, site.base) as visited:
            for page in ("runs", "tasks", "rollouts"):
                visited.go(f"#/{page}?run={run}")
                expect(visited.page.locator("main h1")).not_to_have_text(re.compile("^0 "))
            for n in (0, 7):
                for view in VIEWS:
                    visited.go(f"#/rollout/{run}/{n}?view={view}")
                    assert not re.search(r"undefined|\[object", visited.text()), (n, view)
            assert visited.complaints == []


def test_hostile_rollouts_do_nothing(browser: Browser, tmp_path: Path) -> None:
    write_hostile(tmp_path / "hostile.jsonl")
    with viewer(tmp_path / "hostile.jsonl", cache=tmp_path / "cache") as client:
        site = Site(client, 60)  # the other lines are damaged: the runs' page tells of them
        (run,) = site.runs.values()
        rows = client.get("api/rollouts", params={"limit": 200}).json()["rows"]
        with visit(browser, site.base) as visited:
            for fragment in ("#/runs", "#/tasks", "#/rollouts"):
                visited.go(fragment)
            for row in rows:
                for view in VIEWS:
                    visited.go(f"#/rollout/{run}/{row['n']}?view={view}")
                    visited.page.keyboard.press("e")
                    assert visited.page.evaluate("window.attacked") is None, (row, view)
                    assert visited.page.url.startswith(site.base), (row, view)
                assert visited.complaints == [], row


def test_links_are_asked_about_and_scripts_are_no_links(browser: Browser, tmp_path: Path) -> None:
    text = "[safe](https://example.com/a?b) [script](javascript:window.attacked=1) <b>bold</b>"
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    write(tmp_path / "run.jsonl", [rollout(0, 0, response={"output": [said]})])
    with viewer(tmp_path, cache=tmp_path / "cache") as client:
        site = Site(client, 1)
        (run,) = site.runs.values()
        with visit(browser, site.base) as visited:
            visited.go(f"#/rollout/{run}/0")
            page = visited.page
            assert "<b>bold</b>" in visited.text()
            page.get_by_role("button", name="safe").click()
            question = page.get_by_role("dialog", name="Leave the viewer?")
            expect(question).to_contain_text("example.com")
            link = question.get_by_role("link", name="Open in a new tab")
            assert link.get_attribute("href") == "https://example.com/a?b"
            assert link.get_attribute("rel") == "noopener noreferrer"
            question.get_by_role("button", name="Stay").click()
            page.get_by_role("button", name="script").click()
            refused = page.get_by_role("dialog", name="This link cannot be opened")
            expect(refused).to_be_visible()
            expect(refused.get_by_role("link")).to_have_count(0)
            assert page.evaluate("window.attacked") is None
            assert visited.complaints == []


def test_a_hundred_thousand_rollouts_scroll(browser: Browser, tmp_path: Path) -> None:
    line = {"response": {"output": []}, "responses_create_params": {"input": "Q"}, "reward": 1.0}
    with (tmp_path / "many.jsonl").open("wb") as file:
        for n in range(100_000):
            file.write(orjson.dumps({**line, "_ng_task_index": n // 8, "_ng_rollout_index": n % 8}) + b"\n")
    with viewer(tmp_path, cache=tmp_path / "cache") as client:
        site = Site(client, 100_000)
        with visit(browser, site.base) as visited:
            visited.go("#/rollouts")
            page = visited.page
            expect(page.locator("main h1")).to_have_text("100,000 rollouts")
            page.keyboard.press("G")  # the last row
            expect(page.locator('[aria-rowindex="100001"]')).to_contain_text("12499")
            assert page.locator("[role=row]").count() < 100
            page.keyboard.press("g")
            page.keyboard.press("g")
            expect(page.locator('[aria-rowindex="2"]')).to_contain_text("0")
            assert visited.complaints == []


def test_keys_lead_everywhere(browser: Browser, shown: Site) -> None:
    with visit(browser, shown.base) as visited:
        visited.go("#/runs")
        page = visited.page

        def press(keys: str) -> None:
            for key in keys.split():
                page.keyboard.press(key)

        press("g t")
        expect(page.locator("h1")).to_have_text("24 tasks")
        press("g o")
        expect(page.locator("h1")).to_have_text("394 rollouts")
        expect(page.locator('[aria-rowindex="4"]')).to_contain_text("0 · 2")
        press("j j j k")
        expect(page.locator('[aria-rowindex="3"] a')).to_be_focused()
        press("Enter")
        expect(page.get_by_role("heading", name="Rollout 0-1")).to_be_visible()
        press("]")
        expect(page.get_by_role("heading", name="Rollout 0-2")).to_be_visible()
        press("3")
        expect(page.get_by_label("Colour", exact=True)).to_be_visible()
        press("u")
        expect(page.locator("h1")).to_have_text("394 rollouts")
        press("/")
        expect(page.locator("#filter")).to_be_focused()
        press("Escape ?")
        expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
        press("Escape d d")
        assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark"
        assert visited.complaints == []


def test_tokens_of_branches_have_headings(browser: Browser, shown: Site) -> None:
    with visit(browser, shown.base) as visited:
        visited.go(f"#/rollout/{shown.runs['step-200']}/191?view=tokens")
        titles = visited.page.locator("h2.branch")
        expect(titles).to_have_text(["What was scored", "Branch 1", "Branch 2"])
        expect(visited.page.get_by_text("drift:")).to_have_count(1)  # not at the beginning of a branch
        assert visited.complaints == []


def test_two_versions_of_the_policy_are_compared(browser: Browser, tmp_path: Path) -> None:
    def made(task: int, version: int, reward: float) -> dict[str, Any]:
        steps = [["model", 3, 9, 0, 1, 3, None, 2, None, {"version": str(version)}]]
        found = rollout(task, version, reward=reward)
        return {**found, "_ng_timeline": {**found["_ng_timeline"], "steps": steps}}

    lines = [made(task, version, float(version > 8 + task)) for task in range(3) for version in (8, 9, 10)]
    write(tmp_path / "training.jsonl", lines)
    with viewer(tmp_path, cache=tmp_path / "cache") as client:
        Site(client, 9)
        with visit(browser, str(client.base_url)) as visited:
            visited.go("#/compare")
            page = visited.page
            expect(page.locator(".compare tbody th")).to_have_text(["0", "1"])  # the oldest and the newest
            visited.go("#/compare?where=version+%3D+8")
            expect(page.get_by_text("No task is on both sides")).to_be_visible()
            visited.go("#/compare")
            page.get_by_label("right policy version").select_option("9")
            expect(page.locator(".compare tbody th")).to_have_text(["0"])
            expect(page.locator(".compare thead")).to_contain_text("version 9")
            page.get_by_role("button", name="Swap").click()
            expect(page.locator(".compare tbody tr")).to_contain_text("worse")
            page.get_by_role("link", name="0", exact=True).click()
            expect(page.locator("h1")).to_have_text("Two attempts at task 0")
            expect(page.locator(".side-by-side .reward")).to_have_text(["1", "0"])
            assert visited.complaints == []


def test_the_tab_that_is_shown_is_in_the_window(browser: Browser, shown: Site) -> None:
    with visit(browser, shown.base, NARROW) as visited:
        visited.go(f"#/rollout/{shown.runs['step-200']}/191?view=raw")
        tab = visited.page.locator(".views [aria-current]").bounding_box()
        assert tab is not None
        assert tab["x"] + tab["width"] <= NARROW[0]
        key = visited.page.locator(".raw th", has_text="instructions").first.bounding_box()
        value = visited.page.locator(".raw td", has_text="Solve the problem.").last.bounding_box()
        assert key is not None
        assert value is not None
        assert value["width"] > NARROW[0] / 2  # below its key, not squeezed beside it
        assert value["y"] > key["y"]
        assert visited.complaints == []


def test_what_is_shown_stands_in_the_url(browser: Browser, shown: Site) -> None:
    run = shown.runs["step-200"]
    with visit(browser, shown.base) as visited:
        visited.go(f"#/rollouts?run={run}")
        page = visited.page
        page.get_by_label("Filter", exact=True).fill("reward < 1 and words('computed')")
        page.keyboard.press("Enter")
        visited.settled()
        page.get_by_role("columnheader", name="tokens").get_by_role("button").click()
        page.get_by_text("Columns", exact=True).click()
        page.get_by_label("edit_distance").uncheck()
        visited.settled()
        before = page.inner_text(".scroller")
        assert "edit_distance" not in before
        visited.go(page.url.removeprefix(visited.base))
        assert page.inner_text(".scroller") == before
        page.get_by_label("Filter", exact=True).fill("reward >")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_be_visible()
        expect(page.get_by_label("Filter", exact=True)).to_have_attribute("aria-invalid", "true")
        visited.complaints.clear()  # Chromium logs that the server refused the filter


def test_values_are_clicked_into_the_filter(browser: Browser, shown: Site) -> None:
    with visit(browser, shown.base) as visited:
        visited.go("#/rollouts")
        page = visited.page
        page.get_by_role("button", name=re.compile("^model_timeout")).click()
        expect(page.locator("#filter")).to_have_value("failure = 'model_timeout'")
        visited.settled()
        expect(page.locator("[role=row] .reward").first).to_have_text("failed")
        page.get_by_role("button", name=re.compile("^model_timeout")).click()
        expect(page.locator("#filter")).to_have_value("")
        assert visited.complaints == []


def test_an_annotation_is_kept(browser: Browser, shown: Site) -> None:
    fragment = f"#/rollout/{shown.runs['step-100']}/5"
    with visit(browser, shown.base) as visited:
        visited.go(fragment)
        page = visited.page
        page.keyboard.press("a")
        page.keyboard.type("The judge is wrong.")
        page.get_by_label("Tags").first.fill("judge, look again")
        page.get_by_label("Right reward").first.fill("0.5")
        page.get_by_role("button", name="Save").first.click()
        expect(page.get_by_text("Saved.").first).to_be_visible()
        visited.go(fragment)
        expect(page.get_by_label("Comment").first).to_have_value("The judge is wrong.")
        visited.go("#/rollouts?where=tag('look%20again')")
        expect(page.locator("h1")).to_have_text("1 rollout")
        assert visited.complaints == []


@pytest.mark.parametrize(("lines", "failures"), [(0, 0), (1, 0), (0, 6)])
def test_small_files_and_a_run_that_failed(
    browser: Browser, tmp_path: Path, lines: int, failures: int
) -> None:
    write(tmp_path / "small.jsonl", [rollout(0, 0)] * lines)
    write(tmp_path / "small_failures.jsonl", [failed(task, 0) for task in range(failures)])
    with viewer(tmp_path, cache=tmp_path / "cache") as client:
        site = Site(client, lines + failures)
        with visit(browser, site.base) as visited:
            for page in ("runs", "tasks", "rollouts", "compare"):
                visited.go(f"#/{page}")
                assert not re.search(r"undefined|\bNaN\b|\[object", visited.text()), page
                expect(visited.page.locator(".chart")).to_have_count(0)  # nor an empty frame
                if lines == 0:
                    expect(visited.page.locator(".histogram")).to_have_count(0)
            if failures:
                visited.go("#/rollouts?where=failure%20%3D%20'model_timeout'")
                expect(visited.page.locator(".table .reward")).to_have_text(["failed"] * failures)
            assert visited.complaints == []


def test_a_zero_says_why_beside_the_right_answer(browser: Browser, tmp_path: Path) -> None:
    line = {"expected_answer": "Tuesday", **rollout(0, 0), "reason": "no day is named"}
    write(tmp_path / "out.jsonl", [line, {**rollout(1, 1), "reward": 1.0, "mask_sample": True}])
    write(tmp_path / "out_failures.jsonl", [failed(2, 0)])
    with viewer(tmp_path, cache=tmp_path / "cache") as client:
        site = Site(client, 3)
        with visit(browser, site.base) as visited:
            visited.go("#/runs")
            assert "mean reward, 1 of 3 scored" in visited.text()
            visited.go("#/rollouts")
            assert "no day is named" in visited.text()
            visited.page.locator("[role=row] a").first.click()
            visited.settled()
            verdict = visited.page.locator("aside.verdict")
            expect(verdict).to_contain_text("no day is named")
            expect(verdict).to_contain_text("Tuesday")
            assert visited.complaints == []


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def test_an_export_needs_no_server_of_ours(browser: Browser, folder: Path, tmp_path: Path) -> None:
    program = [sys.executable, "-c", "from gym_serve.cli import main; main()"]
    subprocess.run([*program, "view", str(folder), "--export", str(tmp_path / "site")], check=True)
    handler = functools.partial(_Quiet, directory=str(tmp_path / "site"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with visit(browser, f"http://127.0.0.1:{server.server_port}/") as visited:
            visited.go("#/rollouts?where=reward%20%3C%201%20and%20tool('run_python')&sort=-tokens")
            expect(visited.page.locator("h1")).not_to_have_text("0 rollouts")
            read_every_page(visited)
            assert visited.complaints == []
    finally:
        server.shutdown()
        server.server_close()


def read_every_page(visited: Visit) -> None:
    """Follow the links from page to page, as a reader without the API's ids does."""
    for page in ("runs", "tasks", "rollouts", "compare"):
        visited.go(f"#/{page}")
        assert not re.search(r"undefined|\bNaN\b|\[object|not in this export", visited.text()), page
    visited.go("#/rollouts")
    visited.page.locator("[role=row] a").first.click()
    visited.settled()
    fragment = visited.page.url.removeprefix(visited.base)
    for view in VIEWS:
        visited.go(f"{fragment}&view={view}" if "?" in fragment else f"{fragment}?view={view}")
        assert "not in this export" not in visited.text(), view
