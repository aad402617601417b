"""The instructions of IFEval, as lm-eval implements them, used offline and without chance.

Five things of the library have to be steered. It downloads NLTK's sentence model when it is imported
and none is there, so one is shipped beside this file. Its language detection draws random numbers, so
its seed is fixed; and while one thread loads its languages, others detect with those that are there, so
they are loaded first. It replaces an argument that is missing or out of its range by a random one: such
a row is refused here. And it holds a character that is no letter for out of range, though IFEval's own
data asks for "#" and "!": it is counted here like any other.
"""

from __future__ import annotations

import difflib
import logging
import threading
from functools import cache
from pathlib import Path
from typing import Any

import langdetect
from langdetect import detector_factory

from gym_serve.types.errors import InvalidRequest

__all__ = ["follows", "instruction_ids"]

_NLTK_DATA = Path(__file__).with_name("nltk_data")
_LOADING = threading.Lock()


def instruction_ids() -> list[str]:
    """The names of all instructions."""
    return sorted(_instructions())


def follows(instruction_id: str, arguments: dict[str, Any], text: str) -> bool:
    """Whether ``text`` follows an instruction.

    A blank text follows none, as in IFEval: it would follow every one that forbids something.

    Args:
        instruction_id: its name, e.g. ``length_constraints:number_words``.
        arguments: its arguments, all of them; those that are None do not count.
        text: a model's text.

    Raises:
        InvalidRequest: there is no such instruction, or it does not take these arguments.
    """
    instruction = _prepared(instruction_id, {k: v for k, v in arguments.items() if v is not None})
    if not text.strip():
        return False
    try:
        return bool(instruction.check_following(text))
    except Exception:
        # The arguments are sound, so it was the text: one too deeply nested for a parser, say.
        logging.getLogger(__name__).info("%s failed on a text", instruction_id, exc_info=True)
        return False


def _prepared(instruction_id: str, arguments: dict[str, Any]) -> Any:
    registry = _instructions()
    if instruction_id not in registry:
        near = difflib.get_close_matches(instruction_id, registry, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InvalidRequest(f"instruction_id_list: no instruction {instruction_id[:100]!r}{hint}")
    instruction = registry[instruction_id](instruction_id)
    wanted = set(instruction.get_instruction_args_keys())
    if wanted != arguments.keys():
        raise InvalidRequest(
            f"kwargs of {instruction_id}: {sorted(arguments)} given, it takes {sorted(wanted)}"
        )
    try:
        _build(instruction, arguments)
        instruction.check_following("a")  # what an argument of the wrong type does, it does on any text
    except Exception as error:
        raise InvalidRequest(f"kwargs of {instruction_id}: {type(error).__name__}: {error}") from None
    return instruction


def _build(instruction: Any, arguments: dict[str, Any]) -> None:
    letter = arguments.get("letter")
    if isinstance(letter, str) and len(letter) == 1 and not ("a" <= letter.lower() <= "z"):
        instruction.build_description(**{**arguments, "letter": "a"})
        instruction._letter = letter.lower()
    else:
        instruction.build_description(**arguments)


class _NoChance:
    """Stands in the library for the module ``random``."""

    def __getattr__(self, name: str) -> Any:
        raise ValueError("an argument is out of its range")


def _instructions() -> dict[str, Any]:
    with _LOADING:
        return _load()


@cache
def _load() -> dict[str, Any]:
    import nltk

    # Last in the path: an installed punkt_tab, which knows more abbreviations, goes before it.
    nltk.data.path.append(str(_NLTK_DATA))
    langdetect.DetectorFactory.seed = 0
    detector_factory.init_factory()
    # It logs the whole text where it cannot tell the language: model output does not belong in logs.
    logging.getLogger("lm_eval.tasks.ifeval.instructions").setLevel(logging.CRITICAL)
    from lm_eval.tasks.ifeval import instructions, instructions_util
    from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_DICT

    instructions.random = instructions_util.random = _NoChance()
    return dict(INSTRUCTION_DICT)
