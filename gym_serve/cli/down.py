"""`gym-serve down`: a graph ends, or all of them with the Ray that `up` started."""

from __future__ import annotations

from typing import Annotated

import typer

from gym_serve.cli import local_ray
from gym_serve.cli.completion import graphs
from gym_serve.cli.graph_file import JsonOption
from gym_serve.cli.printing import print_json
from gym_serve.cli.target import stop
from gym_serve.cli.up import ClusterOption
from gym_serve.types.errors import GymError, NotFound

__all__ = ["down"]


def down(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The graph to stop.", autocompletion=graphs)
    ] = None,
    *,
    all_: Annotated[
        bool, typer.Option("--all", help="Stop the Ray that up has started, with all of its graphs.")
    ] = False,
    address: ClusterOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop a graph. With --all, stop every graph and the Ray of gym-serve up; never any other Ray.

    Exit status: 0, or 1 if there was nothing to stop.

    Example: gym-serve down math
    """
    if all_ == (name is not None) or (all_ and address is not None):
        raise typer.BadParameter("give the NAME of a graph, or --all")
    try:
        stopped = _all() if name is None else _one(name, address)
    except GymError as error:
        stop(error, as_json=as_json)
    if as_json:
        print_json({"ok": True, "stopped": stopped})
    else:
        typer.echo(f"stopped {stopped}")


def _all() -> str:
    ray = local_ray.started()
    if ray is None:
        raise NotFound(
            "gym-serve up has started no Ray that still runs; stop graphs elsewhere by their names"
        )
    local_ray.stop(ray)
    return f"the Ray at {ray.address}"


def _one(name: str, address: str | None) -> str:
    local_ray.connect(address)
    from ray import serve

    from gym_serve.routing.serve_compat import serve_is_running

    running = list(serve.status().applications) if serve_is_running() else []
    if name not in running:
        raise NotFound(f"no graph {name!r} runs; there is {', '.join(running) or 'none'}")
    serve.delete(name)
    return name
