"""The files of the page: what can be said of them without a browser."""

from __future__ import annotations

import hashlib
import json
import re
import runpy
from pathlib import Path

import pytest

import gym_serve.view

STATIC = Path(gym_serve.view.__file__).parent / "static"
FOLDER = STATIC / "vendor"
MODULES = sorted(STATIC.glob("*.js"))


def test_vendored_files_are_those_of_the_list() -> None:
    listed = {one["file"]: one for one in json.loads((FOLDER / "vendor.json").read_text("utf-8"))}
    parts = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "vendor.py"))["PARTS"]
    assert set(listed) == {part.name for part in parts}
    for name, one in listed.items():
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == one["sha256"], name
    pins = json.loads((FOLDER / "package.json").read_text("utf-8"))["dependencies"]
    libraries = {library["name"]: library for one in listed.values() for library in one["libraries"]}
    assert {name: libraries[name]["version"] for name in pins} == pins
    assert all((FOLDER / library["text"]).stat().st_size > 500 for library in libraries.values())


def test_the_table_of_advisories_has_the_versions_that_are_vendored() -> None:
    """Whoever changes a version looks for advisories again."""
    listed = json.loads((FOLDER / "vendor.json").read_text("utf-8"))
    vendored = {(library["name"], library["version"]) for one in listed for library in one["libraries"]}
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text("utf-8")
    _, section = page.split("## The libraries of the viewer's page\n")
    rows = re.findall(r"^\| (\S+) \| (\d\S*) \|", section.split("\n## ")[0], re.MULTILINE)
    assert set(rows) == vendored


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_a_module_imports_files_that_exist_and_sets_no_html(path: Path) -> None:
    text = path.read_text("utf-8")
    for imported in re.findall(r'(?:from|import\()\s*"([^"]+)"', text):
        assert imported.startswith("./"), f"{imported}: a page cannot resolve a bare name"
        assert (STATIC / imported).is_file(), imported
    code = re.sub(r"//.*|/\*.*?\*/", "", text)
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc"
    assert not re.search(ways, code)


def test_the_page_has_no_inline_script_or_style_and_loads_nothing_from_elsewhere() -> None:
    page = (STATIC / "index.html").read_text("utf-8")
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=", page)
    assert not re.search(r"""(?:src|href)=["'](?:https?:)?//""", page)
    assert "require-trusted-types-for 'script'" in page
    style = (STATIC / "style.css").read_text("utf-8") + (FOLDER / "uplot.css").read_text("utf-8")
    assert "@import" not in style
    assert "url(" not in style
