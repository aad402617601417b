"""Take the pictures of Ray's dashboard: docs/dashboard-NAME.png, of a graph that runs.

    gym-serve up graphs/weather.yaml
    python docs/dashboard_pictures.py weather weather_agent

It needs playwright (the extra ``browser``) and Debian's Chromium.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

DOCS = Path(__file__).parent


def take(page: Page, url: str, fragment: str, sign: str, name: str) -> None:
    """Open a page of the dashboard, wait until a text is there, and write docs/dashboard-NAME.png.

    Args:
        page: in a browser.
        url: of the dashboard.
        fragment: the page, as the dashboard's addresses have it behind ``#``.
        sign: a text that the page has once it has been drawn.
        name: of the picture.
    """
    page.goto("about:blank")
    page.goto(f"{url}/#{fragment}")
    page.get_by_text(sign, exact=True).first.wait_for()
    page.wait_for_timeout(1000)  # for its icons
    page.screenshot(path=DOCS / f"dashboard-{name}.png")


def main() -> None:
    """Take both pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("graph")
    parser.add_argument("server")
    parser.add_argument("--url", default="http://127.0.0.1:8265", help="of the dashboard")
    asked = parser.parse_args()
    token = subprocess.run(["ray", "get-auth-token"], capture_output=True, text=True, check=True).stdout
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        headers = {"Authorization": f"Bearer {token.strip()}"}
        page = browser.new_page(viewport={"width": 1280, "height": 840}, extra_http_headers=headers)
        take(page, asked.url, "/serve", "gateway", "serve")
        path = f"/serve/applications/{asked.graph}/{asked.server}"
        take(page, asked.url, path, "Replicas", "deployment")
        browser.close()


if __name__ == "__main__":
    main()
