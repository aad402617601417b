"""Reads NeMo Gym's configs: includes and merges them, applies their directives, translates ``${...}``.

A config overrides those that it names in ``config_paths``; of configs side by side, the later one overrides
the earlier. Relative paths are searched from the current directory, then from the folder of the config that
names them and those above it. ``_inherit_from: NAME`` takes the place of another instance, ``_copy`` leaves
it where it is; ``${inherit_from:path}`` and ``${copy:path}`` do the same for a value.

References of OmegaConf become values, or variables of a graph file: ``${policy_base_url}`` (given from
outside) ``${POLICY_BASE_URL}``, ``${oc.env:NAME,default}`` ``${NAME:-default}``, ``${oc.select:key,default}``
the value, else ``${KEY:-default}``; ``${server.resources_servers.type.key}`` and ``${.key}`` the value. A
secret, by the name of its key, is never copied: it becomes a variable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gym_serve.graph.loading import closing_brace, read_yaml
from gym_serve.graph.spec import nearest
from gym_serve.types.errors import GraphError, InvalidRequest

MISSING = "???"  # OmegaConf's mark of a value that must be given from outside

_PATHS = "config_paths"


def load_configs(paths: Sequence[Path]) -> dict[str, Any]:
    """The contents of configs and of all that they pull in, merged. Raises InvalidRequest: a file is missing,
    invalid YAML, or not a config.
    """
    merging: dict[str, Any] = {}
    visited: set[Path] = set()
    for path in paths:
        for content in _with_included(path, None, visited):
            merging = merged(merging, content)
    merging.pop(_PATHS, None)
    return merging


def merged(base: Any, changes: Any) -> Any:
    """``base`` changed by ``changes``: mappings key by key, all else is replaced, but never by `MISSING`."""
    if not isinstance(base, Mapping) or not isinstance(changes, Mapping):
        return base if changes == MISSING else changes
    result = dict(base)
    for key, value in changes.items():
        result[key] = merged(result[key], value) if key in result else value
    return result


def _with_included(path: Path, named_in: Path | None, visited: set[Path]) -> Iterator[dict[str, Any]]:
    """The contents of a config after those of the ones that it pulls in."""
    file = _found(path, named_in)
    if file in visited:
        return
    visited.add(file)
    try:
        content = read_yaml(file)
    except GraphError as error:
        raise InvalidRequest(f"{file}: {'; '.join(error.problems)}") from None
    if content is None:
        return
    if not isinstance(content, dict):
        raise InvalidRequest(f"{file} must be a mapping of servers by name")
    included = content.get(_PATHS) or []
    if not isinstance(included, list) or not all(isinstance(entry, str) for entry in included):
        raise InvalidRequest(f"{file}: {_PATHS} must be a list of paths")
    for entry in included:
        yield from _with_included(Path(entry), file, visited)
    yield {str(key): value for key, value in content.items()}


def _found(path: Path, named_in: Path | None) -> Path:
    folders = [Path.cwd(), *(named_in.parents if named_in is not None else ())]
    for folder in folders:
        if (folder / path).is_file():
            return (folder / path).resolve()
    if named_in is None:
        raise InvalidRequest(f"no such file: {path}")
    raise InvalidRequest(f"{named_in}: {_PATHS}: there is no file {path} in this folder or one above it")


_INHERIT, _COPY, _DELETE = "_inherit_from", "_copy", "_delete_key"
_AS_TEXT = {"${inherit_from:": True, "${copy:": False}


def apply_directives(config: dict[str, Any]) -> dict[str, Any]:
    """The config with every instance spelled out. Raises InvalidRequest: a path leads nowhere, or in a
    circle.
    """
    moved: list[str] = []
    result: dict[str, Any] = _applied(config, config, moved, ())
    for path in moved:
        *above, last = path.split(".")
        holder = value_at(result, above)
        if isinstance(holder, dict):
            holder.pop(last, None)
    return result


def value_at(config: Any, path: Sequence[str]) -> Any:
    """The value at a path of keys, indices of lists included. Raises KeyError: there is none; holds the key
    that is missing.
    """
    for key in path:
        if isinstance(config, dict) and key in config:
            config = config[key]
        elif isinstance(config, list) and key.isdecimal() and int(key) < len(config):
            config = config[int(key)]
        else:
            raise KeyError(key)
    return config


def _applied(value: Any, config: dict[str, Any], moved: list[str], way: tuple[str, ...]) -> Any:
    if isinstance(value, list):
        return [_applied(item, config, moved, way) for item in value]
    if isinstance(value, str):
        for opening, moves in _AS_TEXT.items():
            if value.startswith(opening) and value.endswith("}"):
                return _taken(value[len(opening) : -1], config, moved, way, moves=moves)
        return value
    if not isinstance(value, dict):
        return value
    own = {str(key): item for key, item in value.items()}
    deleted = [key.strip() for key in str(own.pop(_DELETE, "")).split(",") if key.strip()]
    for key in deleted:
        own.pop(key, None)
    for directive in (_INHERIT, _COPY):
        if directive in own:
            path = own.pop(directive)
            if not isinstance(path, str):
                raise InvalidRequest(f"{directive} must be the path of a value in the config")
            base = _taken(path, config, moved, way, moves=directive == _INHERIT)
            own = own if base == MISSING else merged(base, own)
            own = {key: item for key, item in own.items() if key not in deleted}
    return {key: _applied(item, config, moved, way) for key, item in own.items()}


def _taken(path: str, config: dict[str, Any], moved: list[str], way: tuple[str, ...], *, moves: bool) -> Any:
    if path in way:
        raise InvalidRequest(f"{_INHERIT} leads in a circle: {' -> '.join([*way, path])}")
    keys = path.split(".")
    try:
        value = value_at(config, keys)
    except KeyError as error:
        missing = error.args[0]
        near = nearest(missing, config) if missing == keys[0] else ""
        raise InvalidRequest(f"{_INHERIT}, {_COPY}: there is no {path!r} in the configs{near}") from None
    if moves:
        moved.append(path)
    return _applied(value, config, moved, (*way, path))


_SECRET = re.compile(
    r"(api_?key|password|secret|credential|(^|access_|api_|auth_|bearer_|git(hub|lab)_|hf_|private_)token)s?$",
    re.IGNORECASE,
)
_ABSENT = ("null", "", "''", '""')


class Translator:
    """Translates the values of a config whose directives are applied."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self.variables: dict[str, str] = {}
        """The environment variables that the result needs, each with the key that it stands for."""
        self.problems: list[str] = []
        """What cannot be translated, each with its path."""
        self._open: list[tuple[str, ...]] = []

    def translate(self, value: Any, path: tuple[str, ...]) -> Any:
        """The value at a path of the config, for a graph file."""
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
            end = closing_brace(text, start + 2)
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
        is_secret = is_secret_name(keys[-1]) and isinstance(value, str) and value != "" and "${" not in value
        if value == MISSING or is_secret:
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


def is_secret_name(key: str) -> bool:
    """Whether a setting of this name holds a secret; ``stop_token`` and ``max_tokens`` do not."""
    return _SECRET.search(key) is not None


def variable_name(key: str) -> str:
    """The environment variable for a key: ``policy_base_url`` -> ``POLICY_BASE_URL``."""
    name = re.sub(r"[^A-Za-z0-9]+", "_", key).strip("_").upper()
    return f"_{name}" if name[:1].isdigit() else name
