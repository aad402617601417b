"""vLLM's engine arguments in a graph file: checked by name, and written as its command line has them.

The names are read from the source of the installed vLLM, without importing it, which takes seconds and
may want a GPU. Where none is installed (a driver, a laptop), its replicas check.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

_CLASSES = ("EngineArgs", "AsyncEngineArgs")


@lru_cache(maxsize=1)
def known_names() -> frozenset[str]:
    """Names of the installed vLLM's engine arguments; empty where there is none."""
    try:
        spec = importlib.util.find_spec("vllm")
    except (ImportError, ValueError):
        return frozenset()
    folders = list(spec.submodule_search_locations or []) if spec else []
    source = Path(folders[0], "engine", "arg_utils.py") if folders else None
    if source is None or not source.is_file():
        return frozenset()
    classes = [n for n in ast.parse(source.read_bytes()).body if isinstance(n, ast.ClassDef)]
    fields = [field for c in classes if c.name in _CLASSES for field in c.body]
    targets = [f.target for f in fields if isinstance(f, ast.AnnAssign)]
    return frozenset(t.id for t in targets if isinstance(t, ast.Name) and not t.id.startswith("_"))


def problem_of(name: str, taken: Mapping[str, str]) -> str | None:
    """What is wrong with the name of an engine argument; None if nothing is known to be. ``taken`` are the
    names that settings of the server stand for.
    """
    if name in taken:
        return f"{name} is set by {taken[name]!r} of this server"
    names = known_names()
    if not names or name in names:
        return None
    near = difflib.get_close_matches(name, names, n=1)
    return f"vLLM has no engine argument {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """The arguments as vLLM's parser reads them. None is "as by default"."""
    words: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, list):
            words += [f"--{option}", *map(_word, value)]
        else:
            words += [f"--{option}", _word(value)]
    return words


def _word(value: Any) -> str:
    return orjson.dumps(value).decode() if isinstance(value, dict | list) else str(value)
