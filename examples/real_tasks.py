"""The tasks of `train_real.py`: what SmolLM2-135M begins to solve, judged by environments.

Each row shows one question with its answer, so that the model knows the form, and then asks another one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple


class Task(NamedTuple):
    """What the model is asked, and who judges."""

    row: Callable[[random.Random], dict[str, Any]]
    """Draws a row."""
    resources: dict[str, Any]
    """The environment."""
    tokens: int
    """Most tokens of an answer."""


def rows(task: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Rows of a task; no two have the same words in any order. The same seed gives the same rows."""
    draw = random.Random(seed)
    made: dict[frozenset[str], dict[str, Any]] = {}
    while len(made) < count:
        row = TASKS[task].row(draw)
        made.setdefault(frozenset(question_of(row).split()), row)
    return list(made.values())


def question_of(row: dict[str, Any]) -> str:
    """What the last message of a row asks."""
    question: str = row["responses_create_params"]["input"][-1]["content"]
    return question


_WORDS = """
apple bread bridge butter candle castle chair circle cloud coffee corner desert dinner doctor door engine
farmer finger fire flower forest garden glass gold green guitar hammer heart honey horse house island
jacket kitchen lake lamp letter light market metal mirror morning mountain mouse music night ocean orange
paper pencil plant queen rain river road school shadow silver snow stone street summer table tiger tower
train tree valley village wall water wheel wind window winter wood
"""


def swapped_words(draw: random.Random) -> dict[str, Any]:
    """Two words in the other order. To the letter: nothing may stand beside them."""
    first, second = draw.sample(_WORDS.split(), 2)
    asked = _messages("Swap the words.", ("moon dog", "dog moon"), f"{first} {second}")
    return _exactly(f"{second} {first}", asked)


def larger_number(draw: random.Random) -> dict[str, Any]:
    """Which of two numbers is larger? In small steps the model ends in always saying the second one, which is
    right half of the time."""
    first, second = draw.sample(range(1, 1000), 2)
    asked = _messages("Say the larger number.", ("305 or 411", "411"), f"{first} or {second}")
    return _exactly(str(max(first, second)), asked)


def _exactly(answer: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    return {
        "responses_create_params": {"input": messages},
        "expected_answer": answer,
        "extraction_mode": "full_response",
        "case_sensitive": True,
    }


_FACTS = (  # a sentence with a name and a number, and the keys of both
    ("{name} is {number} years old.", "name", "age"),
    ("{name} ran {number} km.", "runner", "distance"),
    ("{name} paid {number} euros.", "buyer", "price"),
    ("{name} has {number} points.", "player", "score"),
    ("{name} read {number} pages.", "reader", "pages"),
)
_NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Greta", "Hugo", "Ida", "Jonas", "Karl", "Lena")


def fact_as_yaml(draw: random.Random) -> dict[str, Any]:
    """A sentence as YAML with two keys: the first is a text, the second a whole number."""
    sentence, name, number = draw.choice(_FACTS)
    fact = sentence.format(name=draw.choice(_NAMES), number=draw.randint(2, 99))
    shown = ("The river is 80 km long. Keys: thing, length", "thing: river\nlength: 80")
    asked = _messages("Answer with YAML.", shown, f"{fact} Keys: {name}, {number}")
    schema = {"type": "object", "properties": {name: {"type": "string"}, number: {"type": "integer"}}}
    return {
        "responses_create_params": {"input": asked},
        "schema_str": json.dumps(schema),
        "schema_type": "yaml",
    }


def _messages(system: str, shown: tuple[str, str], asked: str) -> list[dict[str, str]]:
    question, answer = shown
    said = (("system", system), ("user", question), ("assistant", answer), ("user", asked))
    return [{"role": role, "content": content} for role, content in said]


TASKS = {
    "swap": Task(swapped_words, {"type": "string_match"}, tokens=8),
    "yaml": Task(fact_as_yaml, {"type": "structured_outputs", "num_workers": 1}, tokens=16),
    "numbers": Task(larger_number, {"type": "string_match"}, tokens=6),
}
ON_TWO_CORES = ("swap", "yaml")
"""Those that a processor learns in some minutes."""
