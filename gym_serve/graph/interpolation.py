"""Variables in graph files: ``${NAME}``, ``${NAME:-default}``, and ``$${`` for a literal ``${``.

As in a shell, ``:-`` gives the default of a variable that is unset or empty. ``${NAME}`` alone refuses both,
so that an empty variable never turns a setting off unnoticed. If a value with variables becomes empty, its
key is left out and the setting's default applies. Variables inside the values of variables are not replaced.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dotenv import dotenv_values

from gym_serve.types.errors import GraphError

_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?", re.DOTALL)
_MALFORMED = "invalid variable; write ${NAME} or ${NAME:-default}, and $${ for a literal ${"
_ABSENT = object()


class _Variable(NamedTuple):
    name: str
    default: str | None


def environment(base_dir: Path) -> dict[str, str]:
    """Variables of this process, over those of ``.env`` in ``base_dir``, over ``.env`` here. Raises
    GraphError: a ``.env`` file that cannot be read."""
    variables: dict[str, str] = {}
    for file in dict.fromkeys((Path.cwd() / ".env", base_dir / ".env")):
        if not file.is_file():
            continue
        try:
            values = dotenv_values(file)
        except (OSError, UnicodeDecodeError) as error:
            raise GraphError(f"{file}: cannot be read: {type(error).__name__}") from None
        variables |= {name: value for name, value in values.items() if value is not None}
    return variables | dict(os.environ)


class Variables:
    """Replaces variables by their values, and keeps the problems of those that have none."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self.problems: list[tuple[str, str]] = []
        """Path and message of every problem so far."""

    def fill(self, value: Any, path: str) -> Any:
        """``value`` with its variables replaced, at any depth; unchanged where that failed.

        None for a text that becomes empty.
        """
        filled = self._fill(value, path)
        return None if filled is _ABSENT else filled

    def _fill(self, value: Any, path: str) -> Any:
        if isinstance(value, str):
            return self._text(value, path) if "${" in value else value
        if isinstance(value, Mapping):
            pairs = ((k, self._fill(v, f"{path}.{k}" if path else str(k))) for k, v in value.items())
            return {key: filled for key, filled in pairs if filled is not _ABSENT}
        if isinstance(value, list | tuple):
            items = (self._fill(item, f"{path}[{i}]") for i, item in enumerate(value))
            return [filled for filled in items if filled is not _ABSENT]
        return value

    def _text(self, text: str, path: str) -> Any:
        problems = len(self.problems)
        filled = "".join(self._part(part, path) for part in _parts(text))
        if len(self.problems) > problems:
            return text
        return filled or _ABSENT

    def _part(self, part: str | _Variable | None, path: str) -> str:
        if isinstance(part, str):
            return part
        if part is None:
            self.problems.append((path, _MALFORMED))
            return ""
        if value := self._env.get(part.name):
            return value
        if part.default is not None:
            filled = self._fill(part.default, path)
            return "" if filled is _ABSENT else str(filled)
        state = "is empty" if part.name in self._env else "is not set"
        hint = f"export it, put it into .env, or write ${{{part.name}:-default}}"
        self.problems.append((path, f"environment variable {part.name} {state}; {hint}"))
        return ""


def variables_of(value: Any) -> dict[str, bool]:
    """The variables in a graph as it is written, and of each whether the graph needs a value for it.

    It does not need those that have a default wherever they stand, or that stand in a branch of an ``if``,
    which may not be taken.
    """
    variables: dict[str, bool] = {}

    def visit(value: Any, needed: bool) -> None:
        if isinstance(value, Mapping):
            for key, below in value.items():
                visit(below, needed and key not in ("then", "else"))
        elif isinstance(value, list | tuple):
            for below in value:
                visit(below, needed)
        elif isinstance(value, str):
            for part in _parts(value):
                if isinstance(part, _Variable):
                    variables[part.name] = variables.get(part.name, False) or (
                        needed and part.default is None
                    )
                    visit(part.default, needed)

    visit(value, True)
    return variables


def has_literal(text: str) -> bool:
    """Whether ``text`` has no variable at all, or one whose default is written out."""
    variables = [part for part in _parts(text) if isinstance(part, _Variable)]
    return not variables or any(v.default and has_literal(v.default) for v in variables)


def _parts(text: str) -> Iterator[str | _Variable | None]:
    """The literals and variables of ``text``; None for a malformed rest."""
    at = 0
    while (start := text.find("${", at)) >= 0:
        if text[at:start].endswith("$"):
            yield text[at : start - 1] + "${"
            at = start + 2
            continue
        yield text[at:start]
        end = closing_brace(text, start + 2)
        variable = None if end is None else _VARIABLE.fullmatch(text, start + 2, end)
        if end is None or variable is None:
            yield None
            return
        yield _Variable(*variable.groups())
        at = end + 1
    yield text[at:]


def closing_brace(text: str, at: int) -> int | None:
    """Index of the brace that closes the one before ``at``; braces in between stand in pairs."""
    depth = 1
    for index in range(at, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return None
