"""What the scripted policy knows of the example rows: a right and a wrong way through each.

The right way is, in this order: a case of the environment's own ``fixtures.jsonl`` that gets the full
reward for this row; the calls that the row says are right; the answer that it says is right. The wrong way
is a case that gets none, else a shrug.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from gym_serve.types.requests import input_items

__all__ = ["Known", "Turn", "call", "known_row", "load_answer_key", "message", "prompt_of", "row_prompt"]

Turn = list[dict[str, Any]]
"""Output items of one model call."""

_SHRUG = "I do not know. \\boxed{0}"


class Known(NamedTuple):
    """A row of a shipped environment.

    Attributes:
        environment: its folder.
        row: the row.
        right, wrong: ways through it, turn by turn; ``right`` is empty where the data has none.
    """

    environment: str
    row: dict[str, Any]
    right: list[Turn]
    wrong: list[Turn]


def prompt_of(items: list[dict[str, Any]]) -> str:
    """Text of the last user message; what a row is recognised by."""
    return next((_text(item) for item in reversed(items) if item.get("role") == "user"), "")


def row_prompt(row: dict[str, Any]) -> str:
    """`prompt_of` the input of a row."""
    return prompt_of(input_items(row["responses_create_params"]["input"]))


def known_row(
    key: Mapping[str, Known], items: list[dict[str, Any]]
) -> tuple[Known, str, list[dict[str, Any]]] | None:
    """The row that a conversation is about: its prompt is the last user message that the key holds.

    Returns:
        the row, that prompt followed by what the user said after it, and the items after the last user
        message; None if no prompt is known.
    """
    later: list[str] = []
    since = len(items)
    for index in range(len(items) - 1, -1, -1):
        if items[index].get("role") != "user":
            continue
        if not later:
            since = index + 1
        later.insert(0, _text(items[index]))
        if later[0] in key:
            return key[later[0]], "".join(later), items[since:]
    return None


def load_answer_key(environments: Sequence[str] | None = None) -> dict[str, Known]:
    """The example rows of shipped environments, by prompt.

    Args:
        environments: their folders; None for all.
    """
    spec = importlib.util.find_spec("gym_serve.environments")
    root = Path(next(iter(spec.submodule_search_locations or []))) if spec else Path()
    if environments is None:
        environments = sorted(path.parents[1].name for path in root.glob("*/data/example.jsonl"))
    key: dict[str, Known] = {}
    for environment in environments:
        cases = _cases(root / environment / "fixtures.jsonl")
        for row in _lines(root / environment / "data" / "example.jsonl"):
            prompt = row_prompt(row)
            full, zero = cases.get((prompt, True)), cases.get((prompt, False))
            right = full or _expected_calls(row) or _expected_answer(row)
            key[prompt] = Known(environment, row, right, zero or [[message(_SHRUG)]])
    return key


def message(text: str) -> dict[str, Any]:
    """An output item: what the policy says."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": "assistant", "status": "completed", "content": content}


def call(name: str, arguments: Any, index: int) -> dict[str, Any]:
    """An output item: the call of a tool; arguments that are no text become JSON."""
    return {
        "type": "function_call",
        "name": name,
        "arguments": arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode(),
        "call_id": f"call_{index}",
        "status": "completed",
    }


def _cases(file: Path) -> dict[tuple[str, bool], list[Turn]]:
    """The first fixture of each prompt with the full reward, and with none."""
    cases: dict[tuple[str, bool], list[Turn]] = {}
    for case in _lines(file) if file.exists() else []:
        kind, reward = case["name"].partition(":")[0], case.get("reward")
        if kind in ("full", "zero") and reward is not None and (reward > 0) == (kind == "full"):
            cases.setdefault((row_prompt(case["row"]), kind == "full"), _turns(case))
    return {way: turns for way, turns in cases.items() if turns}


def _turns(case: dict[str, Any]) -> list[Turn]:
    """The turns of a fixture; what its tools said separates them."""
    calls = [call(c["name"], c.get("arguments", {}), index) for index, c in enumerate(case.get("calls", []))]
    turns: list[Turn] = [calls, []]
    for item in case["output"]:
        if item.get("type") == "function_call_output":
            turns.append([])
        else:
            turns[-1].append({key: value for key, value in item.items() if key != "id"})
    return [turn for turn in turns if turn]


def _expected_calls(row: dict[str, Any]) -> list[Turn]:
    wanted = row.get("ground_truth") or row.get("expected_answers") or [row.get("expected_call")]
    if not all(isinstance(w, dict) and "name" in w for w in wanted):
        return []
    return [
        [call(w["name"], w.get("arguments", {}), index) for index, w in enumerate(wanted)],
        [message("Done.")],
    ]


def _expected_answer(row: dict[str, Any]) -> list[Turn]:
    answer = row.get("expected_answer", row.get("expected_result"))
    if answer is None:
        return [] if row.get("answer") is None else [[message(str(row["answer"]))]]
    return [[message(f"So the answer is \\boxed{{{answer}}}")]]


def _text(item: dict[str, Any]) -> str:
    content = item.get("content")
    if isinstance(content, list):
        content = "".join(str(p.get("text", "")) for p in content if isinstance(p, dict))
    return str(content)


def _lines(file: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in file.read_bytes().splitlines() if line.strip()]
