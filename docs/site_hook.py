"""What mkdocs needs for links that leave docs/: the pages they lead to become part of the site.

The pages stay plain Markdown, whose links are right in the repository. Only while the site is built, a link
to a README of another folder becomes a link to its copy in the site, and the version goes into the header.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\]\(([^)#:\s]+)((?:#[^)\s]*)?)\)")


def on_config(config: Any) -> Any:
    """Show the version beside the name."""
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (version,) = re.findall(r'^version = "(.+)"$', pyproject, re.MULTILINE)
    config.site_name = f"{config.site_name} {version}"
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the READMEs of environments and interop, with the sources that they link to."""
    pages = [*ROOT.glob("environments/*/README.md"), *ROOT.glob("gym_serve/interop/*/README.md")]
    linked = {
        (page.parent / target).resolve()
        for page in pages
        for target, _ in _LINK.findall(page.read_text(encoding="utf-8"))
    }
    sources = {path for path in linked if path.suffix != ".md" and path.is_file()}
    for path in [*pages, *sources]:
        name = path.relative_to(ROOT).as_posix()
        files.append(
            File.generated(config, name, abs_src_path=os.fspath(path), inclusion=InclusionLevel.NOT_IN_NAV)
        )
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links between files of the repository into links between files of the site."""
    names = {os.path.realpath(file.abs_src_path): file.src_uri for file in files if file.abs_src_path}
    here = Path(page.file.abs_src_path).resolve().parent

    def of_the_site(link: re.Match[str]) -> str:
        name = names.get(os.path.realpath(here / link[1]))
        if name is None:
            return link[0]  # mkdocs tells
        return f"]({posixpath.relpath(name, posixpath.dirname(page.file.src_uri) or '.')}{link[2]})"

    return _LINK.sub(of_the_site, markdown)
