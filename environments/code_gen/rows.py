"""Rows of published data sets of programming problems, with tests as `CodeGen` reads them."""

from __future__ import annotations

import json
from typing import Any


def deepcoder(row: dict[str, Any]) -> dict[str, Any]:
    """A row of agentica-org/DeepCoder-Preview-Dataset: its ``tests`` are a list of ``{input, output}``, or
    ``{inputs, outputs, fn_name?}``. Raises ValueError: there are none."""
    tests = json.loads(row["tests"]) if isinstance(row["tests"], str) else row["tests"]
    if isinstance(tests, list):
        metadata = row.get("metadata") or {}
        metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
        name = metadata.get("func_name") or next((t["fn_name"] for t in tests if t.get("fn_name")), None)
        tests = {
            "inputs": [t["input"] for t in tests],
            "outputs": [t["output"] for t in tests],
            "fn_name": name,
        }
    tests = {"fn_name": None, **tests}
    if not tests["inputs"]:
        raise ValueError("the row has no tests")
    return {"starter_code": "", **row, "verifier_metadata": {"unit_tests": tests}}
