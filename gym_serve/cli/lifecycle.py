"""`gym-serve up`, `status`, `logs` and `down`: graphs that keep running after the command."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from gym_serve.cli import local_ray
from gym_serve.cli.completion import graphs, servers
from gym_serve.cli.options import ApplicationOption, FileArgument, JsonOption, SetOption, stop
from gym_serve.cli.printing import print_json, print_start, print_table
from gym_serve.graph.loading import load_graph
from gym_serve.graph.preflight import problems_here
from gym_serve.graph.resolving import resolve
from gym_serve.routing.starting import HTTP_PORT, free_port
from gym_serve.types.errors import GraphError, GymError, NotFound

__all__ = ["down", "logs", "status", "up"]

ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="Ray cluster; by default RAY_ADDRESS, the Ray of up, or another one on this machine.",
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
            help="Ray cluster, or auto; by default RAY_ADDRESS, or the Ray that up has started.",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(help="HTTP port, if Serve does not run yet. [default: 8000, or any free one]"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Start a graph and leave it running; a running graph of the same name is updated in place.

    If there is no Ray to join, one is started on this machine. It runs until
    gym-serve down --all.

    Exit status: 0 once every server is ready, or 1 if the graph has a problem or did not start.

    Example: gym-serve up graphs/math.yaml
    """
    try:
        source = load_graph(file, overrides=set_ or (), application=application)
        graph = resolve(source.spec, source=source.path, base_dir=source.base_dir, literal_secrets=False)
        print_start()
        if is_own := local_ray.use(address) is None:
            if problems := problems_here(graph):
                raise GraphError(problems, source=source.path)
            local_ray.start()
        local_ray.connect(address)
        # Imported here: Ray reads the environment, which `local_ray` sets, at import.
        from gym_serve.client.cluster import start_serve
        from gym_serve.client.deployed import launch
        from gym_serve.routing.serve_compat import http_address, serve_is_running

        if not serve_is_running():
            start_serve(port or free_port(HTTP_PORT))
        launch(graph, source.name, source.route_prefix, source=source.path, checked=is_own)
        url = http_address() + source.route_prefix.rstrip("/")
    except GymError as error:
        stop(error, as_json=as_json)
    if as_json:
        print_json({"ok": True, "name": source.name, "url": url})
    else:
        typer.echo(f"{source.name} runs at {url}")


_UNHEALTHY = 3


def status(*, address: ClusterOption = None, as_json: JsonOption = False) -> None:
    """List running graphs with their servers and replicas, and why a deployment has failed.

    Exit status: 0 all graphs run; 1 there is no Ray; 3 a graph does not run.

    Example: gym-serve status
    """
    try:
        local_ray.connect(address)
        applications = _applications()
    except GymError as error:
        stop(error, as_json=as_json)
    healthy = all(application["status"] == "RUNNING" for application in applications.values())
    if as_json:
        print_json({"ok": healthy, "applications": applications})
    elif not applications:
        typer.echo("No graph runs.")
    else:
        print_table(("graph", "server", "status", "replicas", ""), _status_rows(applications))
        for line in _reasons(applications):
            typer.echo(line)
    if not healthy:
        raise typer.Exit(_UNHEALTHY)


def _applications() -> dict[str, Any]:
    from ray import serve

    from gym_serve.client.deployed import states
    from gym_serve.graph.health import reason
    from gym_serve.routing.serve_compat import http_address, route_prefix, serve_is_running

    if not serve_is_running():
        return {}
    applications: dict[str, Any] = {}
    for name, application in serve.status().applications.items():
        servers = {
            server: {
                "status": str(deployment.status.value),
                "message": reason(deployment.message),
                "replicas": {str(state): count for state, count in deployment.replica_states.items()},
            }
            for server, deployment in application.deployments.items()
        }
        applications[name] = {
            "status": str(application.status.value),
            "message": reason(application.message),
            "url": http_address() + route_prefix(name),
            # After a failed build, Serve lists none of the deployments that still run.
            "servers": servers or states(name),
        }
    return applications


