"""The browser of the tests that need one (`view.browser`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from view.browser import chromium  # needs playwright, which other tests of this folder do without

    with chromium() as browser:
        yield browser
