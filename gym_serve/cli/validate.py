"""`gym-serve validate` and `resolve`: all problems of a graph file, or all of its settings; without Ray."""

from __future__ import annotations

from typing import Any

import yaml

from gym_serve.cli.options import ApplicationOption, FileArgument, JsonOption, SetOption, resolve_file
from gym_serve.cli.printing import echo, print_json, print_table
from gym_serve.graph.preflight import problems_here
from gym_serve.graph.spec import MASK, Node

_COLUMNS = ("server", "kind", "type", "references", "replicas")


def validate(
    file: FileArgument,
    set_: SetOption = None,
    application: ApplicationOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check a graph file: print all of its problems, or its servers. Starts nothing.

    Missing packages, programs and files of this machine are reported on stderr, as by gym-serve up. They
    are no problem of the file, because the graph may run elsewhere.

    Exit status: 0, or 1 if there is a problem.

    Example: gym-serve validate graphs/math.yaml --set agents.math_agent.max_steps=3
    """
    graph = resolve_file(file, set_, application)
    missing = problems_here(graph)
    if as_json:
        print_json({"ok": True, "problems": [], "missing": missing, "graph": graph.public()})
    else:
        for problem in missing:
            echo(f"missing on this machine: {problem}", err=True)
        echo("ok")
        print_table(_COLUMNS, (_cells(name, node) for name, node in graph.nodes.items()))


def _cells(name: str, node: Node) -> tuple[str, ...]:
    targets = dict.fromkeys(node.references.values())
    references = (f"{target} (inline)" if target in node.inline else target for target in targets)
    return name, node.kind, node.type, ", ".join(references), _replicas(node)


def _replicas(node: Node) -> str:
    if node.cls is None:
        return "remote"
    if (scaling := node.options.autoscaling) is not None:
        return f"{scaling.fewest} to {scaling.max_replicas}"
    return str(node.options.num_replicas or 1)


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
    graph = resolve_file(file, set_, application)
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
        echo(yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True).rstrip())
