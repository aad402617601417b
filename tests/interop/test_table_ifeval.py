"""IFEval's verdicts, as Google's own code gives them (package if-verifiable), against ours.

instruction_following uses those of lm-eval. Each instruction is tried with several arguments on many texts,
which were written for this test.
"""

from __future__ import annotations

import importlib
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tables import TABLES, needs_table

from gym_serve.environments.instruction_following import worker
from gym_serve.types.errors import InvalidRequest

LESS, AT_LEAST = "less than", "at least"

ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "keywords:existence": [{"keywords": ["sea"]}, {"keywords": ["sea", "Moon"]}, {"keywords": ["a.b"]}],
    "keywords:frequency": [
        {"keyword": "sea", "frequency": n, "relation": r} for n in (1, 2, 3) for r in (LESS, AT_LEAST)
    ],
    "keywords:forbidden_words": [{"forbidden_words": ["sea"]}, {"forbidden_words": ["seas", "moon"]}],
    "keywords:letter_frequency": [
        {"letter": letter, "let_frequency": n, "let_relation": r}
        for letter in ("e", "Q", "#", "!")
        for n in (1, 3)
        for r in (LESS, AT_LEAST)
    ],
    "language:response_language": [{"language": one} for one in ("en", "de", "fr", "hi", "ja")],
    "length_constraints:number_sentences": [
        {"num_sentences": n, "relation": r} for n in (1, 2, 4) for r in (LESS, AT_LEAST)
    ],
    "length_constraints:number_paragraphs": [{"num_paragraphs": n} for n in (1, 2, 3)],
    "length_constraints:number_words": [
        {"num_words": n, "relation": r} for n in (3, 10, 40) for r in (LESS, AT_LEAST)
    ],
    "length_constraints:nth_paragraph_first_word": [
        {"num_paragraphs": n, "nth_paragraph": nth, "first_word": word}
        for n, nth in ((1, 1), (2, 1), (2, 2), (3, 2))
        for word in ("the", "sea")
    ],
    "detectable_content:number_placeholders": [{"num_placeholders": n} for n in (1, 2, 3)],
    "detectable_content:postscript": [{"postscript_marker": one} for one in ("P.S.", "P.P.S", "Note:")],
    "detectable_format:number_bullet_lists": [{"num_bullets": n} for n in (1, 2, 3)],
    "detectable_format:constrained_response": [{}],
    "detectable_format:number_highlighted_sections": [{"num_highlights": n} for n in (1, 2, 3)],
    "detectable_format:multiple_sections": [
        {"section_spliter": one, "num_sections": n} for one in ("Section", "SECTION", "Day") for n in (1, 2)
    ],
    "detectable_format:json_format": [{}],
    "detectable_format:title": [{}],
    "combination:two_responses": [{}],
    "combination:repeat_prompt": [{"prompt_to_repeat": "Write about the sea."}],
    "startend:end_checker": [{"end_phrase": "the sea."}, {"end_phrase": "Is there anything else?"}],
    "change_case:capital_word_frequency": [
        {"capital_frequency": n, "capital_relation": r} for n in (1, 3) for r in (LESS, AT_LEAST)
    ],
    "change_case:english_capital": [{}],
    "change_case:english_lowercase": [{}],
    "punctuation:no_comma": [{}],
    "startend:quotation": [{}],
}

