"""``_inherit_from``, ``_copy`` and ``_delete_key``: an instance made from another one.

    aime24_agent:
      _inherit_from: math_agent          # takes its place: math_agent is gone from the config
      responses_api_agents: {...}        # merged over it

``_copy`` leaves the other one where it is. ``${inherit_from:path}`` and ``${copy:path}`` do the same for a
value. Chains are followed, unlike in NeMo Gym, which does not promise an order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gym_serve.graph.spec import nearest
from gym_serve.interop.nemo_gym.configs import MISSING, merged
from gym_serve.types.errors import InvalidRequest

__all__ = ["apply_directives", "value_at"]

_INHERIT, _COPY, _DELETE = "_inherit_from", "_copy", "_delete_key"
_AS_TEXT = {"${inherit_from:": True, "${copy:": False}


def apply_directives(config: dict[str, Any]) -> dict[str, Any]:
    """The config with every instance spelled out.

    Raises:
        InvalidRequest: a path leads nowhere, or in a circle.
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
    """The value at a path of keys, indices of lists included.

    Raises:
        KeyError: there is none; holds the key that is missing.
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
    """The value at ``path``, with its own directives applied."""
    if path in way:
        raise InvalidRequest(f"{_INHERIT}: in a circle: {' -> '.join([*way, path])}")
    keys = path.split(".")
    try:
        found = value_at(config, keys)
    except KeyError as error:
        missing = error.args[0]
        near = nearest(missing, config) if missing == keys[0] else ""
        raise InvalidRequest(f"{_INHERIT}, {_COPY}: there is no {path!r} in the configs{near}") from None
    if moves:
        moved.append(path)
    return _applied(found, config, moved, (*way, path))
