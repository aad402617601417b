"""The two routes of NeMo Gym's head server, by which its TRL example finds agents; pages of every graph.

Clients read ``/global_config_dict_yaml`` (a JSON string that holds YAML), take ``host`` and ``port`` of each
agent, and post to ``http://{host}:{port}/run``. All servers of a graph share one address, so ``port`` carries
the path as well (``8000/math/math_agent``). A client that knows only host and port needs ``route_prefix: /``.

Source: NVIDIA NeMo Gym v0.5, ``HeadServer`` and ``ServerClient``; TRL, ``examples/scripts/nemo_gym``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import yaml
from starlette.requests import Request

from gym_serve.gateway.pages import Page
from gym_serve.graph.spec import Node
from gym_serve.interop.nemo_gym.instances import KINDS

_SECTIONS = {kind: section for section, kind in KINDS.items()}
_KEYS = {"model": "model_server", "resources": "resources_server"}  # NeMo Gym's names of these settings


def global_config_yaml(request: Request, nodes: Mapping[str, Node]) -> str:
    """``GET /global_config_dict_yaml``: every server with its host and port, as YAML text."""
    host, port = _address(request)
    config: dict[str, Any] = {}
    for name, node in nodes.items():
        entry = {"entrypoint": "app.py", "host": host, "port": f"{port}{_path(request, name)}"}
        references = {
            _KEYS.get(setting, setting): {"type": _SECTIONS[nodes[target].kind], "name": target}
            for setting, target in node.references.items()
        }
        config[name] = {_SECTIONS[node.kind]: {_type(node): {**entry, **references}}}
    return yaml.safe_dump(config, sort_keys=False)


def server_instances(request: Request, nodes: Mapping[str, Node]) -> list[dict[str, Any]]:
    """``GET /server_instances``: the running servers and their URLs."""
    host, port = _address(request)
    return [
        {
            "process_name": name,
            "server_type": _SECTIONS[node.kind],
            "name": _type(node),
            "host": host,
            "port": port,
            "url": f"{request.scope['scheme']}://{host}:{port}{_path(request, name)}",
            "entrypoint": "app.py",
            "status": "success",
        }
        for name, node in nodes.items()
    ]


_ADDRESSES = "NeMo Gym's head server: all servers with their addresses, as YAML in a JSON string"
GLOBAL_CONFIG = Page(_ADDRESSES, {"type": "string"}, global_config_yaml)
_OBJECTS = {"type": "array", "items": {"type": "object"}}
SERVER_INSTANCES = Page("NeMo Gym's head server: the running servers", _OBJECTS, server_instances)


def _address(request: Request) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{request.headers.get('host', '')}")
        host, port = parts.hostname or "127.0.0.1", parts.port
    except ValueError:  # an invalid Host header
        host, port = "127.0.0.1", (request.scope.get("server") or (None, None))[1]
    if port is None:
        port = 443 if request.scope["scheme"] == "https" else 80
    return f"[{host}]" if ":" in host else host, port


def _path(request: Request, name: str) -> str:
    return f"{request.scope.get('root_path', '').rstrip('/')}/{name}"


def _type(node: Node) -> str:
    return node.type.rpartition(":")[2]
