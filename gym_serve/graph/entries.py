"""One server as it is written: the choice that ``if`` makes, and its variables filled in.

A reader of the file must see what happens when a variable is missing, e.g.::

    policy:
      if: "${POLICY_BASE_URL:-}"
      then: {type: chat_model, base_url: "${POLICY_BASE_URL}", model: "${POLICY_MODEL}"}
      else: {type: scripted_model}

Only the branch taken is looked at, so that its variables are asked for only when it is used. A
server whose branch is missing, and its ``type`` with it, is not in the graph.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gym_serve.graph.documents import merged
from gym_serve.graph.interpolation import Variables
from gym_serve.graph.settings import Problem, is_within, join

__all__ = ["Entry", "read_entry"]

_CHOICE = ("if", "then", "else")
_NO = ("", "false", "no", "off", "0")


@dataclass(frozen=True)
class Entry:
    """A server's keys.

    Attributes:
        path: path of the server in the file.
        written: its keys as they are written.
        filled: the same with variables filled in.
        branch: ``then`` or ``else``, where there is a choice.
        of_branch: the keys that come from the branch.
        failed: paths of values whose variables could not be filled in.
    """

    path: str
    written: dict[str, Any]
    filled: dict[str, Any]
    branch: str | None
    of_branch: frozenset[str]
    failed: tuple[str, ...]

    def at(self, relative: str) -> str:
        """The path in the file of a key, or of something below it."""
        if not relative:
            return self.path
        if _first(relative) in self.of_branch and self.branch is not None:
            return join(self.path, self.branch, relative)
        return join(self.path, relative)

    def is_open(self, relative: str) -> bool:
        """Whether a value, or a part of it, is not known for want of a variable."""
        path = self.at(relative)
        return any(is_within(path, failed) or is_within(failed, path) for failed in self.failed)


def read_entry(value: Any, path: str, variables: Variables) -> tuple[Entry | None, list[Problem]]:
    """The keys of a server, and what is wrong with their form.

    None if they cannot be read, and, without a problem, for a server that is not in the graph.
    """
    if not isinstance(value, Mapping):
        return None, [(path, "a server is a mapping with a type")]
    strange = [key for key in value if not isinstance(key, str)]
    problems = [(join(path, str(key)), "a key is a string; quote it") for key in strange]
    known = len(variables.problems)
    own = {key: item for key, item in value.items() if isinstance(key, str) and key not in _CHOICE}
    branch, chosen = None, {}
    if "if" in value:
        branch = "else" if _is_no(variables.fill(value["if"], join(path, "if"))) else "then"
        given = value.get(branch) or {}
        if len(variables.problems) > known:
            return None, [*problems, *variables.problems[known:]]
        if branch not in value and "type" not in own:
            return None, problems
        if not isinstance(given, Mapping):
            return None, [*problems, (join(path, branch), "must be a mapping")]
        chosen = {str(key): item for key, item in given.items()}
    elif stray := [key for key in _CHOICE if key in value]:
        problems.append((join(path, stray[0]), "there is no 'if' beside it"))
    filled = merged(variables.fill(chosen, join(path, branch or "")), variables.fill(own, path))
    failed = tuple(where for where, _ in variables.problems[known:])
    of_branch = frozenset(chosen.keys() - own.keys())
    problems += variables.problems[known:]
    return Entry(path, merged(chosen, own), filled, branch, of_branch, failed), problems


def _is_no(value: Any) -> bool:
    return not value or (isinstance(value, str) and value.strip().lower() in _NO)


def _first(path: str) -> str:
    return re.split(r"[.\[]", path, maxsplit=1)[0]