PIECES = [
    *(
        "The sea is wide.",
        "the sea, the Sea, THE SEAS!",
        "Das Meer ist weit und tief, und es rauscht.",
        "La mer.",
    ),
    *(
        "海は広い。",
        "समुद्र बड़ा है।",
        "# Queen quits!",
        "## Title",
        "<<The Sea>>",
        "<<>>",
        "<< >>",
        "[name] and [place]",
    ),
    *(
        "[]",
        "P.S. bye",
        "p. s. bye",
        "P.P.S. more",
        "P.P.S more",
        "Note: this",
        "* one",
        "- two",
        "  * three",
        "** no",
    ),
    *("*bold*", "**strong**", "***", "* *", "*a* *b*", "Section 1", "SECTION 2", "Day 3", "section 1"),
    *(
        '{"a": 1}',
        "```json\n[1, 2]\n```",
        "```\n{}\n```",
        "```JSON\nnull```",
        "{'a': 1}",
        "******",
        "***\n***",
        "*****",
    ),
    *(
        "Write about the sea.",
        "write about the sea. Yes",
        "Is there anything else?",
        '"quoted"',
        '"',
        '""',
        "“q”",
    ),
    *(
        "My answer is yes.",
        "My answer is maybe",
        "ALL CAPITALS HERE",
        "lower case",
        "Mr. Smith went. He saw it.",
        "a.b",
    ),
    *("1, 2, 3", "e e e Q q", "...", "?!", "\u0301", "I'm e.g. here", "A-B C_D", "\t", " "),
]
JOINTS = ["\n", "\n\n", " ", "\n***\n", "\n******\n", "\n\n\n"]

DISAGREEMENTS = {
    "keywords:letter_frequency": "ours: IFEval's rows ask for # and !; theirs counts a random letter instead",
    "language:response_language": "ours: a text without letters is in no language; theirs has it be in each",
}
"""The instructions with other verdicts, with who is right."""


@pytest.fixture(scope="module")
def theirs() -> Iterator[Callable[[str, dict[str, Any], str], bool | str]]:
    """The verdict of Google's code; the name of the exception that it raises."""
    # The package itself imports a library to download data sets; of it only the instructions are needed.
    package = types.ModuleType("if_verifiable")
    package.__path__ = [str(TABLES / "ifeval" / "if_verifiable")]
    sys.modules["if_verifiable"] = package
    worker.instruction_ids()  # loads the languages, and the model of sentences
    registry = importlib.import_module("if_verifiable.ifeval.instructions_registry").INSTRUCTION_DICT

    def verdict(name: str, arguments: dict[str, Any], text: str) -> bool | str:
        instruction = registry[name](name)
        try:
            instruction.build_description(**arguments)
            return bool(text.strip()) and bool(instruction.check_following(text))
        except Exception as error:
            return type(error).__name__

    yield verdict
    for name in [name for name in sys.modules if name.partition(".")[0] == "if_verifiable"]:
        del sys.modules[name]


def texts() -> list[str]:
    """Each piece alone, and pieces joined in many ways."""
    chance = random.Random(7)
    joined = []
    for _ in range(120):
        text = chance.choice(PIECES)
        for _ in range(chance.randint(1, 4)):
            text += chance.choice(JOINTS) + chance.choice(PIECES)
        joined.append(text)
    return [*PIECES, *joined]


def ours(name: str, arguments: dict[str, Any], text: str) -> bool | str:
    try:
        return worker.follows(name, arguments, text)
    except InvalidRequest as error:
        return error.message


@needs_table("ifeval")
def test_every_disagreement_is_argued(theirs: Callable[[str, dict[str, Any], str], bool | str]) -> None:
    assert ARGUMENTS.keys() == set(worker.instruction_ids())
    found: dict[str, list[Any]] = {}
    both: dict[str, set[Any]] = {}
    for name, all_arguments in ARGUMENTS.items():
        for arguments in all_arguments:
            for text in texts():
                mine, other = ours(name, arguments, text), theirs(name, arguments, text)
                both.setdefault(name, set()).add(other)
                if mine != other:
                    found.setdefault(name, []).append((arguments, text, mine, other))
    never = {name for name, verdicts in both.items() if not {True, False} <= verdicts}
    assert found.keys() == DISAGREEMENTS.keys(), {name: (len(all_), all_[:3]) for name, all_ in found.items()}
    assert {arguments["letter"] for arguments, *_ in found["keywords:letter_frequency"]} == {"#", "!"}
    assert never == set()
