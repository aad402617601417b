"""Relative links of all Markdown pages lead to files, and their anchors to headings, as GitHub names them."""

import re
from pathlib import Path

import pytest
from support.docs import ROOT

PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(ROOT.glob("environments/*/README.md")),
    *sorted(ROOT.glob("examples/*/README.md")),
    *sorted(ROOT.glob("gym_serve/interop/*/README.md")),
]
_CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", _CODE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in titles)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target, anchor in _LINK.findall(_CODE.sub("", page.read_text(encoding="utf-8"))):
        path = page.parent / target if target else page
        assert path.exists(), target
        assert not anchor or anchor in _anchors(path), f"{target}#{anchor}"
