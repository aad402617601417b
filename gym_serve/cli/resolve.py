"""`gym-serve resolve`: a graph file with everything that it leaves open filled in."""

from __future__ import annotations

from typing import Any

import typer
import yaml

from gym_serve.cli.graph_file import ApplicationOption, FileArgument, JsonOption, SetOption, resolve_file
from gym_serve.cli.printing import print_json
from gym_serve.cli.target import stop
from gym_serve.graph.spec import MASK
from gym_serve.types.errors import GraphError

__all__ = ["resolve"]


def resolve(
    file: FileArgument,
    set_: SetOption = None,
    application: ApplicationOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print a graph after extends, variables and overrides, with defaults; secrets are masked.

    Exit status: 0, or 1 if the graph has a problem.

    Example: gym-serve resolve graphs/math.yaml --set models.policy.model=Qwen/Qwen3-8B
    """
    try:
        graph = resolve_file(file, set_, application)
    except GraphError as error:
        stop(error, as_json=as_json)
    resolved: dict[str, Any] = {section: servers for section, servers in graph.public().items() if servers}
    if graph.default_agent is not None:
        resolved["default_agent"] = graph.default_agent
    if graph.auth_tokens:
        resolved["auth_token"] = MASK
    if graph.insecure:
        resolved["insecure"] = True
    if as_json:
        print_json(resolved)
    else:
        typer.echo(yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True).rstrip())
