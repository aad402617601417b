"""Make a folder of versions one site: a list for the selector, and a first page that leads to the newest.

    python docs/site/versions.py FOLDER

Each version is a subfolder with its number as its name. ``make docs`` writes one and leaves the others.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from packaging.version import InvalidVersion, Version

FIRST_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>gym_serve</title>
<meta http-equiv="refresh" content="0; url={newest}/index.html">
<p><a href="{newest}/index.html">gym_serve {newest}</a></p>
</html>
"""


def versions(site: Path) -> list[str]:
    """The versions in a folder, the newest one first: 0.10.0, then 0.10.0rc1, then 0.9.0."""
    found: dict[Version, str] = {}
    for page in site.glob("*/index.html"):
        try:
            found[Version(page.parent.name)] = page.parent.name
        except InvalidVersion:
            continue  # a folder of something else
    return [found[version] for version in sorted(found, reverse=True)]


def main(site: Path) -> None:
    """Write ``versions.js``, which `version.js` of each page reads, and ``index.html``."""
    newest, *_ = names = versions(site)
    listed = [{"name": name, "pages": _pages(site / name)} for name in names]
    (site / "versions.js").write_text(f"var versions = {json.dumps(listed, indent=1)};\n", encoding="utf-8")
    (site / "index.html").write_text(FIRST_PAGE.format(newest=newest), encoding="utf-8")


def _pages(version: Path) -> list[str]:
    """The pages of a version: the selector leads to the same page, if there is one."""
    return sorted(page.relative_to(version).as_posix() for page in version.rglob("*.html"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
