"""Reading configs and what they pull in, merged as NeMo Gym does.

A config overrides what it names in ``config_paths``, however deep; of configs side by side, the later one
overrides the earlier. A file named twice is read once. Relative paths are looked for from the current
directory, then from the folder of the config that names them and those above it: so a config in a checkout of
NeMo Gym finds the others from anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gym_serve.graph.loading import read_yaml
from gym_serve.types.errors import GraphError, InvalidRequest

__all__ = ["MISSING", "load_configs", "merged"]

MISSING = "???"
"""OmegaConf's mark of a value that must be given from outside."""

_PATHS = "config_paths"


def load_configs(paths: Sequence[Path]) -> dict[str, Any]:
    """The contents of configs and of all that they pull in, merged.

    Raises:
        InvalidRequest: a file is not there, is no YAML, or is no config.
    """
    merging: dict[str, Any] = {}
    seen: set[Path] = set()
    for path in paths:
        for content in _with_included(path, None, seen):
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


def _with_included(path: Path, named_in: Path | None, seen: set[Path]) -> Iterator[dict[str, Any]]:
    """The contents of a config after those of the ones that it pulls in."""
    file = _found(path, named_in)
    if file in seen:
        return
    seen.add(file)
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
        yield from _with_included(Path(entry), file, seen)
    yield {str(key): value for key, value in content.items()}


def _found(path: Path, named_in: Path | None) -> Path:
    folders = [Path.cwd(), *(named_in.parents if named_in is not None else ())]
    for folder in folders:
        if (folder / path).is_file():
            return (folder / path).resolve()
    if named_in is None:
        raise InvalidRequest(f"no such file: {path}")
    raise InvalidRequest(f"{named_in}: {_PATHS}: {path} is not there, nor in any folder above this file")
