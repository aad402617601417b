"""Prompt templates: ``{system?, user}`` with ``{field}``, for data sets without prompts of their own.

A template substitutes plain names of the row's top-level fields and nothing else: rows are data, so no
attribute is looked up and no format specification is run. Literal braces are doubled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gym_serve.types.errors import InvalidRequest
from gym_serve.types.requests import JSON

__all__ = ["PromptTemplate", "params_of"]

_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_FIELD = re.compile(r"[^\W\d][\w-]*")


@dataclass(frozen=True)
class PromptTemplate:
    """Makes the ``input`` of a row.

    Attributes:
        user: the user's message.
        system: the system message before it, if any.

    Raises:
        InvalidRequest: a placeholder that is no plain name, or a lone brace; all of them.
    """

    user: str
    system: str | None = None

    def __post_init__(self) -> None:
        problems = [
            f"{key}: {part.group()!r} at {part.start()} is no {{field}}; write a literal brace twice"
            for key, template in self._templates()
            for part in _PART.finditer(template)
            if part.group() not in ("{{", "}}") and not _FIELD.fullmatch(part.group(1) or "")
        ]
        if problems:
            raise InvalidRequest(f"prompt template: {'; '.join(problems)}")

    @classmethod
    def of(cls, source: str | Path | Mapping[str, Any] | PromptTemplate) -> PromptTemplate:
        """A template from the path of a YAML file, or from what such a file holds.

        Raises:
            InvalidRequest: the file cannot be read, or holds no template.
        """
        if isinstance(source, PromptTemplate):
            return source
        where = "prompt template"
        content: Any = source
        if isinstance(source, str | Path):
            where = str(source)
            try:
                content = yaml.safe_load(Path(source).read_text("utf-8"))
            except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
                raise InvalidRequest(f"cannot read {where}: {error}") from error
        if not isinstance(content, Mapping) or not isinstance(content.get("user"), str):
            raise InvalidRequest(f"{where} must be a mapping with 'user', and maybe 'system'")
        if unknown := sorted(map(str, content.keys() - {"user", "system"})):
            raise InvalidRequest(f"{where}: unknown {', '.join(unknown)}; it has 'user' and 'system'")
        if not isinstance(content.get("system"), str | None):
            raise InvalidRequest(f"{where}: 'system' is a text")
        return cls(content["user"], content.get("system"))

    @property
    def fields(self) -> list[str]:
        """The fields that a row must have, in order of first use."""
        names = (part.group(1) for _, template in self._templates() for part in _PART.finditer(template))
        return list(dict.fromkeys(name for name in names if name))

    def apply(self, row: JSON) -> JSON:
        """The row with the messages as its ``input``.

        Raises:
            InvalidRequest: it has an input already, or lacks fields; all of them.
        """
        params = params_of(row)
        if params.get("input"):
            raise InvalidRequest("responses_create_params.input: a row for a prompt template has none")
        return {**row, "responses_create_params": {**params, "input": self.messages(row)}}

    def messages(self, row: JSON) -> list[JSON]:
        """The messages for a row.

        Raises:
            InvalidRequest: the row lacks fields; all of them.
        """
        if missing := [name for name in self.fields if name not in row]:
            raise InvalidRequest(f"the prompt needs {', '.join(missing)}; the row has {', '.join(row)}")

        def substitute(part: re.Match[str]) -> str:
            name = part.group(1)
            return part.group()[0] if name is None else str(row[name])

        return [
            {"role": role, "content": _PART.sub(substitute, template)} for role, template in self._templates()
        ]

    def _templates(self) -> list[tuple[str, str]]:
        user = [("user", self.user)]
        return user if self.system is None else [("system", self.system), *user]


def params_of(row: JSON) -> JSON:
    """The ``responses_create_params`` of a row; empty where it has none.

    Raises:
        InvalidRequest: they are no object.
    """
    params = row.get("responses_create_params") or {}
    if not isinstance(params, dict):
        raise InvalidRequest("`responses_create_params` must be a JSON object")
    return params
