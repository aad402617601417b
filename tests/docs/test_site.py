"""The site that `make docs` builds, in Chromium: from a folder and from a server, asking no other host.

Slow: mkdocs and Chromium are not in the environment of the tests. See tests/view/test_page_in_a_browser.py.
"""

import functools
import http.server
import re
import runpy
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.docs import ROOT

VERSIONS = runpy.run_path(str(ROOT / "docs" / "site" / "versions.py"))


def test_the_newest_version_is_first(tmp_path: Path) -> None:
    for name in ("0.9.0", "0.10.0", "0.10.0rc1", "assets", "1.0.0-without-pages"):
        (tmp_path / name).mkdir()
        if "without" not in name:
            (tmp_path / name / "index.html").write_text("", encoding="utf-8")

    assert VERSIONS["versions"](tmp_path) == ["0.10.0", "0.10.0rc1", "0.9.0"]
    VERSIONS["main"](tmp_path)
    assert "url=0.10.0/index.html" in (tmp_path / "index.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def version() -> str:
    (found,) = re.findall(
        r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, version: str) -> Path:
    """Two versions: this one, and one that is older and lacks a page."""
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(["make", "docs", f"SITE={folder}"], cwd=ROOT, check=True, timeout=600)
    shutil.copytree(folder / version, folder / "0.0.1")
    (folder / "0.0.1" / "errors.html").unlink()
    VERSIONS["main"](folder)
    return folder


@pytest.fixture(scope="module", params=["folder", "server"])
def address(request: pytest.FixtureRequest, site: Path) -> Iterator[str]:
    """Where the site is, without a slash at the end."""
    if request.param == "folder":
        yield site.as_uri()
        return
    handler = functools.partial(_Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Tell nothing."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    pytest.importorskip("playwright", reason="make test-browser installs it")
    pytest.importorskip("axe_playwright_python", reason="make test-browser installs it")
    from view.browser import chromium

    with chromium() as browser:
        yield browser


@pytest.fixture(params=[(1280, 860), (390, 800)], ids=["wide", "narrow"])
def page(request: pytest.FixtureRequest, browser: Any, address: str) -> Iterator[Any]:
    """A window. It fails the test if a page logs an error, or asks another host."""
    width, height = request.param
    context = browser.new_context(viewport={"width": width, "height": height})
    complaints: list[str] = []
    opened = context.new_page()
    opened.on("pageerror", lambda error: complaints.append(f"error: {error}"))
    opened.on("console", lambda told: complaints.append(told.text) if told.type == "error" else None)

    def requested(asked: Any) -> None:
        if not asked.url.startswith((f"{address}/", "data:", "blob:", "about:")):
            complaints.append(f"asks for {asked.url}")

    opened.on("request", requested)
    yield opened
    context.close()
    assert not complaints


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_pages_fit_and_load_all_they_need(page: Any, address: str, site: Path, version: str) -> None:
    for path in sorted((site / version).glob("*.html")):
        if path.stem == "404":
            continue  # answers an address that is not in the site, so its links begin at the root of a server
        page.goto(f"{address}/{version}/{path.name}")
        assert page.locator("h1").count() == 1, path.name
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, path.name
        broken = "[...document.images].filter(image => !image.naturalWidth).map(image => image.src)"
        assert page.evaluate(broken) == [], path.name


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_text_stands_out(browser: Any, site: Path, version: str, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    context = browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 860})
    page = context.new_page()
    for name in ("index", "concepts", "tutorial-coding-agent"):
        page.goto(f"{(site / version / name).as_uri()}.html")
        found = Axe().run(page, options={"runOnly": ["color-contrast"]}).response["violations"]
        assert not found, found[0]["nodes"][0]["html"]
    context.close()


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_the_search_finds_a_section(page: Any, address: str, version: str) -> None:
    page.goto(f"{address}/{version}/index.html")
    page.locator("label[for=__search]:visible, .md-search__input:visible").first.click()
    page.locator(".md-search__input").press_sequentially("restorable", delay=20)
    page.locator(".md-search-result__link").first.wait_for(timeout=60_000)
    assert "Writing an environment" in page.locator(".md-search-result").inner_text()


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_the_selector_of_versions(page: Any, address: str, version: str) -> None:
    page.goto(f"{address}/index.html")  # leads to the newest one
    page.wait_for_url(f"{address}/{version}/index.html")
    assert page.locator(".md-banner--warning").count() == 0

    def hrefs() -> list[str]:
        return [link.get_attribute("href") for link in page.locator(".md-version__link").all()]

    page.goto(f"{address}/{version}/errors.html")
    assert hrefs() == [f"{address}/{version}/errors.html", f"{address}/0.0.1/index.html"]
    page.goto(f"{address}/0.0.1/concepts.html")
    assert hrefs() == [f"{address}/{version}/concepts.html", f"{address}/0.0.1/concepts.html"]
    assert version in page.locator(".md-banner--warning").inner_text()
