"""`gym-serve up`, `status`, `logs` and `down`: graphs that keep running after the command."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from gym_serve.cli import local_ray
from gym_serve.cli.options import ApplicationOption, FileArgument, JsonOption, SetOption, read_graph
from gym_serve.cli.printing import echo, print_json, print_start, print_table
from gym_serve.cluster.code import files_of
from gym_serve.cluster.preflight import problems_here
from gym_serve.cluster.starting import HTTP_PORT, check_port, free_port
from gym_serve.graph.spec import Graph
from gym_serve.observe.logs import Level, Record
from gym_serve.types.errors import GraphError, NotFound
from gym_serve.types.requests import JSON

ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="Ray cluster; by default RAY_ADDRESS, the Ray of up, or another one on this machine.",
    ),
]
GraphOption = Annotated[
    str | None,
    typer.Option(
        "--graph",
        metavar="NAME",
        help="The graph, if several have a server of this name.",
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
            help="Ray cluster, or auto; by default RAY_ADDRESS, the Ray of up, or that of ray start.",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(help="HTTP port, if Serve does not run yet. [default: 8000, or any free one]"),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the files of your own code that a cluster gets, and stop."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Start a graph and leave it running; a running graph of the same name is updated in place.

    If there is no Ray to join, one is started on this machine. It runs until
    gym-serve down --all.

    A cluster gets the packages of the graph's own classes from this machine, and servers whose code has
    changed are replaced: docs/deploying.md. --dry-run lists the files.

    Exit status: 0 once every server is ready, or 1 if the graph has a problem or did not start.

    Example: gym-serve up graphs/math.yaml
    """
    source, graph = read_graph(file, set_, application)
    if dry_run:
        _print_files(graph, as_json=as_json)
        return
    print_start()
    if local_ray.use(address) is None and (address := local_ray.head()) is not None:
        echo(
            f"Joining the Ray at {address}, which `ray start` has started; --address names another", err=True
        )
    if is_new := local_ray.use(address) is None:
        if problems := problems_here(graph):
            raise GraphError(problems, source=source.path)
        if port is not None:
            check_port(port)
        local_ray.start()
    local_ray.connect(address)
    # Imported here: Ray reads the environment, which `local_ray` sets, at import.
    from gym_serve.client.cluster import start_serve
    from gym_serve.client.deployed import launch
    from gym_serve.cluster.serve_compat import dashboard_url, http_address, serve_is_running

    if not serve_is_running():
        start_serve(port or free_port(HTTP_PORT))
    launch(
        graph,
        source.name,
        source.route_prefix,
        source=source.path,
        checked=is_new,
        with_code=not local_ray.is_own(address),  # that one reads the files themselves
    )
    url = http_address() + source.route_prefix.rstrip("/")
    if as_json:
        print_json({"ok": True, "name": source.name, "url": url})
    else:
        echo(f"{source.name} runs at {url}\nIts episodes are shown at {url}/ui")
        if (dashboard := dashboard_url()) is not None:
            echo(f"Ray's dashboard shows its servers at {dashboard}/#/serve")


def _print_files(graph: Graph, *, as_json: bool) -> None:
    files = files_of(graph)
    if as_json:
        print_json({"ok": True, "files": files})
        return
    for file in files:
        echo(str(file))
    size = sum(file.stat().st_size for file in files)
    echo(f"{len(files)} files, {size:,} bytes: what a cluster gets of your own code", err=True)


_UNHEALTHY = 3


def status(*, address: ClusterOption = None, as_json: JsonOption = False) -> None:
    """List running graphs: their servers and replicas, what autoscaling asks for, and why one has failed.

    Exit status: 0 all graphs run; 1 there is no Ray; 3 a graph does not run.

    Example: gym-serve status
    """
    local_ray.connect(address)
    applications = _applications()
    healthy = all(application["status"] == "RUNNING" for application in applications.values())
    if as_json:
        print_json({"ok": healthy, "applications": applications})
    elif not applications:
        echo("No graph runs.")
    else:
        print_table(("graph", "server", "status", "replicas", ""), _status_rows(applications))
        for line in _reasons(applications):
            echo(line)
    if not healthy:
        raise typer.Exit(_UNHEALTHY)


def _applications() -> dict[str, Any]:
    from gym_serve.client.deployed import states
    from gym_serve.cluster.deploy import GATEWAY
    from gym_serve.cluster.reports import reason, reports_of
    from gym_serve.cluster.serve_compat import http_address, route_prefix
    from gym_serve.gateway.host import pressure

    applications: dict[str, Any] = {}
    for name, application in running().items():
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
    for name, application in applications.items():
        names = [server for server in application["servers"] if server != GATEWAY]
        loads = asyncio.run(reports_of(name, names))
        by_server = pressure(loads, ())["servers"]
        for server, state in application["servers"].items():
            state["autoscaling"] = by_server[server]["autoscaling"] if server in by_server else None
    return applications


