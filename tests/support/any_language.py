"""The environment in JavaScript of examples/any_language."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["FIXTURES", "FOLDER", "needs_node", "running"]

FOLDER = Path(__file__).parents[2] / "examples" / "any_language"
FIXTURES = FOLDER / "fixtures.jsonl"

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")


@contextmanager
def running(program: Path = FOLDER / "environment.mjs") -> Iterator[str]:
    """Run it, or a copy of it, on a free port; its URL."""
    with subprocess.Popen(["node", os.fspath(program), "0"], stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        try:
            yield node.stdout.readline().strip()
        finally:
            node.kill()