def _status_rows(applications: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, application in applications.items():
        yield name, "", application["status"], "", application["url"]
        for server, state in application["servers"].items():
            replicas = ", ".join(f"{count} {kind.lower()}" for kind, count in state["replicas"].items())
            yield "", server, state["status"], replicas, ""


def _reasons(applications: dict[str, Any]) -> Iterator[str]:
    """A line for each failure."""
    for name, application in applications.items():
        servers = application["servers"].items()
        told = {name: application["message"], **{f"{name}.{server}": s["message"] for server, s in servers}}
        yield from (f"{place}: {message}" for place, message in told.items() if message)


def down(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The graph to stop.", autocompletion=graphs)
    ] = None,
    *,
    all_: Annotated[
        bool, typer.Option("--all", help="Stop the Ray that up has started, and all of its graphs.")
    ] = False,
    address: ClusterOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop a graph. With --all, stop all graphs and the Ray of gym-serve up, but no other Ray.

    Exit status: 0, or 1 if there was nothing to stop.

    Example: gym-serve down math
    """
    if all_ == (name is not None) or (all_ and address is not None):
        raise typer.BadParameter("give either the NAME of a graph or --all")
    try:
        stopped = _stop_all() if name is None else _stop_graph(name, address)
    except GymError as error:
        stop(error, as_json=as_json)
    if as_json:
        print_json({"ok": True, "stopped": stopped})
    else:
        typer.echo(f"Stopped {stopped}.")


def _stop_all() -> str:
    ray = local_ray.started()
    if ray is None:
        raise NotFound("No Ray of gym-serve up runs on this machine. Stop graphs on other clusters by name.")
    local_ray.stop(ray)
    return f"the Ray at {ray.address}"


def _stop_graph(name: str, address: str | None) -> str:
    local_ray.connect(address)
    from ray import serve

    from gym_serve.routing.serve_compat import serve_is_running

    running = list(serve.status().applications) if serve_is_running() else []
    if name not in running:
        raise NotFound(f"No graph {name!r} runs. Running graphs: {', '.join(running) or 'none'}")
    serve.delete(name)
    return name


_POLL_SECONDS = 0.5


def logs(
    server: Annotated[
        str,
        typer.Argument(metavar="SERVER", help="Name of a server in a running graph.", autocompletion=servers),
    ],
    *,
    graph: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The graph, if several have a server of this name.", autocompletion=graphs
        ),
    ] = None,
    lines: Annotated[
        int, typer.Option("-n", "--lines", min=0, help="Number of last lines of each replica.")
    ] = 100,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Print new lines until Ctrl-C.")] = False,
    address: ClusterOption = None,
) -> None:
    """Print the logs of a server of a running graph: those on this machine, of dead replicas too.

    Exit status: 0, or 1 if no graph has the server or there are no logs on this
    machine; 130 if Ctrl-C ended --follow.

    Example: gym-serve logs math_agent --lines 20
    """
    try:
        local_ray.connect(address)
        prefix = f"replica_{_graph_of(server, graph)}_{server}_"
    except GymError as error:
        stop(error)
    directory = local_ray.logs_directory() / "serve"
    shown: dict[Path, int] = {}
    while True:
        # By prefix, not by glob pattern: a name may contain pattern characters.
        found = sorted(path for path in directory.glob("replica_*.log") if path.name.startswith(prefix))
        for path in found:
            shown[path] = _print_log(path, shown.get(path), lines)
        if not follow:
            break
        time.sleep(_POLL_SECONDS)
    if not shown:
        typer.echo(f"{server} has no logs on this machine ({directory})", err=True)
        raise typer.Exit(1)


def _graph_of(server: str, graph: str | None) -> str:
    from ray import serve

    from gym_serve.routing.serve_compat import serve_is_running

    applications = serve.status().applications if serve_is_running() else {}
    if graph is not None and graph not in applications:
        raise NotFound(f"No graph {graph!r} runs. Running graphs: {', '.join(applications) or 'none'}")
    names = [
        name for name, app in applications.items() if server in app.deployments and graph in (None, name)
    ]
    if len(names) != 1:
        known = sorted({name for app in applications.values() for name in app.deployments})
        problem = (
            f"several graphs have it: choose one of {', '.join(names)} with --graph"
            if names
            else f"not found; running servers: {', '.join(known) or 'none'}"
        )
        raise NotFound(f"server {server!r}: {problem}")
    return names[0]


def _print_log(path: Path, offset: int | None, lines: int) -> int:
    """Print the new lines of a file, or its last lines; returns the offset of its end."""
    with open(path, encoding="utf-8", errors="replace") as file:
        if offset is None:
            typer.echo(f"==> {path.name} <==")
            new = list(deque(file, maxlen=lines))
        else:
            file.seek(offset)
            new = list(file)
        for line in new:
            typer.echo(line, nl=False)
        return file.tell()
