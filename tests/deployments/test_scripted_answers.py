"""What the scripted policy knows of the shipped environments: the right way earns, the wrong one does not."""

import json
from pathlib import Path
from typing import Any

import pytest

import gym_serve.environments
from gym_serve.deployments.scripted_answers import known_row, load_answer_key, prompt_of, row_prompt
from gym_serve.deployments.scripted_model import ScriptedModel

ROOT = Path(gym_serve.environments.__path__[0])
FOLDERS = sorted(path.parents[1].name for path in ROOT.glob("*/data/example.jsonl"))


def rows(environment: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / environment / "data/example.jsonl").read_text().splitlines()]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_prompt_names_its_environment() -> None:
    """Rows are known by their prompts, so no two environments may have one in common."""
    key = load_answer_key()
    for environment in FOLDERS:
        assert {key[row_prompt(row)].environment for row in rows(environment)} == {environment}


@pytest.mark.parametrize("environment", ["code_gen", "math_with_code", "xlam_fc", "workplace_assistant"])
def test_every_row_has_a_right_way(environment: str) -> None:
    assert all(known.right for known in load_answer_key([environment]).values())


def test_a_row_is_known_by_its_prompt_also_when_the_user_goes_on() -> None:
    key = load_answer_key(["code_gen"])
    prompt = next(iter(key))
    answer = {"type": "message", "role": "assistant", "content": "x"}
    assert known_row(key, [user("Hello")]) is None
    assert known_row(key, []) is None
    assert known_row(key, [user(prompt)]) == (key[prompt], prompt, [])
    assert known_row(key, [user(prompt), answer]) == (key[prompt], prompt, [answer])
    assert known_row(key, [user(prompt), answer, user("No!")]) == (key[prompt], prompt + "No!", [])
    assert known_row(key, [user(prompt), answer, user("No!"), answer]) == (
        key[prompt],
        prompt + "No!",
        [answer],
    )
    assert prompt_of([user("a"), {"role": "user", "content": [{"text": "b"}, "c", {}]}]) == "b"


async def test_a_right_way_of_several_turns_is_gone_turn_by_turn() -> None:
    model = ScriptedModel(skill=1.0)
    known = next(k for k in load_answer_key(["math_with_code"]).values() if len(k.right) > 1)
    items = [user(row_prompt(known.row))]
    for turn in known.right:
        said = (await model.responses({"input": items}))["output"]
        assert [item["type"] for item in said] == [item["type"] for item in turn]
        items += said
        items += [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "1"}
            for item in said
            if item["type"] == "function_call"
        ]
    assert items[-1]["type"] == "message"