def _status_rows(applications: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, application in applications.items():
        yield name, "", application["status"], "", application["url"]
        for server, state in application["servers"].items():
            replicas = ", ".join(f"{count} {kind.lower()}" for kind, count in state["replicas"].items())
            yield "", server, state["status"], replicas, _scaling(state["autoscaling"])


def _scaling(scaling: JSON | None) -> str:
    if scaling is None:
        return ""
    load, target = round(scaling["load"]), scaling["target"]
    limits = f"{scaling['min']} to {scaling['max']} allowed"
    return f"{load} {scaling['measure']} at {target:g} each ask for {scaling['asks']} ({limits})"


def _reasons(applications: dict[str, Any]) -> Iterator[str]:
    for name, application in applications.items():
        servers = application["servers"].items()
        messages = {
            name: application["message"],
            **{f"{name}.{server}": s["message"] for server, s in servers},
        }
        yield from (f"{place}: {message}" for place, message in messages.items() if message)


def down(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="The graph to stop.")] = None,
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
    stopped = _stop_all() if name is None else _stop_graph(name, address)
    if as_json:
        print_json({"ok": True, "stopped": stopped})
    else:
        echo(f"Stopped {stopped}.")


def _stop_all() -> str:
    ray = local_ray.started()
    if ray is None:
        raise NotFound("No Ray of gym-serve up runs on this machine. Stop graphs on other clusters by name.")
    local_ray.stop(ray)
    return f"the Ray at {ray.address}"


def _stop_graph(name: str, address: str | None) -> str:
    local_ray.connect(address)
    from ray import serve

    running(name)
    serve.delete(name)
    return name


def running(graph: str | None = None) -> dict[str, Any]:
    """Serve's applications by name, once this process has joined the cluster. Raises NotFound: ``graph`` is
    none of them."""
    from ray import serve

    from gym_serve.cluster.serve_compat import serve_is_running

    applications = serve.status().applications if serve_is_running() else {}
    if graph is not None and graph not in applications:
        raise NotFound(f"No graph {graph!r} runs. Running graphs: {', '.join(applications) or 'none'}")
    return applications


_POLL_SECONDS = 0.5


def logs(
    server: Annotated[
        str | None,
        typer.Argument(
            metavar="[SERVER]",
            help="Name of a server in a running graph; all servers without it.",
        ),
    ] = None,
    *,
    graph: GraphOption = None,
    rollout: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Only records of this rollout (its _ng_rollout_id), all attempts."),
    ] = None,
    level: Annotated[Level, typer.Option(help="Only records of this level, or a higher one.")] = "debug",
    lines: Annotated[
        int, typer.Option("-n", "--lines", min=0, help="Number of last records of each replica.")
    ] = 100,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Print new records until Ctrl-C.")] = False,
    address: ClusterOption = None,
) -> None:
    """Print the logs of running graphs by time: of all nodes, of dead replicas and rotated files too.

    Exit status: 0, or 1 if no graph has the server or there are no logs; 130 if
    Ctrl-C ended --follow.

    Example: gym-serve logs math_agent --level warning --lines 20
    """
    local_ray.connect(address)
    wanted = _servers_of(graph) if server is None else [(_graph_of(server, graph), server)]
    from gym_serve.cluster.reports import NodeLogs

    nodes = NodeLogs(wanted, level=level, rollout=rollout)
    records = nodes.read(last=lines)
    _print_records(records)
    while follow:
        time.sleep(_POLL_SECONDS)
        _print_records(nodes.read())
    if not nodes.found:
        echo(f"{server or 'these graphs'}: there are no logs", err=True)
        raise typer.Exit(1)


def _print_records(records: list[Record]) -> None:
    for record in records:
        echo(record.text)


def _servers_of(graph: str | None) -> list[tuple[str, str]]:
    """All servers of a graph, or of all graphs, the gateways included."""
    return [
        (name, server)
        for name, application in running(graph).items()
        for server in application.deployments
        if graph in (None, name)
    ]


def _graph_of(server: str, graph: str | None) -> str:
    """The running graph that has a server; ``graph`` is None if only one has it."""
    names = [name for name, known in _servers_of(graph) if known == server]
    if len(names) != 1:
        known = sorted({known for _, known in _servers_of(None)})
        problem = (
            f"several graphs have it: choose one of {', '.join(names)} with --graph"
            if names
            else f"not found; running servers: {', '.join(known) or 'none'}"
        )
        raise NotFound(f"server {server!r}: {problem}")
    return names[0]
