"""BFCL's possible answers (package bfcl-eval), through xlam_fc: the first of each is the gold.

BFCL allows several values of an argument, a row of ours has one; what is compared is what both decide: the
same calls in any order are right; a call less, a call more, and another value are wrong.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.environments import Bench, called
from tables import TABLES, json_lines, needs_table

from gym_serve.environments.xlam_fc import XlamFc

ANSWERS = TABLES / "bfcl" / "bfcl_eval" / "data" / "possible_answer"
FILES = [
    *("simple_python", "simple_java", "simple_javascript", "multiple", "parallel", "parallel_multiple"),
    *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple"),
]


def _first(value: Any) -> Any:
    """The first of the possible values, also inside objects; "" stands for an argument that is left out."""
    if isinstance(value, list) and value:
        value = next((one for one in value if one != ""), "")
        return {key: _first(one) for key, one in value.items()} if isinstance(value, dict) else value
    return value


_LEFT_OUT: list[Any] = [[], [""]]


def _calls(truth: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "arguments": {
                key: _first(values) for key, values in arguments.items() if values not in _LEFT_OUT
            },
        }
        for call in truth
        for name, arguments in call.items()
    ]


def _output(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [called(call["name"], call["arguments"], f"call_{n}") for n, call in enumerate(calls)]


@needs_table("bfcl")
@pytest.mark.parametrize("name", FILES)
async def test_possible_answers(name: str) -> None:
    bench = Bench(XlamFc())
    wrong = []
    cases = json_lines(ANSWERS / f"BFCL_v4_{name}.json")
    for case in cases:
        calls = _calls(case["ground_truth"])
        tries = {"as they are": (calls, 1.0), "in another order": (calls[::-1], 1.0)}
        tries["one less"] = (calls[1:], 0.0)
        tries["one more"] = ([*calls, calls[0]], 0.0)
        tries["another tool"] = ([{**calls[0], "name": calls[0]["name"] + "_2"}, *calls[1:]], 0.0)
        if calls[0]["arguments"]:
            other = dict.fromkeys(calls[0]["arguments"], "a value that nobody expects")
            tries["other values"] = ([{**calls[0], "arguments": other}, *calls[1:]], 0.0)
        for what, (made, reward) in tries.items():
            verdict = await bench.verify({"expected_answers": calls}, _output(made))
            if verdict["reward"] != reward:
                wrong.append((case["id"], what, verdict))
    assert len(cases) > 10
    assert wrong == []
