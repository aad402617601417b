"""Tables of others, unpacked from their packages by `make interop` (`TABLES`)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

__all__ = ["TABLES", "json_lines", "needs_table"]

TABLES = Path(os.environ.get("TABLES", Path(__file__).parents[2] / ".venv-tables"))


def needs_table(folder: str) -> pytest.MarkDecorator:
    """Skips tests where a table is not there."""
    return pytest.mark.skipif(
        not (TABLES / folder).is_dir(), reason=f"{TABLES} is not as `make interop` makes it"
    )


def json_lines(path: Path) -> list[Any]:
    """The values of a file with one in each line."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
