"""``${...}`` of OmegaConf, as values or as variables of a graph file.

| NeMo Gym | here |
|---|---|
| ``${policy_base_url}``, given on the command line or in ``env.yaml`` | ``${POLICY_BASE_URL}`` |
| ``${oc.env:NAME,default}`` | ``${NAME:-default}`` |
| ``${oc.select:key,default}`` | the value, else ``${KEY:-default}`` |
| ``${server.resources_servers.type.key}``, ``${.key}`` | the value |

A value that is a secret by the name of its key is never copied: it becomes a variable.
"""

from __future__ import annotations

import re
from typing import Any

from gym_serve.interop.nemo_gym.configs import MISSING
from gym_serve.interop.nemo_gym.directives import value_at

__all__ = ["Translator", "is_secret_name", "variable_name"]

_SECRET = re.compile(
    r"(api_?key|password|secret|credential|(^|access_|api_|auth_|bearer_|git(hub|lab)_|hf_|private_)token)s?$",
    re.IGNORECASE,
)
_ABSENT = ("null", "", "''", '""')


class Translator:
    """Translates the values of a config.

    Args:
        config: the whole config, directives applied.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self.variables: dict[str, str] = {}
        """The environment variables that the result needs, each with the key that it stands for."""
        self.problems: list[str] = []
        """What cannot be translated, each with its path."""
        self._open: list[tuple[str, ...]] = []

    def translate(self, value: Any, path: tuple[str, ...]) -> Any:
        """``value`` for a graph file.

        Args:
            value: a value of the config.
            path: its place there.
        """
        if isinstance(value, dict):
            return {key: self.translate(item, (*path, str(key))) for key, item in value.items()}
        if isinstance(value, list):
            return [self.translate(item, (*path, str(index))) for index, item in enumerate(value)]
        if not isinstance(value, str):
            return value
        if value == MISSING:
            keys = [path[0], path[-1]] if len(path) > 1 else path
            return self.variable(variable_name("_".join(keys)), ".".join(path))
        return self._text(value, path) if "${" in value else value

    def variable(self, name: str, meaning: str, default: str | None = None) -> str:
        """A reference to an environment variable, which is noted."""
        self.variables.setdefault(name, meaning)
        return f"${{{name}}}" if default is None else f"${{{name}:-{default}}}"

    def _text(self, text: str, path: tuple[str, ...]) -> Any:
        parts: list[Any] = []
        at = 0
        while (start := text.find("${", at)) >= 0:
            if text[at:start].endswith("\\"):
                parts.append(f"{text[at : start - 1]}$${{")
                at = start + 2
                continue
            end = _closing(text, start + 2)
            if end is None:
                self._problem(path, f"a ${{ without its }}: {text[start : start + 40]!r}")
                return text
            if start > at:
                parts.append(text[at:start])
            parts.append(self._interpolation(text[start + 2 : end].strip(), path))
            at = end + 1
        if at < len(text):
            parts.append(text[at:])
        if len(parts) == 1:
            return parts[0]
        if any(isinstance(part, dict | list) for part in parts):
            self._problem(path, "a mapping or a list within a text")
        return "".join("" if part is None else str(part) for part in parts)

    def _interpolation(self, inner: str, path: tuple[str, ...]) -> Any:
        resolver, colon, rest = inner.partition(":")
        if not colon:
            return self._reference(inner, path, None)
        name, comma, default = rest.partition(",")
        name = name.strip()
        if resolver == "oc.env":
            is_given = comma and default.strip() != "MISSING"
            return self.variable(name, name, self._default(default, path) if is_given else None)
        if resolver == "oc.select":
            return self._reference(name, path, self._default(default, path) if comma else "")
        if resolver == "oc.decode":
            return self.translate(rest.strip(), path)
        self._problem(path, f"there is no counterpart of ${{{resolver}:...}}; write the value itself")
        return None

    def _default(self, text: str, path: tuple[str, ...]) -> str:
        text = text.strip()
        if text in _ABSENT:
            return ""
        if text[:1] == text[-1:] and text[:1] in ("'", '"'):
            text = text[1:-1]
        default = self.translate(text, path)
        return "" if default is None else str(default)

    def _reference(self, key: str, path: tuple[str, ...], default: str | None) -> Any:
        """The value at a key of the config; a variable, where that is to be given from outside."""
        dots = len(key) - len(key.lstrip("."))
        if dots > len(path):
            self._problem(path, f"${{{key}}} leads out of the config")
            return None
        base = path[: len(path) - dots] if dots else ()
        keys = (*base, *re.split(r"[.\[\]]+", key.lstrip(".").rstrip("]")))
        try:
            value = value_at(self._config, keys)
        except KeyError:
            value = MISSING
        if value is None and len(keys) == 1:
            value = MISSING  # null at the top: to be given on the command line
        if value == MISSING and len(keys) > 1 and default is None:
            self._problem(path, f"${{{key}}} leads to nothing in the configs")
            return None
        if value == MISSING or _is_secret(keys[-1], value):
            whole = ".".join(keys)
            return self.variable(variable_name(whole), whole, default)
        if keys in self._open:
            self._problem(path, f"${{{key}}} leads in a circle")
            return None
        self._open.append(keys)
        try:
            return self.translate(value, keys)
        finally:
            self._open.pop()

    def _problem(self, path: tuple[str, ...], message: str) -> None:
        self.problems.append(f"{'.'.join(path)}: {message}")


def _is_secret(key: str, value: Any) -> bool:
    """Whether a value is a secret that is written out."""
    return is_secret_name(key) and isinstance(value, str) and value != "" and "${" not in value


def is_secret_name(key: str) -> bool:
    """Whether a setting of this name holds a secret; ``stop_token`` and ``max_tokens`` do not."""
    return _SECRET.search(key) is not None


def variable_name(key: str) -> str:
    """The environment variable for a key: ``policy_base_url`` -> ``POLICY_BASE_URL``."""
    name = re.sub(r"[^A-Za-z0-9]+", "_", key).strip("_").upper()
    return f"_{name}" if name[:1].isdigit() else name


def _closing(text: str, at: int) -> int | None:
    """Index of the brace that closes the one before ``at``."""
    depth = 1
    for index in range(at, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return None
