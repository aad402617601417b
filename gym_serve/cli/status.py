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
    """List the graphs that run, with their servers and replicas.

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
    if not healthy:
        raise typer.Exit(_UNHEALTHY)


def _applications() -> dict[str, Any]:
    from ray import serve

    from gym_serve.routing.serve_compat import http_address, route_prefix, serve_is_running

    if not serve_is_running():
        return {}
    return {
        name: {
            "status": str(application.status.value),
            "message": application.message,
            "url": http_address() + route_prefix(name),
            "servers": {
                server: {
                    "status": str(deployment.status.value),
                    "message": deployment.message,
                    "replicas": {str(state): count for state, count in deployment.replica_states.items()},
                }
                for server, deployment in application.deployments.items()
            },
        }
        for name, application in serve.status().applications.items()
    }


def _lines(applications: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, application in applications.items():
        yield name, "", application["status"], "", application["url"]
        for server, state in application["servers"].items():
            replicas = ", ".join(f"{count} {kind.lower()}" for kind, count in state["replicas"].items())
            yield "", server, state["status"], replicas, state["message"]
