"""What mkdocs changes while it builds the site. In the repository, the pages stay plain Markdown.

- Links that leave docs/: the pages they lead to become part of the site.
- The home page has the whole width. The footer says the version.
- Signatures of the Python API become highlighted blocks, with one argument a line where they are long.
"""

from __future__ import annotations

import html
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

ROOT = Path(__file__).parents[2]
ICON = ROOT / "gym_serve" / "view" / "static" / "icon.svg"
CODE = HtmlFormatter(nowrap=True)
LINE = 88
"""The longest signature that stays on one line."""
_SIGNATURE = re.compile(r"<p><code>((?:async |class )?[\w.]+\(.*?)</code></p>")
_LINK = re.compile(r"\]\(([^)#:\s]+)((?:#[^)\s]*)?)\)")


def on_config(config: Any) -> Any:
    """Show the version below each page."""
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (version,) = re.findall(r'^version = "(.+)"$', pyproject, re.MULTILINE)
    config.copyright = f"gym_serve {version}"
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
    for path in [*pages, *sources, ICON]:
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


def on_page_context(context: Any, page: Any, config: Any, nav: Any) -> Any:
    """Give the home page the whole width."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation", "toc"]
    return context


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    """Make a block of each signature."""
    if page.file.src_uri != "api.md":
        return content

    def block(found: re.Match[str]) -> str:
        lines = _lines(html.unescape(found[1]))
        return f'<div class="highlight"><pre><code>{highlight(lines, PythonLexer(), CODE)}</code></pre></div>'

    return _SIGNATURE.sub(block, content)


def _lines(signature: str) -> str:
    """Break a long signature after each of its arguments."""
    if len(signature) <= LINE:
        return signature
    begin, _, rest = signature.partition("(")
    arguments, end, depth, start = [], 0, 0, 0
    for end, letter in enumerate(rest):
        if letter == ")" and depth == 0:
            break
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            arguments.append(rest[start:end].strip())
            start = end + 1
    arguments.append(rest[start:end].strip())
    return "\n".join([f"{begin}(", *(f"    {argument}," for argument in arguments), rest[end:]])
