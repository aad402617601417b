"""`gym-serve validate` and `resolve`: all problems of a graph file, or all of its settings; without Ray.

`gym-serve export-k8s`: a graph as objects of Kubernetes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from gym_serve.cli.options import (
    ApplicationOption,
    FileArgument,
    JsonOption,
    SetOption,
    read_graph,
    resolve_file,
)
from gym_serve.cli.printing import echo, print_json, print_table
from gym_serve.cluster.preflight import problems_here
from gym_serve.graph.loading import TextDumper
from gym_serve.graph.spec import MASK, Graph, Node
from gym_serve.types.errors import GymError

_COLUMNS = ("server", "kind", "type", "references", "replicas")


def validate(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Graph files (Serve config files in YAML), or names of gym-serve list graph.",
        ),
    ],
    set_: SetOption = None,
    application: ApplicationOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check graph files: print all of their problems, or their servers. Starts nothing.

    Missing packages, programs and files of this machine are reported on stderr, as by gym-serve up. They
    are no problem of the file, because the graph may run elsewhere.

    Exit status: 0, or 1 if there is a problem.

    Example: gym-serve validate graphs/math.yaml --set agents.math_agent.max_steps=3
    """
    if len(files) == 1:
        _print_graph(resolve_file(files[0], set_, application), as_json=as_json)
        return
    graphs: dict[str, Any] = {}
    for file in files:
        try:
            graph = resolve_file(file, set_, application)
        except GymError as error:
            graphs[str(file)] = {"ok": False, "error": error.message}
            if not as_json:
                echo(f"{file}: {error.message}", err=True)
            continue
        graphs[str(file)] = _as_json(graph)
        if not as_json:
            echo(f"\n{file}")
            _print_graph(graph)
    ok = all(one["ok"] for one in graphs.values())
    if as_json:
        print_json({"ok": ok, "files": graphs})
    if not ok:
        raise typer.Exit(1)


def _as_json(graph: Graph) -> dict[str, Any]:
    return {"ok": True, "problems": [], "missing": problems_here(graph), "graph": graph.public()}


def _print_graph(graph: Graph, *, as_json: bool = False) -> None:
    if as_json:
        print_json(_as_json(graph))
        return
    for problem in problems_here(graph):
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


def export_k8s(
    file: FileArgument,
    *,
    image: Annotated[
        str, typer.Option(metavar="IMAGE", help="Image with gym_serve and what the graph's types need.")
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where to write; standard output.")
    ] = None,
    cpus: Annotated[int, typer.Option(min=1, help="CPU cores of a worker pod.")] = 4,
    memory: Annotated[int, typer.Option(min=1, metavar="GIB", help="Memory of a worker pod, in GiB.")] = 16,
    application: ApplicationOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a graph as a RayService of KubeRay, with a PodMonitor for its metrics.

    Variables of the graph file stay variables: the pods get them from a Secret. The environment of this
    command decides which branch of an `if` counts for the number of pods.

    Exit status: 0, or 1 if the graph has problems.

    Example: gym-serve export-k8s graphs/math.yaml --image registry.example/gym-serve:0.1 -o math.yaml
    """
    from gym_serve.cluster.kubernetes import PodSize, kubernetes_objects, secret_of

    source, graph = read_graph(file, overrides, application)
    objects = kubernetes_objects(source, graph, image=image, size=PodSize(cpus, memory))
    if as_json:
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}) + "\n"
    else:
        text = yaml.dump_all(objects, Dumper=TextDumper, sort_keys=False, width=110)
    if output is None:
        echo(text, nl=False)
    else:
        output.write_text(text, encoding="utf-8")
    name, variables = secret_of(source)
    if variables:
        optional = [variable for variable, needed in variables.items() if not needed]
        literals = " ".join(f"--from-literal={v}=..." for v, needed in variables.items() if needed)
        echo(f"Pods take variables from a Secret: kubectl create secret generic {name} {literals}", err=True)
        if optional:
            echo(f"It may have {', '.join(optional)} as well.", err=True)
