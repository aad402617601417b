"""What the scripted policy says: known rows of the shipped environments, and a rule for all others.

A script is a right and a wrong way through one row. For some environments it is written here. Else the right
way is, in this order: a case of the environment's ``fixtures.jsonl`` that gets the full reward; the calls,
or the answer, that the row says are right. The wrong way is a case that gets no reward, else a shrug. In an
unknown row, the policy calls the first tool with arguments from the prompt, then repeats what the tool said.
"""

from __future__ import annotations

import importlib.util
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from gym_serve.types.requests import input_items

Turn = list[dict[str, Any]]  # output items of one model call

_SHRUG = "I do not know. \\boxed{0}"


class Known(NamedTuple):
    """A row of a shipped environment, and ways through it; ``right`` is empty where the data has none."""

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
    """The row whose prompt is the last known user message, that prompt with what the user said after it, and
    the items after the last user message; None if no prompt is known.
    """
    later, since = "", 0
    for index in range(len(items) - 1, -1, -1):
        if items[index].get("role") == "user":
            text = _text(items[index])
            since, later = since or index + 1, text + later
            if text in key:
                return key[text], later, items[since:]
    return None


def load_answer_key(environments: Sequence[str] | None = None) -> dict[str, Known]:
    """The example rows of shipped environments (of all by default), by prompt."""
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
    calls = [call(w["name"], w.get("arguments", {}), index) for index, w in enumerate(wanted)]
    return [calls, [message("Done.")]]


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


Script = Callable[[dict[str, Any], bool, list[dict[str, Any]], random.Random], Turn]


def scripted(known: Known, right: bool, items: list[dict[str, Any]], rng: random.Random) -> Turn | None:
    """The next turn in a known row, after ``items``; None where nobody wrote down how to go through it."""
    if script := SCRIPTS.get(known.environment):
        return script(known.row, right, items, rng)
    return turn_after(known.right if right else known.wrong, items) if known.right else None


def turn_after(turns: list[Turn], items: list[dict[str, Any]]) -> Turn:
    """The turn after those whose items there are already; the last one again after the end."""
    turn_length = sum(
        1 for i in items if i.get("role") == "assistant" or i.get("type") in ("function_call", "reasoning")
    )
    for turn in turns:
        if turn_length <= 0:
            return turn
        turn_length -= len(turn)
    return turns[-1]


def improvise(params: dict[str, Any], items: list[dict[str, Any]]) -> Turn:
    """The next turn in a row that no script knows."""
    outputs = _last_outputs(items)
    if outputs:
        return [message("The tool says: " + " ".join(outputs))]
    tools = [t for t in params.get("tools") or [] if isinstance(t, dict) and t.get("type") == "function"]
    if tools and not any(i.get("type") == "function_call" for i in items):
        return [call(str(tools[0].get("name")), _arguments(tools[0].get("parameters"), prompt_of(items)), 0)]
    return [message(_SHRUG)]


def _weather(row: dict[str, Any], right: bool, items: list[dict[str, Any]], rng: random.Random) -> Turn:
    if outputs := _last_outputs(items):
        return [message("Here is the weather: " + " ".join(outputs))]
    if not right:
        return [message("I think that it is probably fine outside.")]
    metadata = row.get("verifier_metadata") or {}
    cities = metadata.get("cities") or [metadata.get("city") or _city(row_prompt(row))]
    return [call("get_weather", {"city": city}, i) for i, city in enumerate(cities)]


def _mcqa(row: dict[str, Any], right: bool, items: list[dict[str, Any]], rng: random.Random) -> Turn:
    letters = sorted(letter for option in row["options"] for letter in option)
    answer = row["expected_answer"]
    letter = answer if right else rng.choice([x for x in letters if x != answer])
    regex = (row.get("template_metadata") or {}).get("output_regex")
    regex = regex[0] if isinstance(regex, list) else regex
    final = _matching(regex, letter) if regex else f"\\boxed{{{letter}}}\nAnswer: {letter}"
    return [_reasoning("Compare the options one by one."), message(f"I choose this one.\n{final}")]


def _math(row: dict[str, Any], right: bool, items: list[dict[str, Any]], rng: random.Random) -> Turn:
    answer = row["expected_answer"] if right else f"{rng.randrange(1000, 9999)}"
    return [_reasoning("Work it out."), message(f"So the answer is \\boxed{{{answer}}}")]


def _counter(row: dict[str, Any], right: bool, items: list[dict[str, Any]], rng: random.Random) -> Turn:
    missing = row["expected_count"] - row["initial_count"]
    added = call("increment_counter", {"count": missing if right else missing + 1}, 0)
    return turn_after([[added], [call("get_counter_value", {}, 0)], [message("That is done.")]], items)


def _synonyms(row: dict[str, Any], right: bool, items: list[dict[str, Any]], rng: random.Random) -> Turn:
    values = row["expected_synonym_values"] if right else [row["minefield_label_value"]]
    looked_up = [
        call("get_synonym_value", {"synonym": word}, i) for i, word in enumerate(row["expected_synonyms"])
    ]
    handed_in = call("extract_synonym_values", {"synonym_values": values}, 0)
    return turn_after([looked_up, [handed_in], [message("That is all.")]], items)


SCRIPTS: dict[str, Script] = {
    "math_with_judge": _math,
    "mcqa": _mcqa,
    "multi_step_synonyms": _synonyms,
    "session_counter": _counter,
    "simple_weather": _weather,
}  # by environment


def _matching(regex: str, letter: str) -> str:
    """A text that a simple pattern such as ``Final Choice:\\s*([A-Z])`` matches."""
    literal = re.sub(r"\([^)]*\)", lambda _: letter, regex)
    return re.sub(r"\\[sb][*+?]?", " ", literal).replace("\\", "")


def _city(prompt: str) -> str:
    words = re.findall(r"\b[A-Z][a-z]+(?: [A-Z][a-z]+)*", prompt)
    return words[-1] if words else "Paris"


def _arguments(schema: Any, prompt: str) -> dict[str, Any]:
    """Arguments that fit the required properties of a tool's schema, taken from the prompt."""
    properties, required = _object(_object(schema).get("properties")), _object(schema).get("required")
    numbers = [int(n) for n in re.findall(r"\d{1,9}", prompt)] or [1]
    picks: dict[str, Any] = {"string": _city(prompt), "integer": numbers[0], "number": numbers[0]}
    picks |= {"boolean": True, "array": [], "object": {}}
    arguments: dict[str, Any] = {}
    for name in filter(lambda name: isinstance(name, str), required if isinstance(required, list) else ()):
        prop = _object(properties.get(name))
        choices = prop.get("enum")
        is_choice = isinstance(choices, list) and len(choices) > 0
        arguments[name] = choices[0] if is_choice and choices else picks.get(str(prop.get("type")))
    return arguments


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _last_outputs(items: list[dict[str, Any]]) -> list[str]:
    """Texts of the function outputs at the end of the input."""
    outputs: list[str] = []
    for item in reversed(items):
        if item.get("type") != "function_call_output":
            break
        outputs.insert(0, str(item.get("output")))
    return outputs


def _reasoning(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}
