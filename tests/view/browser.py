"""A Chromium for the tests of the page: what it complains of, and what it asks of other hosts."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

WIDE, NARROW = (1280, 860), (390, 800)
SIZES = [("wide", WIDE), ("narrow", NARROW)]
DOCS = Path(__file__).parents[2] / "docs"
WRITES_PICTURES = bool(os.environ.get("VIEWER_PICTURES"))
"""Whether the tests write the pictures of docs/viewer.md."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's Chromium. As root it has no sandbox of its own."""
    program = shutil.which("chromium")
    assert program is not None, "the tests of the page need a Chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Visit:
    """A page in a browser, and what went wrong there."""

    page: Page
    base: str
    complaints: list[str] = field(default_factory=list)
    asking: set[Any] = field(default_factory=set)  # requests without an answer yet

    def go(self, fragment: str) -> None:
        """Open a page of the viewer, and wait until it has drawn what it asked for."""
        self.page.goto("about:blank")
        self.page.goto(self.base + fragment)
        self.settled()

    def settled(self) -> None:
        """Wait for what the page is asking for now."""
        self.page.locator("main h1").first.wait_for()
        idle = 0
        while idle < 3:  # what an answer makes the page ask for follows at once
            idle = 0 if self.asking else idle + 1
            self.page.wait_for_timeout(30)
        expect(self.page.locator("main").get_by_text("Reading…", exact=True)).to_have_count(0)

    def text(self) -> str:
        """What a reader sees."""
        return self.page.inner_text("main")

    def check(self, what: str) -> None:
        """Everyone can use what is shown, it fits, and no value is missing.

        Args:
            what: its name, for the message of a failure.
        """
        found = Axe().run(self.page).response["violations"]
        assert not [
            (what, one["id"], [(node["target"], node.get("failureSummary")) for node in one["nodes"]])
            for one in found
        ]
        assert self.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), what
        assert not re.search(r"undefined|\bNaN\b|\[object", self.text()), what

    def picture(self, name: str) -> None:
        """Write docs/viewer-NAME.png, if pictures are wanted."""
        if WRITES_PICTURES:
            self.page.wait_for_timeout(300)
            self.page.screenshot(path=DOCS / f"viewer-{name}.png")


@contextmanager
def visit(
    browser: Browser, base: str, size: tuple[int, int] = WIDE, scheme: Any = "light"
) -> Iterator[Visit]:
    """A window on the viewer. Complaints: requests to other hosts, errors, dialogs, windows."""
    width, height = size
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(30_000)
    visited = Visit(page, base)
    complain = visited.complaints.append
    host = urlsplit(base).netloc

    def requested(request: Any) -> None:
        visited.asking.add(request)
        url = urlsplit(request.url)
        if url.scheme not in ("data", "blob", "about") and url.netloc != host:
            complain(f"asks for {request.url[:200]}")

    def answered(request: Any) -> None:  # playwright takes no builtin
        visited.asking.discard(request)

    page.on("request", requested)
    page.on("requestfinished", answered)
    page.on("requestfailed", answered)
    page.on("pageerror", lambda error: complain(f"error: {error}"))
    page.on("console", lambda told: complain(f"console: {told.text}") if told.type == "error" else None)
    page.on("dialog", lambda dialog: (complain(f"dialog: {dialog.message}"), dialog.dismiss()))
    context.on("page", lambda opened: complain(f"opens {opened.url}"))
    try:
        yield visited
    finally:
        context.close()
