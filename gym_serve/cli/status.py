"""`gym-serve status`: what runs, with its servers, replicas and URLs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from gym_serve.cli import local_ray
from gym_serve.cli.graph_file import JsonOption
from gym_serve.cli.printing import print_json, print_table
from gym_serve.cli.target import stop
from gym_serve.cli.up import ClusterOption
from gym_serve.types.errors import GymError

__all__ = ["status"]

_UNHEALTHY = 3


def status(*, address: ClusterOption = None, as_json: JsonOption = False) -> None:
    """List the graphs that run, with their servers and replicas, and why a deploy has failed.

    Exit status: 0 all of them are running; 1 there is no Ray; 3 one is not.

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
        typer.echo("no graph runs")
    else:
        print_table(("graph", "server", "status", "replicas", ""), _lines(applications))
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
            # After a file that it could not build, Serve names none of those that go on.
            "servers": servers or states(name),
        }
    return applications


def _lines(applications: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, application in applications.items():
        yield name, "", application["status"], "", application["url"]
        for server, state in application["servers"].items():
            replicas = ", ".join(f"{count} {kind.lower()}" for kind, count in state["replicas"].items())
            yield "", server, state["status"], replicas, ""


def _reasons(applications: dict[str, Any]) -> Iterator[str]:
    """A line for everything that has failed."""
    for name, application in applications.items():
        servers = application["servers"].items()
        told = {name: application["message"], **{f"{name}.{server}": s["message"] for server, s in servers}}
        yield from (f"{place}: {message}" for place, message in told.items() if message)
