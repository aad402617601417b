"""What several commands share: their options, the graph that they work on, and how they end on an error.

`Target` says which graph: one that the command deploys, one that runs on a cluster, or one at a URL.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from gym_serve.cli import local_ray
from gym_serve.cli.completion import applications, graph_files, graphs
from gym_serve.cli.printing import print_json
from gym_serve.graph.loading import load_graph, parse_yaml
from gym_serve.graph.resolving import resolve
from gym_serve.graph.spec import Graph
from gym_serve.types.errors import GraphError, GymError

if TYPE_CHECKING:
    from gym_serve.client import Gym
    from gym_serve.graph.spec import Graph

__all__ = [
    "AddressOption",
    "ApplicationOption",
    "AttachOption",
    "FileArgument",
    "JsonOption",
    "RayOption",
    "SetOption",
    "Target",
    "TokenOption",
    "UrlOption",
    "parse_pairs",
    "resolve_file",
    "stop",
]

FileArgument = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="Graph file (a Serve config in YAML).", autocompletion=graph_files),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Override a value, as in the example; may repeat."),
]
ApplicationOption = Annotated[
    str | None,
    typer.Option(
        "--application",
        metavar="NAME",
        help="Which graph, if the graph file has several.",
        autocompletion=applications,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def resolve_file(file: Path, overrides: list[str] | None, application: str | None) -> Graph:
    """The graph of a file.

    Raises:
        GraphError: every problem of it.
    """
    source = load_graph(file, overrides=overrides or (), application=application)
    return resolve(source.spec, source=source.path, base_dir=source.base_dir, literal_secrets=False)


AttachOption = Annotated[
    str | None,
    typer.Option(
        "--attach", metavar="NAME", help="Use the graph that runs under this name.", autocompletion=graphs
    ),
]
AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="Ray cluster, or auto for the one on this machine. Without it, a graph file is deployed on a "
        "new local Ray that ends with the command, and --attach looks in the one that runs here.",
    ),
]
UrlOption = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="Use the graph at this URL, e.g. http://host:8000/math."),
]
RayOption = Annotated[
    bool,
    typer.Option(
        "--no-ray",
        help="Run the graph in this process, without Ray: it starts in a second, and uses one core.",
    ),
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        "--auth-token",
        envvar="GYM_SERVE_AUTH_TOKEN",
        show_envvar=True,
        help="Bearer token of the graph at --url; better given by the variable.",
    ),
]


@dataclass(frozen=True)
class Target:
    """Where the graph of a command is; exactly one of ``graph``, ``attach`` and ``url`` says so.

    Attributes:
        graph: a graph file to deploy.
        attach: name of a running application.
        url: URL of a running graph.
        address: the Ray cluster, for the first two.
        token: bearer token, for the last one.
        overrides: ``path=value`` pairs, for the first one.
        application: which graph of the file, for the first one.
        ray: False runs it in this process, for the first one.

    Raises:
        typer.BadParameter: the options do not go together.
    """

    graph: Path | None = None
    attach: str | None = None
    url: str | None = None
    address: str | None = None
    token: str | None = None
    overrides: Sequence[str] = ()
    application: str | None = None
    ray: bool = True

    def __post_init__(self) -> None:
        if sum(place is not None for place in (self.graph, self.attach, self.url)) != 1:
            raise typer.BadParameter("give one of these: a graph file, --attach NAME or --url URL")
        if self.url is not None and self.address is not None:
            raise typer.BadParameter("--url needs no Ray: leave out --address")
        if self.graph is None and self.overrides:
            raise typer.BadParameter("--set changes a graph that is deployed here, not one that runs already")
        if self.graph is None and self.application is not None:
            raise typer.BadParameter("--application is for a graph file; --attach takes the name itself")
        if not self.ray and (self.graph is None or self.address is not None):
            raise typer.BadParameter("--no-ray needs a graph file, without --address")

    def resolved(self) -> Graph | None:
        """The graph of the file; None where it runs already.

        Raises:
            GraphError: it has problems; all of them.
        """
        if self.graph is None:
            return None
        source = load_graph(self.graph, overrides=self.overrides, application=self.application)
        return resolve(source.spec, source=source.path, base_dir=source.base_dir, literal_secrets=False)

    def open(self) -> Gym:
        """The graph, running; shutting it down stops what this started, and nothing else.

        Raises:
            GymError: it cannot be reached, or did not start.
        """
        from gym_serve.client import Gym

        if self.url is not None:
            return Gym.connect(self.url, self.token)
        if self.attach is not None:
            return Gym.attach(self.attach, local_ray.find(self.address))
        assert self.graph is not None
        return Gym.from_graph(
            self.graph, self.address, self.overrides, application=self.application, ray=self.ray
        )


def stop(error: GymError, *, as_json: bool = False) -> NoReturn:
    """Report why a command cannot do its work, to stderr or as JSON, and exit with status 1."""
    if as_json:
        problems = {"problems": error.problems} if isinstance(error, GraphError) else {}
        content = {"ok": False, **problems, **error.to_body()}
        print_json(content)
    else:
        typer.echo(error.message, err=True)
    raise typer.Exit(1)


def parse_pairs(pairs: Iterable[str], example: str) -> dict[str, Any]:
    """The values by key.

    Args:
        pairs: as given.
        example: a right one, e.g. ``--param temperature=0.7``.

    Raises:
        typer.BadParameter: one is no pair, or its value no YAML.
    """
    values = {}
    for pair in pairs:
        key, given, text = pair.partition("=")
        if not given or not key.strip():
            raise typer.BadParameter(f"write {example}, got {pair!r}")
        try:
            values[key.strip()] = parse_yaml(text)
        except GraphError:
            raise typer.BadParameter(f"{pair!r}: the value is no valid YAML; quote it") from None
    return values
