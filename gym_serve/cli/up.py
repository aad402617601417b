"""`gym-serve up`: a graph that runs on after the command, on a Ray of this machine or on another."""

from __future__ import annotations

from typing import Annotated

import typer

from gym_serve.cli import local_ray
from gym_serve.cli.graph_file import ApplicationOption, FileArgument, JsonOption, SetOption
from gym_serve.cli.printing import print_json
from gym_serve.cli.target import stop
from gym_serve.graph.loading import load_graph
from gym_serve.graph.preflight import problems_here
from gym_serve.graph.resolving import resolve
from gym_serve.routing.ports import HTTP_PORT, free_port
from gym_serve.types.errors import GraphError, GymError

__all__ = ["ClusterOption", "up"]

ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="Ray cluster; by default RAY_ADDRESS, the one that up has started, or another one here.",
    ),
]


def up(
    file: FileArgument,
    *,
    set_: SetOption = None,
    application: ApplicationOption = None,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="HOST:PORT",
            help="Ray cluster, or auto; by default RAY_ADDRESS, or the one that up has started.",
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="HTTP port, if no graph is served there yet. [default: 8000, else any]")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Start a graph, and leave it running; a running one of the same name is updated in place.

    Without a Ray to join, one is started on this machine; it stays until
    gym-serve down --all.

    Exit status: 0 once every server is ready, or 1 if the graph has a problem or did not start.

    Example: gym-serve up graphs/math.yaml
    """
    try:
        source = load_graph(file, overrides=set_ or (), application=application)
        graph = resolve(source.spec, source=source.path, base_dir=source.base_dir, literal_secrets=False)
        if local_ray.use(address) is None:
            if problems := problems_here(graph):
                raise GraphError(problems, source=source.path)
            typer.echo("starting Ray ...", err=True)
            local_ray.start()
        local_ray.connect(address)
        # Only now: what joins Ray reads its environment when it is imported.
        from gym_serve.client.cluster import start_serve
        from gym_serve.client.deployed import launch
        from gym_serve.routing.serve_compat import http_address, serve_is_running

        if not serve_is_running():
            start_serve(port or free_port(HTTP_PORT))
        typer.echo(f"starting {source.name} ...", err=True)
        launch(graph, source.name, source.route_prefix, source=source.path)
        url = http_address() + source.route_prefix.rstrip("/")
    except GymError as error:
        stop(error, as_json=as_json)
    if as_json:
        print_json({"ok": True, "name": source.name, "url": url})
    else:
        typer.echo(f"{source.name} runs at {url}")
