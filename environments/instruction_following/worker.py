"""A worker process of instruction_following: checks IFEval's instructions, as lm-eval implements them.

Some of its patterns take quadratic time, so it runs in a process, offline and without randomness. It would
download NLTK's sentence model, so one is shipped. Language detection gets a fixed seed, and loads all
languages first, as other threads would use an incomplete list. It replaces a wrong argument by a random one:
such a row is refused here. It rejects characters that are not letters, though IFEval's own data asks for "#"
and "!": they are counted here.
"""

from __future__ import annotations

import difflib
import logging
import sys
import threading
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypedDict

import langdetect
from langdetect import detector_factory

from gym_serve.types.errors import InvalidRequest

_NLTK_DATA = Path(__file__).with_name("nltk_data")
_LOADING = threading.Lock()


def instruction_ids() -> list[str]:
    """The names of all instructions."""
    return sorted(_instructions())


def follows(instruction_id: str, arguments: dict[str, Any], text: str) -> bool:
    """Whether ``text`` follows an instruction; a blank text follows none, as in IFEval. Raises
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
        raise InvalidRequest(f"instruction_id_list: there is no instruction {instruction_id[:100]!r}{hint}")
    instruction = registry[instruction_id](instruction_id)
    wanted = set(instruction.get_instruction_args_keys())
    if wanted != arguments.keys():
        raise InvalidRequest(f"kwargs of {instruction_id} must be {sorted(wanted)}, got {sorted(arguments)}")
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


def _language(text: str) -> str:
    """The language of a text; none of a text without letters, which lm-eval has be in every language."""
    return str(langdetect.detect(text)) if any(map(str.isalpha, text)) else ""


def _instructions() -> dict[str, Any]:
    with _LOADING:
        return _load()


@cache
def _load() -> dict[str, Any]:
    import nltk

    # Last in the path: an installed punkt_tab, which knows more abbreviations, takes precedence.
    nltk.data.path.append(str(_NLTK_DATA))
    langdetect.DetectorFactory.seed = 0
    detector_factory.init_factory()
    # It logs the whole text where it cannot tell the language: model output does not belong in logs.
    logging.getLogger("lm_eval.tasks.ifeval.instructions").setLevel(logging.CRITICAL)
    from lm_eval.tasks.ifeval import instructions, instructions_util
    from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_DICT

    instructions.random = instructions_util.random = _NoChance()
    instructions.langdetect = SimpleNamespace(
        detect=_language, LangDetectException=langdetect.LangDetectException
    )
    return dict(INSTRUCTION_DICT)


class Checked(TypedDict):
    """The result."""

    followed: list[bool]  # whether the text follows each instruction
    invalid: str | None  # why no text could follow them; None if one could


def warm_up() -> None:
    """Import the instructions alone. lm-eval's package of tasks imports datasets, and nltk imports SciPy and
    scikit-learn if it can: two thirds of the time to start.
    """
    import lm_eval

    tasks = ModuleType("lm_eval.tasks")
    tasks.__path__ = [f"{lm_eval.__path__[0]}/tasks"]
    sys.modules["lm_eval.tasks"] = tasks
    for name in ("scipy", "sklearn"):
        sys.modules[name] = None  # type: ignore[assignment]  # an ImportError, which nltk expects
    instruction_ids()


def work(request: tuple[list[str], list[dict[str, Any] | None], str]) -> Checked:
    """Check instructions, with the arguments of each, on a text."""
    names, kwargs, text = request
    try:
        followed = [
            follows(name, arguments or {}, text) for name, arguments in zip(names, kwargs, strict=True)
        ]
    except InvalidRequest as error:
        return {"followed": [], "invalid": error.message}
    return {"followed": followed, "invalid": None}
