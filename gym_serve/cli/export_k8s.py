"""`gym-serve export-k8s`: a graph as objects of Kubernetes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
import yaml

from gym_serve.cli.options import ApplicationOption, FileArgument, JsonOption, SetOption
from gym_serve.cli.printing import echo


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
    from gym_serve.graph import load_graph, resolve

    source = load_graph(file, overrides=overrides or (), application=application)
    graph = resolve(source.spec, source=source.path, base_dir=source.base_dir, literal_secrets=False)
    objects = kubernetes_objects(source, graph, image=image, size=PodSize(cpus, memory))
    if as_json:
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}) + "\n"
    else:
        text = yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=110)
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


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as they are read best, and no aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
